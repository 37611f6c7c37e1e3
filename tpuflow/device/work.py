"""How much work there is in blocks of a Program, roughly and without running them: what decides whether a launch can be long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tpuflow.isa.instruction import Instruction
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Block, Kernel, Loop, Switch, While

LEAST = 4096
"""What a kernel counts at least: it takes a host that long to get to it."""
MACS_A_RESULT = 8
"""Multiply-adds of a product that take a host as long as one result of any other instruction, in order of magnitude."""


def work(blocks: Sequence[Block], trips: Mapping[int, int], unknown: float) -> float:
    """Results that the blocks compute; `trips` has the trip counts that are known by their buffers (`known_trips`), and loops without one
    run `unknown` times. Of a switch the branch with most counts."""
    total = 0.0
    for block in blocks:
        match block:
            case Kernel():
                total += kernel_work(block)
            case Loop():
                total += _times(max(0, trips.get(block.trips, unknown)), work(block.body, trips, unknown))
            case While():
                total += _times(unknown, work(block.condition + block.body, trips, unknown))
            case Switch():
                total += max((work(branch, trips, unknown) for branch in block.branches), default=0.0)
    return total


def kernel_work(kernel: Kernel) -> float:
    """Results that a kernel computes, over its whole grid."""
    nest = LoopNest(kernel.grid)
    return max(LEAST, float(sum(nest.runs(name) * sum(map(_results, section)) for name, section in kernel.sections)))


def _results(instruction: Instruction) -> float:
    tiles = [*instruction.reads(), *instruction.writes()]
    if isinstance(instruction, MatmulAccumulate):
        return math.sqrt(math.prod(float(t.elems) for t in (instruction.a, instruction.b, instruction.acc))) / MACS_A_RESULT
    return max((float(t.elems) for t in tiles), default=1.0)


def _times(count: float, amount: float) -> float:
    return count * amount if amount else 0.0
