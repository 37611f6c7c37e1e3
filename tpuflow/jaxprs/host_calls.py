"""How `jax.debug.print`, `jax.debug.callback`, `io_callback` and `pure_callback` are lowered to StableHLO: as custom calls of a number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jax._src import callback
from jax._src.interpreters import mlir
from jax._src.sharding_impls import SPMDAxisContext
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from tpuflow.isa.calls import HOST_CALL, HOST_CALL_PER_CHIP
from tpuflow.jaxprs.compat import host_function

Rule = Callable[..., Sequence[Any]]
HostFunction = Callable[..., Any]
CUSTOM_CALL = "stablehlo.custom_call"


def lowering_rules(
    primitives: Iterable[Any], function_of: Callable[[Any, dict[str, Any]], HostFunction], enlist: Callable[[HostFunction], int]
) -> list[tuple[Any, Rule]]:
    """Each primitive with its lowering rule: a custom call whose backend_config is the number that `enlist` returns for the function that
    the primitive with its parameters calls. Inside of a `shard_map` every device calls, as in JAX; elsewhere a program of several devices
    calls once. Ordered callbacks need no token, since a Program makes its calls in order."""

    def rule(context: Any, *operands: Any, primitive: Any, **params: Any) -> Sequence[Any]:
        return _lower(context, operands, enlist(function_of(primitive, params)))

    return [(primitive, partial(rule, primitive=primitive)) for primitive in primitives]


def with_numbered_calls(closed: ClosedJaxpr, functions: list[HostFunction]) -> ClosedJaxpr:
    """The jaxpr with `host_call`s of functions that are added to `functions`, in place of JAX's own calls of the host, which can be lowered
    for real devices only."""
    return closed.replace(jaxpr=_numbered(closed.jaxpr, functions))


def _numbered(jaxpr: Jaxpr, functions: list[HostFunction]) -> Jaxpr:
    return jaxpr.replace(eqns=[_numbered_equation(equation, functions) for equation in jaxpr.eqns])


def _numbered_equation(equation: Any, functions: list[HostFunction]) -> Any:
    if (function := host_function(equation)) is None:
        return equation.replace(params={key: _numbered_value(value, functions) for key, value in equation.params.items()})
    functions.append(function)
    params = {"number": len(functions) - 1, "avals": tuple(v.aval for v in equation.outvars)}
    return equation.replace(primitive=host_call_p, params=params)


def _numbered_value(value: Any, functions: list[HostFunction]) -> Any:
    """A parameter of an equation, in which there may be jaxprs."""
    if isinstance(value, ClosedJaxpr):
        return with_numbered_calls(value, functions)
    if isinstance(value, Jaxpr):
        return _numbered(value, functions)
    return tuple(_numbered_value(v, functions) for v in value) if type(value) is tuple else value


host_call_p = Primitive("host_call")
host_call_p.multiple_results = True


@host_call_p.def_effectful_abstract_eval
def _types(*_: Any, number: int, avals: tuple[Any, ...]) -> Any:
    return list(avals), {callback._IOEffect}


mlir.register_lowering(host_call_p, lambda context, *operands, number, avals: _lower(context, operands, number))


def _lower(context: Any, operands: Sequence[Any], number: int) -> Sequence[Any]:
    around = context.module_context.axis_context
    if isinstance(around, SPMDAxisContext):
        callback._callback_op_sharding(around, None, context.avals_out)  # raises, if only some axes of the mesh are mapped by hand
    attributes = {
        "call_target_name": ir.StringAttr.get(HOST_CALL_PER_CHIP if isinstance(around, SPMDAxisContext) else HOST_CALL),
        "has_side_effect": ir.BoolAttr.get(True),
        "backend_config": ir.StringAttr.get(str(number)),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
    }
    types = [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in context.avals_out]
    call = ir.Operation.create(CUSTOM_CALL, types, list(operands), attributes)
    context.set_tokens_out(context.tokens_in)
    return list(call.results)


def map_calls_by_hand(module: Any, mesh: Mapping[str, int]) -> None:
    """Let XLA's partitioner give every device the whole operands, and take the results as whole arrays, of calls of the host that are made
    once, in a module (MLIR): it cannot do that with an operation that has side effects, but with one within what is mapped by hand."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name == CUSTOM_CALL and op.attributes["call_target_name"].value == HOST_CALL:
            found.append(op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        name = _name_of(module, mesh) if found else ""
        for op in found:
            _map_by_hand(op, name, tuple(mesh))


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
