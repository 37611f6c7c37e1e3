"""The sink: steps run on the device in one host round trip, launched in slices of about a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpuflow.api.feeding import Chunk, Signature
from tpuflow.api.flattening import from_device, leaf_names, to_device
from tpuflow.api.interrupts import Interrupts
from tpuflow.compiler import compile_sink
from tpuflow.device.runtime import Executable

SLICE_SECONDS = 0.7
FIRST_SLICES = (1, 4)

OnSlice = Callable[[Any, Any, int], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Where Programs run."""

    chip: Any
    engine: str = "fast"
    fidelity: str = "native"


class DeviceSink:
    """A step function compiled to one Program for each batch shape.

    step: (state, (inputs, labels)) -> (state, figures), trees of arrays. The trip count is a launch argument, so a Program serves
    every number of steps and the values do not depend on how steps are grouped.
    """

    def __init__(self, name: str, step: Callable[..., Any], target: Target):
        self._name, self._step, self._target = name, step, target
        self._programs: dict[Signature, _SinkProgram] = {}

    @property
    def executables(self) -> dict[Signature, Executable]:
        """The executables made so far, by batch shape."""
        return {signature: p.executable for signature, p in self._programs.items()}

    @property
    def launches(self) -> int:
        """Launches made so far: a round trip takes one for every slice and batch shape."""
        return sum(p.launches for p in self._programs.values())

    @property
    def compile_seconds(self) -> float:
        """Host seconds spent on tracing, compiling and translating."""
        return sum(p.compile_seconds for p in self._programs.values())

    def prepare(self, state: Any, signature: Signature) -> _SinkProgram:
        """The Program for a batch shape, compiled if it is new."""
        if signature not in self._programs:
            began = time.perf_counter()
            self._programs[signature] = _SinkProgram.compile(self._name, self._step, state, signature, self._target)
            self._programs[signature].compile_seconds += time.perf_counter() - began
        return self._programs[signature]

    def run(self, state: Any, pieces: Iterable[Chunk], interrupts: Interrupts, on_slice: OnSlice) -> Any:
        """Run every batch of the pieces and return the new state.

        After each launch `on_slice(state, figures, steps)` is told the state so far and the stacked figures of its steps, so that an
        interrupt loses nothing.
        """
        for piece in pieces:
            program = self.prepare(state, piece.signature)
            state = program.run(state, piece, interrupts, on_slice)
        return state


@dataclass(slots=True)
class _SinkProgram:
    """One Program with what is known about it: the trees of its state and figures, and the seconds one step takes."""

    executable: Executable
    state_avals: list[Any]
    state_tree: Any
    figures_tree: Any
    interruptible: bool
    launches: int = 0
    compile_seconds: float = 0.0
    step_seconds: float = 0.0
    _compiled: set[int] = field(default_factory=set)

    @classmethod
    def compile(cls, name: str, step: Callable[..., Any], state: Any, signature: Signature, target: Target) -> _SinkProgram:
        """Trace the step for a batch shape and put it on the chip."""
        batch = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signature)
        closed, (new_state, figures) = jax.make_jaxpr(step, return_shape=True)(state, batch)
        leaves, tree = jax.tree.flatten(new_state)
        names = leaf_names(state, "")
        program = compile_sink(
            closed,
            carries=len(leaves),
            chip=target.chip,
            name=name,
            carry_names=names,
            infeed_names=("inputs", "labels"),
            outfeed_names=leaf_names(figures, ""),
        )
        executable = Executable(program, engine=target.engine, fidelity=target.fidelity)
        return cls(executable, leaves, tree, jax.tree.structure(figures), target.engine == "reference")

    def run(self, state: Any, piece: Chunk, interrupts: Interrupts, on_slice: OnSlice) -> Any:
        """The batches of one piece, in slices."""
        done = 0
        self._compile(len(piece.arrays[0]))
        while done < piece.count:
            count = min(piece.count - done, self._slice_steps())
            # The reference engine consumes nothing, so it may be interrupted anywhere; the fast one owns donated state until it returns.
            with nullcontext() if self.interruptible else interrupts.held():
                state, figures = self._launch(state, piece.arrays, piece.start + done, count)
                on_slice(state, figures, count)
            done += count
        return state

    def _compile(self, items: int) -> None:
        if items in self._compiled:
            return
        began = time.perf_counter()
        self.executable.compile(items)
        self._compiled.add(items)
        self.compile_seconds += time.perf_counter() - began

    def _slice_steps(self) -> int:
        if self.launches < len(FIRST_SLICES):
            return FIRST_SLICES[self.launches]
        return max(1, int(SLICE_SECONDS / max(self.step_seconds, 1e-6)))

    def _launch(self, state: Any, arrays: Sequence[Any], start: int, count: int) -> tuple[Any, Any]:
        inputs = [np.int32(count), *to_device(jax.tree.leaves(state))]
        began = time.perf_counter()
        outputs, figures = self.executable.launch(inputs, arrays, start=start, count=count)
        self.step_seconds = (time.perf_counter() - began) / count
        self.launches += 1
        new_state = jax.tree.unflatten(self.state_tree, from_device(outputs, self.state_avals))
        return new_state, jax.tree.unflatten(self.figures_tree, figures)
