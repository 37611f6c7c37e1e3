"""An estimate of the host's time for blocks of a Program: the elements that they compute. The fast engine cuts long Programs by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tpuflow.isa.instruction import Instruction
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Block, Kernel, Loop, Switch, While

LEAST = 4096
"""The least that a kernel counts: the host's overhead of a kernel takes as long."""
MACS_A_RESULT = 8
"""Multiply-adds that take the host as long as one result of any other instruction, to the order of magnitude."""


def result_count(blocks: Sequence[Block], trips: Mapping[int, int], unknown: float) -> float:
    """Elements that the blocks compute, of a switch the longest branch. trips: the known trip counts, by buffer (`known_trips`); other
    loops count as `unknown` trips."""
    total = 0.0
    for block in blocks:
        match block:
            case Kernel():
                total += kernel_result_count(block)
            case Loop():
                total += _times(max(0, trips.get(block.trips, unknown)), result_count(block.body, trips, unknown))
            case While():
                total += _times(unknown, result_count(block.condition + block.body, trips, unknown))
            case Switch():
                total += max((result_count(branch, trips, unknown) for branch in block.branches), default=0.0)
    return total


def kernel_result_count(kernel: Kernel) -> float:
    """Elements that a kernel computes over its whole grid."""
    nest = LoopNest(kernel.grid)
    return max(LEAST, float(sum(nest.runs(name) * sum(map(_results, section)) for name, section in kernel.sections)))


def _results(instruction: Instruction) -> float:
    tiles = [*instruction.reads(), *instruction.writes()]
    if isinstance(instruction, MatmulAccumulate):
        return math.sqrt(math.prod(float(t.elems) for t in (instruction.a, instruction.b, instruction.acc))) / MACS_A_RESULT
    return max((float(t.elems) for t in tiles), default=1.0)


def _times(count: float, amount: float) -> float:
    return count * amount if amount else 0.0
