"""AdamW under a schedule, as transformers' Trainer sets it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from train.schedules import from_rates
from train.trainer.options import TrainerOptions
from train.trainer.schedules import SCHEDULERS

NOT_DECAYED = frozenset({"bias", "scale"})
"""Leaves without weight decay: biases and the weights of norms."""


def rates(options: TrainerOptions, total: int) -> np.ndarray:
    """The rate of every update, and what is left after the last: float64 [total + 1]."""
    warmup = 0 if options.lr_scheduler_type == "constant" else options.warmup_steps
    steps = np.arange(total + 1, dtype=np.float64)
    shape = SCHEDULERS[options.lr_scheduler_type](steps, warmup, total)
    return options.learning_rate * np.where(steps < warmup, steps / max(1, warmup), shape)


def decayed(params: Any) -> Any:
    """Which leaves decay where biases and norms do not: a tree of booleans."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key not in NOT_DECAYED, params)


def optimizer(options: TrainerOptions, total: int, mask: Callable[[Any], Any] | None = decayed) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm. mask: which leaves decay; None: all."""
    adamw = optax.adamw(
        from_rates(rates(options, total)), options.adam_beta1, options.adam_beta2, options.adam_epsilon,
        weight_decay=options.weight_decay, mask=mask,
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(options.max_grad_norm), adamw) if options.max_grad_norm else adamw
