"""Rules of calls, loops and branches: calls are inlined, the rest become regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import S32
from tpuflow.errors import listed
from tpuflow.isa.calls import Call, EachTrip, OneOf, sources
from tpuflow.lower.frontend import jax_compat
from tpuflow.lower.frontend.jaxpr import inline
from tpuflow.lower.frontend.registry import UnsupportedForm, lowers
from tpuflow.lower.frontend.rules.elementwise import as_index
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value


@lowers("jit", "pjit", "device_call", "closed_call", "core_call", "composite", keys=True)
def _call(b: Builder, *operands: Value, jaxpr: Any = None, call_jaxpr: Any = None) -> tuple[Value, ...]:
    return inline(b, jaxpr if jaxpr is not None else call_jaxpr, operands)


@lowers("remat", "remat2", "checkpoint", keys=True)
def _remat(
    b: Builder, *operands: Value, jaxpr: Any, differentiated: bool = False, prevent_cse: bool | Sequence[bool] = True
) -> tuple[Value, ...]:
    """A region computed again for the backward pass starts at a barrier: else it would be found to be the forward pass once more, and
    its intermediate values be kept in between after all, which is what `jax.checkpoint` is there to avoid."""
    prevents = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    return inline(b, jaxpr, b.barrier(operands) if differentiated and prevents else operands)


@lowers("optimization_barrier", keys=True)
def _optimization_barrier(b: Builder, *operands: Value) -> tuple[Value, ...]:
    return b.barrier(operands)


@lowers("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", keys=True)
def _custom_derivative(b: Builder, *operands: Value, call_jaxpr: Any) -> tuple[Value, ...]:
    """The function itself: its own derivative rule has been used where it was differentiated."""
    return inline(b, call_jaxpr, operands)


@lowers("custom_lin")
def _custom_lin(b: Builder, *operands: Value) -> Value:
    raise UnsupportedForm("a custom_vjp function was differentiated in forward mode; JAX does not allow it either")


@lowers("cond", keys=True)
def _cond(b: Builder, index: Value, *operands: Value, branches: Sequence[Any], branches_platforms: Any = None) -> tuple[Value, ...]:
    """A switch; a branch per platform is chosen now: the one for every platform, else the CPU's."""
    if branches_platforms is not None:
        return inline(b, branches[_platform(branches_platforms)], operands)
    if len(branches) == 1:
        return inline(b, branches[0], operands)
    types = [v.type for v in operands]
    inner = [b.region(f"branch{i}", types) for i in range(len(branches))]
    results = [inline(branch, jaxpr, branch.inputs) for branch, jaxpr in zip(inner, branches, strict=True)]
    sent = [[v for _, values in branch.calls for v in values] for branch in inner]
    regions = [branch.finish([*found, *_sent_by(branch, i, sent)]) for i, (branch, found) in enumerate(zip(inner, results, strict=True))]
    number = as_index(b, index)
    chosen = b.switch(number, regions, operands)
    if any(sent):
        calls = OneOf(tuple(tuple(call for call, _ in branch.calls) for branch in inner))
        b.calls.append((calls, (number, *chosen[len(results[0]) :])))
    return chosen[: len(results[0])]


def _sent_by(b: Builder, number: int, sent: Sequence[Sequence[Value]]) -> list[Value]:
    """What a branch has for the host's calls in all branches: its own values, zeros for the others."""
    return [v if i == number else b.full(v.type, 0) for i, values in enumerate(sent) for v in values]


def _platform(platforms: Sequence[Sequence[str] | None]) -> int:
    for i, names in enumerate(platforms):
        if names is None or "cpu" in names:
            return i
    raise UnsupportedForm(f"platform_dependent has branches for {platforms} only, and no default")


@lowers("platform_index")
def _platform_index(b: Builder, *, platforms: Sequence[Sequence[str] | None]) -> Value:
    return b.scalar(_platform(platforms), S32)


@lowers("while", keys=True)
def _while(b: Builder, *operands: Value, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int) -> tuple[Value, ...]:
    """Constants of condition and body become carries that never change."""
    consts = cond_nconsts + body_nconsts
    types = [v.type for v in operands]
    test, body = b.region("condition", types), b.region("body", types)

    def go_on(inner: Builder) -> Value:
        (flag,) = inline(inner, cond_jaxpr, (*inner.inputs[:cond_nconsts], *inner.inputs[consts:]))
        return flag

    flags = go_on(test)
    carries = inline(body, body_jaxpr, body.inputs[cond_nconsts:])
    if flags.shape:
        carries = _where(body, go_on(body), carries, body.inputs[consts:])
    if test.calls or body.calls:
        lines = listed(sources([call for call, _ in (*test.calls, *body.calls)]))
        raise UnsupportedForm(
            f"it calls the host at {lines}, and how often is not known before it runs; print what the loop returns, or count its trips "
            "(jax.lax.scan, or jax.lax.fori_loop with bounds that are Python integers)"
        )
    condition = test.finish([test.reduce("or", flags, range(len(flags.shape)))])
    return b.while_(condition, body.finish([*body.inputs[:consts], *carries]), operands)[consts:]


def _where(b: Builder, flags: Value, new: Sequence[Value], old: Sequence[Value]) -> tuple[Value, ...]:
    """A batched loop runs until every element is done; those that are done stay as they were."""
    along = range(len(flags.shape))
    return tuple(b.select(b.broadcast(flags, x.shape, along), x, y) for x, y in zip(new, old, strict=True))


@lowers("scan", keys=True)
def _scan(b: Builder, *operands: Value, jaxpr: Any, length: int, reverse: bool, num_consts: int, num_carry: int) -> tuple[Value, ...]:
    """A counted loop. Carries, in order: the counter, constants, carries, stacked inputs (these never change), stacked outputs."""
    consts, carries, stacked = operands[:num_consts], operands[num_consts:][:num_carry], operands[num_consts + num_carry :]
    if length == 1:
        return _single_trip(b, jaxpr, consts, carries, stacked)
    sent = _sent_types(b, jaxpr, (*consts, *carries), stacked)
    results = [b.full(TensorType(t.dtype, (length, *t.shape)), 0) for t in (*jax_compat.result_types(jaxpr)[num_carry:], *sent)]
    if not length:
        return (*carries, *results[: len(results) - len(sent)])
    inputs = (b.scalar(0, S32), *consts, *carries, *stacked, *results)
    body, calls = _scan_body(b, jaxpr, inputs, length, num_consts, num_carry, len(stacked), reverse=reverse)
    done = b.loop(length, body, inputs)[1 + num_consts :]
    made = done[num_carry + len(stacked) :]
    if calls:
        b.calls.append((EachTrip(calls, length, reverse), made[len(made) - len(sent) :]))
    return (*done[:num_carry], *made[: len(made) - len(sent)])


def _sent_types(b: Builder, jaxpr: Any, whole: Sequence[Value], stacked: Sequence[Value]) -> list[TensorType]:
    """The types of what a trip sends to the host, found by a trip that is thrown away."""
    if not jax_compat.calls_host(jaxpr):
        return []
    trip = b.region("body", [*(x.type for x in whole), *(TensorType(x.dtype, x.shape[1:]) for x in stacked)])
    inline(trip, jaxpr, trip.inputs)
    return [v.type for _, values in trip.calls for v in values]


def _single_trip(b: Builder, jaxpr: Any, consts: Sequence[Value], carries: Sequence[Value], stacked: Sequence[Value]) -> tuple[Value, ...]:
    """A scan of length 1 is its body."""
    results = inline(b, jaxpr, (*consts, *carries, *(b.reshape(x, x.shape[1:]) for x in stacked)))
    n = len(carries)
    return (*results[:n], *(b.reshape(y, (1, *y.shape)) for y in results[n:]))


def _scan_body(
    b: Builder, jaxpr: Any, inputs: Sequence[Value], length: int, num_consts: int, num_carry: int, num_stacked: int, *, reverse: bool
) -> tuple[Graph, tuple[Call, ...]]:
    """A trip as a graph, and the calls it makes on the host."""
    body = b.region("body", [v.type for v in inputs])
    counter, rest = body.inputs[0], body.inputs[1:]
    consts, carries = rest[:num_consts], rest[num_consts:][:num_carry]
    stacked, results = rest[num_consts + num_carry :][:num_stacked], rest[num_consts + num_carry + num_stacked :]
    place = body.sub(length - 1, counter) if reverse else counter
    outputs = inline(body, jaxpr, (*consts, *carries, *(_item(body, x, place) for x in stacked)))
    made = [*outputs[num_carry:], *(v for _, values in body.calls for v in values)]
    written = [_with_item(body, whole, y, place) for whole, y in zip(results, made, strict=True)]
    graph = body.finish([body.add(counter, 1), *consts, *outputs[:num_carry], *stacked, *written])
    return graph, tuple(call for call, _ in body.calls)


def _at(b: Builder, x: Value, place: Value) -> list[Value]:
    return [place, *(b.scalar(0, S32) for _ in x.shape[1:])]


def _item(b: Builder, stacked: Value, place: Value) -> Value:
    """stacked[place]."""
    return b.reshape(b.dynamic_slice(stacked, _at(b, stacked, place), (1, *stacked.shape[1:])), stacked.shape[1:])


def _with_item(b: Builder, stacked: Value, item: Value, place: Value) -> Value:
    """stacked with item at [place]."""
    return b.dynamic_update_slice(stacked, b.reshape(item, (1, *item.shape)), _at(b, stacked, place))
