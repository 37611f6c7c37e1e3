"""Preparation of a training, an inference or a step: checks every option and chooses those that were not given, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow import amp
from tpuflow.chips import get_chip
from tpuflow.data.batching import Signature, is_data_of_arrays, signature
from tpuflow.data.chunks import samples_in
from tpuflow.data.feeding import ArrayFeed, Feed, make_feed
from tpuflow.errors import ConfigError, DataError, a_thing
from tpuflow.garbage import undisturbed
from tpuflow.jaxprs.compat import ClosedJaxpr
from tpuflow.stages.staging import Target, as_array
from tpuflow.stages.tracing import users_code
from tpuflow.training.adapters import get_model
from tpuflow.training.adapters.model import MISFITS
from tpuflow.training.averaging import get_ema
from tpuflow.training.config import StepConfig, TrainConfig
from tpuflow.training.descriptions import DEFAULT_OPTIMIZER
from tpuflow.training.groups import check_trained
from tpuflow.training.losses import get_loss
from tpuflow.training.metrics import metrics_of_loss
from tpuflow.training.mismatches import types_text
from tpuflow.training.partitioning import Rules, partitioned
from tpuflow.training.roles import get_roles
from tpuflow.training.shape_checks import check_classes, input_error, trace_forward, with_metrics
from tpuflow.training.strategies import ONE_CHIP, Strategy, get_strategy
from tpuflow.training.train_step import CustomStep, Recipe, TrainState, loss_and_metrics, make_optimizer
from tpuflow.training.weights import starting_variables

MODEL_OPTIONS = (
    "policy", "optimizer", "loss", "loss_fn", "inputs", "params", "frozen", "ema", "eval_params", "keep_batchnorm_fp32", "loss_scale",
    "accumulate_steps", "nominal_batch_size", "metrics", "numerics", "mesh", "offload_optimizer",
    "offload_params",
)  # fmt: skip
"""Options that say how the step of a model is made."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training that is ready to start: everything checked and chosen."""

    config: TrainConfig
    recipe: Recipe | CustomStep
    state: TrainState
    feed: Feed
    eval_feed: Feed | None
    target: Target
    batch_size: int
    chosen: dict[str, str]
    settings: dict[str, Any]
    signature: Signature
    eval_epochs: int | None

    @property
    def first(self) -> Any:
        """The first batch."""
        return self.feed.structure.batch(self.feed.first())


@undisturbed()
def prepare(config: TrainConfig) -> Job:
    """Check every option and choose what was not given.

    Raises:
      ConfigError, DataError: see `tpuflow.train`.
    """
    config.check()
    _check_together(config)
    policy, chip = _policy(config), get_chip(config.chip)
    batch_size = 32 if config.batch_size is None else config.batch_size
    feed = make_feed(config.data, batch_size, sink_size=config.sink_size, shuffle=config.shuffle, seed=config.seed)
    leaves = feed.first()
    samples = samples_in(leaves[0].shape)
    if config.nominal_batch_size is not None:
        config = replace(config, accumulate_steps=max(1, round(config.nominal_batch_size / samples)))
    batch = batch_shapes(feed, leaves)
    evaluated = None if config.eval_data is None else eval_feed(config.eval_data, batch_size)
    prepared = (
        _prepare_custom_step(config, batch, evaluated)
        if config.state is not None
        else _prepare_model(config, batch, feed, evaluated, policy)
    )
    chosen = {
        **prepared.chosen,
        **({"batch_size": str(batch_size)} if config.batch_size is None and isinstance(feed, ArrayFeed) else {}),
    }
    settings = {
        "model": prepared.recipe.name,
        "batch_size": samples,
        "chip": chip.name,
        **prepared.settings,
        "metrics": [metric.name for metric in prepared.recipe.metrics],
        **config.shown(),
    }
    return Job(
        config=config,
        recipe=prepared.recipe,
        state=prepared.state,
        feed=feed,
        eval_feed=evaluated,
        target=Target(chip, config.engine, config.fidelity),
        batch_size=samples,
        chosen=chosen,
        settings=settings,
        signature=signature(leaves),
        eval_epochs=1 if config.eval_epochs is None and config.eval_steps is None else config.eval_epochs,
    )


def _check_together(config: TrainConfig) -> None:
    """Check combinations of options."""
    if config.eval_data is None and (config.eval_epochs or config.eval_steps):
        raise ConfigError("eval_epochs and eval_steps say when to evaluate, but there is no eval_data; give eval_data, or leave them out.")
    if config.metrics is not None and config.eval_data is None:
        raise ConfigError("metrics: they are measured on eval_data, which is not given; give eval_data, or leave metrics out.")
    if config.nominal_batch_size is not None and config.accumulate_steps != 1:
        raise ConfigError("nominal_batch_size chooses accumulate_steps; give one of them.")
    own = [name for name in MODEL_OPTIONS if config.is_given(name)]
    if config.state is not None and own:
        raise ConfigError(f"state: a step of your own does by itself what {', '.join(own)} would ask for; leave that out.")
    if config.state is None and config.eval_step is not None:
        raise ConfigError("eval_step belongs to a step of your own, with state=...; a model is evaluated by metrics=.")
    if config.loss is not None and config.loss_fn is not None:
        raise ConfigError("loss and loss_fn are both given; loss_fn(apply, params, batch, rngs) computes the whole loss.")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A recipe, its initial state, and what reports say of them: options chosen for the user, and settings."""

    recipe: Recipe | CustomStep
    state: TrainState
    chosen: dict[str, str]
    settings: dict[str, Any]


def _prepare_custom_step(config: TrainConfig, batch: Any, evaluated: Feed | None) -> _Prepared:
    """The recipe and the initial state of a step function of the user's own (`state=` was given).

    Raises:
      ConfigError: the step does not return (state, scalars by name), with a state like the one that it is given.
    """
    if not callable(config.model):
        raise ConfigError(f"state is given, so the first argument is a step (state, batch) -> (state, scalars); got {config.model!r}.")
    step: Callable[..., Any] = config.model
    recipe = CustomStep(step, evaluate=config.eval_step)
    state = recipe.initial_state(jax.tree.map(as_array, config.state))
    found: Any = jax.eval_shape(step, state.params, batch)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConfigError(f"{recipe.name}: a step must return (state, scalars by name), got {jax.tree.structure(found)}.")
    before, after = _shapes(state.params), _shapes(found[0])
    if before != after:
        raise ConfigError(f"{recipe.name}: the state that a step returns must be like the one it is given, {before}; it is {after}.")
    jax.eval_shape(lambda f: loss_and_metrics(f, recipe.name), found[1])
    if evaluated is not None:
        if config.eval_step is None:
            raise ConfigError("eval_data is given, so a step of your own needs an eval_step (state, batch) -> figures by name.")
        figures = jax.eval_shape(config.eval_step, state.params, batch_shapes(evaluated))
        recipe = replace(recipe, metrics=metrics_of_loss(figures))
    return _Prepared(recipe, state, {}, {"policy": "own", "loss": recipe.name, "loss_scale": "none", "norm_dtype": "float32"})


def _prepare_model(config: TrainConfig, batch: Any, feed: Feed, evaluated: Feed | None, policy: amp.Policy) -> _Prepared:
    """The recipe and the initial state for a model."""
    recipe, why = make_recipe(config, batch, policy)
    variables = _variable_shapes(recipe, batch, config)
    check_trained(variables[0], recipe.frozen)
    recipe, outputs = trace_forward(recipe, *variables, batch, "data")
    recipe = with_metrics(recipe, config.metrics, *variables, batch, outputs, why)
    classes = check_classes(recipe, feed, batch, outputs, "data")
    if evaluated is not None:
        shapes = batch_shapes(evaluated)
        wanted, found_there = jax.tree.structure(batch), jax.tree.structure(shapes)
        if wanted != found_there:
            raise DataError(
                f"eval_data: a batch must have the parts of the training data's, {wanted}; got {found_there}. Give it the same."
            )
        _, own = trace_forward(recipe, *variables, shapes, "eval_data")
        found = check_classes(recipe, evaluated, shapes, own, "eval_data", why)
        if found != classes:
            raise DataError(f"eval_data: the model has {found} outputs on it, {classes} on the training data.")
    state = recipe.initial_state(*_initial_variables(recipe, *variables, batch, config), _key(config.seed, 1) if recipe.streams else None)
    recipe = recipe.for_state(state, batch)
    chosen = {
        **({"loss": f"{recipe.loss_name} ({why})"} if why else {}),
        **({"optimizer": DEFAULT_OPTIMIZER} if config.optimizer is None else {}),
    }
    settings = {
        "policy": policy.name,
        "loss": recipe.loss_name,
        "loss_scale": policy.loss_scale.kind,
        "norm_dtype": policy.norm_dtype,
    }
    return _Prepared(recipe, state, chosen, settings)


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """A prediction or evaluation that is ready to run: everything checked and chosen."""

    recipe: Recipe
    state: TrainState
    feed: Feed
    target: Target


def prepare_inference(config: Any, *, with_loss: bool, metrics: Any = None) -> InferenceJob:
    """Check the options of `tpuflow.predict`, or of `tpuflow.evaluate`, which has a loss and metrics (`with_loss`).

    Raises:
      ConfigError, DataError: see `tpuflow.train`.
    """
    config.check()
    target = Target(get_chip(config.chip), config.engine, config.fidelity)
    feed = eval_feed(config.data, config.batch_size, "data")
    batch = batch_shapes(feed)
    recipe = replace(make_recipe(config, batch, with_loss=with_loss)[0], optimized=None, strategy=ONE_CHIP)
    variables = _variable_shapes(recipe, batch, config)
    recipe, outputs = trace_forward(recipe, *variables, batch, "data", train=False)
    if with_loss:
        recipe = with_metrics(recipe, metrics, *variables, batch, outputs)
        check_classes(recipe, feed, batch, outputs, "data")
    state = recipe.initial_state(*_initial_variables(recipe, *variables, batch, config), None)
    return InferenceJob(recipe, recipe.eval_state(state), feed, target)


def recipe_with_metrics(recipe: Recipe, metrics: Any, params: Any, carried: Any, batch: Any) -> Recipe:
    """A recipe with other metrics (None: its own), checked for batches of these shapes.

    Raises:
      ConfigError, DataError: one cannot be measured, or the model does not take the inputs.
    """
    wanted = recipe.metrics if metrics is None and recipe.loss_fn is None else metrics
    recipe, outputs = trace_forward(recipe, params, carried, batch, "data")
    return with_metrics(recipe, wanted, params, carried, batch, outputs)


def make_recipe(config: StepConfig, batch: Any, policy: amp.Policy | None = None, *, with_loss: bool = True) -> tuple[Recipe, str]:
    """(the recipe of a model's step for batches of these shapes, without metrics and random streams; why its loss was chosen, or "").

    Raises:
      ConfigError, DataError: an option does not fit the batch.
    """
    policy = _policy(config) if policy is None else policy
    model = get_model(config.model, policy.around_norm if policy.surrounds_norms else None, config.params)
    roles = get_roles(batch, config.inputs, model.parameters)
    if config.inputs is not None and not jax.tree.leaves(roles.inputs(batch)):
        raise ConfigError(
            f"inputs: the model would get no array of a batch of {types_text(batch)}; name some of its parts, or return them."
        )
    loss, why = None, ""
    if with_loss and config.loss_fn is None:
        loss, why = get_loss(config.loss, None if roles.labels is None else roles.labels(batch))
    optimizer = make_optimizer(config.optimizer, policy, config.accumulate_steps)
    frozen, ema = tuple(config.frozen), get_ema(config.ema)
    if ema is not None and config.eval_params is not None:
        raise ConfigError("ema and eval_params both say which parameters evaluations use; give one of them.")
    recipe = Recipe(
        model, policy, roles, loss, optimizer, config.loss_fn, frozen=frozen, ema=ema, optimized=config.eval_params,
        offloaded=tuple(name for name, there in (("params", config.offload_params), ("opt_state", config.offload_optimizer)) if there),
    )  # fmt: skip
    return replace(recipe, strategy=_strategy(config.mesh, config.sharding, samples_of(batch))), why


def samples_of(batch: Any) -> int:
    """The samples of a batch, a tree of arrays or shapes [B, ...]."""
    return max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), default=1)


def _strategy(mesh: Mapping[str, int] | None, sharding: str | Rules, samples: int) -> Strategy:
    """The strategy for a mesh, by the name of a sharding or by rules; `samples` is the batch size.

    Raises:
      ConfigError: there is no mesh, or the batches do not divide over it.
    """
    if mesh is None and sharding != "ddp":
        raise ConfigError(f"sharding: {sharding!r} is over the chips of a mesh; give one, such as mesh={{'data': 4}}.")
    if mesh is None or math.prod(mesh.values()) == 1:
        return ONE_CHIP
    return get_strategy(mesh, sharding, samples) if isinstance(sharding, str) else partitioned(mesh, sharding, samples)


def state_shapes(recipe: Recipe, batch: Any) -> tuple[Recipe, TrainState]:
    """The recipe with its random streams, and the shapes and types of its state, for batches of these shapes."""
    made, params, carried = _made_shapes(recipe, batch)
    return _with_state(_with_streams(recipe, made, carried, batch), params, carried, batch)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step as a jaxpr, (state, batch) -> (new state, figures): the recipe with its random streams, and shapes and types of both."""

    recipe: Recipe
    state: TrainState
    jaxpr: ClosedJaxpr
    results: Any


def trace_step(recipe: Recipe, batch: Any) -> TracedStep:
    """Trace a recipe's step, for batches of these shapes.

    A model that fails where it has no random stream to draw from is first taken for one that needs none: most do, and tracing it once more
    to find its streams would take as long as its forward pass does here. Whatever else it fails by is told where its streams are sought.
    """
    made, params, carried = _made_shapes(recipe, batch)
    if recipe.loss_fn is None and recipe.model.without_streams is not None:
        with suppress(Exception), recipe.model.without_streams():
            return _traced(*_with_state(recipe, params, carried, batch), batch)
    return _traced(*_with_state(_with_streams(recipe, made, carried, batch), params, carried, batch), batch)


def _traced(recipe: Recipe, state: TrainState, batch: Any) -> TracedStep:
    return TracedStep(recipe, state, *jax.make_jaxpr(recipe.train_step, return_shape=True)(state, batch))


def _made_shapes(recipe: Recipe, batch: Any) -> tuple[Any, Any, Any]:
    """(parameters as the model makes them, in the policy's type, carried variables), as shapes and types."""

    def variables(batch: Any) -> tuple[Any, Any, Any]:
        params, carried = recipe.model.init(jax.random.key(0), recipe.roles.inputs(batch))
        return params, recipe.policy.cast_params(params, recipe.model.norms(params, carried)), carried

    return jax.eval_shape(variables, batch)


def _with_streams(recipe: Recipe, made: Any, carried: Any, batch: Any) -> Recipe:
    uncast = replace(recipe, policy=amp.get_policy("fp32"))  # which draws from the same streams, and is traced in half the time
    return replace(recipe, streams=trace_forward(uncast, made, carried, batch, "data")[0].streams)


def _with_state(recipe: Recipe, params: Any, carried: Any, batch: Any) -> tuple[Recipe, TrainState]:
    key = jax.eval_shape(lambda: jax.random.key(0)) if recipe.streams else None
    state = jax.eval_shape(recipe.state_of, params, carried, key)
    recipe = recipe.for_state(state, batch)
    return recipe, recipe.strategy.shard_state(state)


def single_batch_config(config: StepConfig) -> TrainConfig:
    """The options of a training whose data are the one batch of a step's options.

    Raises:
      DataError: they are no tree of arrays.
    """
    sizes = _lengths(config.data)
    if not sizes:
        raise DataError(f"data: expected one batch, a tree of arrays [B, ...] such as (inputs, labels), got {a_thing(config.data)}.")
    return config.training(batch_size=max(1, min(sizes)))


def _policy(config: StepConfig) -> amp.Policy:
    return amp.get_policy(config.policy).adjusted(config.keep_batchnorm_fp32, config.loss_scale)


def _variable_shapes(recipe: Recipe, batch: Any, config: StepConfig) -> tuple[Any, Any]:
    """The shapes and types of the model's variables, by tracing its initialisation, so that errors show before anything is computed.

    Raises:
      ConfigError: the model has no parameters.
      DataError: the model cannot take the inputs.
    """
    model, inputs = recipe.model, recipe.roles.inputs(batch)
    if any(0 in leaf.shape for leaf in jax.tree.leaves(inputs)):
        raise DataError(f"data: inputs {types_text(inputs)} have an axis without elements; give every axis at least one.")
    with users_code(
        f"while initialising model {model.name} for inputs {types_text(inputs)}", MISFITS, input_error("data", model.name, inputs)
    ):
        shapes, carried = jax.eval_shape(lambda i: model.init(jax.random.key(config.seed), i), inputs)
    if not jax.tree.leaves(shapes):
        raise ConfigError(f"model {model.name} has no parameters: there is nothing to train. Give it layers that have some.")
    return shapes, carried


def _initial_variables(recipe: Recipe, shapes: Any, carried: Any, batch: Any, config: StepConfig) -> tuple[Any, Any]:
    """The initial variables: drawn from the seed, or the user's parameters, checked against the shapes.

    Raises:
      ConfigError: the user's do not fit the model.
    """
    model, inputs, given = recipe.model, recipe.roles.inputs(batch), config.params
    params, given_carried = (None, None) if given is None else starting_variables(given, shapes, carried)
    if params is None or (jax.tree.leaves(carried) and given_carried is None):
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), inputs)
        fresh, carried = jax.jit(model.init)(_key(config.seed, 0), zeros)
        params = fresh if params is None else params
    return params, carried if given_carried is None else given_carried


def _key(seed: int, stream: int) -> jax.Array:
    """The key of the initial variables (stream 0) or of the training (stream 1)."""
    return jax.random.split(jax.random.key(seed))[stream]


def eval_feed(data: Any, batch_size: int, what: str = "eval_data") -> Feed:
    """The evaluation data; a data set smaller than a batch makes one smaller batch."""
    return make_feed(data, min([batch_size, *(max(1, n) for n in _lengths(data))]), what)


def _lengths(data: Any) -> list[int]:
    """The number of samples of each array, if the data are a tree of arrays; else empty."""
    if not is_data_of_arrays(data):
        return []
    return [len(leaf) for leaf in jax.tree.leaves(data) if getattr(leaf, "shape", ())]


def batch_shapes(feed: Feed, leaves: Any = None) -> Any:
    """Shapes and types of a feed's first batch, in its tree."""
    return _shapes(feed.structure.batch(feed.first() if leaves is None else leaves))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
