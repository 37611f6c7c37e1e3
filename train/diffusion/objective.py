"""The loss of a step of text-to-image training: what is drawn, what the UNet sees, what it is held against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from train.diffusion.noise import NoiseSchedule


class Draws(NamedTuple):
    """What a step draws, standard normal but for the timesteps.

    latents, noise, perturbation: [B, h, w, L]. timesteps: integers [B]. offset: [B, 1, 1, L].
    offset and perturbation are None where nothing is multiplied with them.
    """

    latents: jax.Array
    noise: jax.Array
    timesteps: jax.Array
    offset: jax.Array | None = None
    perturbation: jax.Array | None = None


@dataclass(frozen=True, eq=False)
class Objective:
    """The `loss_fn` of `tpuflow.train`: the mean squared distance of what the UNet predicts from what it should.

    vae, text_encoder: the Flax modules; their variables are carried under these names, in `dtype`, the type that both compute in.
    schedule: the noise that is added, and what is to be predicted of it. snr_gamma: most that the signal-to-noise ratio may weigh a
    sample's loss by (Hang et al., 2023), None: all weigh the same. noise_offset: share of noise that is the same for all pixels.
    input_perturbation: share of further noise on the UNet's input alone (Ning et al., 2023).
    """

    vae: Any
    text_encoder: Any
    schedule: NoiseSchedule
    dtype: Any = jnp.float32
    snr_gamma: float | None = None
    noise_offset: float = 0.0
    input_perturbation: float = 0.0

    def __call__(self, apply: Any, params: Any, batch: Any, rngs: Any) -> jax.Array:
        """The loss of pictures [B, H, W, C] from -1 to 1 and tokens [B, T], with draws from the device's keys."""
        return self.loss(apply, params, batch, self.draws(rngs, batch[0].shape))

    def draws(self, rngs: Any, pictures: tuple[int, ...]) -> Draws:
        """What a step draws for pictures of a shape [B, H, W, C]; rngs: a key for each name in `Draws`."""
        config, (batch, height, width, _) = self.vae.config, pictures
        shape = (batch, height // config.reduction, width // config.reduction, config.latent_channels)
        return Draws(
            jax.random.normal(rngs["latents"], shape),
            jax.random.normal(rngs["noise"], shape),
            jax.random.randint(rngs["timesteps"], (batch,), 0, self.schedule.num_train_timesteps),
            jax.random.normal(rngs["offset"], (batch, 1, 1, shape[-1])) if self.noise_offset else None,
            jax.random.normal(rngs["perturbation"], shape) if self.input_perturbation else None,
        )

    def loss(self, apply: Any, params: Any, batch: Any, draws: Draws) -> jax.Array:
        """The loss with given draws; `apply.carried` has the variables that stay as they are."""
        pictures, tokens = batch
        latents, text = self.frozen(apply.carried, pictures, tokens, draws.latents)
        noise = draws.noise if draws.offset is None else draws.noise + self.noise_offset * draws.offset
        added = noise if draws.perturbation is None else noise + self.input_perturbation * draws.perturbation
        predicted = apply(params, self.schedule.add_noise(latents, added, draws.timesteps), draws.timesteps, text)
        losses = jnp.square(predicted - self.target(latents, noise, draws.timesteps))
        if self.snr_gamma is None:
            return jnp.mean(losses)
        return jnp.mean(jnp.mean(losses, axis=(1, 2, 3)) * jnp.asarray(self.snr_weights)[draws.timesteps])

    def frozen(self, carried: Any, pictures: jax.Array, tokens: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(scaled latents [B, h, w, L], text [B, T, D]) in fp32, which the frozen models compute in `dtype`."""
        found = self.vae.apply({"params": carried["vae"]}, pictures.astype(self.dtype), method="encode")
        latents = found.drawn(noise.astype(self.dtype)) * self.vae.config.scaling_factor
        text = self.text_encoder.apply({"params": carried["text_encoder"]}, tokens)
        return latents.astype(jnp.float32), text.astype(jnp.float32)

    def target(self, latents: jax.Array, noise: jax.Array, timesteps: jax.Array) -> jax.Array:
        """What the UNet should predict: the noise, or the velocity."""
        return noise if self.schedule.prediction_type == "epsilon" else self.schedule.velocity(latents, noise, timesteps)

    @cached_property
    def snr_weights(self) -> np.ndarray:
        """What a sample's loss is multiplied by at each timestep: min(snr, gamma) / snr, of velocities / (snr + 1); fp32 [timesteps]."""
        left = self.schedule.alphas_cumprod.astype(np.float64)
        snr = left / (1 - left)
        per = snr if self.schedule.prediction_type == "epsilon" else snr + 1
        return (np.minimum(snr, np.inf if self.snr_gamma is None else self.snr_gamma) / per).astype(np.float32)
