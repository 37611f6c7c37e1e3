"""Training data of every accepted form as chunks: stacked batches of one shape, ready for the device's infeed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tpuflow.api.positions import START, Position, Source, say_fast_forward, skip
from tpuflow.errors import ConfigError, DataError

INFEED_BYTES = 256 * 2**20
STREAM_BATCHES = 64
LABEL_NAMES = ("label", "labels", "target", "targets", "y")
NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}

Leaves = tuple[np.ndarray, np.ndarray]
Signature = tuple[tuple[tuple[int, ...], str], ...]
Layout = tuple[Signature, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` batches of one shape, from item `start` of the stacked arrays [items, batch, ...].

    `samples` and `batches` precede it in the epoch; `source` is the state of the data `behind` batches before it (None: they have none).
    """

    arrays: tuple[Any, ...]
    start: int
    count: int
    samples: int
    batches: int = 0
    source: Any = None
    behind: int = 0

    @property
    def signature(self) -> Signature:
        """Shape and type of every array of one batch: what a Program is compiled for."""
        return tuple((tuple(a.shape[1:]), str(a.dtype)) for a in self.arrays)

    @property
    def batch_size(self) -> int:
        """Samples in one batch."""
        return self.arrays[0].shape[1]

    def part(self, skip: int, count: int) -> Chunk:
        """`count` of these batches, without the first `skip`."""
        return replace(
            self,
            start=self.start + skip,
            count=count,
            samples=self.samples + skip * self.batch_size,
            batches=self.batches + skip,
            behind=self.behind + skip,
        )


@dataclass(slots=True)
class ArrayFeed:
    """Arrays with one leading axis, cut into full batches and a ragged last one; in file order, or shuffled anew each epoch.

    Unshuffled data that fit the infeed capacity are put on the device's host side once and used again in every epoch.
    """

    leaves: Leaves
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    _kept: dict[tuple[int, int], Chunk] = field(default_factory=dict)
    _done: int = 0

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return len(self.leaves[0])

    @property
    def batches(self) -> int:
        """Batches in an epoch, the ragged one included."""
        return math.ceil(self.samples / self.batch_size)

    def first(self) -> Leaves:
        """One batch, for its shapes."""
        inputs, labels = self.leaves
        return inputs[: self.batch_size], labels[: self.batch_size]

    def seek(self, position: Position) -> None:
        """Have the next epoch begin after the batches that are done."""
        self._done = position.batches

    def between_epochs(self) -> Any:
        """Nothing but its number describes an epoch."""
        return None

    def epoch(self, number: int) -> Iterator[Chunk]:
        """The chunks of one epoch; of what is left of it after `seek`."""
        done, self._done = self._done, 0
        order = np.random.default_rng((self.seed, number)).permutation(self.samples) if self.shuffle else None
        full, items = self.samples // self.batch_size, self._items
        for first in range(done - done % items, full, items):
            # Every chunk has the same number of items, so the last one begins earlier and starts late.
            base, begin, end = min(first, full - items), max(first, done), min(first + items, full)
            if begin < end:
                yield self._chunk(order, base, items, self.batch_size).part(begin - base, end - begin)
        if self.samples % self.batch_size and done <= full:
            yield self._chunk(order, full, 1, self.samples % self.batch_size)

    def layouts(self, steps: int | None) -> list[Layout]:
        """Batch shape and items of every kind of chunk that the first `steps` batches (None: a whole epoch and more) are in."""
        full, tail = self.samples // self.batch_size, self.samples % self.batch_size
        wanted = [(self._items, self.batch_size)]
        if tail and (steps is None or steps > full):
            wanted.append((1, tail))
        return [(tuple(((size, *leaf.shape[1:]), str(leaf.dtype)) for leaf in self.leaves), items) for items, size in wanted]

    @property
    def _items(self) -> int:
        """Full batches in a chunk."""
        return min(self.samples // self.batch_size, max(1, INFEED_BYTES // self._batch_bytes))

    @property
    def _batch_bytes(self) -> int:
        return max(1, sum(leaf[: self.batch_size].nbytes for leaf in self.leaves))

    def _chunk(self, order: np.ndarray | None, first: int, items: int, size: int) -> Chunk:
        if order is None and (first, size) in self._kept:
            return self._kept[first, size]
        begin, end = first * self.batch_size, first * self.batch_size + items * size
        place = slice(begin, end) if order is None else order[begin:end]
        stacked = (leaf[place].reshape(items, size, *leaf.shape[1:]) for leaf in self.leaves)
        chunk = Chunk(tuple(jax.device_put(a) for a in stacked), 0, items, begin, first)
        if order is None and self.batches * self._batch_bytes <= INFEED_BYTES:
            self._kept[first, size] = chunk
        return chunk


@dataclass(slots=True)
class StreamFeed:
    """Batches from an iterable or from a callable that makes one; consecutive batches of one shape are stacked, a few at a time."""

    source: Source
    per_chunk: int
    check: Callable[[np.ndarray, int], None] | None = None
    head: list[Leaves] = field(default_factory=list)
    batches: int | None = None
    samples: int | None = None
    _opened: Iterator[Any] | None = None
    _state: Any = None
    _begin: tuple[int, int] = (0, 0)
    _size: int = 0

    def first(self) -> Leaves:
        """One batch, for its shapes; it is not lost: the first epoch begins with it."""
        self._open()
        try:
            self.head = [_leaves(next(self._opened or iter(())))]
        except StopIteration:
            raise DataError("data: the iterable gives no batch; training needs at least one.") from None
        self._size = len(self.head[0][0])
        return self.head[0]

    def layouts(self, steps: int | None) -> list[Layout]:
        """None: what comes is not known before it comes."""
        return []

    def seek(self, position: Position) -> None:
        """Have the next epoch begin after the batches that are done; data that cannot be moved are drawn again up to there."""
        again = self.source.move(position)
        if again is not None:
            self._opened, self.head = None, []
        else:
            say_fast_forward(position)
            for _ in range(position.passes):
                deque(self._iterate(), maxlen=0)
            again = position.batches
        self._begin = (position.batches - again, again)

    def between_epochs(self) -> Any:
        """What describes the beginning of the next epoch, beside its number."""
        return self.source.state_between_passes()

    def epoch(self, number: int) -> Iterator[Chunk]:
        """The chunks of one epoch, made while it runs; of what is left of it after `seek`."""
        pending: list[Leaves] = []
        (batches, again), self._begin = self._begin, (0, 0)
        stream = self._iterate()
        skip(stream, again)
        batches, behind = batches + again, again
        samples = batches * self._size
        for leaves in stream:
            if pending and _signature(leaves) != _signature(pending[0]):
                yield self._stack(pending, samples, batches, behind)
                samples, batches, behind = samples + _samples(pending), batches + len(pending), behind + len(pending)
                pending = []
            if self.check is not None:
                self.check(leaves[1], samples + _samples(pending))
            pending.append(leaves)
            if len(pending) == self.per_chunk:
                yield self._stack(pending, samples, batches, behind)
                samples, batches, behind = samples + _samples(pending), batches + len(pending), 0
                pending, self._state = [], self.source.state()
        if pending:
            yield self._stack(pending, samples, batches, behind)
            samples, batches = samples + _samples(pending), batches + len(pending)
        if not batches:
            raise DataError(
                f"data: the iterable gives no batch in epoch {number + 1}. An iterator can be walked once only: pass a list, a loader, "
                "or a function that makes a new iterator."
            )
        self.batches, self.samples = batches, samples

    def _open(self) -> None:
        self._opened = self.source.open()
        self._state = self.source.state()

    def _iterate(self) -> Iterator[Leaves]:
        """The batches of one pass; those already taken by `first` come first."""
        if self._opened is None:
            self._open()
        opened, self._opened = self._opened, None
        head, self.head = self.head, []
        yield from head
        for batch in opened or ():
            yield _leaves(batch)

    def _stack(self, batches: list[Leaves], samples: int, before: int, behind: int) -> Chunk:
        """Stacked to `per_chunk` items whatever their number: the device's program is translated once for each stacked shape."""
        stacked = tuple(np.zeros((self.per_chunk, *leaf.shape), leaf.dtype) for leaf in batches[0])
        for i, leaves in enumerate(batches):
            for target, leaf in zip(stacked, leaves, strict=True):
                target[i] = leaf
        return Chunk(tuple(jax.device_put(a) for a in stacked), 0, len(batches), samples, before, self._state, behind)


Feed = ArrayFeed | StreamFeed


class Walk:
    """An endless walk over the epochs of a feed, from a position on, handed out in pieces.

    Pieces may be taken ahead of their use: `position` is the place after the batches that were reported as `done`.
    """

    def __init__(self, feed: Feed, position: Position = START):
        if position != START:
            feed.seek(position)
        self.position = position
        self._feed, self._epoch = feed, position.passes
        self._chunks: Iterator[Chunk] | None = None
        self._rest: Chunk | None = None
        self._taken: deque[tuple[int, Chunk]] = deque()

    def pieces(self, steps: int | None, *, within_epoch: bool = False) -> Iterator[Chunk]:
        """Chunks of `steps` batches altogether, over the epochs' ends unless `within_epoch`; of what is left of this epoch if None."""
        within_epoch = within_epoch or steps is None
        while steps is None or steps > 0:
            chunk = self._peek()
            if chunk is None and within_epoch:
                return
            if chunk is None:
                continue
            count = chunk.count if steps is None else min(chunk.count, steps)
            self._rest = chunk.part(count, chunk.count - count) if count < chunk.count else None
            piece = chunk.part(0, count)
            self._taken.append((self._epoch, piece))
            yield piece
            steps = None if steps is None else steps - count

    def epoch_is_over(self) -> bool:
        """Whether this epoch has no batch left; then the walk, and its position, go on to the next one."""
        if self._peek() is not None:
            return False
        self.position = Position(self._epoch, 0, self.position.steps, self._feed.between_epochs())
        return True

    def done(self, steps: int) -> None:
        """So many batches of those that were taken are done."""
        while steps:
            epoch, piece = self._taken.popleft()
            count = min(steps, piece.count)
            if count < piece.count:
                self._taken.appendleft((epoch, piece.part(count, piece.count - count)))
            total = self.position.steps + count
            self.position = Position(epoch, piece.batches + count, total, piece.source, piece.behind + count)
            steps -= count

    def _peek(self) -> Chunk | None:
        """What comes next in this epoch, without taking it; None once at its end."""
        self._rest = self._rest or self._next()
        return self._rest

    def _next(self) -> Chunk | None:
        """The next chunk of this epoch; None once at its end."""
        if self._chunks is None:
            self._chunks = self._feed.epoch(self._epoch)
        chunk = next(self._chunks, None)
        if chunk is None:
            self._chunks, self._epoch = None, self._epoch + 1
        return chunk


def make_feed(data: Any, batch_size: int, what: str = "data", *, sink_size: int = -1, shuffle: bool = False, seed: int = 0) -> Feed:
    """The feed of arrays (inputs, labels), an iterable of such batches, a callable that makes one, or a loader.

    Raises:
      ConfigError: the batch is larger than the data, or shuffling is asked of a stream.
      DataError: the data are empty or inputs and labels differ in length.
    """
    if is_arrays(data):
        return _array_feed(data, batch_size, what, shuffle=shuffle, seed=seed)
    if shuffle:
        raise ConfigError(f"{what}: shuffle=True needs arrays; shuffle in the loader or iterable instead.")
    per_chunk = STREAM_BATCHES if sink_size < 0 else max(1, min(STREAM_BATCHES, sink_size))
    if isinstance(data, Iterable):
        return StreamFeed(Source(data, lambda: data), per_chunk)
    if callable(data):
        return StreamFeed(Source(data, data), per_chunk)
    raise DataError(
        f"{what}: expected arrays (inputs, labels), an iterable of such batches, or a function that makes one; got a {type(data).__name__}."
    )


def _array_feed(data: Any, batch_size: int, what: str, *, shuffle: bool, seed: int) -> ArrayFeed:
    leaves = _leaves(data, what)
    lengths = [len(leaf) for leaf in leaves]
    if min(lengths) == 0:
        raise DataError(f"{what}: empty; inputs have {lengths[0]} samples, labels {lengths[1]}.")
    if len(set(lengths)) > 1:
        raise DataError(f"{what}: inputs have {lengths[0]} samples but labels {lengths[1]}; they must be equally many.")
    if batch_size > lengths[0]:
        raise ConfigError(f"batch_size {batch_size} is larger than {what}: {lengths[0]} samples; choose at most {lengths[0]}.")
    return ArrayFeed(leaves, batch_size, shuffle, seed)


def is_arrays(data: Any) -> bool:
    """Whether data are one pair of arrays rather than a sequence of batches."""
    parts = list(data.values()) if isinstance(data, Mapping) else data
    return isinstance(parts, (tuple, list)) and len(parts) == 2 and all(hasattr(p, "shape") and hasattr(p, "dtype") for p in parts)


def _leaves(batch: Any, what: str = "data") -> Leaves:
    """(inputs, labels) of a batch given as a pair or as a mapping with a label among its two names."""
    if isinstance(batch, Mapping):
        labels = [name for name in batch if name in LABEL_NAMES]
        if len(batch) != 2 or len(labels) != 1:
            raise DataError(f"{what}: a mapping needs two entries, one named {' or '.join(LABEL_NAMES)}; got {', '.join(map(str, batch))}.")
        (inputs,) = (value for name, value in batch.items() if name != labels[0])
        batch = (inputs, batch[labels[0]])
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError(f"{what}: a batch must be a pair (inputs, labels), got {_describe(batch)}.")
    leaves = (_array(batch[0], f"{what}: inputs"), _array(batch[1], f"{what}: labels"))
    for name, leaf in zip(("inputs", "labels"), leaves, strict=True):
        if leaf.ndim == 0:
            raise DataError(f"{what}: {name} must have a leading batch axis, got a single number.")
    return leaves


def _array(value: Any, what: str) -> np.ndarray:
    """A NumPy array in a type that the device has: 64-bit numbers are narrowed."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what}: cannot be made an array: {error}") from error
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise DataError(f"{what}: elements must be numbers, got {array.dtype}.")
    narrow = NARROW.get(array.dtype.name)
    return array if narrow is None else array.astype(narrow)


def _signature(leaves: Leaves) -> Signature:
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _samples(batches: list[Leaves]) -> int:
    return sum(len(inputs) for inputs, _ in batches)


def _describe(batch: Any) -> str:
    return f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
