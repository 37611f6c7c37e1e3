"""Composition of moves (slices, pads, transposes, ...) into one view; used by `FoldMoves`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.view import View, ViewAxis, dense, regrouped

Scalar = int | float | bool


@dataclass(frozen=True, slots=True)
class ViewOf:
    """A value as a view of another: `view` of `source`, whose result has `shape`; `fill` where there is nothing (None: nowhere yet).

    `moves` counts the moves that would be kernels (a reshape is none).
    """

    source: Value
    view: View
    shape: tuple[int, ...]
    fill: Scalar | None = None
    moves: int = 0

    def axis(self, number: int) -> ViewAxis | None:
        """The viewed axis that a result axis traverses, if any."""
        return next((v for v in self.view if v.axis == number), None)

    def with_axis(self, number: int, new: ViewAxis | None) -> ViewOf:
        """The same view with another (or no) axis traversed by a result axis."""
        kept = tuple(v for v in self.view if v.axis != number)
        return replace(self, view=kept if new is None else (*kept, new))


def whole(value: Value) -> ViewOf:
    """A value as it is."""
    return ViewOf(value, dense(value.shape), value.shape)


def after(seen: ViewOf, node: Node, fill: Scalar | None) -> ViewOf | None:
    """The view of a move's result, given that of its operand and, for a pad, the number it pads with; None if no view can say it."""
    moved = _MOVES[node.op](replace(seen, moves=seen.moves + (node.op != "reshape")), node, fill)
    return None if moved is None else _without_single_axes(moved)


def _slice(seen: ViewOf, node: Node, fill: Scalar | None) -> ViewOf | None:
    for axis, (start, stride) in enumerate(zip(node.attrs["start"], node.attrs["stride"], strict=True)):
        if v := seen.axis(axis):
            seen = seen.with_axis(axis, replace(v, origin=v.origin + start * v.step, step=v.step * stride))
    return replace(seen, shape=node.result.shape)


def _reverse(seen: ViewOf, node: Node, fill: Scalar | None) -> ViewOf | None:
    for axis in node.attrs["axes"]:
        if v := seen.axis(axis):
            seen = seen.with_axis(axis, replace(v, origin=v.origin + v.step * (seen.shape[axis] - 1), step=-v.step))
    return seen


def _transpose(seen: ViewOf, node: Node, fill: Scalar | None) -> ViewOf | None:
    permutation = node.attrs["permutation"]
    return replace(seen, view=tuple(replace(v, axis=permutation.index(v.axis)) for v in seen.view), shape=node.result.shape)


def _broadcast(seen: ViewOf, node: Node, fill: Scalar | None) -> ViewOf | None:
    """A broadcast; axes of size 1 that it stretches traverse nothing already."""
    axes = node.attrs["axes"]
    if any(seen.axis(i) is not None and n != node.result.shape[axes[i]] for i, n in enumerate(seen.shape)):
        return None
    return replace(seen, view=tuple(replace(v, axis=axes[v.axis]) for v in seen.view), shape=node.result.shape)


def _pad(seen: ViewOf, node: Node, fill: Scalar | None) -> ViewOf | None:
    """A pad, if its positions are outside of the viewed axis anyway, and all padding has one value."""
    if fill is None or (seen.fill is not None and repr(seen.fill) != repr(fill)):
        return None
    for axis, (low, high, gaps) in enumerate(zip(*(node.attrs[k] for k in ("low", "high", "interior")), strict=True)):
        if low or high or gaps:
            v = _padded(seen.axis(axis) or _single(seen, axis), seen.shape[axis], low, high, gaps)
            if v is None:
                return None
            seen = seen.with_axis(axis, v)
    return replace(seen, shape=node.result.shape, fill=fill)


def _single(seen: ViewOf, axis: int) -> ViewAxis | None:
    """An axis of size 1 that walks over nothing, as one that walks over an axis of size 1."""
    return ViewAxis(1, 1, axis) if seen.shape[axis] == 1 else None


def _padded(v: ViewAxis | None, size: int, low: int, high: int, gaps: int) -> ViewAxis | None:
    gaps = gaps if size > 1 else 0
    if v is None or (gaps and (v.dilation != 1 or abs(v.step) != 1)):
        return None
    if gaps:
        v = replace(v, origin=v.origin * (gaps + 1), dilation=gaps + 1)
    longer = (size - 1) * (gaps + 1) + 1 + low + high
    new = replace(v, origin=v.origin - low * v.step)
    found, _ = new.places(longer)
    return None if found and (found[0] < low or found[-1] >= longer - max(high, 0)) else new


def _reshape(seen: ViewOf, node: Node, fill: Scalar | None) -> ViewOf | None:
    """A reshape, group by group: one axis split, several merged, or both."""
    groups = regrouped(seen.shape, node.result.shape)
    if groups is None or any(seen.axis(a) for a, n in enumerate(seen.shape) if n == 1):
        return None
    view: list[ViewAxis] = []
    for old, new in groups:
        made = _regroup([seen.axis(a) for a in old], [seen.shape[a] for a in old], new, node.result.shape)
        if made is None:
            return None
        view += made
    return replace(seen, view=tuple(view), shape=node.result.shape)


def _regroup(walks: Sequence[ViewAxis | None], sizes: Sequence[int], new: Sequence[int], shape: Sequence[int]) -> list[ViewAxis] | None:
    if all(v is None for v in walks):
        return []
    if len(walks) == len(new) == 1:
        return [replace(v, axis=new[0]) for v in walks if v]
    merged = _merged(walks, sizes)
    return None if merged is None else _split(merged, new, shape)


def _merged(walks: Sequence[ViewAxis | None], sizes: Sequence[int]) -> ViewAxis | None:
    """Adjacent viewed axes merged into one: the outermost may have any origin, the others must be identities."""
    first, *rest = walks
    if first is None or (rest and (first.step, first.dilation) != (1, 1)):
        return None
    for v, n in zip(rest, sizes[1:], strict=True):
        if v is None or not v.is_identity(n) or first.pitch != v.pitch * v.extent:
            return None
        first = replace(first, extent=first.extent * n, pitch=v.pitch, origin=first.origin * n)
    return first


def _split(v: ViewAxis, new: Sequence[int], shape: Sequence[int]) -> list[ViewAxis] | None:
    """One viewed axis split into several: the inner ones are identities, the outermost has the origin."""
    made: list[ViewAxis] = []
    for axis in reversed(new[1:]):
        n = shape[axis]
        if (v.step, v.dilation) != (1, 1) or v.origin % n or v.extent % n:
            return None
        made.append(ViewAxis(n, v.pitch, axis))
        v = replace(v, extent=v.extent // n, pitch=v.pitch * n, origin=v.origin // n)
    return [replace(v, axis=new[0]), *made]


def _without_single_axes(seen: ViewOf) -> ViewOf | None:
    """Merge viewed axes that a result axis of size 1 traverses into a neighbour, since a window has one axis per axis of its tile."""
    while v := next((v for v in seen.view if seen.shape[v.axis] == 1), None):
        rest = tuple(w for w in seen.view if w is not v)
        if not v.inside(1):
            return None
        if v.extent == 1:
            seen = replace(seen, view=rest)
            continue
        outer = next((w for w in rest if w.pitch == v.pitch * v.extent), None)
        inner = next((w for w in rest if v.pitch == w.pitch * w.extent and w.extent != 1), None)
        at = v.origin // v.dilation
        if outer is not None and outer.dilation == 1:
            joined = replace(
                outer, extent=outer.extent * v.extent, pitch=v.pitch, origin=outer.origin * v.extent + at, step=outer.step * v.extent
            )
            rest = tuple(joined if w is outer else w for w in rest)
        elif inner is not None and inner.dilation == 1 and inner.inside(seen.shape[inner.axis]):
            joined = replace(inner, extent=inner.extent * v.extent, origin=inner.origin + at * inner.extent)
            rest = tuple(joined if w is inner else w for w in rest)
        else:
            return None
        seen = replace(seen, view=rest)
    return seen


_MOVES: Mapping[str, Callable[[ViewOf, Node, Scalar | None], ViewOf | None]] = {
    "slice": _slice, "reverse": _reverse, "transpose": _transpose, "broadcast": _broadcast, "pad": _pad, "reshape": _reshape,
}  # fmt: skip
MOVES = frozenset(_MOVES)
