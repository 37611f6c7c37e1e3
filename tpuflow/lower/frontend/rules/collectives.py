"""Rules of named axes: `shard_map` (what `pmap` is made of too) over a mesh of one device, and the collectives inside of it.

Collectives over a `vmap` axis are ordinary operations as soon as they are batched: `vmap` itself makes a gather of them, a permutation,
or a sum over an axis that is given by its number. What is left with a name is an axis of one device: the walk lets no other in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import S32
from tpuflow.lower.frontend import jax_compat
from tpuflow.lower.frontend.jaxpr import inline
from tpuflow.lower.frontend.registry import UnsupportedForm, lowers
from tpuflow.lower.frontend.rules.reductions import reduce
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value


@lowers("shard_map", keys=True)
def _shard_map(b: Builder, *operands: Value, jaxpr: Any, mesh: Any) -> tuple[Value, ...]:
    """On one device every shard is the whole array."""
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    if (devices := math.prod(sizes.values())) != 1:
        lines = map(jax_compat.location_of, jax_compat.opened(jaxpr)[0].eqns)  # the call's own line may be forgotten, or be pmap's
        raise UnsupportedForm(
            f"what it maps ({next(filter(None, lines), 'nothing')}) is for a mesh of {devices} devices {sizes}, and a program runs on one "
            f"chip. Use a mesh of one device, such as "
            f"jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape({(1,) * len(sizes)}), {tuple(sizes)}) (for pmap: a leading axis of "
            f"size 1), or jax.vmap(..., axis_name=...), whose axes may have any size on one chip"
        )
    return inline(b, jaxpr, operands)


def _enter_reduction(op: str, *primitives: str) -> None:
    @lowers(*primitives)
    def rule(b: Builder, x: Value, *, axes: Sequence[str | int]) -> Value:
        """Over the axes that `vmap` has numbered; one device has nothing to add along those with names."""
        numbered = [a for a in axes if isinstance(a, int)]
        return reduce(b, op, x, numbered) if numbered else x


_enter_reduction("add", "psum", "psum_invariant")
_enter_reduction("max", "pmax")
_enter_reduction("min", "pmin")


@lowers("axis_index")
def _axis_index(b: Builder) -> Value:
    return b.scalar(0, S32)


@lowers("all_gather", "all_gather_invariant", keys=True)
def _all_gather(b: Builder, x: Value, *, all_gather_dimension: int, tiled: bool) -> Value:
    """One shard in a row: an axis of size 1, unless shards are put together along one they have."""
    at = all_gather_dimension
    return x if tiled else b.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


@lowers("reduce_scatter")
def _reduce_scatter(b: Builder, x: Value, *, scatter_dimension: int, tiled: bool) -> Value:
    """The sum over one device, of which it keeps its share: all."""
    at = scatter_dimension
    return x if tiled else b.reshape(x, (*x.shape[:at], *x.shape[at + 1 :]))


@lowers("all_to_all", "pbroadcast", keys=True)
def _to_itself(b: Builder, x: Value) -> Value:
    return x


@lowers("ppermute", keys=True)
def _ppermute(b: Builder, x: Value, *, perm: Sequence[tuple[int, int]]) -> Value:
    """What a device sends to itself; zeros if nobody sends it anything."""
    return x if perm else b.full(x.type, 0)
