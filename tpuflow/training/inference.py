"""Inference: `tpuflow.predict` and `tpuflow.evaluate`, and the same methods of a training's result; they run on the device in sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.amp.policy import cast_floats
from tpuflow.checking import check_number
from tpuflow.data.epochs import EpochIterator
from tpuflow.data.feeding import Feed
from tpuflow.errors import ConfigError
from tpuflow.stages.staging import Target
from tpuflow.training.config import StepConfig, configured, option
from tpuflow.training.device_sink import DeviceSink, OnSlice
from tpuflow.training.metrics import Metric, MetricFunction, Tally
from tpuflow.training.preparing import batch_shapes, eval_feed, prepare_inference, recipe_with_metrics
from tpuflow.training.progress import Bar, progress_bar
from tpuflow.training.roles import get_roles
from tpuflow.training.train_step import CustomStep, Recipe, TrainState

RAISES = "ConfigError, DataError, UnsupportedPrimitiveError: as `tpuflow.train` does."


@dataclass(frozen=True, slots=True)
class InferenceConfig(StepConfig):
    """The options of `tpuflow.predict`; those of training alone (optimizer, frozen, ema, accumulate_steps, ...) have no effect."""

    _: KW_ONLY
    batch_size: int = option(32, "samples in one batch.", lambda name, value: check_number(name, value, 1))
    progress: bool = option(True, "show a progress bar.")


@dataclass(frozen=True, slots=True)
class EvaluateConfig(InferenceConfig):
    """The options of `tpuflow.evaluate`."""

    _: KW_ONLY
    metrics: Sequence[str | Metric | MetricFunction] | None = option(None, "what to measure, as for `tpuflow.train`.")


@configured(InferenceConfig, RAISES)
def predict(config: InferenceConfig) -> Any:
    """A model's outputs for all samples: NumPy arrays [N, ...], floats in fp32, in the tree that the model returns.

    The data may have labels or not; `params` are those of a result, a checkpoint or a file. The model runs in evaluation mode.
    """
    job = prepare_inference(config, with_loss=False)
    return outputs_of(job.recipe, job.state, job.feed, job.target, progress=config.progress)


@configured(EvaluateConfig, RAISES)
def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """The metrics of a model on data: by name a number, or a list of them."""
    job = prepare_inference(config, with_loss=True, metrics=config.metrics)
    return metrics_of(job.recipe, job.state, job.feed, job.target, progress=config.progress)


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model that can be used: what `TrainResult.predict` and `.evaluate` need."""

    recipe: Recipe | CustomStep
    state: TrainState
    target: Target
    batch_size: int

    @property
    def eval_variables(self) -> tuple[Any, Any]:
        """(parameters, carried variables) that evaluations use."""
        state = self.state
        return self.recipe.eval_variables(state) if isinstance(self.recipe, Recipe) else (state.params, state.carried)

    def predict(self, data: Any, *, progress: bool) -> Any:
        """As `tpuflow.predict`: of batches as in training, or of the inputs alone."""
        feed, recipe = eval_feed(data, self.batch_size, "data"), self._model("predict")
        batch = batch_shapes(feed)
        given = recipe.roles.given if isinstance(batch, (Mapping, tuple)) else None
        recipe = replace(recipe, roles=get_roles(batch, given, recipe.model.parameters))
        return outputs_of(recipe, self.state, feed, self.target, progress=progress)

    def evaluate(self, data: Any, metrics: Any, *, progress: bool) -> dict[str, Any]:
        """As `tpuflow.evaluate`."""
        feed = eval_feed(data, self.batch_size, "data")
        recipe: Recipe | CustomStep = self.recipe
        if isinstance(recipe, Recipe):
            recipe = recipe_with_metrics(recipe, metrics, self.state.params, self.state.carried, batch_shapes(feed))
        elif not recipe.metrics:
            raise ConfigError("evaluate: this training has a step of its own and no eval_step that says what to measure.")
        return metrics_of(recipe, self.state, feed, self.target, progress=progress)

    def _model(self, what: str) -> Recipe:
        if not isinstance(self.recipe, Recipe):
            raise ConfigError(f"{what}: this training has a step of its own, so which model it trains is not known; call your own.")
        return self.recipe


def outputs_of(recipe: Recipe, state: TrainState, feed: Feed, target: Target, *, progress: bool) -> Any:
    """The model's outputs for every sample of a feed.

    Raises:
      ConfigError: an output has no axis of samples.
    """

    def step(state: TrainState, batch: Any) -> Any:
        rngs = recipe.rngs(jax.random.key(0)) if recipe.streams else None
        return cast_floats(recipe.outputs(*recipe.eval_variables(state), batch, rngs, train=False), jnp.float32)

    parts: list[Any] = []

    def keep(state: Any, outputs: Any, steps: int) -> None:
        parts.append(jax.tree.map(lambda a: _samples(np.asarray(a), recipe.name), outputs))

    _run(DeviceSink("predict", step, target, feed.structure, updates=False), state, feed, keep, "prediction", progress=progress)
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def metrics_of(recipe: Recipe | CustomStep, state: TrainState, feed: Feed, target: Target, *, progress: bool) -> dict[str, Any]:
    """The metrics of a recipe over a feed."""
    tally = Tally(recipe.metrics)

    def keep(state: Any, figures: Mapping[str, Any], steps: int) -> None:
        tally.add(figures)

    _run(
        DeviceSink("eval_step", recipe.eval_step, target, feed.structure, updates=False), state, feed, keep, "evaluation", progress=progress
    )
    return tally.results()


def _run(sink: DeviceSink, state: TrainState, feed: Feed, keep: OnSlice, what: str, *, progress: bool) -> None:
    """One pass over a feed."""
    iterator = EpochIterator(feed)
    try:
        with progress_bar(shown=progress) as bar:
            bar.begin(what, feed.batches)
            sink.run(state, iterator.chunks(None), _reporting_progress(keep, iterator, bar))
    finally:
        iterator.close()


def _reporting_progress(keep: OnSlice, iterator: EpochIterator, bar: Bar) -> OnSlice:
    def told(state: Any, figures: Any, steps: int) -> None:
        keep(state, figures, steps)
        iterator.mark_done(steps)
        bar.advance(steps)

    return told


def _samples(outputs: np.ndarray, name: str) -> np.ndarray:
    """[steps, B, ...] as [steps * B, ...]."""
    if outputs.ndim < 2:
        raise ConfigError(f"predict: model {name} gives one number a batch, not one result a sample; use tpuflow.evaluate for that.")
    return outputs.reshape(-1, *outputs.shape[2:])
