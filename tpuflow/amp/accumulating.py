"""Gradient accumulation: one update for several micro-batches, with the mean of their gradients.

`optax.MultiSteps` is not used: it keeps its sums in the gradients' type, computes the inner update for every micro-batch and multiplies
it by zero, which makes NaN of an overflow and turns a parameter of -0.0 into +0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuflow.amp.policy import is_float
from tpuflow.amp.scaling import LossScaleState, find_state, no_change
from tpuflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Gradient accumulation with a warm-up, or with sums in place of means.

    steps: the micro-batches for one update, rounded to a whole number. warmup: over this many steps of the training the number rises
    linearly from 1 to `steps`; an update is due as soon as as many micro-batches have accumulated as the current step asks for. total: the
    optimizer gets the sum of the gradients instead of their mean, like a loop that calls `loss.backward()` without dividing the loss.

    Raises:
      ConfigError: a number is out of its range.
    """

    steps: float
    warmup: int = 0
    total: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int | float) or isinstance(self.steps, bool) or not 0.5 <= self.steps < math.inf:
            raise ConfigError(f"Accumulation: expected steps that round to at least 1, got {self.steps!r}.")
        if not isinstance(self.warmup, int) or isinstance(self.warmup, bool) or self.warmup < 0:
            raise ConfigError(f"Accumulation: expected a warm-up of at least 0 steps, got {self.warmup!r}.")

    @property
    def needed(self) -> np.ndarray:
        """int32 [warmup + 1]: the micro-batches for an update at each step of the warm-up, and (the last entry) after it."""
        rising = np.interp(np.arange(self.warmup + 1), [0, max(self.warmup, 1)], [1, self.steps]) if self.warmup else [self.steps]
        return np.maximum(np.round(rising), 1).astype(np.int32)

    def updates(self, steps: int) -> np.ndarray:
        """Which of the first `steps` steps update the parameters, by their numbers from 0: int64 [updates]."""
        needed, found, last = self.needed, [], -1
        for step in range(steps):
            if step - last >= needed[min(step, len(needed) - 1)]:
                found.append(step)
                last = step
        return np.array(found, np.int64)


class AccumulationState(NamedTuple):
    """count: micro-batches since the last update. grads, value: the fp32 sums of their gradients and losses. inner: the optimizer's state.
    step: with a warm-up, the number of micro-batches so far."""

    count: jax.Array
    grads: Any
    value: jax.Array
    inner: Any
    step: jax.Array | None = None


def accumulate(inner: optax.GradientTransformation, steps: int | Accumulation) -> optax.GradientTransformationExtraArgs:
    """`inner` once for every `steps` calls, with the mean of their gradients; no parameter changes in between.

    The sum runs in fp32 and is divided once. Put it outside of the loss scale: the scale does not move while gradients gather, an
    overflow in one of them stays in the sum, and so whether to skip is decided once, for the whole update. `value` (a loss, if it is
    given) and `grad` reach the inner optimizer as means too; other extra arguments as they are in the last call.
    """
    inner = optax.with_extra_args_support(inner)
    plan = steps if isinstance(steps, Accumulation) else Accumulation(steps)
    needed = plan.needed
    if needed.max() == 1:
        return inner

    def init(params: Any) -> Any:
        return _empty(params, inner.init(params), jnp.zeros((), jnp.int32) if plan.warmup else None)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        total = jax.tree.map(lambda s, g: s + g.astype(s.dtype), state.grads, updates)
        value, step = state.value + extra.get("value", 0.0), None if state.step is None else state.step + 1
        gathered = int(needed[-1]) if state.step is None else (state.count + 1).astype(jnp.float32)

        def due() -> tuple[Any, AccumulationState]:
            share = 1 if plan.total else gathered
            gradients = jax.tree.map(lambda s, g: (s / share).astype(g.dtype), total, updates)
            given = {"value": value / gathered, "grad": gradients}
            options = {name: given.get(name, own) for name, own in extra.items()}
            changes, inner_state = inner.update(gradients, state.inner, params, **options)
            return changes, _empty(updates, inner_state, step)

        def early() -> tuple[Any, AccumulationState]:
            return no_change(jax.eval_shape(due)[0]), AccumulationState(state.count + 1, total, value, state.inner, step)

        return jax.lax.cond(state.count >= _needed_at(needed, state.step) - 1, due, early)

    return optax.GradientTransformationExtraArgs(init, update)


def _needed_at(needed: np.ndarray, step: jax.Array | None) -> Any:
    """The micro-batches for an update at a step; after the warm-up the last entry."""
    if step is None:
        return int(needed[-1])
    return jax.lax.dynamic_index_in_dim(jnp.asarray(needed), step, keepdims=False)  # clamps to the last


def has_updated(before: Any, after: Any) -> jax.Array:
    """Whether the step between two optimizer states has updated the parameters: it neither only accumulated gradients nor was skipped."""
    gathering = [s.count for s in jax.tree.leaves(after, is_leaf=_is_gathering) if _is_gathering(s)]
    scaled = [find_state(state) for state in (before, after)]
    updated = [count == 0 for count in gathering]
    updated += [scaled[1].skipped == scaled[0].skipped] if scaled[0] is not None and scaled[1] is not None else []
    return jnp.all(jnp.stack(updated)) if updated else jnp.ones((), jnp.bool_)


def when_updated(before: Any, after: Any, new: Callable[[], Any], old: Any) -> Any:
    """`new()` if the step between two optimizer states has updated the parameters, else `old`.

    While gradients only accumulate, a conditional keeps `old` from being read or written.
    """
    if not isinstance(after, AccumulationState):
        return new()
    return jax.lax.cond(has_updated(before, after), new, lambda: old)


def optimizer_state(state: Any) -> Any:
    """The state of the optimizer itself, inside accumulation and loss scale."""
    while isinstance(state, AccumulationState | LossScaleState):
        state = state.inner
    return state


def _is_gathering(state: Any) -> bool:
    return isinstance(state, AccumulationState)


def _empty(like: Any, inner: Any, step: jax.Array | None) -> AccumulationState:
    """The state before the first micro-batch of an update, for gradients of these shapes."""
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32 if is_float(p) else p.dtype), like)
    return AccumulationState(jnp.zeros((), jnp.int32), zeros, jnp.zeros((), jnp.float32), inner, step)
