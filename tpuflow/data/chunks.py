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
    """`count` batches of one shape: the items from `start` on of the stacked arrays [items, ...].

    `samples`, `batches`: how many come before it in the epoch. `source`: the state of the data source, from which the chunk is reached by
    drawing `behind` batches; None if the source has no state to save.
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
class ChunkBuilder:
    """Stacks batches of one shape into a chunk of at most `most` batches (fewer if these exceed `INFEED_BYTES`).

    The other fields are those of the chunk.
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
        """Whether the chunk has as many batches as it can hold."""
        return self.count > 0 and self.count == len(self._arrays[0])

    @property
    def samples_after(self) -> int:
        """Samples of the epoch up to the last batch."""
        return self.samples + (self.count * samples_in(self._signature[0][0]) if self.count else 0)

    @property
    def batches_after(self) -> int:
        """Batches of the epoch up to the last one."""
        return self.batches + self.count

    def accepts(self, leaves: Leaves) -> bool:
        """Whether a batch has the shapes of the batches so far."""
        return not self.count or signature(leaves) == self._signature

    def add(self, leaves: Leaves) -> None:
        """Append a batch, by copying it."""
        if not self.count:
            items = max(1, min(self.most, INFEED_BYTES // max(1, sum(leaf.nbytes for leaf in leaves))))
            self._arrays = tuple(aligned((items, *leaf.shape), leaf.dtype) for leaf in leaves)
            self._signature = signature(leaves)
        for array, leaf in zip(self._arrays, leaves, strict=True):
            array[self.count] = leaf
        self.count += 1

    def build(self) -> Chunk:
        """The chunk of the batches so far. Programs are translated for each stacked shape, so a chunk that is not full has the same shape,
        with zeros at its end."""
        for array in self._arrays:
            array[self.count :] = 0
        arrays = tuple(jax.device_put(a) for a in self._arrays)
        return Chunk(arrays, 0, self.count, self.samples, self.batches, self.source, self.behind)

    def next_builder(self) -> ChunkBuilder:
        """An empty builder for the batches that follow in the epoch."""
        return ChunkBuilder(self.most, self.samples_after, self.batches_after, self.behind + self.count, self.source)


def samples_in(shape: Sequence[int]) -> int:
    """Samples in a batch whose first array has this shape."""
    return shape[0] if shape else 1


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array aligned to `ALIGNMENT`, which XLA:CPU takes without a copy."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + count].view(dtype).reshape(shape)
