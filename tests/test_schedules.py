"""Learning-rate schedules and losses give what the guide's own code gives."""

from __future__ import annotations

import math

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import tpuflow
from tpuflow.errors import ConfigError
from train import schedules
from train.losses import dense_softmax_cross_entropy

GUIDE = {"lr_init": 0.01, "lr_end": 0.00001, "lr_max": 0.1, "warmup_epochs": 5, "total_epochs": 10, "steps_per_epoch": 156}


def _steps_rate(i, total, warmup, lr_init, lr_end, lr_max):
    for bound, factor in ((0.3, 1.0), (0.6, 0.1), (0.8, 0.01)):
        if i < bound * total:
            return lr_max * factor
    return lr_max * 0.001


def _poly_rate(i, total, warmup, lr_init, lr_end, lr_max):
    increase = (float(lr_max) - float(lr_init)) / float(warmup) if warmup != 0 else 0
    if i < warmup:
        return float(lr_init) + increase * float(i)
    base = 1.0 - (float(i) - float(warmup)) / (float(total) - float(warmup))
    return max(float(lr_max) * base * base, 0.0)


def _linear_rate(i, total, warmup, lr_init, lr_end, lr_max):
    if i < warmup:
        return lr_init + (lr_max - lr_init) * i / warmup
    return lr_max - (lr_max - lr_end) * (i - warmup) / (total - warmup)


def _cosine_rate(i, total, warmup, lr):
    if i < warmup:
        return 0.0 + (float(lr) - 0.0) / float(warmup) * (i + 1)
    decay = total - warmup
    return lr * ((total - i) / decay * (0.5 * (1 + math.cos(math.pi * 2 * 0.47 * i / decay))) + 0.00001)


FORMULAS = {"steps": _steps_rate, "poly": _poly_rate, "linear": _linear_rate}


def _values(schedule: optax.Schedule, count: int) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(count)))


def _assert_same(ours: np.ndarray, formula: list[float]) -> None:
    theirs = np.array(formula).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("warmup_epochs", [0, 5])
@pytest.mark.parametrize("mode", FORMULAS)
def test_every_rate_is_the_guides(mode, warmup_epochs):
    options = {**GUIDE, "warmup_epochs": warmup_epochs}
    total, warmup = options["steps_per_epoch"] * options["total_epochs"], options["steps_per_epoch"] * warmup_epochs
    rates = (options["lr_init"], options["lr_end"], options["lr_max"])
    ours = _values(schedules.get_lr(**options, lr_decay_mode=mode), total)
    _assert_same(ours, [FORMULAS[mode](i, total, warmup, *rates) for i in range(total)])


@pytest.mark.parametrize(("warmup_epochs", "global_step"), [(0, 0), (2, 0), (2, 1000)])
def test_every_rate_of_the_cosine_is_the_guides(warmup_epochs, global_step):
    ours = _values(schedules.warmup_cosine(0.1, 100, warmup_epochs, 12, global_step), 1200 - global_step)
    _assert_same(ours, [_cosine_rate(i, 1200, 100 * warmup_epochs, 0.1) for i in range(global_step, 1200)])


def test_after_the_last_step_the_last_rate_stays():
    schedule = schedules.linear(0.0, 0.25, 1.0, 2, 5)
    np.testing.assert_array_equal([schedule(4), schedule(5), schedule(10**6)], [schedule(4)] * 3)


def test_a_warm_up_longer_than_the_training_never_falls():
    np.testing.assert_allclose(_values(schedules.poly(0.0, 1.0, 10, 4), 4), [0.0, 0.1, 0.2, 0.3], rtol=1e-7)


def test_a_schedule_drives_an_optimizer_on_the_device():
    optimizer = optax.sgd(schedules.linear(0.5, 0.1, 1.0, 2, 4))
    step = tpuflow.jit(lambda state: optimizer.update(jnp.ones(()), state))
    state, rates = optimizer.init(jnp.ones(())), []
    for _ in range(5):
        update, state = step(state)
        rates.append(-float(update))
    np.testing.assert_allclose(rates, [0.5, 0.75, 1.0, 0.55, 0.55], rtol=1e-6)


def test_an_unknown_mode_and_an_empty_training_are_clear_errors():
    with pytest.raises(ConfigError, match=r"'cosine'.*steps, poly, linear"):
        schedules.get_lr(**GUIDE, lr_decay_mode="cosine")
    with pytest.raises(ConfigError, match="total_steps"):
        schedules.poly(0.0, 1.0, 0, 0)
    with pytest.raises(ConfigError, match="one number a step"):
        schedules.warmup_cosine(0.1, 10, 1, 2, global_step=20)


def test_dense_labels_of_zeros_cost_nothing():
    logits = np.random.default_rng(0).normal(size=(32, 10)).astype(np.float32)
    np.testing.assert_array_equal(dense_softmax_cross_entropy(logits, np.zeros((32, 10), np.float32)), np.zeros(32))
