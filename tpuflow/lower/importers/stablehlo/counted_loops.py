"""Counted loops in a module: `stablehlo.while` with an induction variable, which is how JAX writes `scan` and a static `fori_loop`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.stablehlo.module import Block, Operation
from tpuflow.lower.operations.complex import Number


@dataclass(frozen=True, slots=True)
class CountedLoop:
    """A loop of `trips` trips whose carry number `counter` is the induction variable: start, start + 1, ..."""

    counter: int
    start: int
    trips: int


def match_counted_loop(b: Builder, condition: Block, body: Block, carries: Sequence[Number]) -> CountedLoop | None:
    """The loop as a counted one, if a carry starts at a constant, is compared with a constant (LT), and grows by 1 each trip; else None."""
    (test,) = condition.outputs
    compare = _defining_operation(condition, test)
    if compare is None or compare.name != "stablehlo.compare" or compare.attributes["comparison_direction"] != "LT":
        return None
    value, limit = compare.operands
    last = _integer_constant(condition, limit)
    if value not in condition.arguments or last is None:
        return None
    counter = condition.arguments.index(value)
    initial = carries[counter]
    start = b.known(initial) if isinstance(initial, Value) else None
    if start is None or not _increments(body, counter):
        return None
    return CountedLoop(counter, int(start), max(0, last - int(start)))


def _increments(body: Block, counter: int) -> bool:
    """Whether a trip adds 1 to the carry number `counter`."""
    add = _defining_operation(body, body.outputs[counter])
    if add is None or add.name != "stablehlo.add":
        return False
    before = body.arguments[counter]
    steps = [_integer_constant(body, v) for v in add.operands if v != before]
    return before in add.operands and steps == [1]


def _defining_operation(block: Block, value: int) -> Operation | None:
    return next((operation for operation in block.operations if value in operation.results), None)


def _integer_constant(block: Block, value: int) -> int | None:
    """The integer that a constant of the block is."""
    made = _defining_operation(block, value)
    if made is None or made.name != "stablehlo.constant":
        return None
    data = made.attributes["value"]
    return int(data) if isinstance(data, np.ndarray) and data.shape == () and data.dtype.kind in "iu" else None
