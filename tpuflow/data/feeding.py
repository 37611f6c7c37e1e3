"""Feeds: training data, in every form that users give them, cut into chunks for the device's infeed."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tpuflow.data import chunks
from tpuflow.data.batching import BatchStructure, Leaves, Signature, is_data_of_arrays
from tpuflow.data.chunks import Chunk, ChunkBuilder, aligned, samples_in
from tpuflow.data.positions import Position, Source, say_fast_forward, skip
from tpuflow.errors import ConfigError, DataError, a_thing

STREAM_BATCHES = 64
"""Batches in a chunk of a stream at most."""

WALKED_ONCE = "An iterator can be walked once only: pass a list, a loader, or a function that makes a new iterator."

Layout = tuple[Signature, int]


@dataclass(slots=True)
class ArrayFeed:
    """Arrays [samples, ...], cut into full batches and a smaller last one; in their order, or shuffled anew each epoch.

    The chunks of unshuffled data of at most `INFEED_BYTES` in all are made once and used in every epoch.
    """

    leaves: Leaves
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_remainder: bool = False
    structure: BatchStructure = field(default_factory=BatchStructure)
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
        """The first batch, from which shapes are known."""
        return tuple(leaf[: self.batch_size] for leaf in self.leaves)

    def seek(self, position: Position) -> None:
        """Start the next epoch after the batches that a position has done."""
        self._done = position.batches

    def state_between_epochs(self) -> Any:
        """None: the seed and an epoch's number determine its order."""
        return None

    def stop(self) -> None:
        """Nothing to do: making a chunk takes no time worth interrupting."""

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
        """(signature of a batch, items) of every kind of chunk among the first `steps` batches; None: of a whole epoch and more."""
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
    """Batches from an iterable, or from a function that returns one; consecutive batches of one shape are stacked into chunks.

    An error in the iterable is raised after the chunks of the batches before it. `most`: the most batches of a chunk.
    """

    source: Source
    most: int
    check: Callable[[Any, int], None] | None = None
    structure: BatchStructure = field(default_factory=BatchStructure)
    head: list[Leaves] = field(default_factory=list)
    batches: int | None = None
    samples: int | None = None
    what: str = "data"
    _opened: Iterator[Any] | None = None
    _state: Any = None
    _begin: tuple[int, int] = (0, 0)
    _size: int = 0
    _stopped: bool = False

    def first(self) -> Leaves:
        """The first batch, from which shapes are known; the first epoch still starts with it."""
        self._open()
        try:
            self.head = [self.structure.leaves(next(self._opened or iter(())), self.what)]
        except StopIteration:
            raise DataError(f"{self.what}: the iterable gives no batch; at least one is needed. {WALKED_ONCE}") from None
        self._size = samples_in(self.head[0][0].shape)
        return self.head[0]

    def layouts(self, steps: int | None) -> list[Layout]:
        """None of them is known before the iterable is read."""
        return []

    def seek(self, position: Position) -> None:
        """Start the next epoch after the batches that a position has done; a source that cannot seek is read again up to there."""
        again = self.source.move(position)
        if again is not None:
            self._opened, self.head = None, []
        else:
            say_fast_forward(position)
            for _ in range(position.passes):
                deque(self._iterate(), maxlen=0)
            again = position.batches
        self._begin = (position.batches - again, again)

    def state_between_epochs(self) -> Any:
        """The state of the source before the next epoch; None if it has none."""
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
        builder = ChunkBuilder(self.most, (batches + again) * self._size, batches + again, again, self._state)
        try:
            for leaves in stream:
                if not builder.accepts(leaves):
                    yield builder.build()
                    builder = builder.next_builder()
                if self.check is not None:
                    self.check(self.structure.batch(leaves), builder.samples_after)
                builder.add(leaves)
                if builder.full:
                    yield builder.build()
                    builder = replace(builder.next_builder(), source=self.source.state(), behind=0)
        except Exception:
            if builder.count:
                yield builder.build()
            raise
        if builder.count:
            yield builder.build()
        if not builder.batches_after:
            raise DataError(f"{self.what}: the iterable gives no batch in epoch {number + 1}. {WALKED_ONCE}")
        self.batches, self.samples = builder.batches_after, builder.samples_after

    def _open(self) -> None:
        self._opened = self.source.open()
        self._state = self.source.state()

    def _iterate(self) -> Iterator[Leaves]:
        """The batches of one epoch, until `stop`; the batch that `first` has read comes first."""
        if self._opened is None:
            self._open()
        opened, self._opened = self._opened, None
        head, self.head = self.head, []
        yield from head
        for batch in opened or ():
            if self._stopped:
                return
            yield self.structure.leaves(batch, self.what)


Feed = ArrayFeed | StreamFeed


def make_feed(data: Any, batch_size: int, what: str = "data", *, sink_size: int = -1, shuffle: bool = False, seed: int = 0) -> Feed:
    """The feed of a tree of arrays such as (inputs, labels), an iterable of such batches, a callable that makes one, or a loader.

    Raises:
      ConfigError: the batch is larger than the data, or shuffling is asked of a stream.
      DataError: the data are empty or inputs and labels differ in length.
    """
    if isinstance(data, (str, os.PathLike)):
        raise DataError(f"{what}: expected arrays or batches, got the path {os.fspath(data)!r}. Load the file first: np.load, or a loader.")
    if is_data_of_arrays(data):
        return array_feed(data, batch_size, what, BatchStructure(samples=True), shuffle=shuffle, seed=seed)
    if shuffle:
        raise ConfigError(f"{what}: shuffle=True needs arrays; shuffle in the loader or iterable instead.")
    expected = "arrays (inputs, labels), another tree of arrays, an iterable of such batches"
    return stream_feed(data, what, BatchStructure(samples=True), sink_size=sink_size, expected=expected)


def stream_feed(data: Any, what: str, structure: BatchStructure, *, sink_size: int, expected: str = "an iterable of batches") -> StreamFeed:
    """The feed of an iterable, a loader, or a function that makes one: no more batches at a time than one sink takes.

    Raises:
      DataError: the data are nothing of the kind.
    """
    most = STREAM_BATCHES if sink_size < 0 else max(1, min(STREAM_BATCHES, sink_size))
    if isinstance(data, Iterable):
        return StreamFeed(Source(data, lambda: data, what), most, structure=structure, what=what)
    if callable(data):
        return StreamFeed(Source(data, data, what), most, structure=structure, what=what)
    batches = " Put it into a loader: torch.utils.data.DataLoader(data, batch_size=32)." if hasattr(data, "__getitem__") else ""
    raise DataError(f"{what}: expected {expected}, or a function that makes one; got {a_thing(data)}.{batches}")


def array_feed(data: Any, batch_size: int, what: str, structure: BatchStructure, **options: Any) -> ArrayFeed:
    """The feed of arrays that are cut into batches; the options are those of `ArrayFeed`.

    Raises:
      ConfigError: the batch is larger than the data.
      DataError: the data are empty, differ in length, or are no arrays of numbers.
    """
    leaves = structure.leaves(data, what)
    names = [name or "the array" for name in structure.names]
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.ndim == 0:
            raise DataError(f"{what}: {name} must have a leading axis of samples, got a single number.")
    lengths = [len(leaf) for leaf in leaves]
    counted = f"{names[0]} have {lengths[0]} samples" + "".join(f", {n} {k}" for n, k in zip(names[1:], lengths[1:], strict=True))
    if min(lengths) == 0:
        raise DataError(f"{what}: empty; {counted}; give at least one.")
    if len(set(lengths)) > 1:
        raise DataError(f"{what}: {counted}; they must be equally many.")
    if batch_size > lengths[0]:
        raise ConfigError(f"batch_size {batch_size} is larger than {what}: {lengths[0]} samples; choose at most {lengths[0]}.")
    return ArrayFeed(leaves, batch_size, structure=structure, **options)


def _picked(leaf: np.ndarray, place: Any) -> np.ndarray:
    """The samples at a slice or at an array of indices; the latter are copied into an aligned array, which the device takes as it is."""
    if isinstance(place, slice):
        return leaf[place]
    return np.take(leaf, place, axis=0, out=aligned((len(place), *leaf.shape[1:]), leaf.dtype), mode="clip")
