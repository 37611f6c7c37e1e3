"""Before a training: every option checked, everything not given chosen, so that mistakes show before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow import amp
from tpuflow.checking import check_choice, check_number
from tpuflow.chips import get_chip
from tpuflow.data.batching import Leaves, Signature, is_pair_of_arrays
from tpuflow.data.feeding import ArrayFeed, Feed, make_feed
from tpuflow.device.runtime import ENGINES, FIDELITIES
from tpuflow.errors import ConfigError, DataError, TpuflowError
from tpuflow.stages.staging import Target
from tpuflow.training.losses import check_fit, check_labels, get_loss
from tpuflow.training.metrics import check_metrics, get_metrics
from tpuflow.training.modelling import MISFITS
from tpuflow.training.stepping import Recipe, TrainState, make_recipe
from tpuflow.training.weights import starting_variables


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `tpuflow.train`, before anything was checked."""

    model: Any
    data: Any
    eval_data: Any
    policy: Any
    optimizer: Any
    loss: Any
    epochs: int
    batch_size: int | None
    sink_size: int
    chip: Any
    seed: int
    params: Any
    shuffle: bool
    engine: str
    fidelity: str
    keep_batchnorm_fp32: bool | None = None
    loss_scale: Any = None
    accumulate_steps: int = 1
    metrics: Any = None
    eval_epochs: int | None = None
    eval_steps: int | None = None
    numerics: bool | int = False


@dataclass(frozen=True, slots=True)
class Job:
    """A training that is ready to start: everything checked and chosen."""

    recipe: Recipe
    state: TrainState
    feed: Feed
    eval_feed: Feed | None
    target: Target
    epochs: int
    batch_size: int
    sink_size: int
    chosen: dict[str, str]
    settings: dict[str, Any]
    signature: Signature
    eval_epochs: int | None
    eval_steps: int | None
    numerics: bool | int = False


def prepare(o: Options) -> Job:
    """Check every option and choose what was not given.

    Raises:
      ConfigError, DataError: see `tpuflow.train`.
    """
    policy, chip = amp.get_policy(o.policy).adjusted(o.keep_batchnorm_fp32, o.loss_scale), get_chip(o.chip)
    check_choice("engine", o.engine, ENGINES)
    check_choice("fidelity", o.fidelity, FIDELITIES)
    check_number("epochs", o.epochs, 1)
    check_number("sink_size", o.sink_size, -1)
    check_number("accumulate_steps", o.accumulate_steps, 1)
    for name in ("batch_size", "eval_epochs", "eval_steps"):
        if getattr(o, name) is not None:
            check_number(name, getattr(o, name), 1)
    if not isinstance(o.numerics, bool):
        check_number("numerics", o.numerics, 1)
    if o.eval_data is None and (o.eval_epochs or o.eval_steps):
        raise ConfigError("eval_epochs and eval_steps say when to evaluate, but there is no eval_data.")
    if o.optimizer is not None and not hasattr(o.optimizer, "update"):
        raise ConfigError(f"optimizer: expected an Optax transformation such as optax.sgd(1e-3), got {o.optimizer!r}.")
    if o.metrics is not None and o.eval_data is None:
        raise ConfigError("metrics: they are measured on eval_data, which is not given.")
    batch_size = 32 if o.batch_size is None else o.batch_size
    feed = make_feed(o.data, batch_size, sink_size=o.sink_size, shuffle=o.shuffle, seed=o.seed)
    first = feed.first()
    loss, why = get_loss(o.loss, first[1])
    metrics = get_metrics(o.metrics, loss, policy.loss_dtype)
    recipe = make_recipe(o.model, policy, loss, o.optimizer, accumulate_steps=o.accumulate_steps, metrics=metrics)
    state = _initial_state(recipe, first, o.params, o.seed)
    classes = _check_data(recipe, state, feed, first, "data")
    eval_feed = None if o.eval_data is None else _eval_feed(recipe, state, o.eval_data, batch_size, classes)
    chosen = {
        **({"loss": f"{loss.name} ({why})"} if why else {}),
        **({"optimizer": "adam(1e-3)"} if o.optimizer is None else {}),
        **({"batch_size": str(batch_size)} if o.batch_size is None and isinstance(feed, ArrayFeed) else {}),
    }
    settings = {
        "model": recipe.model.name,
        "policy": policy.name,
        "loss": loss.name,
        "loss_scale": policy.loss_scale.kind,
        "norm_dtype": policy.norm_dtype,
        "accumulate_steps": o.accumulate_steps,
        "metrics": [metric.name for metric in metrics],
        "epochs": o.epochs,
        "batch_size": len(first[0]),
        "sink_size": o.sink_size,
        "chip": chip.name,
        "seed": o.seed,
        "shuffle": o.shuffle,
        "engine": o.engine,
        "fidelity": o.fidelity,
    }
    target = Target(chip, o.engine, o.fidelity)
    return Job(
        recipe=recipe,
        state=state,
        feed=feed,
        eval_feed=eval_feed,
        target=target,
        epochs=o.epochs,
        batch_size=len(first[0]),
        sink_size=o.sink_size,
        chosen=chosen,
        settings=settings,
        signature=tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in first),
        eval_epochs=1 if o.eval_epochs is None and o.eval_steps is None else o.eval_epochs,
        eval_steps=o.eval_steps,
        numerics=o.numerics,
    )


def _initial_state(recipe: Recipe, first: Leaves, params: Any, seed: int) -> TrainState:
    """Variables drawn from the seed, or the user's parameters, in the policy's types.

    Raises:
      ConfigError: the model has no parameters, or the user's do not fit it.
      DataError: the model cannot take the inputs.
    """
    model = recipe.model
    spec = jax.ShapeDtypeStruct(first[0].shape, first[0].dtype)
    try:
        shapes, carried = jax.eval_shape(lambda inputs: model.init(jax.random.key(seed), inputs), spec)
    except TpuflowError:
        raise
    except Exception as error:  # whatever the user's module raises when it is traced
        error.add_note(f"while initialising model {model.name} for inputs {_shape_of(first[0])}")
        raise
    if not jax.tree.leaves(shapes):
        raise ConfigError(f"model {model.name} has no parameters: there is nothing to train.")
    given, given_carried = (None, None) if params is None else starting_variables(params, shapes, carried)
    if given is None or (jax.tree.leaves(carried) and given_carried is None):
        fresh, carried = jax.jit(model.init)(_key(seed, 0), jnp.zeros(spec.shape, spec.dtype))
        given = fresh if given is None else given
    carried = carried if given_carried is None else given_carried
    key = _key(seed, 1) if model.needs_key(given, carried, spec) else None
    return recipe.initial_state(given, carried, key)


def _key(seed: int, stream: int) -> jax.Array:
    """The key of the initial variables (stream 0) or of the training (stream 1)."""
    return jax.random.split(jax.random.key(seed))[stream]


def _check_data(recipe: Recipe, state: TrainState, feed: Feed, first: Leaves, what: str) -> int | None:
    """That the model takes the inputs and the loss its outputs and the labels; the number of classes, if labels are classes.

    Raises:
      DataError: they do not fit.
    """
    inputs, labels = first
    try:
        outputs = jax.eval_shape(recipe.outputs, state.params, state.carried, jax.ShapeDtypeStruct(inputs.shape, inputs.dtype), state.key)
    except MISFITS as error:
        raise DataError(f"{what}: model {recipe.model.name} cannot take inputs {_shape_of(inputs)}: {error}") from error
    if not hasattr(outputs, "shape"):
        raise DataError(f"model {recipe.model.name} must return one array for the loss, got {jax.tree.structure(outputs)}.")
    check_fit(recipe.loss, outputs, labels)
    check_metrics(recipe.metrics, outputs, labels)
    if not recipe.loss.classes:
        return None
    classes = outputs.shape[-1]
    if isinstance(feed, ArrayFeed):
        check_labels(feed.leaves[1], classes, what=what)
    else:
        feed.check = lambda labels, samples: check_labels(labels, classes, samples, what=what)
    return classes


def _eval_feed(recipe: Recipe, state: TrainState, data: Any, batch_size: int, classes: int | None) -> Feed:
    """The evaluation data, checked as the training data were; a data set smaller than a batch makes one smaller batch."""
    size = min(batch_size, max(1, len(data[0]))) if isinstance(data, (tuple, list)) and is_pair_of_arrays(data) else batch_size
    feed = make_feed(data, size, "eval_data")
    found = _check_data(recipe, state, feed, feed.first(), "eval_data")
    if found != classes:
        raise DataError(f"eval_data: the model has {found} outputs on it, {classes} on the training data.")
    return feed


def _shape_of(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
