"""The exponential moving average of the parameters, kept in fp32; evaluations and saved models use it in their place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpuflow.amp.policy import is_float
from tpuflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EMA:
    """An exponential moving average of the parameters: after every update, average = d * average + (1 - d) * parameters.

    decay: d, from 0 to below 1; or a function of the number of updates so far (an int32 scalar, on the device) that gives it.
    warmup: with a number w above 0, d after t updates is decay * (1 - exp(-t / w)), so that the initial parameters are soon forgotten.
    evaluate: evaluations, `result.predict` and `result.evaluate` use the average.
    statistics: the floats among the variables that the model carries, such as running statistics of batches, are averaged too, and then
      used with the average; else evaluations use them as they are.

    Raises:
      ConfigError: a number is out of its range.
    """

    decay: float | Callable[[jax.Array], jax.Array]
    warmup: float = 0.0
    evaluate: bool = True
    statistics: bool = False

    def __post_init__(self) -> None:
        if not callable(self.decay) and not (isinstance(self.decay, (int, float)) and 0.0 <= self.decay < 1.0):
            raise ConfigError(f"ema: expected a decay from 0 to below 1, or a function of the number of updates, got {self.decay!r}.")
        if not (isinstance(self.warmup, (int, float)) and 0.0 <= self.warmup < math.inf):
            raise ConfigError(f"ema: expected a warm-up of at least 0 updates, got {self.warmup!r}.")

    def decay_after(self, updates: jax.Array) -> jax.Array:
        """d after so many updates, an fp32 scalar."""
        decay = jnp.asarray(self.decay(updates) if callable(self.decay) else self.decay, jnp.float32)
        return decay * -jnp.expm1(-updates.astype(jnp.float32) / self.warmup) if self.warmup else decay


class EMAState(NamedTuple):
    """Updates so far, and the average: trees like the parameters and, if these are averaged, like the carried variables; floats in fp32."""

    updates: jax.Array
    params: Any
    carried: Any = None


def get_ema(given: EMA | float | None) -> EMA | None:
    """An EMA as it is, a number as the decay of one.

    Raises:
      ConfigError: it is neither.
    """
    return given if given is None or isinstance(given, EMA) else EMA(given)


def initial_average(ema: EMA, params: Any, carried: Any) -> EMAState:
    """The average before the first update: the variables themselves."""
    return EMAState(jnp.zeros((), jnp.int32), jax.tree.map(_wide, params), jax.tree.map(_wide, carried) if ema.statistics else None)


def updated_average(ema: EMA, state: EMAState, params: Any, carried: Any, changed: jax.Array) -> EMAState:
    """The average after a step. `changed`: whether the step has updated the parameters; otherwise the average stays the same."""
    updates = state.updates + changed.astype(jnp.int32)
    share = jnp.where(changed, 1.0 - ema.decay_after(updates), 0.0)

    def moved(old: Any, new: Any) -> Any:
        return old + share * (_wide(new) - old) if is_float(new) else new

    statistics = jax.tree.map(moved, state.carried, carried) if ema.statistics else None
    return EMAState(updates, jax.tree.map(moved, state.params, params), statistics)


def averaged(average: Any, like: Any) -> Any:
    """An average, cast from fp32 to the types of `like`."""
    return jax.tree.map(lambda a, p: a.astype(p.dtype), average, like)


def averaged_carried(state: EMAState, carried: Any) -> Any:
    """The carried variables to use with the average: their own average if one is kept."""
    return carried if state.carried is None else averaged(state.carried, carried)


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if is_float(leaf) else leaf
