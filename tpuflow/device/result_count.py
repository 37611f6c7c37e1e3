"""An estimate of the host's time for blocks of a Program: the elements that they compute. The fast engine cuts long Programs by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tpuflow.isa.instruction import Instruction
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Block, Kernel, Loop, Program, Switch, While

LEAST = 4096
"""The least that a kernel counts: the host's overhead of a kernel takes as long."""
MACS_A_RESULT = 8
"""Multiply-adds that take the host as long as one result of any other instruction, to the order of magnitude."""


class ResultCounts:
    """The counts of a Program's blocks; kernels of one form have the same, which is found once."""

    def __init__(self, program: Program, trips: Mapping[int, int]):
        self._trips, self._forms = trips, program.forms_by_id()
        self._known: dict[int, float] = {}

    def of(self, blocks: Sequence[Block], unknown: float) -> float:
        """Elements that the blocks compute, of a switch the longest branch. Loops that are not in `trips` count as `unknown` trips."""
        total = 0.0
        for block in blocks:
            match block:
                case Kernel():
                    total += self._kernel(block)
                case Loop():
                    total += _times(max(0, self._trips.get(block.trips, unknown)), self.of(block.body, unknown))
                case While():
                    total += _times(unknown, self.of(block.condition + block.body, unknown))
                case Switch():
                    total += max((self.of(branch, unknown) for branch in block.branches), default=0.0)
        return total

    def _kernel(self, kernel: Kernel) -> float:
        number = self._forms[id(kernel)].number
        if number not in self._known:
            self._known[number] = kernel_result_count(kernel)
        return self._known[number]


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
