"""The optimizers of a YOLOv5 training: three groups of parameters, gradients clipped to a norm of 10."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from train.detection.schedules import Plan
from train.schedules import from_rates

LARGEST_NORM = 10.0
BETA2 = 0.999

Make = Callable[[Plan, optax.Schedule, float], optax.GradientTransformation]


class NesterovState(NamedTuple):
    """Updates so far, and the velocities: a tree like the parameters."""

    count: jax.Array
    velocity: Any


def nesterov(rate: optax.Schedule, momentum: optax.Schedule) -> optax.GradientTransformation:
    """SGD with Nesterov momentum as PyTorch has it, where the momentum too changes from update to update.

    v = momentum * v + gradient; the update is -rate * (gradient + momentum * v), computed in fp32.
    """

    def init(params: Any) -> Any:
        return NesterovState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu, step = (jnp.asarray(schedule(state.count), jnp.float32) for schedule in (momentum, rate))
        velocity = jax.tree.map(lambda g, v: (mu * v + g.astype(jnp.float32)).astype(v.dtype), updates, state.velocity)
        changes = jax.tree.map(lambda g, v: (-step * (g.astype(jnp.float32) + mu * v)).astype(g.dtype), updates, velocity)
        return changes, NesterovState(state.count + 1, velocity)

    return optax.GradientTransformation(init, update)


def _sgd(plan: Plan, rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay), nesterov(rate, from_rates(plan.momenta())))


def _adam(plan: Plan, rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(rate, plan.hyp.momentum, BETA2))


def _adamw(plan: Plan, rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    return optax.adamw(rate, plan.hyp.momentum, BETA2, weight_decay=decay)


OPTIMIZERS: Mapping[str, Make] = {"SGD": _sgd, "Adam": _adam, "AdamW": _adamw}


def make_optimizer(name: str, plan: Plan) -> optax.GradientTransformation:
    """The optimizer: kernels decay, biases and scales do not, biases begin with a rate of their own."""
    make = OPTIMIZERS[name]
    rate, of_biases = from_rates(plan.rates()), from_rates(plan.rates(plan.hyp.warmup_bias_lr))
    groups: dict[Any, optax.GradientTransformation] = {"kernel": make(plan, rate, plan.weight_decay), "scale": make(plan, rate, 0.0)}
    groups["bias"] = make(plan, of_biases, 0.0)
    return optax.chain(optax.clip_by_global_norm(LARGEST_NORM), optax.multi_transform(groups, _kinds))


def _kinds(params: Any) -> Any:
    """The last part of each parameter's path."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key, params)
