"""Collectives over named mesh axes. The device sends dense buffers; axes other than the first are handled by transposes around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.forms import UnsupportedForm

Names = tuple[str, ...]
NamedCut = tuple[Names, ...]
"""For each dimension the names of the mesh axes, major first, that it is cut over."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of chips that differ only along some mesh axes: the names and sizes of these axes, none of which has size 1."""

    names: Names
    sizes: tuple[int, ...]

    @staticmethod
    def of(sizes: Mapping[str, int], names: Sequence[str]) -> Group:
        """The group over the named axes; axes of size 1 are left out."""
        several = tuple(n for n in names if sizes[n] > 1)
        return Group(several, tuple(sizes[n] for n in several))

    @property
    def chips(self) -> int:
        """The number of chips in a group."""
        return math.prod(self.sizes)


def position(b: Builder, group: Group) -> Value:
    """s32[]: a chip's number in its group, row-major over its axes."""
    total = b.scalar(0, S32)
    for name, size in zip(group.names, group.sizes, strict=True):
        total = b.add(b.mul(total, size), b.emit("position", (), {"axis": name}).result)
    return total


def _collective(
    b: Builder, kind: str, x: Value, group: Group, shape: Sequence[int], reducer: str = "none", pairs: Sequence[tuple[int, int]] = ()
) -> Value:
    attrs = {"kind": kind, "reducer": reducer, "axes": group.names, "chips": group.chips, "pairs": tuple(pairs)}
    return b.emit("collective", (x,), attrs, [TensorType(x.dtype, tuple(shape))]).result


def all_reduce(b: Builder, reducer: str, x: Value, group: Group) -> Value:
    """The sum (or max, min) over the group: x's type."""
    return _collective(b, "all_reduce", x, group, x.shape, reducer) if group.chips > 1 else x


def all_gather(b: Builder, x: Value, group: Group, axis: int, *, tiled: bool) -> Value:
    """The arrays of all chips of the group, stacked along a new `axis`, or concatenated along it if `tiled`."""
    shape = x.shape
    if group.chips > 1:
        x = _moveaxis(b, _collective(b, "all_gather", x, group, (group.chips, *shape)), 0, axis)
    elif not tiled:
        return b.reshape(x, (*shape[:axis], 1, *shape[axis:]))
    return b.reshape(x, (*shape[:axis], group.chips * shape[axis], *shape[axis + 1 :])) if tiled else x


def reduce_scatter(b: Builder, reducer: str, x: Value, group: Group, axis: int, *, tiled: bool) -> Value:
    """Each chip's shard along `axis` of the reduction over the group; the axis is removed unless `tiled`."""
    own = x.shape[axis] // group.chips
    rest = (*x.shape[:axis], *((own,) if tiled else ()), *x.shape[axis + 1 :])
    if group.chips == 1:
        return b.reshape(x, rest)
    return _collective(b, "reduce_scatter", _split_axis_first(b, x, axis, group.chips, own if tiled else None), group, rest, reducer)


def all_to_all(b: Builder, x: Value, group: Group, split: int, concat: int) -> Value:
    """Piece i along axis `split` is sent to chip i; the received pieces are concatenated along axis `concat`."""
    if group.chips == 1:
        return x
    pieces = _split_axis_first(b, x, split, group.chips, x.shape[split] // group.chips)
    found = _moveaxis(b, _collective(b, "all_to_all", pieces, group, pieces.shape), 0, concat)
    shape = pieces.shape[1:]
    return b.reshape(found, (*shape[:concat], group.chips * shape[concat], *shape[concat + 1 :]))


def collective_permute(b: Builder, x: Value, group: Group, pairs: Sequence[tuple[int, int]]) -> Value:
    """The array of the source chip that `pairs` (source, target) assigns to this chip; zeros if there is none."""
    if not pairs:
        return b.full(x.type, 0)
    return _collective(b, "permute", x, group, x.shape, pairs=[(int(s), int(d)) for s, d in pairs]) if group.chips > 1 else x


def shard(b: Builder, x: Value, cut: NamedCut, sizes: Mapping[str, int]) -> Value:
    """A chip's shard of an array that every chip has whole.

    Raises:
      UnsupportedForm: an axis of the array does not divide.
    """
    groups = [Group.of(sizes, names) for names in cut]
    for d, group in enumerate(groups):
        if x.shape[d] % group.chips:
            raise UnsupportedForm(f"axis {d} of {x.type} is cut over {group.chips} chips ({', '.join(group.names)}); expected it to divide")
    shape = tuple(n // group.chips for n, group in zip(x.shape, groups, strict=True))
    starts = [b.mul(position(b, group), n) if group.chips > 1 else b.scalar(0, S32) for group, n in zip(groups, shape, strict=True)]
    return b.emit("dynamic_slice", (x, *starts), {"sizes": shape}).result


def unshard(b: Builder, x: Value, cut: NamedCut, sizes: Mapping[str, int]) -> Value:
    """The whole array, on every chip, from its shards."""
    for d, names in enumerate(cut):
        x = all_gather(b, x, Group.of(sizes, names), d, tiled=True)
    return x


def _split_axis_first(b: Builder, x: Value, axis: int, chips: int, own: int | None) -> Value:
    """[chips, ...]: `axis` split into `chips` pieces of `own` elements (None: of one, without the axis), with the new axis in front."""
    piece = () if own is None else (own,)
    return _moveaxis(b, b.reshape(x, (*x.shape[:axis], chips, *piece, *x.shape[axis + 1 :])), axis, 0)


def _moveaxis(b: Builder, x: Value, source: int, target: int) -> Value:
    """One axis moved, as numpy.moveaxis."""
    order = [i for i in range(len(x.shape)) if i != source]
    order.insert(target, source)
    return x if order == list(range(len(order))) else b.transpose(x, tuple(order))
