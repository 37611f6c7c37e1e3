"""The step that `tpuflow.train` compiles, as a plain JAX function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

from tpuflow import amp
from tpuflow.training.losses import Loss, LossFunction
from tpuflow.training.preparing import Options, prepare
from tpuflow.training.stepping import StepFigures, TrainState


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step as pure functions over `state`, which is made to be donated.

    step(state, (inputs, labels)) -> (new state, figures: loss, loss scale, skipped)
    evaluate(state, (inputs, labels)) -> every metric's figures, by name
    outputs(state, inputs) -> what the model gives in training, under the policy
    """

    state: TrainState
    step: Callable[[TrainState, Any], tuple[TrainState, StepFigures]]
    evaluate: Callable[[TrainState, Any], dict[str, Any]]
    outputs: Callable[[TrainState, Any], Any]


def training_step(
    model: Any,
    batch: Any,
    policy: str | amp.Policy = "fp32",
    optimizer: optax.GradientTransformation | None = None,
    loss: str | Loss | LossFunction | None = None,
    *,
    seed: int = 0,
    params: Any = None,
    keep_batchnorm_fp32: bool | None = None,
    loss_scale: amp.LossScale | float | str | None = None,
    accumulate_steps: int = 1,
) -> TrainingStep:
    """The very step that `tpuflow.train` would compile for the device, to run under `jax.jit` beside it, or to look at.

    Args:
      batch: (inputs [B, ...], labels [B, ...]), which the step is made for; the other arguments are those of `tpuflow.train`.

    Raises:
      ConfigError, DataError: as `tpuflow.train`.
    """
    job = prepare(
        Options(
            model=model, data=batch, eval_data=None, policy=policy, optimizer=optimizer, loss=loss, epochs=1, batch_size=len(batch[0]),
            sink_size=-1, chip="generic", seed=seed, params=params, shuffle=False, engine="fast", fidelity="native",
            keep_batchnorm_fp32=keep_batchnorm_fp32, loss_scale=loss_scale, accumulate_steps=accumulate_steps,
        )
    )  # fmt: skip
    recipe = job.recipe

    def outputs(state: TrainState, inputs: Any) -> Any:
        return recipe.outputs(state.params, state.carried, inputs, state.key)

    return TrainingStep(job.state, recipe.train_step, recipe.eval_step, outputs)
