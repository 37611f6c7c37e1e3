"""The training step and the evaluation step as pure functions: state and batch in, new state and figures out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuflow import amp
from tpuflow.training.losses import Loss
from tpuflow.training.metrics import Metric, measure
from tpuflow.training.modelling import Apply, Model, get_model

LOSS_SCOPE, OPTIMIZER_SCOPE = "loss", "optimizer"
"""Name scopes of what belongs to no layer."""


class TrainState(NamedTuple):
    """What lives on the device through a sink: parameters, carried variables (batch statistics, ...), optimizer state, random key.

    `key` is None for models that draw no random numbers.
    """

    params: Any
    carried: Any
    opt_state: Any
    key: Any = None


class StepFigures(NamedTuple):
    """What a training step reports: its loss, the loss scale it used, and whether its update was skipped for overflow."""

    loss: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array


class Changes(NamedTuple):
    """What a step makes on its way, as trees like the parameters: gradients (of the scaled loss), and what the optimizer makes of them."""

    grads: Any
    updates: Any


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step is made of."""

    model: Model
    policy: amp.Policy
    loss: Loss
    optimizer: optax.GradientTransformationExtraArgs
    metrics: tuple[Metric, ...] = ()

    def initial_state(self, params: Any, carried: Any, key: Any) -> TrainState:
        """Parameters in the policy's type and the optimizer's state for them: copies, since the device overwrites its state."""

        def make(params: Any, carried: Any) -> TrainState:
            return TrainState(params, carried, self.optimizer.init(params))

        # Cast by NumPy, which has every conversion on every host; then as one computation: nothing is compiled array by array.
        params = self.policy.cast_params(jax.tree.map(_on_host, params), self.model.norms(params, carried))
        state = jax.jit(make)(params, carried)._replace(key=key)
        return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), state)

    def train_step(self, state: TrainState, batch: tuple[Any, Any]) -> tuple[TrainState, StepFigures]:
        """One step. The loss is rounded to the policy's type before it is scaled and differentiated."""
        new_state, figures, _ = self.watched_step(state, batch)
        return new_state, figures

    def watched_step(self, state: TrainState, batch: tuple[Any, Any]) -> tuple[TrainState, StepFigures, Changes]:
        """One step, and what it makes on its way."""
        inputs, labels = batch
        next_key, key = (None, None) if state.key is None else jax.random.split(state.key)

        def scaled_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            outputs, carried = self._apply(self.model.train_apply, params, state.carried, inputs, key)
            with jax.named_scope(LOSS_SCOPE):
                loss = self.loss(outputs, labels).astype(self.policy.loss_dtype)
                return amp.scale_loss(loss, state.opt_state), (loss, carried)

        (_, (loss, carried)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(state.params)
        with jax.named_scope(OPTIMIZER_SCOPE):
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params, value=loss.astype(jnp.float32))
            params = optax.apply_updates(state.params, updates)
        return TrainState(params, carried, opt_state, next_key), _figures(loss, state.opt_state, opt_state), Changes(grads, updates)

    def eval_step(self, state: TrainState, batch: tuple[Any, Any]) -> dict[str, Any]:
        """The figures of every metric for one batch, by name."""
        inputs, labels = batch
        outputs, _ = self._apply(self.model.eval_apply, state.params, state.carried, inputs, None)
        return measure(self.metrics, outputs, labels)

    def outputs(self, params: Any, carried: Any, inputs: Any, key: Any) -> Any:
        """The model's outputs in training, under the policy."""
        return self._apply(self.model.train_apply, params, carried, inputs, key)[0]

    def _apply(self, apply: Apply, params: Any, carried: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
        """(outputs, carried) under the policy: what it keeps in fp32 (batch normalisation, statistics) is not cast."""
        norms = self.model.norms(params, carried) if self.policy.keeps_norms else False
        cast = amp.autocast(apply, self.policy, keep=(norms, self.policy.keeps_statistics))
        return cast(params, carried, self.policy.cast_inputs(inputs), key)


def make_recipe(
    model: Any,
    policy: amp.Policy,
    loss: Loss,
    optimizer: optax.GradientTransformation | None = None,
    *,
    accumulate_steps: int = 1,
    metrics: tuple[Metric, ...] = (),
) -> Recipe:
    """The step of a linen or nnx module: accumulation around the loss scale around the optimizer (adam(1e-3) if not given).

    So the optimizer, with the clipping and weight decay it may hold, sees gradients that are unscaled and averaged.

    Raises:
      ConfigError: the model is neither linen nor nnx.
    """
    scaled = amp.with_loss_scale(optax.adam(1e-3) if optimizer is None else optimizer, policy.loss_scale)
    layers = get_model(model, policy.around_norm if policy.surrounds_norms else None)
    return Recipe(layers, policy, loss, amp.accumulate(scaled, accumulate_steps), metrics)


def _on_host(leaf: Any) -> Any:
    """Floating arrays as NumPy arrays; anything else as it is."""
    return np.asarray(leaf) if amp.is_float(leaf) else leaf


def _figures(loss: jax.Array, before: Any, after: Any) -> StepFigures:
    scaled, then = amp.find_state(before), amp.find_state(after)
    if scaled is None or then is None:
        return StepFigures(loss.astype(jnp.float32), jnp.ones((), jnp.float32), jnp.zeros((), jnp.bool_))
    return StepFigures(loss.astype(jnp.float32), scaled.scale, then.skipped > scaled.skipped)
