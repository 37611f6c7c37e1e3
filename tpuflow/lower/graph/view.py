"""Views: strided access to an array as a DMA window does it, a composition of slices, pads, reversals and transposes.

A view regards the dense row-major elements of its operand as axes with an `extent` and a `pitch` (stride in elements). Each of these is
traversed by one axis of the result; result axes that traverse none are broadcast.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuflow.isa.instruction import WindowAxis
from tpuflow.isa.windows import present


@dataclass(frozen=True, slots=True)
class ViewAxis:
    """Result axis `axis` at index i reads position `origin + step * i`: element position / `dilation` if there is one, else nothing.

    `pitch` is the distance in elements between neighbours of the viewed axis, which has `extent` elements.
    """

    extent: int
    pitch: int
    axis: int
    origin: int = 0
    step: int = 1
    dilation: int = 1

    def __str__(self) -> str:
        spread = f"/{self.dilation}" if self.dilation != 1 else ""
        return f"{self.extent}*{self.pitch}:d{self.axis}*{self.step}{self.origin:+d}{spread}"

    def is_identity(self, size: int) -> bool:
        """Whether `size` indices traverse the whole axis in order."""
        return (self.origin, self.step, self.dilation, self.extent) == (0, 1, 1, size)

    def places(self, size: int) -> tuple[range, range]:
        """(indices of 0 ... size - 1 that read an element, the elements that they read)."""
        return present(WindowAxis(self.extent, self.pitch, step=self.step, dilation=self.dilation), size, self.origin)

    def inside(self, size: int) -> bool:
        """Whether every index reads an element."""
        return len(self.places(size)[0]) == size


View = tuple[ViewAxis, ...]


def problem(view: View, elems: int, shape: Sequence[int]) -> str:
    """Why a view of an array of `elems` elements cannot give a result of `shape`; empty if it can."""
    walked = [v.axis for v in view]
    if len(set(walked)) != len(walked) or any(not 0 <= a < len(shape) for a in walked):
        return f"result axes {walked} must be different and below {len(shape)}"
    if any(v.step == 0 or v.dilation < 1 for v in view):
        return "steps are not 0 and dilations at least 1"
    inner = 1
    for v in sorted((v for v in view if v.extent != 1), key=lambda v: v.pitch):
        if v.pitch != inner:
            return f"axes {', '.join(map(str, view))} are not row-major in any order"
        inner *= v.extent
    return "" if inner == elems else f"axes of {inner} elements in all view an array of {elems}"


def _by_pitch(view: View) -> list[ViewAxis]:
    return sorted(view, key=lambda v: -v.pitch)


def read(x: np.ndarray, view: View, shape: Sequence[int], fill: int | float | bool) -> np.ndarray:
    """The result of `shape`: x seen through the view, `fill` where there is nothing."""
    order = _by_pitch(view)
    sizes = [shape[v.axis] for v in order]
    value = np.full(sizes, np.asarray(fill).astype(x.dtype), x.dtype)
    places = [v.places(n) for v, n in zip(order, sizes, strict=True)]
    value[np.ix_(*(at for at, _ in places))] = x.reshape([v.extent for v in order])[np.ix_(*(element for _, element in places))]
    turned = value.transpose(sorted(range(len(order)), key=lambda i: order[i].axis))
    walked = {v.axis for v in view}
    return np.broadcast_to(turned.reshape([n if a in walked else 1 for a, n in enumerate(shape)]), tuple(shape))


def write(out: np.ndarray, view: View, piece: np.ndarray) -> None:
    """Put a piece into `out` (dense) where the view reads; what lies outside is dropped. Every axis of the piece is walked or of size 1."""
    order = _by_pitch(view)
    places = [v.places(piece.shape[v.axis]) for v in order]
    walked = [v.axis for v in order]
    turned = piece.transpose([*walked, *(a for a in range(piece.ndim) if a not in walked)]).reshape([piece.shape[a] for a in walked])
    where = out.reshape([v.extent for v in order])
    where[np.ix_(*(element for _, element in places))] = turned[np.ix_(*(at for at, _ in places))]


def runs(view: View, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Result axes in groups that could each be merged into one axis of contiguous elements; axes of size 1 are in no group."""
    groups: list[list[ViewAxis]] = []
    for v in sorted((v for v in view if shape[v.axis] != 1), key=lambda v: -v.pitch):
        last = groups[-1][-1] if groups else None
        contiguous = last is not None and last.pitch == v.pitch * v.extent and last.is_identity(shape[last.axis])
        groups[-1].append(v) if contiguous and v.is_identity(shape[v.axis]) else groups.append([v])
    return [tuple(v.axis for v in group) for group in groups]


def dense(shape: Sequence[int]) -> View:
    """The view of an array as it is, axes of size 1 left out."""
    view, pitch = [], 1
    for axis, n in reversed(list(enumerate(shape))):
        if n != 1:
            view.append(ViewAxis(n, pitch, axis))
        pitch *= n
    return tuple(reversed(view))


def regrouped(old: Sequence[int], new: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """A reshape in its finest independent groups (old axes, new axes) of equal size. Axes of size 1 are left out; None for empty arrays."""
    if 0 in (*old, *new):
        return None
    left, right = ([i for i, n in enumerate(s) if n != 1] for s in (old, new))
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while left:
        i = j = 1
        while (a := _product(old, left[:i])) != (b := _product(new, right[:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        groups.append((tuple(left[:i]), tuple(right[:j])))
        left, right = left[i:], right[j:]
    return groups


def _product(shape: Sequence[int], axes: Sequence[int]) -> int:
    return list(itertools.accumulate((shape[a] for a in axes), lambda x, y: x * y))[-1]
