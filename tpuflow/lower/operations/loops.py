"""Loops and branches: their bodies, given as functions, become regions, and what bodies call on the host leaves through results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpuflow.dtypes import S32
from tpuflow.errors import listed
from tpuflow.isa.calls import Call, EachTrip, OneOf, sources
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.operations.elementwise import as_index
from tpuflow.lower.operations.forms import Body, UnsupportedForm


def switch(b: Builder, index: Value, branches: Sequence[Body], operands: Sequence[Value]) -> tuple[Value, ...]:
    """The results of branches[index]; a number below 0 takes the first, one beyond the last the last."""
    if len(branches) == 1:
        return tuple(branches[0](b, *operands))
    types = [v.type for v in operands]
    inner = [b.region(f"branch{i}", types) for i in range(len(branches))]
    results = [body(branch, *branch.inputs) for branch, body in zip(inner, branches, strict=True)]
    sent = [[v for _, values in branch.calls for v in values] for branch in inner]
    regions = [branch.finish([*found, *_sent_by(branch, i, sent)]) for i, (branch, found) in enumerate(zip(inner, results, strict=True))]
    number = as_index(b, index)
    chosen = b.switch(number, regions, operands)
    if any(sent):
        calls = OneOf(tuple(tuple(call for call, _ in branch.calls) for branch in inner))
        b.calls.append((calls, (number, *chosen[len(results[0]) :])))
    return chosen[: len(results[0])]


def _sent_by(b: Builder, number: int, sent: Sequence[Sequence[Value]]) -> list[Value]:
    """The results of a branch for the host calls of all branches: its own operands, and zeros for the calls of other branches."""
    return [v if i == number else b.full(v.type, 0) for i, values in enumerate(sent) for v in values]


def while_loop(b: Builder, condition: Body, body: Body, invariants: Sequence[Value], carries: Sequence[Value]) -> tuple[Value, ...]:
    """Carries after running `body` as long as `condition` (one pred) holds; both take (*invariants, *carries).

    A condition of several elements is a batch of loops: each runs until its own is done.

    Raises:
      UnsupportedForm: a body calls the host.
    """
    operands, n = (*invariants, *carries), len(invariants)
    types = [v.type for v in operands]
    test, inner = b.region("condition", types), b.region("body", types)
    (flags,) = condition(test, *test.inputs)
    results = body(inner, *inner.inputs)
    if flags.shape:
        (going,) = condition(inner, *inner.inputs)
        results = _where(inner, going, results, inner.inputs[n:])
    if test.calls or inner.calls:
        lines = listed(sources([call for call, _ in (*test.calls, *inner.calls)]))
        raise UnsupportedForm(
            f"it calls the host at {lines}, and how often is not known before it runs; print what the loop returns, or count its trips "
            "(jax.lax.scan, or jax.lax.fori_loop with bounds that are Python integers)"
        )
    region = test.finish([test.reduce("or", flags, range(len(flags.shape)))])
    return b.while_(region, inner.finish([*inner.inputs[:n], *results]), operands)[n:]


def _where(b: Builder, flags: Value, new: Sequence[Value], old: Sequence[Value]) -> tuple[Value, ...]:
    """A batched loop runs until every element is done; those that are done stay as they were."""
    along = range(len(flags.shape))
    return tuple(b.select(b.broadcast(flags, x.shape, along), x, y) for x, y in zip(new, old, strict=True))


def scan(
    b: Builder, body: Body, length: int, invariants: Sequence[Value], carries: Sequence[Value], stacked: Sequence[Value],
    made: Sequence[TensorType], *, reverse: bool = False, calls_host: bool = False, numbered: bool = False,
) -> tuple[Value, ...]:  # fmt: skip
    """A counted loop: carries after `length` trips of body(*invariants, *carries, *items) -> (*carries, *made), and what it made stacked.

    Items are those of `stacked` along the first axis. made: the types of what a trip makes. calls_host: whether the body may call the
    host. numbered: the number of the trip (s32[], from 0) comes first among the body's values. The region's carries, in order: the
    counter, invariants, carries, stacked inputs (these never change), stacked outputs.
    """
    if length == 1:
        results = body(b, *([b.scalar(0, S32)] if numbered else []), *invariants, *carries, *(b.reshape(x, x.shape[1:]) for x in stacked))
        return (*results[: len(carries)], *(b.reshape(y, (1, *y.shape)) for y in results[len(carries) :]))
    sent = _sent_types(b, body, (*([b.scalar(0, S32)] if numbered else []), *invariants, *carries), stacked) if calls_host else []
    outputs = [b.full(TensorType(t.dtype, (length, *t.shape)), 0) for t in (*made, *sent)]
    if not length:
        return (*carries, *outputs[: len(made)])
    inputs = (b.scalar(0, S32), *invariants, *carries, *stacked, *outputs)
    edges = (len(invariants), len(carries), len(stacked))
    region, calls = _trip(b, body, inputs, length, edges, reverse=reverse, numbered=numbered)
    done = b.loop(length, region, inputs)[1 + len(invariants) :]
    found = done[len(carries) + len(stacked) :]
    if calls:
        b.calls.append((EachTrip(calls, length, reverse), found[len(made) :]))
    return (*done[: len(carries)], *found[: len(made)])


def _sent_types(b: Builder, body: Body, whole: Sequence[Value], stacked: Sequence[Value]) -> list[TensorType]:
    """The types of what a trip sends to the host, found by a trip that is thrown away."""
    trip = b.region("body", [*(x.type for x in whole), *(TensorType(x.dtype, x.shape[1:]) for x in stacked)])
    body(trip, *trip.inputs)
    return [v.type for _, values in trip.calls for v in values]


def _trip(
    b: Builder, body: Body, inputs: Sequence[Value], length: int, counts: tuple[int, int, int], *, reverse: bool, numbered: bool
) -> tuple[Graph, tuple[Call, ...]]:
    """A trip as a graph, and the calls it makes on the host; `counts`: how many invariants, carries and stacked inputs there are."""
    trip = b.region("body", [v.type for v in inputs])
    values = iter(trip.inputs)
    counter = next(values)
    invariants, carries, stacked = (list(itertools.islice(values, n)) for n in counts)
    place = trip.sub(length - 1, counter) if reverse else counter
    trip.ranges[counter] = (0, length - 1)
    results = body(trip, *([counter] if numbered else []), *invariants, *carries, *(_item(trip, x, place) for x in stacked))
    made = [*results[len(carries) :], *(v for _, sent in trip.calls for v in sent)]
    written = [_with_item(trip, whole, y, place) for whole, y in zip(values, made, strict=True)]
    graph = trip.finish([trip.add(counter, 1), *invariants, *results[: len(carries)], *stacked, *written])
    return graph, tuple(call for call, _ in trip.calls)


def _at(b: Builder, x: Value, place: Value) -> list[Value]:
    return [place, *(b.scalar(0, S32) for _ in x.shape[1:])]


def _item(b: Builder, stacked: Value, place: Value) -> Value:
    """stacked[place]."""
    return b.reshape(b.dynamic_slice(stacked, _at(b, stacked, place), (1, *stacked.shape[1:])), stacked.shape[1:])


def _with_item(b: Builder, stacked: Value, item: Value, place: Value) -> Value:
    """stacked with item at [place]."""
    return b.dynamic_update_slice(stacked, b.reshape(item, (1, *item.shape)), _at(b, stacked, place))
