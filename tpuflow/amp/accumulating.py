"""Gradient accumulation: one update for several micro-batches, with the mean of their gradients.

`optax.MultiSteps` is not used: it keeps its sums in the gradients' type, computes the inner update for every micro-batch and multiplies
it by zero, which makes NaN of an overflow and turns a parameter of -0.0 into +0.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpuflow.amp.policy import is_float
from tpuflow.amp.scaling import LossScaleState, find_state, no_change


class AccumulationState(NamedTuple):
    """Micro-batches seen since the last update, the fp32 sums of their gradients and of their losses, the inner state."""

    count: jax.Array
    grads: Any
    value: jax.Array
    inner: Any


def accumulate(inner: optax.GradientTransformation, steps: int) -> optax.GradientTransformationExtraArgs:
    """`inner` once for every `steps` calls, with the mean of their gradients; no parameter changes in between.

    The sum runs in fp32 and is divided once. Put it outside of the loss scale: the scale does not move while gradients gather, an
    overflow in one of them stays in the sum, and so whether to skip is decided once, for the whole update. `value` (a loss, if it is
    given) and `grad` reach the inner optimizer as means too; other extra arguments as they are in the last call.
    """
    inner = optax.with_extra_args_support(inner)
    if steps == 1:
        return inner

    def init(params: Any) -> AccumulationState:
        return _empty(params, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AccumulationState]:
        total = jax.tree.map(lambda s, g: s + g.astype(s.dtype), state.grads, updates)
        value = state.value + extra.get("value", 0.0)

        def due() -> tuple[Any, AccumulationState]:
            mean = jax.tree.map(lambda s, g: (s / steps).astype(g.dtype), total, updates)
            means = {"value": value / steps, "grad": mean}
            options = {name: means.get(name, given) for name, given in extra.items()}
            changes, inner_state = inner.update(mean, state.inner, params, **options)
            return changes, _empty(updates, inner_state)

        def early() -> tuple[Any, AccumulationState]:
            return no_change(jax.eval_shape(due)[0]), AccumulationState(state.count + 1, total, value, state.inner)

        return jax.lax.cond(state.count == steps - 1, due, early)

    return optax.GradientTransformationExtraArgs(init, update)


def has_updated(before: Any, after: Any) -> jax.Array:
    """Whether a step from one optimizer state to the next has updated the parameters: gradients were not only gathered, nor dropped."""
    gathering = [s.count for s in jax.tree.leaves(after, is_leaf=_is_gathering) if _is_gathering(s)]
    scaled = [find_state(state) for state in (before, after)]
    updated = [count == 0 for count in gathering]
    updated += [scaled[1].skipped == scaled[0].skipped] if scaled[0] is not None and scaled[1] is not None else []
    return jnp.all(jnp.stack(updated)) if updated else jnp.ones((), jnp.bool_)


def optimizer_state(state: Any) -> Any:
    """The state of the optimizer itself, inside accumulation and loss scale."""
    while isinstance(state, AccumulationState | LossScaleState):
        state = state.inner
    return state


def _is_gathering(state: Any) -> bool:
    return isinstance(state, AccumulationState)


def _empty(like: Any, inner: Any) -> AccumulationState:
    """Nothing gathered yet, for gradients of such shapes."""
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32 if is_float(p) else p.dtype), like)
    return AccumulationState(jnp.zeros((), jnp.int32), zeros, jnp.zeros((), jnp.float32), inner)
