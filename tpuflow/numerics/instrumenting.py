"""A training step compiled for the device together with everything that is measured in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow import amp
from tpuflow.jaxprs.compat import prune
from tpuflow.numerics.measures import FORMATS, LARGE, Counts, bits_of, bits_of_number, encode, format_of, is_zero, tally
from tpuflow.numerics.walking import Site, Walk, is_float, track
from tpuflow.stages.staging import DeviceFunction, Target, as_array
from tpuflow.training.stepping import Changes, Recipe, StepFigures, TrainState


class LeafCounts(NamedTuple):
    """What is measured of one parameter: itself, its update, and how many of its elements have a gradient and yet do not change."""

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
class Measured:
    """The figures of one step, NumPy arrays: those of operations and of parameters in their order.

    `updated`: whether the parameters were to change: neither skipped for overflow, nor while gradients were being accumulated.
    """

    figures: StepFigures
    counts: list[Counts]
    leaf_counts: list[LeafCounts]
    updated: bool


@dataclass(frozen=True, slots=True)
class Instrumented:
    """An instrumented step on the device."""

    function: DeviceFunction
    results: Any
    sites: tuple[Site, ...]
    leaves: tuple[Leaf, ...]

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Measured]:
        """Run the step; the state is not overwritten."""
        flat = self.function([as_array(leaf) for leaf in jax.tree.leaves((state, batch))])
        new_state, figures, found, fates = jax.tree.unflatten(jax.tree.structure(self.results), flat)
        figures, found, fates = jax.tree.map(np.asarray, (figures, found, fates))
        counts = [counted(f, s.dtype, len(s.shape), s.thresholds) for f, s in zip(found, self.sites, strict=True)]
        leaf_counts = [_leaf_counts(f[0], f[1], f[2], leaf) for f, leaf in zip(fates, self.leaves, strict=True)]
        return new_state, Measured(figures, counts, leaf_counts, bool(amp.has_updated(state.opt_state, new_state.opt_state)))


@jax.disable_jit(False)
def instrument(recipe: Recipe, state: TrainState, batch: Any, target: Target, thresholds: Sequence[float] = ()) -> Instrumented:
    """The step of `recipe` for states and batches of these shapes, with its measurements.

    thresholds: magnitudes of the census of the fp32 numbers in the backward pass, see `measures.Counts`.

    Raises:
      UnsupportedPrimitiveError, OutOfMemoryError: as compiling the step itself does.
    """
    closed, shapes = jax.make_jaxpr(recipe.watched_step, return_shape=True)(state, batch)
    closed = prune(closed)
    gradients = jax.tree.leaves(jax.tree.broadcast((False, False, Changes(grads=True, updates=False)), shapes))
    structure, state_tree = jax.tree.structure(shapes), jax.tree.structure(state)
    bits = tuple(bits_of_number(t, "float32") for t in thresholds)
    walks: list[Walk] = []

    def measured_step(*arguments: Any) -> Any:
        walk = Walk(recipe.model.name, bits)
        walks[:] = [walk]
        values = [r.value for r in walk.run(closed, [track(a) for a in arguments], gradients)]
        new_state, figures, changes = jax.tree.unflatten(structure, values)
        old_state = jax.tree.unflatten(state_tree, arguments[: state_tree.num_leaves])
        trees = (old_state.params, new_state.params, changes.grads, changes.updates)
        fates = [_fate(*parts) for parts in zip(*map(jax.tree.leaves, trees), strict=True) if is_float(parts[0])]
        return new_state, figures, walk.found, fates

    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    jaxpr, results = jax.make_jaxpr(measured_step, return_shape=True)(*specs)
    leaves = _leaves(state.params, shapes[2].updates, recipe.model.name)
    return Instrumented(DeviceFunction(jaxpr, "numerics", target), results, tuple(walks[0].sites), leaves)


def counted(found: Any, dtype: str, rank: int, thresholds: Sequence[int] = ()) -> Counts:
    """The figures of what the device found: its counts, or those of its code."""
    return found if isinstance(found, Counts) else tally(found, FORMATS[dtype], thresholds, found.ndim - rank)


def _fate(old: Any, new: Any, gradient: Any, update: Any) -> tuple[Any, Any, Any]:
    """What is found of one parameter: its code, its update's (marked where it is zero and the gradient is not), what becomes of it."""
    has_gradient = ~is_zero(gradient)
    lost = has_gradient & (bits_of(old) == bits_of(new))
    fate = has_gradient.astype(jnp.int32) + lost.astype(jnp.int32)
    codes = encode(old), encode(update, has_gradient)
    if old.size < LARGE:
        return codes[0], codes[1], fate
    return tally(codes[0], format_of(old), xp=jnp), tally(codes[1], format_of(update), xp=jnp), _fates(fate, xp=jnp)


def _fates(fate: Any, *, xp: Any) -> Any:
    """[elements with a gradient, those of them that do not change]."""
    return xp.stack([xp.sum(fate >= n, dtype=np.int32) for n in (1, 2)])


def _leaf_counts(parameter: Any, update: Any, fate: Any, leaf: Leaf) -> LeafCounts:
    large = isinstance(parameter, Counts)
    with_gradient, lost = fate if large else _fates(fate, xp=np)
    rank = len(leaf.shape)
    return LeafCounts(counted(parameter, leaf.dtype, rank), counted(update, leaf.update_dtype, rank), with_gradient, lost)


def _leaves(params: Any, updates: Any, model: str) -> tuple[Leaf, ...]:
    rows = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(updates), strict=True)
    return tuple(_leaf(path, leaf, update, model) for (path, leaf), update in rows if is_float(leaf))


def _leaf(path: Any, leaf: Any, update: Any, model: str) -> Leaf:
    """nnx ends a path with the field "value" of its variables."""
    parts = [jax.tree_util.keystr((p,), simple=True) for p in path]
    parts = parts[:-1] if len(parts) > 1 and parts[-1] == "value" else parts
    return Leaf("/".join(parts[:-1]) or model, parts[-1], str(leaf.dtype), str(update.dtype), tuple(leaf.shape))
