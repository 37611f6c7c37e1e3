"""Precision: policies, automatic casts, loss scaling. Works with plain jax.jit as well."""

from tpuflow.amp.accumulating import Accumulation, AccumulationState, accumulate, has_updated, optimizer_state, when_updated
from tpuflow.amp.autocast import autocast
from tpuflow.amp.policy import (
    LOSS_SCALES,
    MINDSPORE_DYNAMIC,
    POLICIES,
    TORCH_DYNAMIC,
    LossScale,
    Policy,
    cast_floats,
    get_loss_scale,
    get_policy,
    is_float,
)
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
    "LOSS_SCALES",
    "MINDSPORE_DYNAMIC",
    "POLICIES",
    "TORCH_DYNAMIC",
    "Accumulation",
    "AccumulationState",
    "LossScale",
    "LossScaleState",
    "Policy",
    "accumulate",
    "all_finite",
    "autocast",
    "cast_floats",
    "dynamic_loss_scale",
    "find_state",
    "get_loss_scale",
    "get_policy",
    "has_updated",
    "is_float",
    "optimizer_state",
    "scale_loss",
    "static_loss_scale",
    "when_updated",
    "with_loss_scale",
]
