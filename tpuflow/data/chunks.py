"""Chunks: stacked batches of one shape, as the device's infeed takes them, and how a stream of batches is stacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tpuflow.data.batching import Leaves, Signature, signature

INFEED_BYTES = 256 * 2**20
"""What a chunk holds at most, one batch excepted; two chunks exist at a time: one on the device and one in the making."""
ALIGNMENT = 64
"""Bytes: arrays that begin at a multiple of it are handed to XLA:CPU without a copy."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` batches of one shape, from item `start` of the stacked arrays [items, ...].

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
        return samples_in(self.arrays[0].shape[1:])

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
class Stack:
    """Batches of one shape, copied one after the other into arrays that have room for `most` (fewer if they hold too many bytes).

    The other fields are those of the chunk that it becomes.
    """

    most: int
    samples: int
    batches: int
    behind: int
    source: Any
    count: int = 0
    _arrays: tuple[np.ndarray, ...] = ()
    _signature: Signature = field(default=())

    @property
    def full(self) -> bool:
        """Whether there is no room left."""
        return self.count > 0 and self.count == len(self._arrays[0])

    @property
    def samples_after(self) -> int:
        """Samples of the epoch up to the last batch."""
        return self.samples + (self.count * samples_in(self._signature[0][0]) if self.count else 0)

    @property
    def batches_after(self) -> int:
        """Batches of the epoch up to the last one."""
        return self.batches + self.count

    def takes(self, leaves: Leaves) -> bool:
        """Whether the batch has the shapes of those that are there."""
        return not self.count or signature(leaves) == self._signature

    def add(self, leaves: Leaves) -> None:
        """Copy a batch behind the others."""
        if not self.count:
            items = max(1, min(self.most, INFEED_BYTES // max(1, sum(leaf.nbytes for leaf in leaves))))
            self._arrays = tuple(aligned((items, *leaf.shape), leaf.dtype) for leaf in leaves)
            self._signature = signature(leaves)
        for array, leaf in zip(self._arrays, leaves, strict=True):
            array[self.count] = leaf
        self.count += 1

    def chunk(self) -> Chunk:
        """The batches so far; the device's program is translated once for each stacked shape, so what has not come is zero."""
        for array in self._arrays:
            array[self.count :] = 0
        arrays = tuple(jax.device_put(a) for a in self._arrays)
        return Chunk(arrays, 0, self.count, self.samples, self.batches, self.source, self.behind)

    def after(self) -> Stack:
        """An empty stack for what follows."""
        return Stack(self.most, self.samples_after, self.batches_after, self.behind + self.count, self.source)


def samples_in(shape: Sequence[int]) -> int:
    """Samples in a batch whose first array has this shape."""
    return shape[0] if shape else 1


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that XLA:CPU takes over as it is."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + count].view(dtype).reshape(shape)
