"""How `jax.debug.print`, `jax.debug.callback`, `io_callback` and `pure_callback` are lowered to StableHLO: as custom calls of a number."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax._src import callback
from jax._src.effects import ordered_effects
from jax._src.interpreters import mlir
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.isa.calls import HOST_CALL, HOST_CALL_PER_CHIP
from tpuflow.jaxprs.compat import host_function, location_of, partly_mapped

Rule = Callable[..., Sequence[Any]]
HostFunction = Callable[..., Any]
_PARTITIONED = "partitioned"
"""The parameter of JAX's primitives that says that devices call with the pieces of arrays that they have (`_Call.with_pieces`)."""
CUSTOM_CALL = "stablehlo.custom_call"


@dataclass(frozen=True, slots=True)
class _Call:
    """The number of a function, the user's line, and whether devices are to call it with the pieces of arrays that they have."""

    number: int
    source: str
    with_pieces: bool


def lowering_rules(
    primitives: Iterable[Any], function_of: Callable[[Any, dict[str, Any]], HostFunction], enlist: Callable[[HostFunction], int]
) -> list[tuple[Any, Rule]]:
    """Each primitive with its lowering rule: a custom call whose backend_config is the number that `enlist` returns for the function that
    the primitive with its parameters calls. Inside of a `shard_map` every device calls, as in JAX; elsewhere a program of several devices
    calls once. Ordered callbacks need no token, since a Program makes its calls in order."""

    def rule(context: Any, *operands: Any, primitive: Any, **params: Any) -> Sequence[Any]:
        number = enlist(function_of(primitive, params))
        return _lower(context, operands, _Call(number, _source_of(ir.Location.current), params.get(_PARTITIONED, False)))

    return [(primitive, partial(rule, primitive=primitive)) for primitive in primitives]


def with_numbered_calls(closed: ClosedJaxpr, functions: list[HostFunction]) -> ClosedJaxpr:
    """The jaxpr with `host_call`s of functions that are added to `functions`, in place of JAX's own calls of the host, which can be lowered
    for real devices only."""
    jaxpr = _numbered(closed.jaxpr, functions)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def _numbered(jaxpr: Jaxpr, functions: list[HostFunction]) -> Jaxpr:
    """What calls nobody stays the object that it is: JAX lowers each only once."""
    found = [_numbered_equation(equation, functions) for equation in jaxpr.eqns]
    return jaxpr if all(map(operator.is_, found, jaxpr.eqns)) else jaxpr.replace(eqns=found)


def _numbered_equation(equation: Any, functions: list[HostFunction]) -> Any:
    if (function := host_function(equation)) is None:
        params = {key: _numbered_value(value, functions) for key, value in equation.params.items()}
        return equation if all(value is equation.params[key] for key, value in params.items()) else equation.replace(params=params)
    if any(map(ordered_effects.contains, equation.effects)):
        raise UnsupportedPrimitiveError(
            f"{location_of(equation) or 'unknown source line'}: {equation.primitive.name!r} with ordered=True in a program that is "
            "partitioned over several chips, which JAX has not, either: its partitioner keeps no order of calls. Leave ordered=True out, "
            "or put all that runs on the chips inside of jax.shard_map, where calls are made in the program's order."
        )
    functions.append(function)
    found = _Call(len(functions) - 1, location_of(equation) or "", equation.params.get(_PARTITIONED, False))
    params = {"call": found, "avals": tuple(v.aval for v in equation.outvars)}
    return equation.replace(primitive=host_call_p, params=params)


def _numbered_value(value: Any, functions: list[HostFunction]) -> Any:
    """A parameter of an equation, in which there may be jaxprs."""
    if isinstance(value, ClosedJaxpr):
        return with_numbered_calls(value, functions)
    if isinstance(value, Jaxpr):
        return _numbered(value, functions)
    if type(value) is not tuple:
        return value
    found = tuple(_numbered_value(v, functions) for v in value)
    return value if all(map(operator.is_, found, value)) else found


host_call_p = Primitive("host_call")
host_call_p.multiple_results = True


@host_call_p.def_effectful_abstract_eval
def _types(*_: Any, call: _Call, avals: tuple[Any, ...]) -> Any:
    return list(avals), {callback._IOEffect}


mlir.register_lowering(host_call_p, lambda context, *operands, call, avals: _lower(context, operands, call))


def _lower(context: Any, operands: Sequence[Any], call: _Call) -> Sequence[Any]:
    around = context.module_context.axis_context
    if isinstance(around, SPMDAxisContext):
        if any(size > 1 and name not in around.manual_axes for name, size in around.mesh.shape.items()):
            raise partly_mapped(call.source)
    elif call.with_pieces and isinstance(around, ShardingContext) and around.num_devices > 1:
        raise UnsupportedPrimitiveError(
            f"{call.source or 'unknown source line'}: a call of the host with partitioned=True outside of jax.shard_map: which piece a "
            "device has there only the partitioner knows. Leave it out, for one call with the whole array, or call inside of jax.shard_map."
        )
    attributes = {
        "call_target_name": ir.StringAttr.get(HOST_CALL_PER_CHIP if isinstance(around, SPMDAxisContext) else HOST_CALL),
        "has_side_effect": ir.BoolAttr.get(True),
        "backend_config": ir.StringAttr.get(str(call.number)),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
    }
    types = [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in context.avals_out]
    made = ir.Operation.create(CUSTOM_CALL, types, list(operands), attributes)
    context.set_tokens_out(context.tokens_in)
    return list(made.results)


def _source_of(location: Any) -> str:
    found = re.search(r'"([^"]+)":(\d+)', str(location))
    return f"{found[1]}:{found[2]}" if found else ""


def map_calls_by_hand(module: Any, mesh: Mapping[str, int]) -> None:
    """Let XLA's partitioner give every device the whole operands, and take the results as whole arrays, of calls of the host that are made
    once, in a module (MLIR): it cannot do that with an operation that has side effects, but with one within what is mapped by hand."""
    with module.context:
        found = custom_calls(module, HOST_CALL)
        name = _name_of(module, mesh) if found else ""
        for op in found:
            _map_by_hand(op, name, tuple(mesh))


def custom_calls(module: Any, target: str) -> list[Any]:
    """The custom calls of a target in a module (MLIR)."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name == CUSTOM_CALL and op.attributes["call_target_name"].value == target:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _map_by_hand(op: Any, mesh: str, axes: Sequence[str]) -> None:
    """Put an operation into a manual computation over some axes, of whole arrays."""
    types = [value.type for value in op.operands], [result.type for result in op.results]
    operands, results = (sdy.TensorShardingPerValueAttr.get([_whole(t, mesh) for t in of]) for of in types)
    with op.location, ir.InsertionPoint(op):
        names = sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name in axes])
        around = sdy.ManualComputationOp(types[1], list(op.operands), operands, results, names)
        for old, new in zip(op.results, around.results, strict=True):
            old.replace_all_uses_with(new)
        block = ir.Block.create_at_start(around.body, types[0])
        attributes = {name: op.attributes[name] for name in _ATTRIBUTES}
        with ir.InsertionPoint(block):
            sdy.return_(ir.Operation.create(CUSTOM_CALL, types[1], list(block.arguments), attributes).results)
    op.erase()


_ATTRIBUTES = ("call_target_name", "has_side_effect", "backend_config", "api_version")


def _whole(kind: Any, mesh: str) -> Any:
    along = sdy.DimensionShardingAttr.get([], is_closed=True)
    return sdy.TensorShardingAttr.get(mesh, [along] * len(kind.shape))


def _name_of(module: Any, mesh: Mapping[str, int]) -> str:
    """The name of a mesh in a module, to which it is added if it is not there."""
    names = set()
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            names.add(name := ir.StringAttr(op.attributes["sym_name"]).value)
            if [(axis.name, axis.size) for axis in axes] == list(mesh.items()):
                return name
    name = next(name for n in itertools.count() if (name := f"mesh_of_calls_{n}") not in names)
    axes = [sdy.MeshAxisAttr.get(*item) for item in mesh.items()]
    with ir.Location.unknown(), ir.InsertionPoint.at_block_begin(module.body):
        sdy.MeshOp(name, sdy.MeshAttr.get(axes))
    return name
