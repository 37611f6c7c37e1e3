"""Training data of every accepted form as chunks: stacked batches of one shape, ready for the device's infeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

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
    """`count` batches of one shape, from item `start` of the stacked arrays [items, batch, ...]; `samples` precede it in the epoch."""

    arrays: tuple[Any, ...]
    start: int
    count: int
    samples: int

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
        return replace(self, start=self.start + skip, count=count, samples=self.samples + skip * self.batch_size)


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

    def epoch(self, number: int) -> Iterator[Chunk]:
        """The chunks of one epoch."""
        order = np.random.default_rng((self.seed, number)).permutation(self.samples) if self.shuffle else None
        full, items = self.samples // self.batch_size, self._items
        for first in range(0, full, items):
            # Every chunk has the same number of items, so the last one begins earlier and starts late.
            base = min(first, full - items)
            yield self._chunk(order, base, items, self.batch_size).part(first - base, min(items, full - first))
        if self.samples % self.batch_size:
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
        chunk = Chunk(tuple(jax.device_put(a) for a in stacked), 0, items, begin)
        if order is None and self.batches * self._batch_bytes <= INFEED_BYTES:
            self._kept[first, size] = chunk
        return chunk


@dataclass(slots=True)
class StreamFeed:
    """Batches from an iterable or from a callable that makes one; consecutive batches of one shape are stacked, a few at a time."""

    make: Callable[[], Any]
    per_chunk: int
    check: Callable[[np.ndarray, int], None] | None = None
    head: list[Leaves] = field(default_factory=list)
    batches: int | None = None
    samples: int | None = None
    _opened: Iterator[Any] | None = None

    def first(self) -> Leaves:
        """One batch, for its shapes; it is not lost: the first epoch begins with it."""
        self._opened = iter(self.make())
        try:
            self.head = [_leaves(next(self._opened))]
        except StopIteration:
            raise DataError("data: the iterable gives no batch; training needs at least one.") from None
        return self.head[0]

    def layouts(self, steps: int | None) -> list[Layout]:
        """None: what comes is not known before it comes."""
        return []

    def epoch(self, number: int) -> Iterator[Chunk]:
        """The chunks of one epoch, made while it runs."""
        pending: list[Leaves] = []
        samples = batches = 0
        for leaves in self._iterate():
            if pending and (_signature(leaves) != _signature(pending[0]) or len(pending) == self.per_chunk):
                yield self._stack(pending, samples)
                samples, batches = samples + sum(len(p[0]) for p in pending), batches + len(pending)
                pending = []
            if self.check is not None:
                self.check(leaves[1], samples + sum(len(p[0]) for p in pending))
            pending.append(leaves)
        if pending:
            yield self._stack(pending, samples)
            samples, batches = samples + sum(len(p[0]) for p in pending), batches + len(pending)
        if not batches:
            raise DataError(
                f"data: the iterable gives no batch in epoch {number + 1}. An iterator can be walked once only: pass a list, a loader, "
                "or a function that makes a new iterator."
            )
        self.batches, self.samples = batches, samples

    def _iterate(self) -> Iterator[Leaves]:
        """The batches of one pass; those already taken by `first` come first."""
        opened, self._opened = self._opened, None
        head, self.head = self.head, []
        yield from head
        for batch in opened if opened is not None else self.make():
            yield _leaves(batch)

    def _stack(self, batches: list[Leaves], samples: int) -> Chunk:
        """Stacked to `per_chunk` items whatever their number: the device's program is translated once for each stacked shape."""
        stacked = tuple(np.zeros((self.per_chunk, *leaf.shape), leaf.dtype) for leaf in batches[0])
        for i, leaves in enumerate(batches):
            for target, leaf in zip(stacked, leaves, strict=True):
                target[i] = leaf
        return Chunk(tuple(jax.device_put(a) for a in stacked), 0, len(batches), samples)


Feed = ArrayFeed | StreamFeed


class Walk:
    """An endless walk over the epochs of a feed, handed out in pieces."""

    def __init__(self, feed: Feed):
        self._feed, self._epoch = feed, 0
        self._chunks: Iterator[Chunk] | None = None
        self._rest: Chunk | None = None

    def pieces(self, steps: int | None) -> Iterator[Chunk]:
        """Chunks of `steps` batches altogether, over the epochs' ends; of what is left of this epoch if None."""
        while steps is None or steps > 0:
            chunk = self._rest or self._next()
            if chunk is None and steps is None:
                return
            if chunk is None:
                continue
            count = chunk.count if steps is None else min(chunk.count, steps)
            self._rest = chunk.part(count, chunk.count - count) if count < chunk.count else None
            yield chunk.part(0, count)
            steps = None if steps is None else steps - count

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
        return StreamFeed(lambda: data, per_chunk)
    if callable(data):
        return StreamFeed(data, per_chunk)
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


def _describe(batch: Any) -> str:
    return f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
