"""Pictures from prompts: one function with a loop over the steps of sampling, for `tpuflow.jit` or `jax.jit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp

from train.diffusion.folders import Pipeline
from train.diffusion.schedulers import Scheduler, Step


@dataclass(frozen=True, eq=False)
class Sampler:
    """What a sampling is, but for arrays: models and scheduler, so many steps, pictures of [height, width] pixels.

    guidance_scale: how far the prediction goes from the one without the prompt through the one with it (Ho and Salimans, 2022); up to 1
    there is no such guidance, and the model is asked once a step. dtype: what the models compute in.
    """

    pipeline: Pipeline
    scheduler: Scheduler
    steps: int
    guidance_scale: float
    height: int
    width: int
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        """Raise ValueError if latents of such pictures do not go through the UNet, or the schedule does not have so many steps."""
        least = self.pipeline.configs["vae"].reduction * self.pipeline.configs["unet"].reduction
        if self.height % least or self.width % least:
            raise ValueError(f"pictures of {self.height}x{self.width}: expected multiples of {least} pixels, for this UNet and VAE")
        self.scheduler.steps(self.steps)

    @property
    def guided(self) -> bool:
        """Whether the model is asked with and without the prompt."""
        return self.guidance_scale > 1

    def latent_shape(self, count: int) -> tuple[int, int, int, int]:
        """The shape of so many pictures' latents [B, H / f, W / f, L]."""
        vae = self.pipeline.configs["vae"]
        return count, self.height // vae.reduction, self.width // vae.reduction, vae.latent_channels

    def draw(self, variables: Mapping[str, Any], prompts: jax.Array, others: jax.Array, key: jax.Array) -> jax.Array:
        """Pictures [B, H, W, C] of prompts [B, T]: the latents that it begins with, standard normal, are drawn too; as `sample`."""
        first, later = jax.random.split(key)
        return self.sample(variables, prompts, others, jax.random.normal(first, self.latent_shape(len(prompts))), later)

    def sample(
        self, variables: Mapping[str, Any], prompts: jax.Array, others: jax.Array, latents: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Pictures [B, H, W, C] from 0 to 1 for tokens of prompts [B, T], and of what is not wanted [B, T], from standard normal latents.

        variables: of the pipeline's parts, in `dtype`. key: for the noise that some schedulers add on the way, see `adds_noise`.
        """
        text = self._text(variables, prompts, others)
        deviation = jnp.float32(self.scheduler.initial_deviation(self.steps))
        latents = self._denoised(variables, text, deviation * latents.astype(jnp.float32), key)
        vae = self.pipeline.model("vae")
        scaled = (latents / self.pipeline.configs["vae"].scaling_factor).astype(self.dtype)
        pictures = vae.apply(variables["vae"], scaled, method="decode").astype(jnp.float32)
        return jnp.clip(pictures / 2 + 0.5, 0, 1)

    @property
    def adds_noise(self) -> bool:
        """Whether the scheduler adds noise on the way."""
        return bool(self.scheduler.steps(self.steps).noise.any())

    def _text(self, variables: Mapping[str, Any], prompts: jax.Array, others: jax.Array) -> jax.Array:
        """The text encoder's results for what is not wanted and the prompts, in this order [2 B, T, D]; for the prompts alone [B, T, D]."""
        tokens = jnp.concatenate([others, prompts]) if self.guided else prompts
        return self.pipeline.model("text_encoder").apply(variables["text_encoder"], tokens)

    def _denoised(self, variables: Mapping[str, Any], text: jax.Array, latents: jax.Array, key: jax.Array | None) -> jax.Array:
        tables = jax.tree.map(jnp.asarray, self.scheduler.steps(self.steps))
        noisy = self.adds_noise
        if noisy and key is None:
            raise ValueError(f"{type(self.scheduler).__name__} adds noise on the way: give a key, such as jax.random.key(0)")

        def step(latents: jax.Array, place: tuple[jax.Array, Step]) -> tuple[jax.Array, None]:
            number, at = place
            output = self._predicted(variables, text, self.scheduler.scaled(at, latents), at.timestep)
            noise = jax.random.normal(jax.random.fold_in(key, number), latents.shape) if noisy and key is not None else None
            return self.scheduler.step(at, output, latents, noise), None

        return jax.lax.scan(step, latents, (jnp.arange(self.steps), tables))[0]

    def _predicted(self, variables: Mapping[str, Any], text: jax.Array, latents: jax.Array, timestep: jax.Array) -> jax.Array:
        """The model's output for the prompts, guided; in fp32."""
        inputs = (jnp.concatenate([latents, latents]) if self.guided else latents).astype(self.dtype)
        output = self.pipeline.model("unet").apply(variables["unet"], inputs, timestep, text).astype(jnp.float32)
        if not self.guided:
            return output
        without, asked = jnp.split(output, 2)
        return without + self.guidance_scale * (asked - without)
