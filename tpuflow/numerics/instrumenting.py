"""`instrument`: a training step that runs on the device operation by operation, with every result measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from tpuflow import amp
from tpuflow.jaxprs.compat import ClosedJaxpr, prune
from tpuflow.numerics.interpreter import ABSENT, MeasuringInterpreter, Site, is_float
from tpuflow.numerics.measures import Counts, bits_of, bits_of_number, is_zero, tally
from tpuflow.stages.staging import Target, as_array
from tpuflow.training.train_step import Changes, Recipe, StepFigures, TrainState


class LeafCounts(NamedTuple):
    """The figures of one parameter and of its update; how many elements have a gradient, and how many of these keep every bit (`lost`)."""

    parameter: Counts
    update: Counts
    with_gradient: Any
    lost: Any


@dataclass(frozen=True, slots=True)
class Leaf:
    """One parameter: the module path and the name in it, its type and that of its updates."""

    layer: str
    name: str
    dtype: str
    update_dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """The figures of one step: those of operations, with an axis of the times that they ran, and of parameters, in their order.

    `updated`: whether the step updates parameters: it is not skipped for overflow, and does not only accumulate gradients.
    """

    figures: StepFigures
    counts: list[Counts]
    leaf_counts: list[LeafCounts]
    updated: bool


@dataclass(frozen=True, slots=True)
class InstrumentedStep:
    """A step whose operations are measured: its jaxpr, the structure of its results, and which of them are gradients of parameters."""

    jaxpr: ClosedJaxpr
    results: Any
    gradients: tuple[bool, ...]
    target: Target
    model: str
    thresholds: tuple[int, ...]
    sites: tuple[Site, ...]
    leaves: tuple[Leaf, ...]

    @jax.disable_jit(False)
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMeasurements]:
        """Run the step; the state is not overwritten.

        Raises:
          UnsupportedPrimitiveError, OutOfMemoryError: as compiling any function of one operation does.
        """
        interpreter = MeasuringInterpreter(self.model, self.target, self.thresholds)
        arguments = [interpreter.track(as_array(leaf)) for leaf in jax.tree.leaves((state, batch))]
        values = [r.value for r in interpreter.run(self.jaxpr, arguments, self.gradients)]
        new_state, figures, changes = jax.tree.unflatten(self.results, values)
        trees = (state.params, new_state.params, changes.grads, changes.updates)
        fates = [_leaf_counts(*map(np.asarray, parts)) for parts in zip(*map(jax.tree.leaves, trees), strict=True) if is_float(parts[0])]
        updated = bool(amp.has_updated(state.opt_state, new_state.opt_state))
        return new_state, StepMeasurements(jax.tree.map(np.asarray, figures), interpreter.measurements.figures(), fates, updated)


@jax.disable_jit(False)
def instrument(recipe: Recipe, state: TrainState, batch: Any, target: Target, thresholds: Sequence[float] = ()) -> InstrumentedStep:
    """The step of `recipe` for states and batches of these shapes, with its measurements.

    thresholds: magnitudes of the census of the fp32 numbers in the backward pass, see `measures.Counts`.
    """
    closed, shapes = jax.make_jaxpr(recipe.watched_step, return_shape=True)(state, batch)
    closed = prune(closed)
    gradients = tuple(jax.tree.leaves(jax.tree.broadcast((False, False, Changes(grads=True, updates=False)), shapes)))
    name, bits = recipe.model.name, tuple(bits_of_number(t, "float32") for t in thresholds)
    listing = MeasuringInterpreter(name, target, bits, runs=False)
    listing.run(closed, [ABSENT] * len(closed.in_avals), gradients)
    leaves = _leaves(state.params, shapes[2].updates, name)
    return InstrumentedStep(closed, jax.tree.structure(shapes), gradients, target, name, bits, tuple(listing.measurements.sites), leaves)


def _leaf_counts(old: Any, new: Any, gradient: Any, update: Any) -> LeafCounts:
    """The figures of one parameter, from its values before and after the step, its gradient and its update."""
    has_gradient = ~is_zero(gradient)
    lost = has_gradient & (bits_of(old) == bits_of(new))
    return LeafCounts(tally(old), tally(update, lambda: has_gradient), np.count_nonzero(has_gradient), np.count_nonzero(lost))


def _leaves(params: Any, updates: Any, model: str) -> tuple[Leaf, ...]:
    rows = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(updates), strict=True)
    return tuple(_leaf(path, leaf, update, model) for (path, leaf), update in rows if is_float(leaf))


def _leaf(path: Any, leaf: Any, update: Any, model: str) -> Leaf:
    """nnx ends a path with the field "value" of its variables."""
    parts = [jax.tree_util.keystr((p,), simple=True) for p in path]
    parts = parts[:-1] if len(parts) > 1 and parts[-1] == "value" else parts
    return Leaf("/".join(parts[:-1]) or model, parts[-1], str(leaf.dtype), str(update.dtype), tuple(leaf.shape))
