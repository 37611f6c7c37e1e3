"""The training step and the evaluation step as pure functions: state and batch in, new state and figures out."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuflow import amp
from tpuflow.errors import ConfigError
from tpuflow.jaxprs.compat import ClosedJaxpr
from tpuflow.training.adapters.model import AUXILIARY, DROPOUT, Model
from tpuflow.training.application import Application, LossFn
from tpuflow.training.averaging import EMA, EMAState, averaged, averaged_carried, initial_average, updated_average
from tpuflow.training.groups import trained_mask, trained_part, with_rest
from tpuflow.training.losses import Loss
from tpuflow.training.metrics import Metric, measure
from tpuflow.training.roles import Roles
from tpuflow.training.state import TrainState
from tpuflow.training.strategies import ONE_CHIP, Strategy

LOSS_SCOPE, OPTIMIZER_SCOPE = "loss", "optimizer"
"""Name scopes of what belongs to no layer."""


class StepFigures(NamedTuple):
    """What a training step reports: its loss, the loss scale it used, whether its update was skipped for overflow, and what else a loss of
    the user's own measures (scalars by name)."""

    loss: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array
    metrics: Mapping[str, jax.Array] = {}


class Changes(NamedTuple):
    """The intermediate results of a step, trees like the parameters: the gradients of the scaled loss, and the optimizer's updates."""

    grads: Any
    updates: Any


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that defines the training step of a model. The loss is `loss`, of outputs and labels, or `loss_fn`, which calls the model itself.

    `optimized`: (the optimizer's state, params) -> the parameters that evaluations use, for optimizers that have better ones than `params`
    (schedule-free ones). `strategy`: how a step runs on several chips. `offloaded`: the fields of the state that are at the host between
    steps.
    """

    model: Model
    policy: amp.Policy
    roles: Roles
    loss: Loss | None
    optimizer: optax.GradientTransformationExtraArgs
    loss_fn: LossFn | None = None
    metrics: tuple[Metric, ...] = ()
    frozen: tuple[str, ...] = ()
    ema: EMA | None = None
    optimized: Callable[[Any, Any], Any] | None = None
    streams: tuple[str, ...] = ()
    strategy: Strategy = ONE_CHIP
    offloaded: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.model.name

    @property
    def loss_name(self) -> str:
        """What reports call its loss."""
        return self.loss.name if self.loss is not None else getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)

    def initial_state(self, params: Any, carried: Any, key: Any) -> TrainState:
        """Parameters in the policy's type and the optimizer's state for them: copies, since the device overwrites its state."""

        def make(params: Any, carried: Any) -> TrainState:
            return self.state_of(params, carried)

        # Cast by NumPy, which has every conversion on every host; then as one computation: nothing is compiled array by array.
        params = self.policy.cast_params(jax.tree.map(_on_host, params), self.model.norms(params, carried))
        state = jax.jit(make)(params, carried)._replace(key=key)
        return jax.tree.map(_owned, state)

    def state_of(self, params: Any, carried: Any, key: Any = None) -> TrainState:
        """The state for parameters in the policy's type."""
        ema = None if self.ema is None else initial_average(self.ema, params, carried)
        return TrainState(params, carried, self.optimizer.init(self._trained(params)), key, ema)

    def at_host(self, state: TrainState) -> tuple[bool, ...]:
        """Of every leaf of a state whether it is in the host's memory between steps: arrays of the offloaded fields. Single numbers are
        not."""
        none = jax.tree.map(lambda _: False, state)
        there = {name: jax.tree.map(lambda leaf: bool(leaf.shape), getattr(state, name)) for name in self.offloaded}
        return tuple(jax.tree.leaves(none._replace(**there)))

    def for_state(self, state: TrainState, batch: Any) -> Recipe:
        """The recipe with its strategy prepared for states and batches of these shapes."""

        def loss(params: Any, carried: Any, batch: Any, key: Any) -> Any:
            return self.forward(params, carried, batch, self.rngs(key))

        def traced() -> ClosedJaxpr:
            with self.strategy.with_axes():
                return jax.make_jaxpr(loss)(state.params, state.carried, batch, state.key)

        return replace(self, strategy=self.strategy.for_state(state, traced))

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, StepFigures]:
        """One step. The loss is rounded to the policy's type before it is scaled and differentiated."""
        return self.strategy.run_step(lambda state, batch: self.watched_step(state, batch, self.strategy)[:2], state, batch)

    def watched_step(self, state: TrainState, batch: Any, strategy: Strategy = ONE_CHIP) -> tuple[TrainState, StepFigures, Changes]:
        """One step with its gradients and updates: on one chip of several, on its piece of the batch and what it holds of the state."""
        next_key, key = (None, None) if state.key is None else jax.random.split(state.key)
        rngs = self.rngs(key if key is None else strategy.chip_key(key))
        grad_inputs = strategy.grad_inputs(state.params)

        def loss_of(part: Any) -> tuple[jax.Array, tuple[Any, Any]]:
            loss, measured, carried = strategy.call_with_params(
                lambda params: self.forward(params, state.carried, batch, rngs), self._whole(part, grad_inputs), state.params
            )
            return loss.astype(self.policy.loss_dtype), (carried, measured)

        def scaled_loss(part: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            loss, others = loss_of(part)
            with jax.named_scope(LOSS_SCOPE):
                return amp.scale_loss(loss, state.opt_state), (loss, others)

        (_, found), grads = strategy.value_and_grad(scaled_loss, self._trained(grad_inputs))
        loss, (carried, measured) = strategy.mean(found)
        grads = strategy.reduce_grads(grads, state.opt_state)
        with jax.named_scope(OPTIMIZER_SCOPE):
            value = loss.astype(jnp.float32)

            def value_fn(part: Any, grad_fn: Any = None) -> jax.Array:  # Optax's line searches refuse what their function does not take
                return strategy.mean(loss_of(part)[0]).astype(jnp.float32)

            def grad_fn(part: Any, *_: Any) -> Any:
                return strategy.mean(jax.grad(lambda part: loss_of(part)[0].astype(jnp.float32))(part))

            extra = {"value": value, "grad": grads, "value_fn": value_fn, "grad_fn": grad_fn}
            part = self._trained(state.params)
            updates, opt_state, part = strategy.update(self.optimizer, grads, state.opt_state, part, extra)
            params = self._whole(part, state.params)
            ema = self._averaged(state, opt_state, params, carried)
        figures = _figures(loss, state.opt_state, opt_state, measured)
        changes = Changes(*(self._whole(tree, jax.tree.map(jnp.zeros_like, params) if self.frozen else tree) for tree in (grads, updates)))
        return TrainState(params, carried, opt_state, next_key, ema), figures, changes

    def forward(self, params: Any, carried: Any, batch: Any, rngs: Any, *, train: bool = True) -> tuple[jax.Array, Any, Any]:
        """(loss in fp32, what else is measured, carried variables) of a batch."""
        apply = Application(self.model, self.policy, carried, rngs, train=train)
        if self.loss_fn is not None:
            loss, measured = loss_and_metrics(self.loss_fn(apply, params, batch, rngs), self.loss_name)
            return loss, measured, apply.carried
        outputs, sown = apply.call(params, self.roles.inputs(batch), rngs, (AUXILIARY,))
        with jax.named_scope(LOSS_SCOPE):
            loss, sown = self.loss_of(outputs, batch), jax.tree.leaves(sown.get(AUXILIARY, {}))
            return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in sown), loss), {}, apply.carried

    def loss_of(self, outputs: Any, batch: Any) -> jax.Array:
        """The loss of outputs, without what the model has sown."""
        assert self.loss is not None
        part = self.roles.labels if self.loss.checked else self.roles.targets
        assert part is not None
        return self.loss(outputs, part(batch))

    def eval_step(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """The figures of every metric for one batch, by name. Random numbers come from the same key in every evaluation.

        On several chips the model runs on pieces of the batch, and metrics are computed from the outputs of the whole batch, as on one.
        """
        own = [metric for metric in self.metrics if not metric.of_loss]
        figures = self._figures_of_loss(state, batch) if self.loss_fn is not None and len(own) < len(self.metrics) else {}
        if not own:
            return figures
        labels = None if self.roles.labels is None else self.roles.labels(batch)
        return {**figures, **measure(own, self._eval_outputs(state, batch), self.roles.targets(batch), labels)}

    def _figures_of_loss(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """The loss and the scalars of the user's `loss_fn`; means over the chips."""

        def step(state: TrainState, batch: Any) -> Any:
            loss, measured, _ = self.forward(*self.eval_variables(state), batch, self._eval_rngs(), train=False)
            return self.strategy.mean({"avg_loss": loss.astype(self.policy.loss_dtype).astype(jnp.float32), **measured})

        return self.strategy.run_eval_step(step, state, batch, self.eval_state, joined=False)

    def _eval_outputs(self, state: TrainState, batch: Any) -> Any:
        """The model's outputs for the whole batch; where they have no axis of samples, every chip computes them all."""

        def step(state: TrainState, batch: Any) -> Any:
            return self.outputs(*self.eval_variables(state), batch, self._eval_rngs(), train=False)

        return self.strategy.run_eval_step(step, state, batch, self.eval_state, joined=True)

    def _eval_rngs(self) -> dict[str, jax.Array] | None:
        return self.rngs(jax.random.key(0)) if self.streams else None

    def eval_state(self, state: TrainState) -> TrainState:
        """What evaluations need of the state."""
        return state._replace(opt_state=() if self.optimized is None else amp.optimizer_state(state.opt_state), key=None)

    def eval_variables(self, state: TrainState) -> tuple[Any, Any]:
        """(parameters, carried variables) for evaluations, from an `eval_state`: averages if they are kept and `EMA.evaluate` is set."""
        if self.optimized is not None:
            return self._whole(self.optimized(state.opt_state, self._trained(state.params)), state.params), state.carried
        if self.ema is None or not self.ema.evaluate or state.ema is None:
            return state.params, state.carried
        return averaged(state.ema.params, state.params), averaged_carried(state.ema, state.carried)

    def outputs(self, params: Any, carried: Any, batch: Any, rngs: Any, *, train: bool = True) -> Any:
        """The model's outputs for a batch, under the policy."""
        return Application(self.model, self.policy, carried, rngs, train=train).call(params, self.roles.inputs(batch), rngs)[0]

    def rngs(self, key: Any) -> dict[str, jax.Array] | None:
        """The keys of a step's random streams: the step's own key for dropout, others folded in from it by their names."""
        if key is None:
            return None
        return {name: key if name == DROPOUT else jax.random.fold_in(key, zlib.crc32(name.encode())) for name in self.streams}

    def _trained(self, params: Any) -> Any:
        return trained_part(params, trained_mask(params, self.frozen)) if self.frozen else params

    def _whole(self, part: Any, rest: Any) -> Any:
        return with_rest(part, rest) if self.frozen else part

    def _averaged(self, state: TrainState, opt_state: Any, params: Any, carried: Any) -> EMAState | None:
        if self.ema is None or state.ema is None:
            return None
        ema, old, before = self.ema, state.ema, state.opt_state
        return amp.when_updated(
            before, opt_state, lambda: updated_average(ema, old, params, carried, amp.has_updated(before, opt_state)), old
        )


@dataclass(frozen=True, slots=True)
class CustomStep:
    """A training step of the user's: (state, batch) -> (state, scalars by name, "loss" among them); the state is any tree of arrays."""

    function: Callable[[Any, Any], tuple[Any, Any]]
    evaluate: Callable[[Any, Any], Mapping[str, Any]] | None = None
    metrics: tuple[Metric, ...] = ()
    strategy: Strategy = ONE_CHIP

    def at_host(self, state: TrainState) -> tuple[bool, ...]:
        """None of the state is in the host's memory between steps."""
        return ()

    @property
    def name(self) -> str:
        """What reports call it."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def eval_state(self, state: TrainState) -> TrainState:
        """The whole state."""
        return state

    def initial_state(self, state: Any) -> TrainState:
        """A copy, since the device overwrites its state."""
        return TrainState(jax.tree.map(_owned, state), {}, ())

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, StepFigures]:
        """One step."""
        new, found = self.function(state.params, batch)
        loss, measured = loss_and_metrics(found, self.name)
        return TrainState(new, {}, ()), StepFigures(loss, jnp.ones((), jnp.float32), jnp.zeros((), jnp.bool_), measured)

    def eval_step(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """What the user's own evaluation gives for one batch."""
        return {} if self.evaluate is None else dict(self.evaluate(state.params, batch))


def loss_and_metrics(found: Any, name: str) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss in fp32, fp32 scalars by name), from what the user's function returned: a scalar, a pair, or a mapping with "loss".

    Raises:
      ConfigError: it returned something else.
    """
    if isinstance(found, Mapping) and "loss" in found:
        found = (found["loss"], {key: value for key, value in found.items() if key != "loss"})
    parts: Any = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    loss, measured = parts
    wrong = [key for key, value in measured.items() if jnp.shape(value)] if isinstance(measured, Mapping) else ["what it returns beside"]
    if not hasattr(loss, "dtype") or jnp.shape(loss) or wrong:
        raise ConfigError(
            f"{name}: expected a scalar loss, or (loss, scalars by name), got {jax.tree.map(jnp.shape, found)}"
            + (f"; {wrong[0]!r} is no scalar" if wrong else "")
            + ". Reduce it, for example with jnp.mean."
        )
    return loss.astype(jnp.float32), {key: jnp.asarray(value, jnp.float32) for key, value in measured.items()}


def make_optimizer(optimizer: Any, policy: amp.Policy, accumulate_steps: int | amp.Accumulation) -> optax.GradientTransformationExtraArgs:
    """Accumulation around the loss scale around the optimizer (adam(1e-3) if not given).

    So the optimizer, with the clipping and weight decay it may hold, sees gradients that are unscaled and averaged.
    """
    scaled = amp.with_loss_scale(optax.adam(1e-3) if optimizer is None else _with_named_extras(optimizer), policy.loss_scale)
    return amp.accumulate(scaled, accumulate_steps)


def _with_named_extras(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, called with only those extra arguments that its `update` names, unless it takes any."""
    parameters = inspect.signature(optimizer.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return optimizer

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return optimizer.update(updates, state, params, **{name: extra[name] for name in parameters if name in extra})

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _owned(leaf: Any) -> Any:
    """A copy that is not weakly typed, so that a step is the same Program for a fresh state and for one read from a checkpoint."""
    copy = jax.device_put(leaf, may_alias=False)
    return jnp.asarray(copy, copy.dtype) if getattr(copy, "weak_type", False) else copy


def _on_host(leaf: Any) -> Any:
    """Floating arrays as NumPy arrays; anything else as it is."""
    return np.asarray(leaf) if amp.is_float(leaf) else leaf


def _figures(loss: jax.Array, before: Any, after: Any, measured: Any) -> StepFigures:
    scaled, then = amp.find_state(before), amp.find_state(after)
    if scaled is None or then is None:
        return StepFigures(loss.astype(jnp.float32), jnp.ones((), jnp.float32), jnp.zeros((), jnp.bool_), measured)
    return StepFigures(loss.astype(jnp.float32), scaled.scale, then.skipped > scaled.skipped, measured)
