"""Rules of calls, loops and branches: calls are inlined, the rest become regions."""

from __future__ import annotations

from collections.abc import Sequence

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.stablehlo.counted_loops import CountedLoop, match_counted_loop
from tpuflow.lower.importers.stablehlo.module import device_type
from tpuflow.lower.importers.stablehlo.walk import RULES, Region
from tpuflow.lower.operations import loops
from tpuflow.lower.operations.complex import Number, Type, packed, planes
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.ranges import range_of


@RULES.lowers("func.call")
def _call(b: Builder, *operands: Value, callee: Region) -> tuple[Value, ...]:
    return callee.run(b, operands)


@RULES.lowers("stablehlo.composite")
def _composite(b: Builder, *operands: Value, decomposition: Region) -> tuple[Value, ...]:
    """The decomposition, inlined."""
    return decomposition.run(b, operands)


@RULES.lowers("sdy.manual_computation", "sdy.named_computation")
def _computation(b: Builder, *operands: Value, regions: tuple[Region]) -> tuple[Value, ...]:
    """On one device every shard is the whole array."""
    if tuple(x.type for x in operands) != tuple(device_type(t, "") for t in regions[0].block.types):
        raise UnsupportedForm(
            "its arrays are parts of those outside, for a mesh of several devices, and a program runs on one chip. Use a mesh of one device"
        )
    return regions[0].run(b, operands)


def _captured(*regions: Region) -> tuple[tuple[int, ...], tuple[Value, ...]]:
    """The outer values that regions read, as numbers and as arrays."""
    numbers = tuple(dict.fromkeys(v for region in regions for v in region.block.captured))
    return numbers, tuple(planes([regions[0].outer[v] for v in numbers]))


@RULES.lowers("stablehlo.case")
def _case(b: Builder, index: Value, *, regions: tuple[Region, ...], types: tuple[Type, ...]) -> tuple[Number, ...]:
    """An index out of range takes the last branch, as StableHLO specifies."""
    numbers, values = _captured(*regions)
    lowest, highest = range_of(b, index)
    last = len(regions) - 1
    if lowest < 0 or highest > last:
        index = b.select(b.and_(b.ge(index, 0), b.le(index, last)), index, last)
    return packed(loops.switch(b, index, [region.body(numbers) for region in regions], values), types)


@RULES.lowers("stablehlo.if")
def _if(b: Builder, which: Value, *, regions: tuple[Region, Region], types: tuple[Type, ...]) -> tuple[Number, ...]:
    numbers, values = _captured(*regions)
    branches = [region.body(numbers) for region in reversed(regions)]
    return packed(loops.switch(b, b.convert(which, S32), branches, values), types)


@RULES.lowers("stablehlo.while")
def _while(b: Builder, *operands: Number, regions: tuple[Region, Region], types: tuple[Type, ...]) -> tuple[Number, ...]:
    """A loop with an induction variable and a known trip count becomes a counted loop."""
    condition, body = regions
    numbers, values = _captured(*regions)
    counted = match_counted_loop(b, condition.block, body.block, operands)
    if counted is None:
        return packed(loops.while_loop(b, condition.body(numbers), body.body(numbers), values, planes(operands)), types)
    return packed(_counted(b, body, counted, numbers, values, operands), types)


def _counted(
    b: Builder, body: Region, counted: CountedLoop, numbers: tuple[int, ...], values: Sequence[Value], operands: Sequence[Number]
) -> tuple[Value, ...]:
    """The counted loop, whose induction variable is computed from the trip's number rather than carried."""
    arrays, place = planes(operands), len(planes(operands[: counted.counter]))
    first, trips, dtype = counted.start, counted.trips, arrays[place].dtype
    run = body.body(numbers)

    def trip(inner: Builder, number: Value, *given: Value) -> tuple[Value, ...]:
        outer, carries = given[: len(values)], given[len(values) :]
        counter = inner.convert(inner.add(number, first) if first else number, dtype)
        results = run(inner, *outer, *carries[:place], counter, *carries[place:])
        return (*results[:place], *results[place + 1 :])

    kept = (*arrays[:place], *arrays[place + 1 :])
    done = loops.scan(b, trip, trips, values, kept, (), (), calls_host=body.calls_host(), numbered=True)
    return (*done[:place], b.scalar(first + trips, dtype), *done[place:])
