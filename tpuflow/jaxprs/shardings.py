"""The shardings in a jaxpr: those that its equations name, and those of its types with explicit axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.jaxprs.compat import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    at_host,
    inner_jaxprs,
    is_at_host,
    is_token,
    jaxpr_as_fun,
    location_of,
)
from tpuflow.jaxprs.host_calls import with_numbered_calls
from tpuflow.jaxprs.versions import manual_axes

LAST = "tpuflow_partitioned"
"""The target of the custom call at the end of a module to be partitioned. It is not registered, so that XLA stops before code
generation."""


Cut = tuple[tuple[str, ...], ...]
"""For each dimension of an array the mesh axes, major first, that it is cut over; () if every device has all of it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The mesh axes, with their sizes, and the shardings of inputs and outputs that a jaxpr asks the partitioner for; None lets it
    choose."""

    mesh: Mapping[str, int]
    inputs: tuple[NamedSharding | None, ...]
    outputs: tuple[NamedSharding | None, ...]

    def carrying(self, count: int, cuts: Sequence[Cut] = (), divided: Mapping[str, int] | None = None) -> Asked:
        """The same for a step whose first `count` inputs and outputs are carried: each carry has one sharding, that of the output, else of
        the input, else of `cuts`. divided: the mesh of `cuts`, where axes of this mesh have been split."""
        sizes = divided or self.mesh
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        chosen = [NamedSharding(mesh, PartitionSpec(*cut)) for cut in cuts[:count]] or [None] * count
        both = tuple(new or old or other for new, old, other in zip(self.outputs, self.inputs, chosen, strict=False))
        return Asked(self.mesh, (*both, *self.inputs[count:]), (*both, *self.outputs[count:]))


def cuts(sharding: Any) -> bool:
    """Whether a sharding shards an array over several devices."""
    return isinstance(sharding, NamedSharding) and any(sharding.mesh.shape[name] > 1 for name in axes_in(sharding.spec))


def axes_in(spec: PartitionSpec) -> list[str]:
    """The mesh axes that a specification names."""
    rows = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [name for row in rows for name in row if isinstance(name, str)]


def axes_of(sharding: NamedSharding) -> list[Any]:
    """The mesh axes of each dimension, as the partition spec names them, up to the last dimension that is sharded."""
    spec = list(sharding.spec)
    while spec and not spec[-1]:
        spec.pop()
    return [entry or None for entry in spec]


def is_explicit(sharding: NamedSharding) -> bool:
    """Whether it is over a mesh with explicit axes, so that it is part of the types of arrays."""
    return AxisType.Explicit in sharding.mesh.axis_types


def asked_of(closed: ClosedJaxpr) -> Asked | None:
    """The shardings that a jaxpr asks for; None if nothing outside of `shard_map` is sharded, so that there is nothing to partition.

    Raises:
      UnsupportedPrimitiveError: it is over meshes of different numbers of devices.
    """
    inputs, outputs = _of_ports(closed)
    found = [(None, s) for s in (*inputs, *outputs) if s is not None] + list(_named(closed.jaxpr))
    if not any(cuts(sharding) for _, sharding in found):
        return None
    return Asked(_mesh_of(closed, found), inputs, outputs)


def is_mapped(closed: ClosedJaxpr) -> bool:
    """Whether all operations of a jaxpr are inside of `shard_map`s, apart from calls around them."""
    inner = [e for e in closed.jaxpr.eqns if e.primitive.name != "shard_map"]
    return all(e.primitive.name == "jit" and is_mapped(e.params["jaxpr"]) for e in inner)


def with_sharding(spec: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """A `ShapeDtypeStruct` with a sharding in its type, if the sharding has explicit axes."""
    return spec.update(sharding=sharding) if sharding is not None and is_explicit(sharding) else spec


def with_shardings(
    closed: ClosedJaxpr, name: str, inputs: Sequence[NamedSharding | None], outputs: Sequence[NamedSharding | None]
) -> ClosedJaxpr:
    """The jaxpr as one `jit` call with these shardings of arguments and results."""
    call = _named_function(closed, name)
    return jax.make_jaxpr(jax.jit(call, in_shardings=tuple(inputs), out_shardings=list(outputs)))(*specs_of(closed.in_avals))


def lowered(closed: ClosedJaxpr, name: str, asked: Asked, functions: list[Callable[..., Any]]) -> Any:
    """The StableHLO module of a jaxpr, with shardings over an abstract mesh; its last result is that of the call of `LAST`. What its
    calls of the host call is added to `functions`."""
    outputs, closed = [*asked.outputs, None], with_numbered_calls(closed, functions)
    call = jax.jit(_named_function(closed, name, last=True), in_shardings=asked.inputs, out_shardings=outputs, keep_unused=True)
    return call.trace(*specs_of(closed.in_avals)).lower(lowering_platforms=("tpu",)).compiler_ir()


def specs_of(avals: Sequence[Any]) -> list[Any]:
    """Types as arguments to trace with."""
    return [a if is_token(a) else _spec_of(a) for a in avals]


def _spec_of(aval: Any) -> Any:
    if is_at_host(aval):
        return at_host(aval)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=_in_type(aval))


def _named_function(closed: ClosedJaxpr, name: str, *, last: bool = False) -> Any:
    """A jaxpr as a function of a name, by which XLA knows it; with the result of a call of `LAST` behind its own."""
    call = jaxpr_as_fun(closed)

    def function(*arrays: Any) -> list[Any]:
        return [*call(*arrays), *([jax.ffi.ffi_call(LAST, jax.ShapeDtypeStruct((), np.float32))()] if last else [])]

    function.__name__ = name
    return function


def _in_type(aval: Any) -> NamedSharding | None:
    """The sharding that is part of a type (of an array over explicit axes); None if there is none."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and is_explicit(sharding) else None


def _of_ports(closed: ClosedJaxpr) -> tuple[tuple[NamedSharding | None, ...], tuple[NamedSharding | None, ...]]:
    """The shardings of inputs and outputs: from their types, or from the `jit` call that is the jaxpr's only equation."""
    equations = closed.jaxpr.eqns
    inputs: dict[Any, Any] = {}
    outputs: dict[Any, Any] = {}
    if len(equations) == 1 and equations[0].primitive.name == "jit":
        (call,) = equations
        inputs = {v: s for v, s in zip(call.invars, call.params["in_shardings"], strict=True) if not isinstance(v, Literal)}
        outputs = dict(zip(call.outvars, call.params["out_shardings"], strict=True))
    ports = ((closed.jaxpr.invars, inputs), (closed.jaxpr.outvars, outputs))
    of_inputs, of_outputs = (tuple(_of_port(v, given) for v in values) for values, given in ports)
    return of_inputs, of_outputs


def _of_port(value: Any, given: Mapping[Any, Any]) -> NamedSharding | None:
    sharding = None if isinstance(value, Literal) else given.get(value)
    is_whole = isinstance(sharding, NamedSharding) and PartitionSpec.UNCONSTRAINED not in tuple(sharding.spec)
    return sharding if is_whole else _in_type(value.aval)


def _named(jaxpr: Jaxpr) -> Iterator[tuple[Equation, NamedSharding]]:
    """Every sharding that an equation or the type of its results names, outside of `shard_map`s that map all axes by hand."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map" and set(equation.params["mesh"].axis_names) <= manual_axes(equation.params):
            continue
        named = [s for value in equation.params.values() for s in (value if isinstance(value, tuple) else (value,))]
        in_types = [_in_type(v.aval) for v in equation.outvars]
        for s in (*named, *in_types):
            if isinstance(s, NamedSharding):
                yield equation, s
        for inner in inner_jaxprs(equation):
            yield from _named(inner)


def _mesh_of(closed: ClosedJaxpr, found: Sequence[tuple[Equation | None, NamedSharding]]) -> Mapping[str, int]:
    """The mesh, of all that are named, with the most axes larger than one: shardings over the others are over products of its axes."""
    mesh: dict[str, int] = {}
    for equation, sharding in found:
        other = {str(name): int(size) for name, size in sharding.mesh.shape.items()}
        if mesh and _several(other) and math.prod(other.values()) != math.prod(mesh.values()) > 1:
            where = (location_of(equation) if equation is not None else "") or "unknown source line"
            raise UnsupportedPrimitiveError(
                f"{where}: a sharding over the mesh {other} in a program that has one over {mesh}; all chips of a program run all of it. "
                "Name all axes in one mesh, and in each PartitionSpec those that the array is cut over."
            )
        mesh = mesh if mesh and len(_several(mesh)) >= len(_several(other)) else other
    return mesh


def _several(mesh: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in mesh.items() if size > 1}
