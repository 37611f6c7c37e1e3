"""Training data of every accepted form as chunks, and the walk over them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tpuflow.api import chunks
from tpuflow.api.ahead import Ahead
from tpuflow.api.batching import Form, Leaves, PairForm, Signature, is_pair_of_arrays
from tpuflow.api.chunks import Chunk, Stack, aligned, samples_in
from tpuflow.api.positions import START, Position, Source, say_fast_forward, skip
from tpuflow.errors import ConfigError, DataError

STREAM_BATCHES = 64
"""Batches in a chunk of a stream at most."""

Layout = tuple[Signature, int]


@dataclass(slots=True)
class ArrayFeed:
    """Arrays with one leading axis, cut into full batches and a ragged last one; in file order, or shuffled anew each epoch.

    Unshuffled data that fit the infeed capacity are put on the device's host side once and used again in every epoch.
    """

    leaves: Leaves
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_remainder: bool = False
    form: Form = field(default_factory=PairForm)
    _kept: dict[tuple[int, int], Chunk] = field(default_factory=dict)
    _done: int = 0

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return self._full * self.batch_size + self._tail

    @property
    def batches(self) -> int:
        """Batches in an epoch, the ragged one included."""
        return math.ceil(self.samples / self.batch_size)

    def first(self) -> Leaves:
        """One batch, for its shapes."""
        return tuple(leaf[: self.batch_size] for leaf in self.leaves)

    def seek(self, position: Position) -> None:
        """Have the next epoch begin after the batches that are done."""
        self._done = position.batches

    def between_epochs(self) -> Any:
        """Nothing but its number describes an epoch."""
        return None

    def stop(self) -> None:
        """Nothing: a chunk is made in a moment."""

    def epoch(self, number: int) -> Iterator[Chunk]:
        """The chunks of one epoch; of what is left of it after `seek`."""
        done, self._done = self._done, 0
        order = np.random.default_rng((self.seed, number)).permutation(len(self.leaves[0])) if self.shuffle else None
        full, items = self._full, self._items
        for first in range(done - done % items, full, items):
            # Every chunk has the same number of items, so the last one begins earlier and starts late.
            base, begin, end = min(first, full - items), max(first, done), min(first + items, full)
            if begin < end:
                yield self._chunk(order, base, items, self.batch_size).part(begin - base, end - begin)
        if self._tail and done <= full:
            yield self._chunk(order, full, 1, self._tail)

    def layouts(self, steps: int | None) -> list[Layout]:
        """Batch shape and items of every kind of chunk that the first `steps` batches (None: a whole epoch and more) are in."""
        wanted = [(self._items, self.batch_size)]
        if self._tail and (steps is None or steps > self._full):
            wanted.append((1, self._tail))
        return [(tuple(((size, *leaf.shape[1:]), str(leaf.dtype)) for leaf in self.leaves), items) for items, size in wanted]

    @property
    def _full(self) -> int:
        """Full batches in an epoch."""
        return len(self.leaves[0]) // self.batch_size

    @property
    def _tail(self) -> int:
        """Samples in the ragged last batch."""
        return 0 if self.drop_remainder else len(self.leaves[0]) % self.batch_size

    @property
    def _items(self) -> int:
        """Full batches in a chunk."""
        return min(self._full, max(1, chunks.INFEED_BYTES // self._batch_bytes))

    @property
    def _batch_bytes(self) -> int:
        return max(1, sum(leaf[: self.batch_size].nbytes for leaf in self.leaves))

    def _chunk(self, order: np.ndarray | None, first: int, items: int, size: int) -> Chunk:
        if order is None and (first, size) in self._kept:
            return self._kept[first, size]
        begin, end = first * self.batch_size, first * self.batch_size + items * size
        place = slice(begin, end) if order is None else order[begin:end]
        stacked = (_picked(leaf, place).reshape(items, size, *leaf.shape[1:]) for leaf in self.leaves)
        chunk = Chunk(tuple(jax.device_put(a) for a in stacked), 0, items, begin, first)
        if order is None and self.batches * self._batch_bytes <= chunks.INFEED_BYTES:
            self._kept[first, size] = chunk
        return chunk


@dataclass(slots=True)
class StreamFeed:
    """Batches from an iterable or from a callable that makes one; consecutive batches of one shape are stacked, a few at a time.

    An error in the iterable comes after the batches that it gave before. `most`: batches in a chunk at most.
    """

    source: Source
    most: int
    check: Callable[[np.ndarray, int], None] | None = None
    form: Form = field(default_factory=PairForm)
    head: list[Leaves] = field(default_factory=list)
    batches: int | None = None
    samples: int | None = None
    _opened: Iterator[Any] | None = None
    _state: Any = None
    _begin: tuple[int, int] = (0, 0)
    _size: int = 0
    _stopped: bool = False

    def first(self) -> Leaves:
        """One batch, for its shapes; it is not lost: the first epoch begins with it."""
        self._open()
        try:
            self.head = [self.form.leaves(next(self._opened or iter(())))]
        except StopIteration:
            raise DataError("data: the iterable gives no batch; training needs at least one.") from None
        self._size = samples_in(self.head[0][0].shape)
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

    def stop(self) -> None:
        """End the epoch under way, from any thread, as soon as the iterable has given its next batch."""
        self._stopped = True

    def epoch(self, number: int) -> Iterator[Chunk]:
        """The chunks of one epoch, made while it runs; of what is left of it after `seek`."""
        self._stopped = False
        if self._opened is None:
            self._open()
        (batches, again), self._begin = self._begin, (0, 0)
        stream = self._iterate()
        skip(stream, again)
        stack = Stack(self.most, (batches + again) * self._size, batches + again, again, self._state)
        try:
            for leaves in stream:
                if not stack.takes(leaves):
                    yield stack.chunk()
                    stack = stack.after()
                if self.check is not None:
                    self.check(leaves[1], stack.samples_after)
                stack.add(leaves)
                if stack.full:
                    yield stack.chunk()
                    stack = replace(stack.after(), source=self.source.state(), behind=0)
        except Exception:
            if stack.count:
                yield stack.chunk()
            raise
        if stack.count:
            yield stack.chunk()
        if not stack.batches_after:
            raise DataError(
                f"data: the iterable gives no batch in epoch {number + 1}. An iterator can be walked once only: pass a list, a loader, "
                "or a function that makes a new iterator."
            )
        self.batches, self.samples = stack.batches_after, stack.samples_after

    def _open(self) -> None:
        self._opened = self.source.open()
        self._state = self.source.state()

    def _iterate(self) -> Iterator[Leaves]:
        """The batches of one pass until it is stopped; those already taken by `first` come first."""
        if self._opened is None:
            self._open()
        opened, self._opened = self._opened, None
        head, self.head = self.head, []
        yield from head
        for batch in opened or ():
            if self._stopped:
                return
            yield self.form.leaves(batch)


Feed = ArrayFeed | StreamFeed


@dataclass(frozen=True, slots=True)
class _EpochEnd:
    """The end of a pass; `source` is what describes the next one, beside its number."""

    source: Any


_Made = Chunk | _EpochEnd | Exception


class Walk:
    """An endless walk over the epochs of a feed, from a position on, handed out in pieces; the next chunk is made while one is used.

    Pieces may be taken ahead of their use: `position` is the place after the batches that were reported as `done`.

    An epoch is begun when it is asked for, so that what callbacks change between epochs takes effect; unless the walk is one of `steps`
    batches that go on over the epochs' ends: then its next epoch is begun ahead as well, as long as steps are left.
    """

    def __init__(self, feed: Feed, position: Position = START, *, steps: float | None = None):
        if position != START:
            feed.seek(position)
        self.position = position
        self._feed, self._steps, self._epoch = feed, steps, position.passes
        self._ahead = Ahead(self._make)
        self._made: deque[_Made] = deque()
        self._rest: Chunk | None = None
        self._end: _EpochEnd | None = None
        self._taken: deque[tuple[int, Chunk]] = deque()
        # Changed by `_make` only, on its thread:
        self._making, self._step = position.passes, 0
        self._chunks: Iterator[Chunk] | None = None

    def pieces(self, steps: int | None, *, within_epoch: bool = False) -> Iterator[Chunk]:
        """Chunks of `steps` batches altogether, over the epochs' ends unless `within_epoch`; of what is left of this epoch if None.

        At an epoch's end, the next call goes on with the next epoch.
        """
        within_epoch = within_epoch or steps is None
        while steps is None or steps > 0:
            if self._end is not None:
                self._begin_next()
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
        end = self._begin_next()
        self.position = Position(self._epoch, 0, self.position.steps, end.source)
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

    def take_back(self) -> None:
        """Have the batches that were taken and are not done come again: a round trip was cut short."""
        if self._taken:
            (_, piece), rest = self._taken.pop(), self._rest
            assert not self._taken, "a round trip takes a piece when the one before it is done"
            self._rest = piece if rest is None else replace(piece, count=piece.count + rest.count)

    def close(self) -> None:
        """End what is being made ahead; the walk cannot go on."""
        self._feed.stop()
        if self._ahead.settle() and isinstance(self._chunks, Generator):
            self._chunks.close()

    def _peek(self) -> Chunk | None:
        """What comes next in this epoch, without taking it; None at its end."""
        if self._rest is None and self._end is None:
            made = self._next()
            if isinstance(made, _EpochEnd):
                self._end = made
            else:
                self._rest = made
        return self._rest

    def _begin_next(self) -> _EpochEnd:
        end, self._end = self._end, None
        assert end is not None
        self._epoch += 1
        return end

    def _next(self) -> Chunk | _EpochEnd:
        """What was made next, chunk or end; then the one after it is begun."""
        if not self._made:
            self._made.extend(self._ahead.take())
            if self._chunks is not None if self._steps is None else self._step < self._steps:
                self._ahead.begin()
        made = self._made.popleft()
        if isinstance(made, Exception):
            raise made
        return made

    def _make(self) -> list[_Made]:
        """The next chunk; at an epoch's end that, and perhaps the first chunk of the next epoch, or the error that came instead."""
        made = self._chunk_or_end()
        if isinstance(made, Chunk) or self._steps is None or self._step >= self._steps:
            return [made]
        try:
            return [made, self._chunk_or_end()]
        except Exception as error:  # not due before the end of the epoch was heard of
            return [made, error]

    def _chunk_or_end(self) -> Chunk | _EpochEnd:
        if self._chunks is None:
            self._chunks = self._feed.epoch(self._making)
        chunk = next(self._chunks, None)
        if chunk is None:
            self._chunks, self._making = None, self._making + 1
            return _EpochEnd(self._feed.between_epochs())
        self._step += chunk.count
        return chunk


def make_feed(data: Any, batch_size: int, what: str = "data", *, sink_size: int = -1, shuffle: bool = False, seed: int = 0) -> Feed:
    """The feed of arrays (inputs, labels), an iterable of such batches, a callable that makes one, or a loader.

    Raises:
      ConfigError: the batch is larger than the data, or shuffling is asked of a stream.
      DataError: the data are empty or inputs and labels differ in length.
    """
    if is_pair_of_arrays(data):
        return array_feed(data, batch_size, what, PairForm(), shuffle=shuffle, seed=seed)
    if shuffle:
        raise ConfigError(f"{what}: shuffle=True needs arrays; shuffle in the loader or iterable instead.")
    expected = "arrays (inputs, labels), an iterable of such batches"
    return stream_feed(data, what, PairForm(), sink_size=sink_size, expected=expected)


def stream_feed(data: Any, what: str, form: Form, *, sink_size: int, expected: str = "an iterable of batches") -> StreamFeed:
    """The feed of an iterable, a loader, or a function that makes one: no more batches at a time than one sink takes.

    Raises:
      DataError: the data are nothing of the kind.
    """
    most = STREAM_BATCHES if sink_size < 0 else max(1, min(STREAM_BATCHES, sink_size))
    if isinstance(data, Iterable):
        return StreamFeed(Source(data, lambda: data), most, form=form)
    if callable(data):
        return StreamFeed(Source(data, data), most, form=form)
    raise DataError(f"{what}: expected {expected}, or a function that makes one; got a {type(data).__name__}.")


def array_feed(data: Any, batch_size: int, what: str, form: Form, **options: Any) -> ArrayFeed:
    """The feed of arrays that are cut into batches; the options are those of `ArrayFeed`.

    Raises:
      ConfigError: the batch is larger than the data.
      DataError: the data are empty, differ in length, or are no arrays of numbers.
    """
    leaves = form.leaves(data, what)
    names = [name or "the array" for name in form.names]
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.ndim == 0:
            raise DataError(f"{what}: {name} must have a leading axis of samples, got a single number.")
    lengths = [len(leaf) for leaf in leaves]
    counted = f"{names[0]} have {lengths[0]} samples" + "".join(f", {n} {k}" for n, k in zip(names[1:], lengths[1:], strict=True))
    if min(lengths) == 0:
        raise DataError(f"{what}: empty; {counted}.")
    if len(set(lengths)) > 1:
        raise DataError(f"{what}: {counted}; they must be equally many.")
    if batch_size > lengths[0]:
        raise ConfigError(f"batch_size {batch_size} is larger than {what}: {lengths[0]} samples; choose at most {lengths[0]}.")
    return ArrayFeed(leaves, batch_size, form=form, **options)


def _picked(leaf: np.ndarray, place: Any) -> np.ndarray:
    """The samples of a slice, or those of an order's part in an array that needs no further copy."""
    if isinstance(place, slice):
        return leaf[place]
    return np.take(leaf, place, axis=0, out=aligned((len(place), *leaf.shape[1:]), leaf.dtype), mode="clip")
