"""The walk over the operations of a StableHLO module: each goes to its rule, with the user's source line and scope on every node made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tpuflow.errors import CompileError, GraphError, UnsupportedDtypeError, UnsupportedPrimitiveError
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.registry import Rule, Rules
from tpuflow.lower.importers.stablehlo.advice import advice
from tpuflow.lower.importers.stablehlo.expressions import expressions
from tpuflow.lower.importers.stablehlo.module import Block, ForeignType, Module, Operation, Symbol, calls_host, device_type
from tpuflow.lower.importers.stablehlo.wide import Counter, convert_to_counter, lower_counter_operation
from tpuflow.lower.operations.complex import Complex, ComplexType, Number, Type, listed, packed, plane_by_plane, planes
from tpuflow.lower.operations.forms import Body, UnsupportedForm
from tpuflow.lower.operations.linalg.arithmetic import each
from tpuflow.lower.operations.storage import by_computed, in_computed, is_stored

COMPLEX = Rules()
"""The rules of operations on complex numbers, whose operands and results are `Complex` where the module's are complex."""
PLANEWISE: set[str] = set()
"""Operations that act on the real and the imaginary plane separately."""
STRUCTURAL: set[str] = set()
"""Operations whose rules only pass values on, so that they accept complex and storage-only ones."""
STORED: set[str] = set()
"""Operations whose rules accept storage-only types; for other rules operands are widened first (`operations.storage`)."""
RULES = Rules()
"""The rule of every operation. Beside the operation's attributes its keyword-only arguments may be `types` (of the results) and `regions`;
an attribute that names a function is given as a Region. The rules of custom calls are entered under "custom_call" and their target."""
_DEVICES = {
    "stablehlo.shift_right_logical": "shr_logical", "stablehlo.shift_right_arithmetic": "shr_arithmetic", "stablehlo.popcnt": "popcnt",
    "stablehlo.count_leading_zeros": "clz",
}  # fmt: skip
"""Operations on the bits of numbers -> their names on the device."""

MOST_OPERATIONS = 1 << 22
"""Limit on operations after inlining; a training step has some ten thousand."""


@dataclass(frozen=True, slots=True)
class Context:
    """The state of one import: the module, the callables of host calls by number, the functions being inlined (outermost first), and in
    `walked[0]` how many operations were lowered so far.
    """

    module: Module
    host_functions: Sequence[Callable[..., Any]] = ()
    calling: tuple[str, ...] = ()
    walked: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True, slots=True)
class Region:
    """A block to be lowered: a region of an operation, or the body of a called function.

    outer: the values of the enclosing block, of which it captures some. scope: the name scope that its operations' scopes are relative to.
    shape: () for most; a reducer or comparator, written on scalars, is applied element by element to arrays of this shape, and every scalar
    of the block stands for such an array.
    """

    context: Context
    block: Block
    outer: Mapping[int, Value]
    scope: str
    shape: tuple[int, ...] = ()

    def run(self, b: Builder, inputs: Sequence[Number]) -> tuple[Any, ...]:
        """Append the block's operations to `b`, which holds the outer values; its results."""
        return _run(self, b, dict(self.outer), inputs)

    def body(self, captured: tuple[int, ...]) -> Body:
        """The block as a function of (*captured, *inputs): outer values by their numbers, then its arguments; complex ones as planes."""

        outer = [self.outer[v] for v in captured]
        kinds = [*(x.type if isinstance(x, Complex) else None for x in outer), *self.block.types]

        def run(b: Builder, *arrays: Value) -> list[Value]:
            values = packed(arrays, kinds)
            return planes(_run(self, b, dict(zip(captured, values, strict=False)), values[len(captured) :]))

        return run

    def expressions(self) -> tuple[str, ...]:
        """Its results as canonical text, by which known reducers and comparators are matched; see `expressions`."""
        return expressions(self.context.module, self.block)

    def calls_host(self) -> bool:
        """Whether there is a call of the host in it."""
        return calls_host(self.context.module, self.block)

    def elementwise(self, b: Builder, *values: Any) -> tuple[Any, ...]:
        """Apply a block on scalars element by element to arrays of one shape."""
        return _run(replace(self, shape=values[0].shape), b, {}, values)


def _run(region: Region, b: Builder, env: dict[int, Any], inputs: Sequence[Number]) -> tuple[Any, ...]:
    """Append a block's operations to the builder; the values of its results."""
    block = region.block
    env.update(zip(block.arguments, inputs, strict=True))
    source, scope = b.source, b.scope
    try:
        for operation in block.operations:
            place = operation.place
            known = place.users or not source  # the line of a library in a function that is called says less than that of the call
            b.source = place.source if known else source
            b.scope = "/".join(filter(None, (region.scope, place.scope))) if place.scope else region.scope
            results = _lower(region, b, operation, env, place.location if known else source)
            env.update(zip(operation.results, results, strict=True))
    finally:
        b.source, b.scope = source, scope
    return tuple(env[v] for v in block.outputs)


def _lower(region: Region, b: Builder, operation: Operation, env: Mapping[int, Any], where: str) -> tuple[Number, ...]:
    """Run the operation's rule and check its results against the types that the module declares."""
    where, shape = where or "unknown source line", region.shape
    if (counter := _counted(b, operation, env)) is not None:
        return (counter,)  # type: ignore[return-value]
    types = tuple(device_type(t, where) for t in operation.types)
    if shape:
        types = tuple(replace(t, shape=(*shape, *t.shape)) for t in types)
    _count(region.context, where)
    operands = [_on_device(env[v], operation, where) for v in operation.operands]
    try:
        results = _apply(region, b, operation, operands, types, env, where)
    except UnsupportedForm as error:
        raise UnsupportedPrimitiveError(f"{where}: {_described(operation, operands)}: {error}") from error
    except (UnsupportedPrimitiveError, UnsupportedDtypeError, CompileError):
        raise
    except Exception as error:
        error.add_note(f"while lowering {_described(operation, operands)} at {where}")
        raise
    found = tuple(v.type for v in results)
    if shape and found != types:  # of numbers alone
        results = tuple(each(lambda p: b.splat(p, shape), v) if v.shape == () else v for v in results)
        found = tuple(v.type for v in results)
    if found != types:
        raise GraphError(f"{where}: the rule of {_described(operation, operands)} made {listed(found)} instead of {listed(types)}")
    return results


def _counted(b: Builder, operation: Operation, env: Mapping[int, Any]) -> Counter | None:
    """The result of an operation that yields 64-bit counters; None for every other operation."""
    (kind, *others) = operation.types or (None,)
    if not isinstance(kind, ForeignType) or kind.counter is None or others:
        return None
    operands = [env[v] for v in operation.operands]
    if len(operands) == 1 and isinstance(operands[0], Value):
        return convert_to_counter(b, operation.name, operands[0], kind.counter)
    counters = [x for x in operands if isinstance(x, Counter)]
    return (
        lower_counter_operation(b, operation.name, counters, operation.attributes, kind.counter) if len(counters) == len(operands) else None
    )


def _on_device(x: Number | Counter, operation: Operation, where: str) -> Number:
    """The operand; a counter may only be converted to a narrower type, which needs nothing but its u32 value."""
    if isinstance(x, Counter):
        if operation.name != "stablehlo.convert":
            raise UnsupportedDtypeError(
                f"{where}: {operation.name!r} on 64-bit integers, which the device does not have; cast them to 32 bits."
            )
        return x.value
    return x


def _apply(
    region: Region, b: Builder, operation: Operation, operands: Sequence[Number], types: tuple[Type, ...], env: Mapping[int, Any],
    where: str,
) -> tuple[Number, ...]:  # fmt: skip
    name = operation.name
    if region.shape and (operation.blocks or any(t.shape != region.shape for t in types)):
        raise UnsupportedForm("it is in a body of a reduction or a map, which is for numbers and has neither arrays nor loops")
    if name == "stablehlo.custom_call":
        name = f"custom_call {operation.attributes.get('call_target_name')}"
    rule = RULES.get(name) or COMPLEX.get(name)
    if rule is None:
        described = _described(operation, operands)
        raise UnsupportedPrimitiveError(f"{where}: no lowering rule for {described}. {advice(name)}")
    context = region.context
    params: dict[str, Any] = dict(operation.attributes)
    for key, value in operation.attributes.items():
        if isinstance(value, Symbol):
            params[key] = _function(region, value.name, b.scope)
    params["types"] = types
    params["regions"] = tuple(Region(context, block, env, region.scope, region.shape) for block in operation.blocks)
    params["host_functions"], params["location"] = context.host_functions, where
    if name not in STRUCTURAL and any(isinstance(t, ComplexType) for t in (*types, *(x.type for x in operands))):
        return _apply_to_complex(b, name, rule, operands, params)
    if name not in STRUCTURAL and name not in STORED and is_stored((*types, *(x.type for x in operands))):
        computed = {**params, "types": tuple(map(in_computed, types))}
        return by_computed(b, _DEVICES.get(name, name), partial(rule, params=computed), operands, types)
    return rule(b, *operands, params=params)


def _apply_to_complex(b: Builder, name: str, rule: Rule, operands: Sequence[Number], params: dict[str, Any]) -> tuple[Number, ...]:
    """A rule for complex numbers, or one that moves elements, done with both planes."""
    if (own := COMPLEX.get(name)) is not None:
        return own(b, *operands, params=params)
    if name not in PLANEWISE:
        raise UnsupportedForm("complex numbers; give it their real and their imaginary part as two arrays")
    of_planes = {**params, "types": tuple(t.plane if isinstance(t, ComplexType) else t for t in params["types"])}
    return plane_by_plane(b, lambda b, *arrays: rule(b, *arrays, params=of_planes), operands)


def _function(region: Region, name: str, scope: str) -> Region:
    """A function that is called in a region.

    Raises:
      UnsupportedForm: there is none of that name, or it calls itself.
    """
    context = region.context
    function = context.module.functions.get(name)
    if function is None:
        raise UnsupportedForm(f"the module has no function @{name}")
    if name in context.calling:
        raise UnsupportedForm(f"@{name} calls itself (by way of {', '.join(context.calling)}); functions are inlined")
    inner = Context(context.module, context.host_functions, (*context.calling, name), context.walked)
    return Region(inner, function.body, {}, scope, region.shape)


def _count(context: Context, where: str) -> None:
    context.walked[0] += 1
    if context.walked[0] > MOST_OPERATIONS:
        raise CompileError(f"{where}: more than {MOST_OPERATIONS} operations after inlining. Call fewer functions, or make loops of calls.")


def _described(operation: Operation, operands: Sequence[Number]) -> str:
    target = operation.attributes.get("call_target_name")
    what = f"{operation.name} @{target}" if target else operation.name
    return f"{what!r} on {listed([v.type for v in operands])}"
