"""Rules of named axes: `shard_map` (what `pmap` is made of too), and the collectives inside of it.

Collectives over a `vmap` axis are ordinary operations as soon as they are batched: `vmap` itself makes a gather of them, a permutation,
or a sum over an axis that is given by its number. What is left with a name is an axis of a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.importer import inline
from tpuflow.lower.importers.jaxpr.registry import COMPLEX, bound, enter, lowers
from tpuflow.lower.operations import collectives
from tpuflow.lower.operations.collectives import Group, NamedCut
from tpuflow.lower.operations.complex import Complex, Number
from tpuflow.lower.operations.complex_reductions import reduce_extreme
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.linalg.arithmetic import each
from tpuflow.lower.operations.reductions import reduce

_REDUCE = {"psum": "add", "psum_invariant": "add", "pmax": "max", "pmin": "min"}
Names = Any
"""An axis name, or several."""


@lowers("shard_map", keys=True)
def _shard_map(
    b: Builder, *operands: Number, jaxpr: Any, mesh: Any, in_specs: Sequence[Any], out_specs: Sequence[Any]
) -> tuple[Number, ...]:
    """Inline the body with the shards of a chip as operands; code outside of it runs on whole arrays on every chip."""
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    around, b.mesh = b.mesh, {**b.mesh, **sizes}
    pieces = [_shard(b, x, _cut(spec, x, sizes), sizes) for x, spec in zip(operands, in_specs, strict=True)]
    results = inline(b, jaxpr, pieces)
    b.mesh = around
    return tuple(_unshard(b, x, _cut(spec, x, sizes), sizes) for x, spec in zip(results, out_specs, strict=True))


def _cut(spec: Any, x: Number, sizes: Mapping[str, int]) -> NamedCut:
    """A `PartitionSpec` for all dimensions of an array, without axes of one chip."""
    rows = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    named = [Group.of(sizes, list(map(str, row))).names for row in rows]
    return tuple(named + [()] * (len(x.shape) - len(named)))


def _shard(b: Builder, x: Number, cut: NamedCut, sizes: Mapping[str, int]) -> Number:
    return each(lambda p: _shard_plane(b, p, cut, sizes), x) if any(cut) else x


def _shard_plane(b: Builder, x: Value, cut: NamedCut, sizes: Mapping[str, int]) -> Value:
    maker = b.maker(x)
    if maker is not None and maker.op == "unshard" and maker.attrs["cut"] == cut:
        return maker.inputs[0]
    return b.emit("shard", (x,), {"cut": cut, "sizes": _counts(cut, sizes)}).result


def _unshard(b: Builder, x: Number, cut: NamedCut, sizes: Mapping[str, int]) -> Number:
    attributes = {"cut": cut, "sizes": _counts(cut, sizes)}
    return each(lambda p: b.emit("unshard", (p,), attributes).result, x) if any(cut) else x


def _counts(cut: NamedCut, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(Group.of(sizes, names).chips for names in cut)


def _group(b: Builder, names: Names, groups: Any = None) -> Group:
    """The group of chips over one axis name or several."""
    if groups is not None:
        raise UnsupportedForm("axis_index_groups; give the mesh an axis for each kind of group instead")
    return Group.of(b.mesh, list(map(str, names if isinstance(names, (tuple, list)) else (names,))))


def _reduce(b: Builder, op: str, x: Value, *, axes: Sequence[Any], axis_index_groups: Any = None) -> Value:
    """Reduce over axes that `vmap` made positional (integers), then over named ones."""
    numbered = [a for a in axes if isinstance(a, int)]
    x = reduce(b, op, x, numbered) if numbered else x
    return collectives.all_reduce(b, op, x, _group(b, [a for a in axes if not isinstance(a, int)], axis_index_groups))


enter({primitive: bound(_reduce, op) for primitive, op in _REDUCE.items()})


def _complex_extreme(b: Builder, x: Complex, *, op: str, axes: Sequence[Any], axis_index_groups: Any = None) -> Complex:
    """As `_reduce`; complex numbers are compared by both parts, which no collective does, so the chips gather all and reduce."""
    numbered = [a for a in axes if isinstance(a, int)]
    x = reduce_extreme(b, x, op=op, axes=numbered) if numbered else x
    group = _group(b, [a for a in axes if not isinstance(a, int)], axis_index_groups)
    if group.chips == 1:
        return x
    return reduce_extreme(b, each(lambda p: collectives.all_gather(b, p, group, 0, tiled=False), x), op=op, axes=(0,))


COMPLEX.enter({f"p{op}": partial(_complex_extreme, op=op) for op in ("max", "min")})


@lowers("reduce_scatter")
def _reduce_scatter(b: Builder, x: Value, *, axis_name: Names, scatter_dimension: int, tiled: bool, axis_index_groups: Any = None) -> Value:
    return collectives.reduce_scatter(b, "add", x, _group(b, axis_name, axis_index_groups), scatter_dimension, tiled=tiled)


@lowers("all_gather", "all_gather_invariant", keys=True)
def _all_gather(b: Builder, x: Value, *, axis_name: Names, all_gather_dimension: int, tiled: bool, axis_index_groups: Any = None) -> Value:
    return collectives.all_gather(b, x, _group(b, axis_name, axis_index_groups), all_gather_dimension, tiled=tiled)


@lowers("all_to_all", keys=True)
def _all_to_all(b: Builder, x: Value, *, axis_name: Names, split_axis: int, concat_axis: int, axis_index_groups: Any = None) -> Value:
    """The primitive never adds or removes an axis: JAX inserts axes of size 1 where needed."""
    return collectives.all_to_all(b, x, _group(b, axis_name, axis_index_groups), split_axis, concat_axis)


@lowers("ppermute", keys=True)
def _ppermute(b: Builder, x: Value, *, axis_name: Names, perm: Sequence[tuple[int, int]]) -> Value:
    return collectives.collective_permute(b, x, _group(b, axis_name), perm)


@lowers("axis_index")
def _axis_index(b: Builder, *, axis_name: Names) -> Value:
    return collectives.position(b, _group(b, axis_name))


@lowers("pbroadcast", keys=True)
def _from_one(b: Builder, x: Value, *, axis_name: Names, source: int) -> Value:
    """The array of chip `source`, on all chips of the group."""
    group = _group(b, axis_name)
    if group.chips == 1:
        return x
    whole = collectives.all_gather(b, x, group, 0, tiled=False)
    return b.reshape(b.slice_axis(whole, 0, source, source + 1), x.shape)
