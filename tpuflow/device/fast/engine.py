"""The fast engine: a verified Program translated to one XLA:CPU executable, compiled once for each code hash and outfeed capacity."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.device.fast.translate import Translation
from tpuflow.device.verify import verify
from tpuflow.isa.program import Program

# Algebraic simplification would change results (`(x * 1.1) * 1.3`, `x / 3`, fp16 overflow that must stay infinite). Without it
# the reshape mover never comes to an end: it wraps every transpose in hundreds of others.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "algsimp,reshape-mover"}


class FastEngine:
    """Runs a Program as one XLA:CPU executable, in "native" or "bitexact" fidelity."""

    def __init__(self, program: Program, *, fidelity: str = "native", verified: bool = False):
        if not verified:
            verify(program)
        self.program = program
        self.translation = Translation(program, bitexact=fidelity == "bitexact")
        donated = tuple(i for i, p in enumerate(program.inputs) if p.donated)
        kept = tuple(i for i, p in enumerate(program.inputs) if not p.donated)
        self._donated, self._kept = donated, kept
        self._run = jax.jit(self._flat, donate_argnums=(1, 5), compiler_options=COMPILER_OPTIONS)
        self._zero = np.zeros((), np.int32)

    def _flat(
        self, zero: Any, donated: list[Any], kept: list[Any], infeeds: list[Any], start: Any, outfeeds: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        inputs: list[Any] = [None] * len(self.program.inputs)
        for i, x in (*zip(self._donated, donated, strict=True), *zip(self._kept, kept, strict=True)):
            inputs[i] = x
        return self.translation(zero, inputs, infeeds, start, outfeeds)

    def launch(self, inputs: Sequence[Any], infeeds: Sequence[Any] = (), start: int = 0, capacity: int = 1) -> tuple[list[Any], list[Any]]:
        """One run of the Program.

        inputs: one array a port; infeeds: one stacked array [items, ...] a port, read from item `start` on; capacity: items that each
        outfeed port has room for. Donated inputs may be consumed. Returns (outputs, stacked outfeeds [capacity, ...]) as JAX arrays.
        """
        donated = _distinct([inputs[i] for i in self._donated])
        kept = [inputs[i] for i in self._kept]
        outfeeds = [jnp.zeros((capacity, *p.shape), p.dtype.numpy) for p in self.program.outfeeds]
        return self._run(self._zero, donated, kept, list(infeeds), np.int32(start), outfeeds)

    def compile(self, infeed_items: int = 1, capacity: int = 1) -> Any:
        """Translate and compile without running; the result is kept in the jit's cache by the first launch of these shapes."""
        spec = [jax.ShapeDtypeStruct(p.shape, p.dtype.numpy) for p in self.program.inputs]
        feeds = [jax.ShapeDtypeStruct((infeed_items, *p.shape), p.dtype.numpy) for p in self.program.infeeds]
        sends = [jax.ShapeDtypeStruct((capacity, *p.shape), p.dtype.numpy) for p in self.program.outfeeds]
        scalar = jax.ShapeDtypeStruct((), np.int32)
        donated, kept = [spec[i] for i in self._donated], [spec[i] for i in self._kept]
        return self._run.lower(scalar, donated, kept, feeds, scalar, sends).compile()

    @functools.cached_property
    def tiers(self) -> dict[str, int]:
        """Tier of every kernel by its place in the program (filled by the first compile or launch)."""
        return self.translation.tiers


def _distinct(arrays: list[Any]) -> list[Any]:
    """The arrays, those that come again copied: XLA takes over each donated buffer, so no two may be the same."""
    seen: set[int] = set()
    return [jnp.copy(x) if id(x) in seen or seen.add(id(x)) else x for x in arrays]
