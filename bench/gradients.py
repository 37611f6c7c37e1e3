"""When the gradients of a step are ready, and how their sums over several chips are split: what of them the backward pass can hide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import jax

from tpuflow.chips import Chip
from tpuflow.chips.links import all_reduce_seconds
from tpuflow.compiler import PIPELINE, compile_graph
from tpuflow.device.timing import Calibration, time_program
from tpuflow.device.timing.result import PICOSECONDS
from tpuflow.isa.program import Copy, Kernel, Program, walk
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr
from tpuflow.lower.passes.join_small import JoinSmall
from tpuflow.lower.passes.merge_kernels import MergeKernels
from tpuflow.lower.passes.simplify import Simplify
from tpuflow.stages.flattening import leaf_names
from tpuflow.training.config import StepConfig
from tpuflow.training.preparing import make_recipe, state_shapes

GRADIENT_BYTES = 4  # summed in f32
WAITING = (MergeKernels(), JoinSmall())
"""Passes that let a kernel wait for company. One whose gradient is to be summed as soon as it is there would not."""
SAME = " = "
"""Between the names of equal gradients: of the biases of normalised layers that are added, for one."""
Ready = tuple[int, float]
"""Bytes of a gradient, and how many seconds before the last one it is there."""


def gradient_program(config: StepConfig, chip: Chip) -> Program:
    """The forward and backward pass of a training step, with the gradients as outputs; one output for those that are the same."""

    batch = config.data
    recipe, state = state_shapes(make_recipe(config, batch)[0], batch)

    def gradients(state: Any, batch: Any) -> Any:
        return recipe.watched_step(state, batch)[2].grads

    closed, shapes = jax.make_jaxpr(gradients, return_shape=True)(state, batch)
    graph = Simplify()(lower_jaxpr(closed, "gradients"))
    names: dict[Value, list[str]] = {}
    for name, value in zip(leaf_names(shapes), graph.outputs, strict=True):
        names.setdefault(value, []).append(name)
    told_apart = replace(graph, outputs=tuple(names), output_names=tuple(map(SAME.join, names.values())))
    return compile_graph(told_apart, chip=chip, passes=[p for p in PIPELINE if p not in WAITING])


def ready(program: Program, calibration: Calibration | None = None) -> tuple[Ready, ...]:
    """The gradients that a `gradient_program` has as outputs, in the order in which it makes them."""
    rows = time_program(program, calibration=calibration).kernels
    kernels = {place: block for place, block in walk(program.code) if isinstance(block, Kernel)}
    ends: dict[int, int] = {}
    for row, end in zip(rows, accumulate(row.picoseconds for row in rows), strict=True):
        ends.update((w.buffer, end) for i in kernels[row.place].instructions for role, w in i.windows() if role == "write")
    copied = {block.target: block.source for _, block in walk(program.code) if isinstance(block, Copy)}
    made = sorted((ends[copied.get(port.buffer, port.buffer)], port.shape) for port in program.outputs for _ in port.name.split(SAME))
    last = made[-1][0]
    return tuple((GRADIENT_BYTES * math.prod(shape), (last - end) / PICOSECONDS) for end, shape in made)


def sums(gradients: Sequence[tuple[int, float]], splits: Sequence[int], chip: Chip, chips: int) -> tuple[tuple[float, float], ...]:
    """(seconds, share of the step before the last gradient) of every sum: one begins after each number of gradients in `splits`."""
    cuts = sorted({0, *(min(s, len(gradients)) for s in splits), len(gradients)})
    groups = [gradients[a:b] for a, b in pairwise(cuts)]
    return tuple((all_reduce_seconds(chip, sum(size for size, _ in group), chips), group[-1][1]) for group in groups)
