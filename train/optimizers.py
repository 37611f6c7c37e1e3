"""Optimizers and learning-rate schedules by name, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optax

from train import schedules


@dataclass(frozen=True, slots=True)
class Rates:
    """What a schedule is made of: its rates, and steps counted over the whole training."""

    lr: float
    lr_init: float
    lr_end: float
    warmup_epochs: int
    steps_per_epoch: int
    total_steps: int

    @property
    def warmup_steps(self) -> int:
        """Steps of rising rate."""
        return self.warmup_epochs * self.steps_per_epoch


def _cosine(r: Rates) -> optax.Schedule:
    return schedules.warmup_cosine(r.lr, r.steps_per_epoch, r.warmup_epochs, r.total_steps / r.steps_per_epoch)


SCHEDULES: Mapping[str, Callable[[Rates], float | optax.Schedule]] = {
    "constant": lambda r: r.lr,
    "steps": lambda r: schedules.steps(r.lr, r.total_steps),
    "poly": lambda r: schedules.poly(r.lr_init, r.lr, r.warmup_steps, r.total_steps),
    "linear": lambda r: schedules.linear(r.lr_init, r.lr_end, r.lr, r.warmup_steps, r.total_steps),
    "cosine": _cosine,
}
"""Name -> learning rate, or one for every step, as MindSpore's mixed-precision guide computes them."""

Rate = float | optax.Schedule

OPTIMIZERS: Mapping[str, Callable[[Rate, float], optax.GradientTransformation]] = {
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum=momentum or None),
    "adam": lambda rate, momentum: optax.adam(rate),
    "rmsprop": lambda rate, momentum: optax.rmsprop(rate, momentum=momentum or None),
    "lamb": lambda rate, momentum: optax.lamb(rate),
}


def make_optimizer(
    name: str, rate: Rate, *, momentum: float = 0.0, weight_decay: float = 0.0, clip_norm: float | None = None
) -> optax.GradientTransformation:
    """Clip, then add the weights' decay to the gradients, then the optimizer: as PyTorch's and MindSpore's optimizers order them."""
    before = [optax.clip_by_global_norm(clip_norm)] if clip_norm is not None else []
    decay = [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    last = OPTIMIZERS[name](rate, momentum)
    return optax.chain(*before, *decay, last) if before or decay else last
