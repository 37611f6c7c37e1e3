"""Rules of calls, loops and branches: calls are inlined, the rest become regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import S32
from tpuflow.jaxprs.calls import PLAIN_CALLS, RECOMPUTED_CALLS, WHOLE_CALLS
from tpuflow.jaxprs.compat import calls_host
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.importer import inline
from tpuflow.lower.importers.jaxpr.registry import enter, lowers
from tpuflow.lower.importers.jaxpr.types import argument_types, result_types
from tpuflow.lower.operations import loops
from tpuflow.lower.operations.complex import Number, packed, plane_types, planes
from tpuflow.lower.operations.forms import Body, UnsupportedForm


def _body(jaxpr: Any) -> Body:
    """A jaxpr as the body of an operation, which takes and gives complex numbers as their planes."""
    return lambda b, *arrays: planes(inline(b, jaxpr, packed(arrays, argument_types(jaxpr))))


def _call(b: Builder, *operands: Number, jaxpr: Any) -> tuple[Number, ...]:
    """The function itself: rules of its own have been used where it was differentiated or batched."""
    return inline(b, jaxpr, operands)


for _primitive, _parameter in (PLAIN_CALLS | WHOLE_CALLS).items():
    enter({_primitive: _call}, keys=True, **{_parameter: "jaxpr"})


@lowers(*RECOMPUTED_CALLS, keys=True)
def _remat(
    b: Builder, *operands: Number, jaxpr: Any, differentiated: bool = False, prevent_cse: bool | Sequence[bool] = True
) -> tuple[Number, ...]:
    """A region computed again for the backward pass starts at a barrier: else it would be found to be the forward pass once more, and
    its intermediate values be kept in between after all, which is what `jax.checkpoint` is there to avoid."""
    prevents = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    return inline(b, jaxpr, _barrier(b, operands) if differentiated and prevents else operands)


def _barrier(b: Builder, operands: Sequence[Number]) -> tuple[Number, ...]:
    return packed(b.barrier(planes(operands)), [x.type for x in operands])


@lowers("optimization_barrier", keys=True)
def _optimization_barrier(b: Builder, *operands: Number) -> tuple[Number, ...]:
    return _barrier(b, operands)


@lowers("custom_lin")
def _custom_lin(b: Builder, *operands: Number) -> Value:
    raise UnsupportedForm("a custom_vjp function was differentiated in forward mode; JAX does not allow it either")


@lowers("cond", keys=True)
def _cond(b: Builder, index: Value, *operands: Number, branches: Sequence[Any], branches_platforms: Any = None) -> tuple[Number, ...]:
    """A switch; a branch per platform is chosen now: the one for every platform, else the CPU's."""
    if branches_platforms is not None:
        return inline(b, branches[_platform(branches_platforms)], operands)
    results = loops.switch(b, index, list(map(_body, branches)), planes(operands))
    return packed(results, result_types(branches[0]))


def _platform(platforms: Sequence[Sequence[str] | None]) -> int:
    for i, names in enumerate(platforms):
        if names is None or "cpu" in names:
            return i
    raise UnsupportedForm(f"platform_dependent has branches for {platforms} only, and no default")


@lowers("platform_index")
def _platform_index(b: Builder, *, platforms: Sequence[Sequence[str] | None]) -> Value:
    return b.scalar(_platform(platforms), S32)


@lowers("while", keys=True)
def _while(b: Builder, *operands: Number, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int) -> tuple[Number, ...]:
    """Condition and body have constants of their own."""
    own, shared = cond_nconsts, cond_nconsts + body_nconsts
    tests, consts, carries = (planes(part) for part in (operands[:own], operands[own:shared], operands[shared:]))

    def condition(inner: Builder, *arrays: Value) -> Sequence[Value]:
        return _body(cond_jaxpr)(inner, *arrays[: len(tests)], *arrays[len(tests) + len(consts) :])

    def body(inner: Builder, *arrays: Value) -> Sequence[Value]:
        return _body(body_jaxpr)(inner, *arrays[len(tests) :])

    results = loops.while_loop(b, condition, body, [*tests, *consts], carries)
    return packed(results, result_types(body_jaxpr))


@lowers("scan", keys=True)
def _scan(b: Builder, *operands: Number, jaxpr: Any, length: int, reverse: bool, num_consts: int, num_carry: int) -> tuple[Number, ...]:
    last = num_consts + num_carry
    consts, carries, stacked = (planes(part) for part in (operands[:num_consts], operands[num_consts:last], operands[last:]))
    types = result_types(jaxpr)
    results = loops.scan(
        b, _body(jaxpr), length, consts, carries, stacked, plane_types(types[num_carry:]), reverse=reverse, calls_host=calls_host(jaxpr)
    )
    return packed(results, types)
