"""Batches from arrays: shuffled, transformed, repeated, made ahead on threads; deterministic by a seed, and resumable anywhere.

`Batches` says what batch number n is, for any n and in any order, so that nothing depends on threads or on where a run began; it is a data
source for Grain as it stands. `Loader` walks over it, an epoch at each iteration, which is what `tpuflow.train` takes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from tpuflow.errors import ConfigError, DataError
from train import transforms
from train.ranges import check_positive
from train.transforms import Transform

Batch = tuple[np.ndarray, np.ndarray]


class NumberedBatches(Protocol):
    """What a loader walks over: `len` batches an epoch, each known by its number alone, and what gives the numbers their meaning."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...

    def identity(self) -> Mapping[str, Any]:
        """In numbers and words that JSON can hold."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Batches (inputs, labels) of one data set, walked over endlessly: batch number n belongs to epoch n // len(self).

    `shuffle`: False for the arrays' order; True for a new order of all samples in every pass (the order of `tpuflow.train(shuffle=True)`);
    a number for a buffer of so many samples, which are drawn from at random while the rest moves up, as MindSpore's shuffle(buffer_size).
    `transforms` work on a batch of inputs each; their random numbers depend on the seed and the batch's number only.
    `repeat`: passes over the data in an epoch. Without `drop_remainder`, the last batch of a pass may be smaller.
    """

    inputs: np.ndarray
    labels: np.ndarray
    batch_size: int
    transforms: Sequence[Transform] = ()
    shuffle: bool | int = False
    seed: int = 0
    repeat: int = 1
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise DataError(f"data: {len(self.inputs)} inputs but {len(self.labels)} labels; they must be equally many.")
        check_positive(self, ("batch_size", "repeat"))
        if self.shuffle < 0:
            raise ConfigError(f"shuffle: expected True, False or the size of a buffer, got {self.shuffle}.")
        if not self.batches_per_pass:
            raise DataError(f"data: {len(self.inputs)} samples make no batch of {self.batch_size}.")

    @property
    def batches_per_pass(self) -> int:
        """Batches in one pass over the data."""
        samples = len(self.inputs)
        return samples // self.batch_size if self.drop_remainder else -(-samples // self.batch_size)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.batches_per_pass * self.repeat

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, counted from the first batch of the first epoch."""
        if number < 0:
            raise IndexError(f"batches are numbered from 0, got {number}")
        walk, place = divmod(number, self.batches_per_pass)
        chosen = self._order(walk, slice(place * self.batch_size, (place + 1) * self.batch_size))
        # A third number of 0 would give the stream of the pass's order.
        rng = np.random.default_rng((self.seed, walk, 1 + place))
        return transforms.apply(self.transforms, self.inputs[chosen], rng), self.labels[chosen]

    def identity(self) -> dict[str, int | bool]:
        """What gives the batches' numbers their meaning."""
        names = ("batch_size", "seed", "repeat", "drop_remainder")
        return {"samples": len(self.inputs), "buffer": self._buffer, **{name: getattr(self, name) for name in names}}

    @property
    def _buffer(self) -> int:
        """Samples that are shuffled among each other; 0 for none."""
        return len(self.inputs) if self.shuffle is True else min(int(self.shuffle), len(self.inputs))

    def _order(self, walk: int, part: slice) -> Any:
        """Which samples, in the order of that pass."""
        return shuffled(len(self.inputs), self._buffer, self.seed, walk)[part] if self._buffer else part


@lru_cache(maxsize=4)
def shuffled(count: int, buffer: int, seed: int, walk: int) -> np.ndarray:
    """The numbers below `count` in the order of one pass, drawn through a buffer of that size."""
    rng = np.random.default_rng((seed, walk))
    if buffer >= count:
        return rng.permutation(count)
    slots = rng.integers(0, np.minimum(buffer, count - np.arange(count))).tolist()
    held, order = list(range(buffer)), np.empty(count, np.intp)
    for i, slot in enumerate(slots):
        order[i] = held[slot]
        following = buffer + i
        held[slot] = following if following < count else held[-1]
        if following >= count:
            held.pop()
    return order


@dataclass(slots=True)
class Loader:
    """A walk over batches from a position on; each iteration gives the rest of an epoch, the next one the next epoch.

    Up to `prefetch` batches are made ahead by `threads` threads. `position` is the number of the next batch to be handed out; whoever takes
    batches ahead of their use, as `tpuflow.train` does, resumes at the number of steps done: `loader.seek(steps)`. Each training needs a
    loader of its own; batches can be shared.
    """

    batches: NumberedBatches
    position: int = 0
    threads: int = 2
    prefetch: int = 8
    _walks: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(self, ("threads", "prefetch"))

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position to the end of its epoch."""
        self._walks += 1
        return self._walk(self._walks, self.position)

    def seek(self, position: int) -> None:
        """Go to a batch; iterations that have begun end with an error."""
        if position < 0:
            raise ConfigError(f"position: expected 0 or more, got {position}.")
        self.position, self._walks = position, self._walks + 1

    def state_dict(self) -> dict[str, Any]:
        """The position and what it refers to, in numbers that JSON can hold."""
        return {"position": self.position, **self.batches.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another loader was.

        Raises:
          ConfigError: that loader's batches were cut or ordered otherwise, so that its position means nothing here.
        """
        ours = self.batches.identity()
        other = [f"{name} {state.get(name)!r} (here {value!r})" for name, value in ours.items() if state.get(name) != value]
        if other or "position" not in state:
            raise ConfigError(f"the position was saved for other batches: {', '.join(other) or 'it has no position'}.")
        self.seek(state["position"])

    def _walk(self, walk: int, start: int) -> Iterator[Any]:
        numbers = range(start, (start // len(self) + 1) * len(self))
        waiting = iter(numbers)
        pool = ThreadPoolExecutor(self.threads, "loader")
        try:
            pending = deque(pool.submit(self.batches.__getitem__, number) for number in itertools.islice(waiting, self.prefetch))
            for number in numbers:
                batch = pending.popleft().result()
                pending.extend(pool.submit(self.batches.__getitem__, following) for following in itertools.islice(waiting, 1))
                if walk != self._walks:
                    raise ConfigError("this iteration was overtaken: its loader was moved, or another iteration of it has begun.")
                self.position = number + 1
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
