"""Schedulers that sample: DDPM, DDIM and Euler as diffusers has them, as pure functions of tables that a loop walks through."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from train.diffusion.noise import NoiseSchedule

SMALLEST_VARIANCE = 1e-20
"""Of DDPM's posterior, whose logarithm some take."""


class Step(NamedTuple):
    """What a step of sampling is told: scalars, or their tables over all steps, fp32 [steps].

    timestep: what the model gets. here, there: how noisy the sample is before and after the step: for DDPM and DDIM the signal's share, for
    Euler the noise's standard deviation. noise: what is multiplied with the noise that is added.
    """

    timestep: Any
    here: Any
    there: Any
    noise: Any


@dataclass(frozen=True)
class Scheduler(NoiseSchedule):
    """A schedule and how to sample by it: `steps` makes the tables, and `step` takes one row after the other."""

    def initial_deviation(self, steps: int) -> float:
        """The standard deviation of the noise that sampling begins with."""
        return 1.0

    @abc.abstractmethod
    def steps(self, steps: int) -> Step:
        """The tables of so many steps.

        Raises:
          ValueError: the schedule does not have so many.
        """

    def scaled(self, at: Step, sample: jax.Array) -> jax.Array:
        """What the model gets of the sample."""
        return sample

    @abc.abstractmethod
    def step(self, at: Step, output: jax.Array, sample: jax.Array, noise: jax.Array | None) -> jax.Array:
        """The less noisy sample, from the model's output; all [B, ...]. noise: standard normal; None if no step adds any."""


@dataclass(frozen=True)
class ClippingScheduler(Scheduler):
    """A scheduler that may clip the image that it predicts: not done where images are latents."""

    clip_sample: bool = True
    clip_sample_range: float = 1.0

    def predicted(self, at: Step, output: jax.Array, sample: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the image, clipped if asked for, the noise) that the model's output predicts."""
        signal, spread = jnp.sqrt(at.here), jnp.sqrt(1 - at.here)
        if self.prediction_type == "epsilon":
            image, noise = (sample - spread * output) / signal, output
        elif self.prediction_type == "sample":
            image, noise = output, (sample - signal * output) / spread
        else:
            image, noise = signal * sample - spread * output, signal * output + spread * sample
        return jnp.clip(image, -self.clip_sample_range, self.clip_sample_range) if self.clip_sample else image, noise


@dataclass(frozen=True)
class DDPM(ClippingScheduler):
    """Ancestral sampling (Ho et al., 2020, equations 6 and 7). `variance_type`: of what is added at each step but the last."""

    ARCHITECTURE: ClassVar[str] = "DDPMScheduler"
    variance_type: str = "fixed_small"

    @classmethod
    def choices(cls) -> Mapping[str, Collection[str]]:
        """As `FileConfig.choices`."""
        return {**super().choices(), "variance_type": ("fixed_small", "fixed_small_log", "fixed_large")}

    def steps(self, steps: int) -> Step:
        """As `Scheduler.steps`; the step after a timestep is the next one of the table, and after the last there is no noise."""
        timesteps = self.timesteps(steps)
        here = self.alphas_cumprod[timesteps.astype(int)]
        there = np.append(here[1:], np.float32(1))
        beta = 1 - here / there
        variance = np.maximum((1 - there) / (1 - here) * beta, np.float32(SMALLEST_VARIANCE))
        deviation = np.sqrt(beta if self.variance_type == "fixed_large" else variance)
        return Step(timesteps, here, there, np.where(timesteps > 0, deviation, np.float32(0)))

    def step(self, at: Step, output: jax.Array, sample: jax.Array, noise: jax.Array | None) -> jax.Array:
        """As `Scheduler.step`."""
        image, _ = self.predicted(at, output, sample)
        alpha = at.here / at.there
        mean = jnp.sqrt(at.there) * (1 - alpha) / (1 - at.here) * image + jnp.sqrt(alpha) * (1 - at.there) / (1 - at.here) * sample
        return mean if noise is None else mean + at.noise * noise


@dataclass(frozen=True)
class DDIM(ClippingScheduler):
    """Implicit sampling (Song et al., 2021, equations 12 and 16). `eta`, which is not in the file, is the share of DDPM's noise."""

    ARCHITECTURE: ClassVar[str] = "DDIMScheduler"
    OURS: ClassVar[tuple[str, ...]] = ("eta",)
    set_alpha_to_one: bool = True
    eta: float = 0.0

    def steps(self, steps: int) -> Step:
        """As `Scheduler.steps`; a step goes down by the same number of timesteps each, which need not be the table's next one."""
        timesteps = self.timesteps(steps)
        here, before = self.alphas_cumprod[timesteps.astype(int)], timesteps.astype(int) - self.num_train_timesteps // steps
        last = np.float32(1) if self.set_alpha_to_one else self.alphas_cumprod[0]
        there = np.where(before >= 0, self.alphas_cumprod[before], last)
        variance = (1 - there) / (1 - here) * (1 - here / there)
        return Step(timesteps, here, there, np.float32(self.eta) * np.sqrt(variance))

    def step(self, at: Step, output: jax.Array, sample: jax.Array, noise: jax.Array | None) -> jax.Array:
        """As `Scheduler.step`."""
        image, direction = self.predicted(at, output, sample)
        found = jnp.sqrt(at.there) * image + jnp.sqrt(1 - at.there - jnp.square(at.noise)) * direction
        return found if noise is None else found + at.noise * noise


@dataclass(frozen=True)
class Euler(Scheduler):
    """Euler's method over the noise's standard deviation (Karras et al., 2022, algorithm 2 without churn)."""

    ARCHITECTURE: ClassVar[str] = "EulerDiscreteScheduler"
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "interpolation_type": "linear",
            "use_karras_sigmas": False,
            "use_exponential_sigmas": False,
            "use_beta_sigmas": False,
            "timestep_type": "discrete",
            "final_sigmas_type": "zero",
        }
    )
    LEAST_SIGNAL: ClassVar[float] = 2.0**-24
    """The smallest number of fp16, for the deviation to be finite."""
    timestep_spacing: str = "linspace"

    def timesteps(self, steps: int) -> np.ndarray:
        """As `NoiseSchedule.timesteps`; evenly spaced ones need not be whole."""
        if self.timestep_spacing != "linspace":
            return super().timesteps(steps)
        self._check_steps(steps)
        return np.linspace(0, self.num_train_timesteps - 1, steps, dtype=np.float32)[::-1].copy()

    def initial_deviation(self, steps: int) -> float:
        """As `Scheduler.initial_deviation`."""
        largest = self.steps(steps).here.max()
        return float(largest if self.timestep_spacing in ("linspace", "trailing") else np.sqrt(np.square(largest) + 1))

    def steps(self, steps: int) -> Step:
        """As `Scheduler.steps`; between timesteps deviations are interpolated."""
        timesteps, left = self.timesteps(steps), self.alphas_cumprod
        deviations = np.sqrt((1 - left) / left)
        here = np.interp(timesteps, np.arange(len(left)), deviations).astype(np.float32)
        return Step(timesteps, here, np.append(here[1:], np.float32(0)), np.zeros_like(here))

    def scaled(self, at: Step, sample: jax.Array) -> jax.Array:
        """As `Scheduler.scaled`: of variance 1."""
        return sample / jnp.sqrt(jnp.square(at.here) + 1)

    def step(self, at: Step, output: jax.Array, sample: jax.Array, noise: jax.Array | None) -> jax.Array:
        """As `Scheduler.step`."""
        return sample + (sample - self._predicted(at, output, sample)) / at.here * (at.there - at.here)

    def _predicted(self, at: Step, output: jax.Array, sample: jax.Array) -> jax.Array:
        """The image that the model's output predicts."""
        if self.prediction_type == "epsilon":
            return sample - at.here * output
        if self.prediction_type == "sample":
            return output
        power = jnp.square(at.here) + 1
        return output * (-at.here / jnp.sqrt(power)) + sample / power


SCHEDULERS: Mapping[str, type[Scheduler]] = {"ddpm": DDPM, "ddim": DDIM, "euler": Euler}
"""Short name -> scheduler."""
