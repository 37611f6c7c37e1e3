"""The reference engine with the interface of the fast engine, which `tpuflow.device.runtime` calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tpuflow.device.budget import Budget
from tpuflow.device.reference.interpreter import ReferenceEngine, stacked
from tpuflow.isa.program import Program


class ReferenceAdapter:
    """A verified Program on the reference engine. It donates no inputs (`consumes`), so it may be interrupted anywhere."""

    consumes = False
    short = False

    def __init__(self, program: Program):
        self.tiers: Mapping[str, int] = {}
        self._engine = ReferenceEngine(program, verify=False)

    def start(
        self, inputs: Sequence[Any], infeeds: Sequence[Any], start: int, capacity: int, paces: object, budget: Budget
    ) -> ReferenceExecution:
        """As `FastEngine.start`."""
        pieces = self._engine.launch_in_slices([np.asarray(x) for x in inputs], [np.asarray(x)[start:] for x in infeeds], budget)
        return ReferenceExecution(self._engine, pieces)


class ReferenceExecution:
    """As the fast engine's `Execution`: each trip of a loop that is the Program's last block is a slice."""

    def __init__(self, engine: ReferenceEngine, pieces: Iterator[int]):
        self._engine, self._pieces = engine, pieces
        self._begun = [0] * len(engine.program.outfeeds)

    def __iter__(self) -> ReferenceExecution:
        return self

    def __next__(self) -> int:
        self._begun = list(map(len, self._engine.sent))
        return next(self._pieces)

    @property
    def outputs(self) -> list[np.ndarray]:
        """One array an output port."""
        return self._engine.outputs

    @property
    def outfeeds(self) -> list[np.ndarray]:
        """What each outfeed port has sent, stacked."""
        return [stacked(p, items) for p, items in zip(self._engine.program.outfeeds, self._engine.sent, strict=True)]

    @property
    def totals(self) -> list[int]:
        """How many items each has sent."""
        return list(map(len, self._engine.sent))

    @property
    def latest(self) -> list[np.ndarray]:
        """The items that each port has sent in the latest piece, stacked."""
        ports = zip(self._engine.program.outfeeds, self._engine.sent, self._begun, strict=True)
        return [stacked(p, items[begun:]) for p, items, begun in ports]
