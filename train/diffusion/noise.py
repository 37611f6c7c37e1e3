"""How much noise there is at each timestep of a diffusion: diffusers' schedules of betas, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax import numpy as jnp

from models.configs import FileConfig

LARGEST_BETA = 0.999
"""Of squaredcos_cap_v2, as Nichol and Dhariwal (2021) have it: beyond, the last steps would be singular."""


def _between(first: float, last: float, count: int) -> np.ndarray:
    """Evenly spaced numbers [count], counted in fp32 from both ends towards the middle and rounded once each, as PyTorch's linspace."""
    start, end = np.float32(first), np.float32(last)
    step, places = np.float64((end - start) / np.float32(max(count - 1, 1))), np.arange(count)
    return np.where(places < count // 2, start + step * places, end - step * (count - 1 - places)).astype(np.float32)


def _linear(schedule: NoiseSchedule) -> np.ndarray:
    return _between(schedule.beta_start, schedule.beta_end, schedule.num_train_timesteps)


def _scaled_linear(schedule: NoiseSchedule) -> np.ndarray:
    """Linear in the roots, as latent diffusion was trained."""
    return np.square(_between(schedule.beta_start**0.5, schedule.beta_end**0.5, schedule.num_train_timesteps))


def _squared_cosine(schedule: NoiseSchedule) -> np.ndarray:
    """What is left of the signal falls as a squared cosine (Nichol and Dhariwal, 2021)."""

    def left(share: float) -> float:
        return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

    count = schedule.num_train_timesteps
    return np.asarray([min(1 - left((i + 1) / count) / left(i / count), LARGEST_BETA) for i in range(count)], np.float32)


BETAS: Mapping[str, Callable[[NoiseSchedule], np.ndarray]] = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _squared_cosine,
}
"""beta_schedule -> betas, fp32 [timesteps]."""

SPACINGS = ("leading", "trailing", "linspace")
PREDICTIONS = ("epsilon", "v_prediction", "sample")


@dataclass(frozen=True)
class NoiseSchedule(FileConfig):
    """What the schedulers have in common, under the names of diffusers' `scheduler_config.json`.

    A file that another class wrote is read too, as diffusers does: DDIM may sample what was trained by DDPM. Keys that it does not have get
    the class's own defaults.
    """

    KIND: ClassVar[str] = "_class_name"
    FILE: ClassVar[str] = "scheduler_config.json"
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType({"thresholding": False})
    ARCHITECTURE: ClassVar[str]
    """diffusers' class that computes the same."""
    LEAST_SIGNAL: ClassVar[float] = 0.0
    """What is left of the signal after the last timestep with `rescale_betas_zero_snr`."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: float = 0
    rescale_betas_zero_snr: bool = False

    @classmethod
    def kind(cls) -> str:
        """As `FileConfig.kind`."""
        return cls.ARCHITECTURE

    @classmethod
    def choices(cls) -> Mapping[str, Collection[str]]:
        """As `FileConfig.choices`."""
        return {"beta_schedule": BETAS, "prediction_type": PREDICTIONS, "timestep_spacing": SPACINGS}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """The schedule that a `scheduler_config.json` says, of whichever class.

        Raises:
          ValueError: it asks for something that is not computed here, or a value is none.
        """
        defaults_of_its_class = json.get("_use_default_values", ())
        keys = {key: value for key, value in json.items() if key not in defaults_of_its_class}
        return cls._from_keys(keys, f"{cls.FILE} for {cls.ARCHITECTURE}")

    def conflicts(self) -> list[str]:
        """Betas lie between 0 and 1, offsets are whole, and there are as many betas as timesteps."""
        found: list[str] = []
        if not 0 < self.beta_start <= self.beta_end < 1:
            found.append(f"beta_start is {self.beta_start} and beta_end {self.beta_end}, expected 0 < beta_start <= beta_end < 1")
        if self.steps_offset != int(self.steps_offset):
            found.append(f"steps_offset is {self.steps_offset}, expected a whole number")
        if self.trained_betas is not None and len(self.trained_betas) != self.num_train_timesteps:
            found.append(f"trained_betas are {len(self.trained_betas)}, expected num_train_timesteps, {self.num_train_timesteps}")
        return found

    @cached_property
    def betas(self) -> np.ndarray:
        """The variance that each timestep adds: fp32 [timesteps]."""
        betas = BETAS[self.beta_schedule](self) if self.trained_betas is None else np.asarray(self.trained_betas, np.float32)
        return _without_terminal_signal(betas) if self.rescale_betas_zero_snr else betas

    @cached_property
    def alphas_cumprod(self) -> np.ndarray:
        """The share of the signal's variance that is left after each timestep: fp32 [timesteps]."""
        left = _products(1 - self.betas)
        return np.append(left[:-1], np.float32(self.LEAST_SIGNAL)) if self.rescale_betas_zero_snr else left

    def add_noise(self, samples: jax.Array, noise: jax.Array, timesteps: jax.Array) -> jax.Array:
        """sqrt(a) * samples + sqrt(1 - a) * noise with a of each sample's timestep: samples, noise [B, ...], timesteps [B] of integers."""
        signal, spread = self._scales(samples, timesteps)
        return signal * samples + spread * noise

    def velocity(self, samples: jax.Array, noise: jax.Array, timesteps: jax.Array) -> jax.Array:
        """What a v-prediction model predicts (Salimans and Ho, 2022): sqrt(a) * noise - sqrt(1 - a) * samples, shapes as in `add_noise`."""
        signal, spread = self._scales(samples, timesteps)
        return signal * noise - spread * samples

    def timesteps(self, steps: int) -> np.ndarray:
        """Where so many steps of sampling are, the noisiest first: fp32 [steps], whole numbers here.

        Raises:
          ValueError: the spacing gives another number of steps, or one outside of the schedule.
        """
        self._check_steps(steps)
        places = SPACED[self.timestep_spacing](self.num_train_timesteps, steps, int(self.steps_offset))
        return self._within(places.astype(np.float32), steps)

    def _scales(self, samples: jax.Array, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """sqrt(a), sqrt(1 - a), [B, 1, ...] in the samples' type."""
        left = jnp.asarray(self.alphas_cumprod, samples.dtype)[timesteps]
        left = left.reshape(left.shape + (1,) * (samples.ndim - left.ndim))
        return jnp.sqrt(left), jnp.sqrt(1 - left)

    def _check_steps(self, steps: int) -> None:
        if not 1 <= steps <= self.num_train_timesteps:
            raise ValueError(f"{steps} steps of sampling: expected 1 to num_train_timesteps, {self.num_train_timesteps}")

    def _within(self, places: np.ndarray, steps: int) -> np.ndarray:
        if len(places) != steps or places.max() >= self.num_train_timesteps or places.min() < 0:
            raise ValueError(
                f"{steps} steps of sampling with timestep_spacing {self.timestep_spacing!r} and steps_offset {self.steps_offset} are "
                f"{len(places)} timesteps from {places.max():g} to {places.min():g}, expected {steps} between 0 and "
                f"{self.num_train_timesteps - 1}; take another number of steps"
            )
        return places


def _leading(count: int, steps: int, offset: int) -> np.ndarray:
    return np.arange(steps)[::-1] * (count // steps) + offset


def _trailing(count: int, steps: int, offset: int) -> np.ndarray:
    return np.round(np.arange(count, 0, -count / steps)) - 1


def _linspace(count: int, steps: int, offset: int) -> np.ndarray:
    return np.round(np.linspace(0, count - 1, steps))[::-1]


SPACED: Mapping[str, Callable[[int, int, int], np.ndarray]] = {"leading": _leading, "trailing": _trailing, "linspace": _linspace}
"""timestep_spacing -> whole timesteps of so many steps (Lin et al., 2023, table 2); only "leading" has an offset."""


def _products(alphas: np.ndarray) -> np.ndarray:
    """Cumulative products of fp32 numbers, carried in fp64 and rounded at each place, as PyTorch computes them."""
    return np.cumprod(alphas, dtype=np.float64).astype(np.float32)


def _without_terminal_signal(betas: np.ndarray) -> np.ndarray:
    """Betas scaled so that the last timestep is nothing but noise (Lin et al., 2023, algorithm 1)."""
    roots = np.sqrt(_products(1 - betas))
    first, last = roots[0], roots[-1]
    left = np.square((roots - last) * (first / (first - last)))
    return 1 - np.concatenate([left[:1], left[1:] / left[:-1]])
