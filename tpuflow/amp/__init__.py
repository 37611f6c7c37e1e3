"""Precision: policies, automatic casts, loss scaling. Works with plain jax.jit as well."""

from tpuflow.amp.autocast import autocast
from tpuflow.amp.policy import POLICIES, LossScale, Policy, cast_floats, get_policy, is_float
from tpuflow.amp.scaling import (
    LossScaleState,
    all_finite,
    dynamic_loss_scale,
    find_state,
    scale_loss,
    static_loss_scale,
    with_loss_scale,
)

__all__ = [
    "POLICIES",
    "LossScale",
    "LossScaleState",
    "Policy",
    "all_finite",
    "autocast",
    "cast_floats",
    "dynamic_loss_scale",
    "find_state",
    "get_policy",
    "is_float",
    "scale_loss",
    "static_loss_scale",
    "with_loss_scale",
]
