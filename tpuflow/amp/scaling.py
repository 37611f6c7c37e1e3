"""Loss scaling as Optax transformations: the scale and its history live in the optimizer state.

    optimizer = dynamic_loss_scale(optax.sgd(1e-3))
    loss, grads = value_and_grad(lambda p: scale_loss(loss_fn(p), opt_state))(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)

`update` unscales the gradients in fp32, tests once whether all are finite, and hands them to the inner optimizer; a step that
overflowed changes neither parameters nor the inner state. Put clipping and weight decay inside: they see unscaled fp32 gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpuflow.amp.policy import LossScale, cast_floats, is_float


class LossScaleState(NamedTuple):
    """The state of an optimizer with a loss scale: the current scale, updates without overflow since it last changed, updates skipped so
    far, whether the last one was finite, and the inner state; with hysteresis, the overflows that are left until the scale is lowered."""

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    last_finite: jax.Array
    inner: Any
    overflows_left: jax.Array | None = None


def with_loss_scale(inner: optax.GradientTransformation, config: LossScale) -> optax.GradientTransformationExtraArgs:
    """`inner` with the loss scale that `config` describes; `inner` itself if its kind is "none"."""
    inner = optax.with_extra_args_support(inner)
    if config.kind == "none":
        return inner

    def init(params: Any) -> Any:
        zero = jnp.zeros((), jnp.int32)
        # The inner optimizer gets fp32 gradients, so its state is made for fp32 parameters.
        inner_state = inner.init(cast_floats(params, jnp.float32))
        left = jnp.int32(config.hysteresis) if config.hysteresis > 1 else None
        return LossScaleState(jnp.float32(config.initial), zero, zero, jnp.ones((), jnp.bool_), inner_state, left)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grads = unscale(updates, state.scale)
        finite = all_finite(grads)
        extra = {name: grads if name == "grad" else given for name, given in extra.items()}
        changes, inner_state = inner.update(grads, state.inner, params, **extra)
        if config.drop_overflow_update:
            changes, inner_state = _keep_if(finite, (changes, inner_state), (no_change(changes), state.inner))
        return changes, _next_state(state, finite, inner_state, config)

    return optax.GradientTransformationExtraArgs(init, update)


def static_loss_scale(
    inner: optax.GradientTransformation, scale: float, *, drop_overflow_update: bool = True
) -> optax.GradientTransformationExtraArgs:
    """`inner` with a constant loss scale; steps that overflow are skipped if `drop_overflow_update` is set."""
    return with_loss_scale(inner, LossScale("static", initial=scale, drop_overflow_update=drop_overflow_update))


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    initial: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> optax.GradientTransformationExtraArgs:
    """`inner` with a loss scale that grows after `growth_interval` steps without overflow; a step with overflow lowers it, and is
    skipped."""
    return with_loss_scale(inner, LossScale("dynamic", initial, growth_factor, backoff_factor, growth_interval))


def scale_loss(loss: jax.Array, state: Any) -> jax.Array:
    """The loss in fp32 times the scale in force; the loss in fp32 alone if the optimizer state holds none."""
    found = find_state(state)
    loss = loss.astype(jnp.float32)
    return loss if found is None else loss * found.scale


def find_state(state: Any) -> LossScaleState | None:
    """The loss-scale state inside an optimizer state, wherever it sits; None if there is none."""
    leaves = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, LossScaleState))
    return next((leaf for leaf in leaves if isinstance(leaf, LossScaleState)), None)


def unscale(grads: Any, scale: jax.Array) -> Any:
    """Gradients in fp32 times the reciprocal of the scale."""
    inverse = 1.0 / scale
    return jax.tree.map(lambda g: g.astype(jnp.float32) * inverse if is_float(g) else g, grads)


def all_finite(tree: Any) -> jax.Array:
    """Whether every floating element of the tree is finite: a bool scalar."""
    flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if is_float(leaf)]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones((), jnp.bool_)


def _next_state(state: LossScaleState, finite: jax.Array, inner: Any, config: LossScale) -> LossScaleState:
    """Grow after `growth_interval` good updates (but never to infinity), back off after a bad one (but never below `smallest`)."""
    skipped = state.skipped + (1 - finite.astype(jnp.int32)) if config.drop_overflow_update else state.skipped
    good = state.good_steps + 1
    if config.kind == "static":
        return LossScaleState(state.scale, jnp.where(finite, good, 0), skipped, finite, inner)
    grow = jnp.logical_and(finite, good >= config.growth_interval)
    grown = state.scale * config.growth_factor
    grown = jnp.where(jnp.isfinite(grown), grown, state.scale)
    backed_off = state.scale * config.backoff_factor
    if config.smallest > 0.0:
        backed_off = jnp.maximum(backed_off, config.smallest)
    left = state.overflows_left
    if left is not None:
        backed_off = jnp.where(left > 1, state.scale, backed_off)
        left = jnp.where(finite, jnp.where(grow, config.hysteresis, left), jnp.maximum(left - 1, 1)).astype(jnp.int32)
    scale = jnp.where(finite, jnp.where(grow, grown, state.scale), backed_off)
    good = jnp.where(jnp.logical_and(finite, jnp.logical_not(grow)), good, 0)
    return LossScaleState(scale, good, skipped, finite, inner, left)


def _keep_if(finite: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def no_change(updates: Any) -> Any:
    """Updates that leave every parameter as it is: -0.0, since adding +0.0 would turn a parameter of -0.0 into +0.0."""
    return jax.tree.map(lambda u: jnp.full_like(u, -0.0), updates)
