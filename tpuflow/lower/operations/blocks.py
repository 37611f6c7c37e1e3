"""What windowed reductions and their gradients share: strided loads that may reach outside of the operand, and interleaving."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.view import ViewAxis


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads along one axis: from each of `starts`, `count` elements that are `stride` positions apart.

    Element i of the operand lies at position i * base_dilation; positions between and outside of the elements are padding.
    """

    starts: tuple[int, ...]
    count: int
    stride: int = 1
    base_dilation: int = 1

    def margins(self, size: int) -> tuple[int, int]:
        """Padding (low, high) that the loads need around an operand of `size` elements."""
        last = max(self.starts) + (self.count - 1) * self.stride
        return max(0, -min(self.starts)), max(0, last - (size - 1) * self.base_dilation)


def load_all(b: Builder, x: Value, axes: Sequence[Loads], fill: bool | int | float) -> Iterator[tuple[tuple[int, ...], Value]]:
    """(starts, what is loaded from there) for every combination of starts, in row-major order; `fill` where x has no element."""
    low, high = zip(*(a.margins(n) for a, n in zip(axes, x.shape, strict=True)), strict=True)
    padded = b.pad(x, fill, low, high, [a.base_dilation - 1 for a in axes])
    for starts in itertools.product(*(a.starts for a in axes)):
        begin = [s + lo for s, lo in zip(starts, low, strict=True)]
        end = [s + (a.count - 1) * a.stride + 1 for s, a in zip(begin, axes, strict=True)]
        yield starts, b.slice(padded, begin, end, [a.stride for a in axes])


def blocks(size: int, step: int) -> int:
    """Elements of each of the `step` pieces that interleave to `size` elements: at least two, since a window with a step must move."""
    return max(2, -(-size // step)) if step > 1 else size


def interleaved(b: Builder, pieces: Sequence[Value], origins: Sequence[Sequence[int]], steps: Sequence[int], shape: Sequence[int]) -> Value:
    """The array of `shape` in which element i of a piece lies at origin + step * i along every axis; what falls outside is dropped."""
    views = []
    for origin in origins:
        pitch = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        rows = zip(shape, pitch, range(len(shape)), origin, steps, strict=True)
        views.append(tuple(ViewAxis(n, p, axis, o, step) for n, p, axis, o, step in rows if (n, o, step) != (1, 0, 1)))
    if len(pieces) == 1 and pieces[0].shape == tuple(shape):
        return pieces[0]
    return b.emit("join", pieces, {"views": tuple(views)}, [TensorType(pieces[0].dtype, tuple(shape))]).result
