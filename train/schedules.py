"""Learning-rate schedules of MindSpore's mixed-precision guide, as Optax schedules.

The guide computes one rate for each step in float64, rounds the list to float32 and hands it to the optimizer. So do these: the list is a
constant of the program, looked up by the step's number on the device, and its values are the guide's to the last bit. After the last step
the last rate stays.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import optax
from jax import numpy as jnp

from tpuflow.errors import ConfigError

STEP_BOUNDS = (0.3, 0.6, 0.8)
"""Shares of all steps at which `steps` divides the rate by ten."""


def from_rates(rates: np.ndarray) -> optax.Schedule:
    """The schedule that gives rates[step], float [steps], in float32."""
    if rates.ndim != 1 or not len(rates):
        raise ConfigError(f"learning rates: expected a list with one number a step, got an array of shape {list(rates.shape)}.")
    table = np.asarray(rates, np.float32)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(jnp.asarray(table), jnp.asarray(step, jnp.int32), keepdims=False)  # clamps to the last

    return schedule


def steps(lr_max: float, total_steps: int) -> optax.Schedule:
    """`lr_max`, a tenth of it from 30 % of all steps on, a hundredth from 60 %, a thousandth from 80 %."""
    bounds = [share * _positive("total_steps", total_steps) for share in STEP_BOUNDS]
    passed = np.searchsorted(bounds, np.arange(total_steps), side="right")
    return from_rates(np.array([lr_max, lr_max * 0.1, lr_max * 0.01, lr_max * 0.001])[passed])


def poly(lr_init: float, lr_max: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Linear from `lr_init` to `lr_max` in the warm-up, then lr_max * (share of the steps left) squared."""
    i = _steps(warmup_steps, total_steps)
    slope = (lr_max - lr_init) / warmup_steps if warmup_steps else 0.0
    left = 1.0 - (i - warmup_steps) / max(total_steps - warmup_steps, 1)
    return from_rates(np.where(i < warmup_steps, lr_init + slope * i, np.maximum(lr_max * left * left, 0.0)))


def linear(lr_init: float, lr_end: float, lr_max: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Linear from `lr_init` to `lr_max` in the warm-up, then linear to `lr_end`."""
    i = _steps(warmup_steps, total_steps)
    rising = lr_init + (lr_max - lr_init) * i / max(warmup_steps, 1)
    falling = lr_max - (lr_max - lr_end) * (i - warmup_steps) / max(total_steps - warmup_steps, 1)
    return from_rates(np.where(i < warmup_steps, rising, falling))


def warmup_cosine(lr: float, steps_per_epoch: int, warmup_epochs: float, max_epoch: float = 120, global_step: int = 0) -> optax.Schedule:
    """Linear from `lr` / (steps of the warm-up) to `lr`, then the product of a line and 0.47 periods of a cosine, from `global_step` on."""
    total_steps, warmup_steps = int(max_epoch * steps_per_epoch), int(warmup_epochs * steps_per_epoch)
    i = _steps(warmup_steps, total_steps)
    decay_steps = max(total_steps - warmup_steps, 1)
    rising = lr / max(warmup_steps, 1) * (i + 1)
    cosine = 0.5 * (1 + np.cos(np.pi * 2 * 0.47 * i / decay_steps))
    falling = lr * ((total_steps - i) / decay_steps * cosine + 0.00001)
    return from_rates(np.where(i < warmup_steps, rising, falling)[global_step:])


MODES: dict[str, Callable[..., optax.Schedule]] = {
    "steps": lambda lr_init, lr_end, lr_max, warmup, total: steps(lr_max, total),
    "poly": lambda lr_init, lr_end, lr_max, warmup, total: poly(lr_init, lr_max, warmup, total),
    "linear": lambda lr_init, lr_end, lr_max, warmup, total: linear(lr_init, lr_end, lr_max, warmup, total),
}
"""What `get_lr` knows; the guide takes everything that is neither "steps" nor "poly" for "linear"."""


def get_lr(
    lr_init: float, lr_end: float, lr_max: float, warmup_epochs: int, total_epochs: int, steps_per_epoch: int, lr_decay_mode: str
) -> optax.Schedule:
    """The guide's function of this name, with epochs instead of steps.

    Raises:
      ConfigError: the mode is unknown, or the epochs and steps make no schedule.
    """
    if lr_decay_mode not in MODES:
        raise ConfigError(f"unknown lr_decay_mode {lr_decay_mode!r}; there are: {', '.join(MODES)}.")
    return MODES[lr_decay_mode](lr_init, lr_end, lr_max, steps_per_epoch * warmup_epochs, steps_per_epoch * total_epochs)


def _steps(warmup_steps: int, total_steps: int) -> np.ndarray:
    """The number of every step, as float64 [total_steps]."""
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps: expected 0 or more, got {warmup_steps}.")
    return np.arange(_positive("total_steps", total_steps), dtype=np.float64)


def _positive(what: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{what}: expected 1 or more, got {value}.")
    return value
