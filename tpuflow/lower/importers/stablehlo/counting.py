"""Loops that count: how JAX writes `scan`, and `fori_loop` between numbers, as a `stablehlo.while`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.stablehlo.module import Block, Operation
from tpuflow.lower.operations.complex import Number


@dataclass(frozen=True, slots=True)
class Counting:
    """The carry at `place` is `first`, first + 1, ... in the `trips` trips of a loop."""

    place: int
    first: int
    trips: int


def counting(b: Builder, condition: Block, body: Block, carries: Sequence[Number]) -> Counting | None:
    """What counts a loop that begins at a known number, goes on while it is below another, and adds 1 each time; None for other loops."""
    (test,) = condition.outputs
    compare = _maker(condition, test)
    if compare is None or compare.name != "stablehlo.compare" or compare.attributes["comparison_direction"] != "LT":
        return None
    counter, limit = compare.operands
    last = _number(condition, limit)
    if counter not in condition.arguments or last is None:
        return None
    place = condition.arguments.index(counter)
    start = carries[place]
    first = b.known(start) if isinstance(start, Value) else None
    if first is None or not _counts(body, place):
        return None
    return Counting(place, int(first), max(0, last - int(first)))


def _counts(body: Block, place: int) -> bool:
    """Whether a trip adds 1 to the carry at `place`."""
    add = _maker(body, body.outputs[place])
    if add is None or add.name != "stablehlo.add":
        return False
    before = body.arguments[place]
    steps = [_number(body, v) for v in add.operands if v != before]
    return before in add.operands and steps == [1]


def _maker(block: Block, value: int) -> Operation | None:
    return next((operation for operation in block.operations if value in operation.results), None)


def _number(block: Block, value: int) -> int | None:
    """The integer that a constant of the block is."""
    made = _maker(block, value)
    if made is None or made.name != "stablehlo.constant":
        return None
    data = made.attributes["value"]
    return int(data) if isinstance(data, np.ndarray) and data.shape == () and data.dtype.kind in "iu" else None
