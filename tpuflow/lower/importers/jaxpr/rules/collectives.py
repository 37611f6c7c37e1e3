"""Rules of named axes: `shard_map` (what `pmap` is made of too) over a mesh of one device, and the collectives inside of it.

Collectives over a `vmap` axis are ordinary operations as soon as they are batched: `vmap` itself makes a gather of them, a permutation,
or a sum over an axis that is given by its number. What is left with a name is an axis of one device: the walk lets no other in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import S32
from tpuflow.jaxprs.compat import location_of, opened
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.importer import inline
from tpuflow.lower.importers.jaxpr.registry import bound, enter, lowers
from tpuflow.lower.operations import collectives
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.reductions import reduce

_REDUCE = {"psum": "add", "psum_invariant": "add", "pmax": "max", "pmin": "min"}


@lowers("shard_map", keys=True)
def _shard_map(b: Builder, *operands: Value, jaxpr: Any, mesh: Any) -> tuple[Value, ...]:
    """On one device every shard is the whole array."""
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    if (devices := math.prod(sizes.values())) != 1:
        lines = map(location_of, opened(jaxpr)[0].eqns)  # the call's own line may be forgotten, or be pmap's
        raise UnsupportedForm(
            f"what it maps ({next(filter(None, lines), 'nothing')}) is for a mesh of {devices} devices {sizes}, and a program runs on one "
            f"chip. Use a mesh of one device, such as "
            f"jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape({(1,) * len(sizes)}), {tuple(sizes)}) (for pmap: a leading axis of "
            f"size 1), or jax.vmap(..., axis_name=...), whose axes may have any size on one chip"
        )
    return inline(b, jaxpr, operands)


def _reduce(b: Builder, op: str, x: Value, *, axes: Sequence[str | int]) -> Value:
    """Over the axes that `vmap` has numbered; one device has nothing to add along those with names."""
    numbered = [a for a in axes if isinstance(a, int)]
    return reduce(b, op, x, numbered) if numbered else x


enter({primitive: bound(_reduce, op) for primitive, op in _REDUCE.items()})
enter({"reduce_scatter": collectives.reduce_scatter}, scatter_dimension="axis")
enter(dict.fromkeys(("all_gather", "all_gather_invariant"), collectives.all_gather), keys=True, all_gather_dimension="axis")
enter({"ppermute": collectives.collective_permute}, keys=True, perm="pairs")


@lowers("axis_index")
def _axis_index(b: Builder) -> Value:
    return b.scalar(0, S32)


@lowers("all_to_all", "pbroadcast", keys=True)
def _to_itself(b: Builder, x: Value) -> Value:
    return x
