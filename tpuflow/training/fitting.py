"""Whether model, loss, metrics and data fit one another, found from shapes: what a step draws, what it measures, which labels it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from tpuflow.data.chunks import samples_in
from tpuflow.data.feeding import ArrayFeed, Feed
from tpuflow.errors import DataError, a_thing
from tpuflow.stages.tracing import users_code
from tpuflow.training.adapters.linen_modules import traced_with_streams
from tpuflow.training.adapters.model import MISFITS
from tpuflow.training.losses import check_fit, check_function, check_labels, fitting
from tpuflow.training.metrics import check_metrics, get_metrics, metrics_of_loss
from tpuflow.training.mismatches import in_words
from tpuflow.training.stepping import Recipe


def traced(recipe: Recipe, params: Any, carried: Any, batch: Any, what: str, *, train: bool = True) -> tuple[Recipe, Any]:
    """The recipe with the random streams that a step draws from; and the shapes of the model's outputs, or of what a loss of the user's own
    gives.

    Raises:
      DataError: the model does not take the inputs.
    """

    def forward(rngs: Any, params: Any, carried: Any, batch: Any) -> Any:
        if recipe.loss_fn is not None:
            return recipe.forward(params, carried, batch, rngs, train=train)[:2]
        return recipe.outputs(params, carried, batch, rngs, train=train)

    inputs = recipe.roles.inputs(batch)
    misfits = () if recipe.loss_fn is not None else MISFITS
    with users_code(
        f"while tracing model {recipe.name} for inputs {in_words(inputs)} of {what}", misfits, misfit(what, recipe.name, inputs)
    ):
        shapes, streams = traced_with_streams(forward, params, carried, batch)
    return replace(recipe, streams=streams), shapes


def misfit(what: str, name: str, inputs: Any) -> Callable[[str], DataError]:
    """The error of a model that cannot take inputs, for what the model said."""
    told = f"{what}: model {name} cannot take inputs {in_words(inputs)}"
    return lambda said: DataError(f"{told}: {said} Give inputs of a shape and type that the model is made for.")


def measured(recipe: Recipe, metrics: Any, params: Any, carried: Any, batch: Any, outputs: Any, why: str = "") -> Recipe:
    """The recipe with its metrics, each of which gives something that can be summed; `why` its loss was chosen, if it was not given.

    Raises:
      ConfigError, DataError: one does not.
    """
    labels = None if recipe.roles.labels is None else recipe.roles.labels(batch)
    if recipe.loss_fn is not None:
        of_loss = metrics_of_loss({"avg_loss": None, **outputs[1]})
        own = () if metrics is None else get_metrics(metrics, None, recipe.policy.loss_dtype)
        recipe = replace(recipe, metrics=(*of_loss, *own))
        if not own:
            return recipe
        _, outputs = traced(replace(recipe, loss_fn=None), params, carried, batch, "data")
    else:
        assert recipe.loss is not None
        recipe = replace(recipe, loss=fitting(recipe.loss, outputs, labels))
        _check_outputs(recipe, batch, outputs, "data", why)
        recipe = replace(recipe, metrics=get_metrics(metrics, recipe.loss, recipe.policy.loss_dtype))
    own = [metric for metric in recipe.metrics if not metric.of_loss]
    check_metrics(own, outputs, recipe.roles.targets(batch), labels, samples_in(jax.tree.leaves(batch)[0].shape))
    return recipe


def _check_outputs(recipe: Recipe, batch: Any, outputs: Any, what: str, why: str) -> None:
    """That a batch's outputs and labels can meet in the loss.

    Raises:
      DataError: they cannot.
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
    """That inputs, outputs and labels have as many samples as one another, where a loss compares them.

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
            f"{what}: inputs {in_words(inputs)} have an axis of samples and none of features, and model {recipe.name} takes one for the "
            f"other: its outputs have shape {list(outputs.shape)}. Give them an axis of features: inputs[:, None]."
        )


def check_classes(recipe: Recipe, feed: Feed, batch: Any, outputs: Any, what: str, why: str = "") -> int | None:
    """That every label is a class, now or when it comes; the number of classes, if labels are classes.

    A loss of the user's own may give labels that are no class a meaning, such as -100 for what does not count: it gets them as they are.

    why: the loss was chosen, if it was not given.

    Raises:
      DataError: one is not.
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
        check_labels(of(feed.form.batch(feed.leaves)), classes, what=what)
    else:
        feed.check = lambda batch, samples: check_labels(of(batch), classes, samples, what=what)
    return classes
