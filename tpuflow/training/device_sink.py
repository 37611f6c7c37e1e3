"""`DeviceSink`: runs many steps on the device in one host round trip, from the chunks of a feed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpuflow.compiler import compile_sink
from tpuflow.data.batching import BatchStructure, Signature
from tpuflow.data.chunks import Chunk
from tpuflow.data.feeding import Layout
from tpuflow.device.runtime import Executable
from tpuflow.errors import DataError
from tpuflow.garbage import undisturbed
from tpuflow.jaxprs.compat import ClosedJaxpr
from tpuflow.jaxprs.shardings import cuts, is_mapped, with_shardings
from tpuflow.stages.flattening import from_device, leaf_names, to_device
from tpuflow.stages.shardings import brought
from tpuflow.stages.staging import Target
from tpuflow.stages.tracing import users_code

OnSlice = Callable[[Any, Any, int], None]


class DeviceSink:
    """A step function compiled to one Program for each batch shape.

    step: (state, batch) -> (new state, figures), trees of arrays; figures alone if it does not change the state (`updates=False`).
    `structure`: that of a batch. `at_host`: of every leaf of a state whether it is in the host's memory between steps. The trip count is a
    launch argument, so a Program serves every number of steps and the values do not depend on how steps are grouped. `compile_seconds`
    counts what was compiled during `run`.
    """

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        target: Target,
        structure: BatchStructure,
        *,
        updates: bool = True,
        at_host: Callable[[Any], Sequence[bool]] = lambda state: (),
    ):
        self._name, self._step, self._target, self._updates = name, step, target, updates
        self._structure, self._at_host = structure, at_host
        self._programs: dict[Signature, SinkProgram] = {}
        self.compile_seconds = 0.0

    @property
    def executables(self) -> dict[Signature, Executable]:
        """The executables made so far, by batch shape."""
        return {signature: p.executable for signature, p in self._programs.items()}

    @property
    def launches(self) -> int:
        """Slices launched so far: a round trip takes one or more for every batch shape (`tpuflow.device.fast.execution`)."""
        return sum(p.launches for p in self._programs.values())

    @property
    def launch_seconds(self) -> float:
        """Host seconds spent in launches."""
        return sum(p.launch_seconds for p in self._programs.values())

    def prepare(self, state: Any, signature: Signature) -> SinkProgram:
        """The Program for a batch shape, traced and loaded if it is new."""
        if signature not in self._programs:
            self._programs[signature] = self._load(state, signature)
        return self._programs[signature]

    def run(self, state: Any, pieces: Iterable[Chunk], on_slice: OnSlice) -> Any:
        """Run every batch of the pieces and return the new state.

        After each slice `on_slice(state, figures, steps)` is told the state so far and the stacked figures of its steps, so that an
        interrupt, which comes between slices, loses nothing.
        """
        for piece in pieces:
            began = time.perf_counter()
            with undisturbed():
                program = self.prepare(state, piece.signature)
                program.compile(len(piece.arrays[0]))
            self.compile_seconds += time.perf_counter() - began
            state = program.run(state, piece, on_slice)
        return state

    def _load(self, state: Any, signature: Signature) -> SinkProgram:
        """Trace the step for a batch shape and put it on the chip."""
        batch = jax.tree.unflatten(self._structure.tree, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signature])
        told = ", ".join(
            f"{name or 'array'} {dtype}{list(shape)}" for name, (shape, dtype) in zip(self._structure.names, signature, strict=True)
        )

        def refusal(said: str) -> DataError:
            return DataError(f"{self._name}: cannot take a batch of {told}, as it took others: {said} Give batches of one form.")

        # The first batch was tried before; what a later one of another shape raises is its fault.
        users = users_code(f"while tracing {self._name} for a batch of {told}", (Exception,) if self._programs else (), refusal)
        with users, jax.disable_jit(False):  # a loop on the device is one program
            closed, shapes = jax.make_jaxpr(self._step, return_shape=True)(state, batch)
            closed = _with_own_shardings(closed, self._name, state, updates=self._updates)
        figures = shapes[1] if self._updates else shapes
        names = leaf_names(state)
        program = compile_sink(
            closed,
            carries=len(names) if self._updates else 0,
            invariants=0 if self._updates else len(names),
            chip=self._target.chip,
            name=self._name,
            carry_names=names if self._updates else (),
            invariant_names=() if self._updates else names,
            infeed_names=self._structure.names,
            outfeed_names=leaf_names(figures),
            host_carries=self._at_host(state),
        )
        executable = Executable(program, engine=self._target.engine, fidelity=self._target.fidelity)
        return SinkProgram(executable, shapes[0] if self._updates else None, jax.tree.structure(figures))


def _with_own_shardings(closed: ClosedJaxpr, name: str, state: Any, *, updates: bool) -> ClosedJaxpr:
    """The step's jaxpr with the shardings of the state's arrays on its inputs, and on the new state that it returns."""
    own = [brought(getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(state)]
    if not any(map(cuts, own)) or is_mapped(closed):
        return closed
    inputs, outputs = ((None,) * (len(avals) - len(own)) for avals in (closed.in_avals, closed.out_avals))
    return with_shardings(closed, name, (*own, *inputs), (*own, *outputs) if updates else (None,) * len(closed.out_avals))


@dataclass(slots=True)
class SinkProgram:
    """A loaded Program of a sink: the shapes of its new state (None if it leaves the state unchanged), the tree structure of its figures,
    and the slices and seconds that it has taken."""

    executable: Executable
    new_state: Any
    figures_tree: Any
    launches: int = 0
    launch_seconds: float = 0.0
    compiled: set[int] = field(default_factory=set)

    def run(self, state: Any, piece: Chunk, on_slice: OnSlice) -> Any:
        """Run the batches of one chunk, and return the new state."""
        began = time.perf_counter()

        def told(outputs: list[Any], figures: list[np.ndarray], steps: int) -> None:
            nonlocal state, began
            self.launch_seconds += time.perf_counter() - began
            self.launches += 1
            if self.new_state is not None:
                avals, tree = jax.tree.flatten(self.new_state)
                state = jax.tree.unflatten(tree, from_device(outputs, avals))
            on_slice(state, jax.tree.unflatten(self.figures_tree, figures), steps)
            began = time.perf_counter()

        inputs = [np.array(piece.count, np.int32), *to_device(jax.tree.leaves(state))]
        self.executable.launch(inputs, piece.arrays, start=piece.start, count=piece.count, on_slice=told)
        return state

    def compile(self, items: int) -> None:
        """Have the engine compile the Program for chunks of so many items, unless it has."""
        if items not in self.compiled:
            self.executable.compile(items)
            self.compiled.add(items)


@undisturbed()
def compile_ahead(work: Sequence[tuple[DeviceSink, Any, Sequence[Layout]]]) -> float:
    """Compile the Programs of sinks for these layouts before they are needed; returns the seconds that it took.

    Tracing, which is Python, is sequential; the engine's compilations run in parallel.
    """
    began = time.perf_counter()
    programs = [(sink.prepare(state, signature), items) for sink, state, layouts in work for signature, items in layouts]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(lambda job: job[0].compile(job[1]), programs))
    return time.perf_counter() - began
