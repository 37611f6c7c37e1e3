"""The step that `tpuflow.train` compiles, as a plain JAX function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpuflow.training.config import StepConfig, configured
from tpuflow.training.preparing import prepare, single_batch_config
from tpuflow.training.train_step import Recipe, StepFigures, TrainState


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step as pure functions over `state`, which is made to be donated.

    step(state, batch) -> (new state, figures: loss, loss scale, skipped, metrics of a loss of the user's own)
    evaluate(state, batch) -> every metric's figures, by name
    outputs(state, batch) -> what the model gives in training, under the policy
    """

    state: TrainState
    step: Callable[[TrainState, Any], tuple[TrainState, StepFigures]]
    evaluate: Callable[[TrainState, Any], dict[str, Any]]
    outputs: Callable[[TrainState, Any], Any]


@configured(StepConfig, "ConfigError, DataError: as `tpuflow.train`.")
def training_step(config: StepConfig) -> TrainingStep:
    """The very step that `tpuflow.train` would compile for the device, to run under `jax.jit` beside it, or to look at.

    The data are one batch, which the step is made for.
    """
    job = prepare(single_batch_config(config))
    recipe = job.recipe
    assert isinstance(recipe, Recipe)

    def outputs(state: TrainState, batch: Any) -> Any:
        return recipe.outputs(state.params, state.carried, batch, recipe.rngs(state.key))

    return TrainingStep(job.state, recipe.train_step, recipe.eval_step, outputs)
