"""Checks, from shapes alone, that model, loss, metrics and data fit together; called by `preparing` before anything is compiled.

They also find what only a trace shows: the random streams that the model draws from, and the number of classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from tpuflow.data.chunks import samples_in
from tpuflow.data.feeding import ArrayFeed, Feed
from tpuflow.errors import ConfigError, DataError, a_thing
from tpuflow.stages.tracing import users_code
from tpuflow.training.adapters.linen_modules import traced_with_streams
from tpuflow.training.adapters.model import MISFITS
from tpuflow.training.losses import check_fit, check_function, check_labels, resolve_classes
from tpuflow.training.metrics import check_metrics, get_metrics, metrics_of_loss
from tpuflow.training.mismatches import types_text
from tpuflow.training.train_step import Recipe

_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")  # of JAX's error


def trace_forward(recipe: Recipe, params: Any, carried: Any, batch: Any, what: str, *, train: bool = True) -> tuple[Recipe, Any]:
    """Trace the forward pass: (the recipe with the random streams that the model draws from, the shapes of the model's outputs).

    With a `loss_fn`, the shapes are those of (loss, scalars by name). what: the data in error messages, "data" or "eval_data".

    Raises:
      DataError: the model does not take the inputs.
    """

    def forward(rngs: Any, params: Any, carried: Any, batch: Any) -> Any:
        if recipe.loss_fn is not None:
            return recipe.forward(params, carried, batch, rngs, train=train)[:2]
        return recipe.outputs(params, carried, batch, rngs, train=train)

    inputs = recipe.roles.inputs(batch)
    misfits = () if recipe.loss_fn is not None else MISFITS
    told = f"while tracing model {recipe.name} for inputs {types_text(inputs)} of {what}"
    with _named_axes(recipe), users_code(told, misfits, input_error(what, recipe.name, inputs)), recipe.strategy.with_axes():
        shapes, streams = traced_with_streams(forward, params, carried, batch)
    return replace(recipe, streams=streams), shapes


@contextmanager
def _named_axes(recipe: Recipe) -> Iterator[None]:
    """A clear error for a model that uses an axis of a mesh that there is not."""
    try:
        yield
    except NameError as error:
        if (found := _UNBOUND.search(str(error))) is None:
            raise
        raise ConfigError(
            f"model {recipe.name} computes over the chips along a mesh axis {found[1]!r}, as batch normalisation with an axis_name does; "
            f"the training has no such axis. Give it a mesh that has one, without rules (mesh={{{found[1]!r}: 4}}), or leave out the name."
        ) from error


def input_error(what: str, name: str, inputs: Any) -> Callable[[str], DataError]:
    """A function that makes the error for a model that cannot take these inputs out of the model's own error text."""
    told = f"{what}: model {name} cannot take inputs {types_text(inputs)}"
    return lambda said: DataError(f"{told}: {said} Give inputs of a shape and type that the model is made for.")


def with_metrics(recipe: Recipe, metrics: Any, params: Any, carried: Any, batch: Any, outputs: Any, why: str = "") -> Recipe:
    """The recipe with its metrics, each checked to return something that can be summed over batches.

    why: the reason for the choice of the loss, if it was not given; for error messages.

    Raises:
      ConfigError, DataError: a metric or the loss does not fit outputs and labels.
    """
    labels = None if recipe.roles.labels is None else recipe.roles.labels(batch)
    if recipe.loss_fn is not None:
        of_loss = metrics_of_loss({"avg_loss": None, **outputs[1]})
        own = () if metrics is None else get_metrics(metrics, None, recipe.policy.loss_dtype)
        recipe = replace(recipe, metrics=(*of_loss, *own))
        if not own:
            return recipe
        _, outputs = trace_forward(replace(recipe, loss_fn=None), params, carried, batch, "data")
    else:
        assert recipe.loss is not None
        recipe = replace(recipe, loss=resolve_classes(recipe.loss, outputs, labels))
        _check_outputs(recipe, batch, outputs, "data", why)
        recipe = replace(recipe, metrics=get_metrics(metrics, recipe.loss, recipe.policy.loss_dtype))
    own = [metric for metric in recipe.metrics if not metric.of_loss]
    check_metrics(own, outputs, recipe.roles.targets(batch), labels, samples_in(jax.tree.leaves(batch)[0].shape))
    return recipe


def _check_outputs(recipe: Recipe, batch: Any, outputs: Any, what: str, why: str) -> None:
    """Check that the loss can compare outputs and labels of these shapes.

    Raises:
      DataError: it cannot.
    """
    loss, labels = recipe.loss, None if recipe.roles.labels is None else recipe.roles.labels(batch)
    assert loss is not None
    if loss.checked and not hasattr(outputs, "shape"):
        raise DataError(
            f"model {recipe.name} must return one array for the loss {loss.name!r}, got {a_thing(outputs)}. Give a function "
            "loss(outputs, labels) that takes what it returns."
        )
    _check_samples(recipe, batch, outputs, labels, what)
    check_fit(loss, outputs, labels, what, why)
    check_function(loss, outputs, recipe.roles.targets(batch))


def _check_samples(recipe: Recipe, batch: Any, outputs: Any, labels: Any, what: str) -> None:
    """Check that inputs, outputs and labels have equally many samples, where a loss compares them.

    Raises:
      DataError: they have not.
    """
    inputs = jax.tree.leaves(recipe.roles.inputs(batch))
    if labels is None or not inputs or recipe.loss is None or not recipe.loss.checked:
        return
    if len(inputs) == 1 and inputs[0].shape[:1] != labels.shape[:1]:
        counts = f"inputs have {samples_in(inputs[0].shape)} samples, labels {samples_in(labels.shape)}"
        raise DataError(f"{what}: {counts}; they must be equally many.")
    if len(inputs) == 1 and inputs[0].ndim == 1 and outputs.shape[:1] != inputs[0].shape:
        raise DataError(
            f"{what}: inputs {types_text(inputs)} have an axis of samples and none of features, and model {recipe.name} takes one for the "
            f"other: its outputs have shape {list(outputs.shape)}. Give them an axis of features: inputs[:, None]."
        )


def check_classes(recipe: Recipe, feed: Feed, batch: Any, outputs: Any, what: str, why: str = "") -> int | None:
    """Check that every label is a class number: of arrays now, of other data batch by batch. Returns the number of classes, or None if
    labels are no classes.

    A loss of the user's own may give a meaning to labels that are no class, such as -100 for samples to ignore, so these are not checked.

    why: the reason for the choice of the loss, if it was not given; for error messages.

    Raises:
      DataError: a label is none of the classes.
    """
    if recipe.loss is None:
        return None
    labels = recipe.roles.labels
    if what != "data":
        _check_outputs(recipe, batch, outputs, what, why)
    if not recipe.loss.classes or labels is None:
        return None
    classes, of = outputs.shape[-1], labels
    if not recipe.loss.checked:
        return classes
    if isinstance(feed, ArrayFeed):
        check_labels(of(feed.structure.batch(feed.leaves)), classes, what=what)
    else:
        feed.check = lambda batch, samples: check_labels(of(batch), classes, samples, what=what)
    return classes
