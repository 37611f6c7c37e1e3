"""Precision policies: one row says which types a model is stored, computed, and reported in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow.checking import check_number, check_real, check_switch, check_text
from tpuflow.errors import ConfigError, unknown

CASTS = ("none", "all", "list")
FLOAT_TYPES = ("float32", "float16", "bfloat16")
POSITIVE, TINY = "a positive, finite number", 5e-324  # the smallest number above 0
SCALE_KINDS = ("none", "static", "dynamic")


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{what}: expected one of {', '.join(allowed)}, got {value!r}.")


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the loss is scaled before the backward pass.

    "none" does nothing; "static" multiplies by `initial` always; "dynamic" multiplies the scale by `growth_factor` after every
    `growth_interval` updates without overflow and by `backoff_factor` after one with overflow, but never below `smallest`. With
    `hysteresis` h, the first h - 1 overflows since the scale last grew leave it as it is, as in DeepSpeed.
    An update with overflow is skipped unless `drop_overflow_update` is false, which a dynamic scale does not allow.
    The defaults are those of PyTorch's GradScaler. MindSpore's DynamicLossScaleManager is `MINDSPORE_DYNAMIC`, its
    FixedLossScaleManager(1024, flag) is LossScale("static", 1024, drop_overflow_update=flag).
    """

    kind: str = "none"
    initial: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    smallest: float = 0.0
    drop_overflow_update: bool = True
    hysteresis: int = 1

    def __post_init__(self) -> None:
        _one_of("kind of loss scale", self.kind, SCALE_KINDS)
        check_real("loss scale: initial", self.initial, POSITIVE, TINY)
        check_real("loss scale: growth_factor", self.growth_factor, POSITIVE, TINY)
        check_real("loss scale: backoff_factor", self.backoff_factor, POSITIVE, TINY)
        check_real("loss scale: smallest", self.smallest, "a finite number of at least 0", 0.0)
        check_switch("loss scale: drop_overflow_update", self.drop_overflow_update)
        if self.kind == "dynamic" and not self.drop_overflow_update:
            raise ConfigError("loss scale: a dynamic one backs off by skipping updates, so drop_overflow_update cannot be false.")
        check_number("loss scale: growth_interval", self.growth_interval, 1)
        check_number("loss scale: hysteresis", self.hysteresis, 1)


@dataclass(frozen=True, slots=True)
class Policy:
    """One row of the table of precisions.

    `casts` says how `autocast` chooses types: "none" keeps the function as it is; "all" computes everything in the type of the
    arguments (as PyTorch's `model.half()`), accumulating in fp32; "list" chooses by operation (as PyTorch's `autocast`).
    `norm_dtype` is the type that batch normalisation takes its inputs and parameters in: fp32 or, under "all", the compute type.
    `loss_dtype` is the type the loss is rounded to before it is scaled, differentiated and printed.
    """

    name: str
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    norm_dtype: str = "float32"
    loss_dtype: str = "float32"
    casts: str = "none"
    loss_scale: LossScale = LossScale()
    documented_by: str = ""

    def __post_init__(self) -> None:
        check_text("policy: name", self.name)
        check_text("policy: documented_by", self.documented_by)
        _one_of("casts", self.casts, CASTS)
        for dtype in (self.param_dtype, self.compute_dtype, self.norm_dtype, self.loss_dtype):
            _one_of(f"policy {self.name!r}: element type", dtype, FLOAT_TYPES)
        if self.norm_dtype not in ("float32", self.compute_dtype if self.casts == "all" else "float32"):
            raise ConfigError(
                f"policy {self.name!r}: batch normalisation cannot be kept in {self.norm_dtype}: with casts={self.casts!r} and "
                f"compute_dtype={self.compute_dtype!r} its type is float32{f' or {self.compute_dtype}' * (self.casts == 'all')}. Leave it "
                "there, or choose a policy that computes everything in one type."
            )
        if not isinstance(self.loss_scale, LossScale):
            raise ConfigError(f"policy {self.name!r}: loss_scale must be a tpuflow.amp.LossScale, got {self.loss_scale!r}.")

    @property
    def compute(self) -> Any:
        """The type of matrix operands (and of all arithmetic if `casts` is "all")."""
        return jnp.dtype(self.compute_dtype)

    @property
    def keeps_norms(self) -> bool:
        """Whether batch normalisation has another type than the other layers, so that its parameters are cast differently."""
        return self.casts == "all" and self.norm_dtype != self.compute_dtype

    @property
    def keeps_statistics(self) -> bool:
        """Whether the variables that a model carries (running statistics) stay in fp32: parameters or batch normalisation are in fp32."""
        return "float32" in (self.param_dtype, self.norm_dtype)

    @property
    def surrounds_norms(self) -> bool:
        """Whether batch normalisation has fp32 inputs or statistics and other layers have not, so that its calls need casts around them."""
        return self.casts == "all" and self.keeps_statistics

    def around_norm(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a batch-normalisation layer: casts its inputs to `norm_dtype` and its results to the compute type."""

        def bounded(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = cast_floats((args, kwargs), self.norm_dtype)
            return cast_floats(call(*args, **kwargs), self.compute_dtype)

        return bounded

    def cast_params(self, tree: Any, norms: Any = False) -> Any:
        """The tree with every floating array in the type that parameters are stored in; other leaves are kept.

        norms: a tree of booleans (or a prefix of one) that tells the parameters of batch normalisation, whose type is at least
          `norm_dtype`.
        """
        norm_storage = jnp.promote_types(self.param_dtype, self.norm_dtype)
        told = jax.tree.broadcast(norms, tree)
        return jax.tree.map(lambda leaf, norm: cast_floats(leaf, norm_storage if norm else self.param_dtype), tree, told)

    def cast_inputs(self, tree: Any) -> Any:
        """The tree with every floating array in the compute type if the policy computes everything in it; else as it is."""
        return cast_floats(tree, self.compute_dtype) if self.casts == "all" else tree

    def adjusted(self, keep_batchnorm_fp32: bool | None = None, loss_scale: LossScale | float | str | None = None) -> Policy:
        """The policy with other settings; None keeps the policy's own.

        keep_batchnorm_fp32: batch normalisation in fp32 (True) or in the compute type (False).
        loss_scale: a number (static), "dynamic" (PyTorch's), "none", or a `LossScale`.

        Raises:
          ConfigError: the policy does not allow it, or `loss_scale` is no loss scale.
        """
        row = self
        if keep_batchnorm_fp32 is not None:
            check_switch("keep_batchnorm_fp32", keep_batchnorm_fp32)
            row = replace(row, norm_dtype="float32" if keep_batchnorm_fp32 else row.compute_dtype)
        return row if loss_scale is None else replace(row, loss_scale=get_loss_scale(loss_scale))


def cast_floats(tree: Any, dtype: Any) -> Any:
    """The tree with every floating-point array converted to `dtype`; integers, booleans and random keys stay as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


def is_float(leaf: Any) -> bool:
    """Whether a value is an array with a floating-point element type."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


TORCH_DYNAMIC = LossScale("dynamic", initial=2.0**16)
"""PyTorch's GradScaler."""

MINDSPORE_DYNAMIC = LossScale("dynamic", initial=2.0**24, smallest=1.0)
"""MindSpore's DynamicLossScaleManager(init_loss_scale=2**24, scale_factor=2, scale_window=2000)."""

LOSS_SCALES = {"none": LossScale(), "dynamic": TORCH_DYNAMIC}
"""The loss scales that have a name."""

POLICIES = {
    row.name: row
    for row in (
        Policy("fp32", documented_by="torch-tpu, MindSpore"),
        Policy("O0", documented_by="MindSpore's name of fp32"),
        Policy("fp16", "float16", "float16", "float16", "float16", "all", documented_by="torch-tpu model.half()"),
        Policy("mixed", "float32", "float16", "float32", "float16", "list", TORCH_DYNAMIC, "torch-tpu autocast and GradScaler"),
        Policy("O2", "float32", "float16", "float32", "float32", "all", MINDSPORE_DYNAMIC, "MindSpore"),
        Policy("O3", "float32", "float16", "float16", "float32", "all", LossScale("static", initial=1024.0), "MindSpore"),
        Policy("bf16", "bfloat16", "bfloat16", "bfloat16", "float32", "all", documented_by="TPU practice"),
        Policy("mixed_bf16", "float32", "bfloat16", "float32", "float32", "list", documented_by="TPU practice"),
    )
}


def get_policy(policy: str | Policy) -> Policy:
    """The row of a policy name; a `Policy` of the user's own is returned as it is.

    Raises:
      ConfigError: no policy has that name.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    raise unknown("policy", policy, POLICIES, "a tpuflow.amp.Policy of your own", alias=_policy_of_type(policy))


def _policy_of_type(policy: Any) -> str | None:
    """The policy that computes everything in an element type, if that was given instead."""
    try:
        dtype = jnp.dtype(policy).name
    except (TypeError, ValueError):
        return None
    return next((row.name for row in POLICIES.values() if row.param_dtype == row.compute_dtype == dtype), None)


def get_loss_scale(scale: LossScale | float | str) -> LossScale:
    """A loss scale by its name, by its static value, or as it is.

    Raises:
      ConfigError: it is none of them.
    """
    if isinstance(scale, LossScale):
        return scale
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return LossScale("static", initial=float(scale))
    if isinstance(scale, str) and scale in LOSS_SCALES:
        return LOSS_SCALES[scale]
    raise unknown("loss scale", scale, LOSS_SCALES, "a number (static) or a tpuflow.amp.LossScale")
