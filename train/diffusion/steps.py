"""Training steps of Stable Diffusion in full size, from shapes alone: for `tpuflow estimate` and the comparison with published times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from jax import numpy as jnp

from models import autoencoder_kl, clip_text, unet_2d_condition
from tpuflow.amp import get_policy
from tpuflow.training.config import StepConfig
from train.diffusion.folders import Pipeline
from train.diffusion.objective import Objective
from train.diffusion.schedulers import DDPM
from train.diffusion.tuning import Tuning
from train.text.tokenizing import Tokenizer

VAE = autoencoder_kl.Config(
    down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(128, 256, 512, 512),
    layers_per_block=2, sample_size=512,
)  # fmt: skip
"""Of Stable Diffusion 1.x and 2.x."""

SCHEDULE: Mapping[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
FIRST, SECOND = "CompVis/stable-diffusion-v1-4", "stabilityai/stable-diffusion-2-base"
LORA_RANK = 4
ADAMW = optax.adamw(1e-5, weight_decay=1e-2)


def step_of(
    name: str, batch: int, side: int = 512, policy: str = "mixed", *, prediction_type: str = "epsilon", lora_rank: int | None = None,
    gradient_checkpointing: bool = False,
) -> StepConfig:  # fmt: skip
    """The step of `python -m train text_to_image` with AdamW for pictures [batch, side, side, 3] and 77 tokens each.

    name: of `models.unet_2d_condition.SIZES`. prediction_type: of `train.diffusion.options.PREDICTIONS`.
    """
    configs = {"unet": unet_2d_condition.SIZES[name], "vae": VAE, "text_encoder": clip_text.SIZES[name]}
    pipeline, dtype = Pipeline(configs, {}, {}, Tokenizer(Path(), None)), get_policy(policy).compute
    schedule = DDPM(**SCHEDULE, prediction_type=prediction_type)
    objective = Objective(pipeline.model("vae"), pipeline.model("text_encoder"), schedule, dtype)
    pictures = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
    tokens = jax.ShapeDtypeStruct((batch, pipeline.prompt_length), jnp.int32)
    model = Tuning(pipeline, dtype, lora_rank, gradient_checkpointing).model
    return StepConfig(model, (pictures, tokens), policy, ADAMW, loss_fn=objective)


def stable_diffusion_step(batch: int) -> StepConfig:
    """All of the UNet of Stable Diffusion 1.x at 512x512, whose activations are kept for the backward pass."""
    return step_of(FIRST, batch)


def stable_diffusion_checkpointed_step(batch: int) -> StepConfig:
    """The same with inner values of its blocks computed again."""
    return step_of(FIRST, batch, gradient_checkpointing=True)


def stable_diffusion_lora_step(batch: int) -> StepConfig:
    """Matrices of rank 4 beside its projections of attention."""
    return step_of(FIRST, batch, lora_rank=LORA_RANK)


def stable_diffusion_lora_checkpointed_step(batch: int) -> StepConfig:
    """The same with inner values of its blocks computed again."""
    return step_of(FIRST, batch, lora_rank=LORA_RANK, gradient_checkpointing=True)
