"""Precision policies: one row says which types a model is stored, computed, and reported in."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow.errors import ConfigError

CASTS = ("none", "all", "list")
FLOAT_TYPES = ("float32", "float16", "bfloat16")
SCALE_KINDS = ("none", "static", "dynamic")


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{what}: expected one of {', '.join(allowed)}, got {value!r}.")


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the loss is scaled before the backward pass.

    "none" does nothing; "static" multiplies by `initial` always; "dynamic" multiplies the scale by `growth_factor` after every
    `growth_interval` steps without overflow and by `backoff_factor` after a step with overflow, which is skipped.
    The defaults are those of PyTorch's GradScaler.
    """

    kind: str = "none"
    initial: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        _one_of("kind of loss scale", self.kind, SCALE_KINDS)
        if not self.initial > 0.0:
            raise ConfigError(f"loss scale: initial must be positive, got {self.initial!r}.")
        if self.growth_interval < 1:
            raise ConfigError(f"loss scale: growth_interval must be at least 1, got {self.growth_interval!r}.")


@dataclass(frozen=True, slots=True)
class Policy:
    """One row of the table of precisions.

    `casts` says how `autocast` chooses types: "none" keeps the function as it is; "all" computes everything in the type of the
    arguments (as PyTorch's `model.half()`), accumulating in fp32; "list" chooses by operation (as PyTorch's `autocast`).
    `norm_dtype` is the type of normalisation statistics, `loss_dtype` the type the loss is rounded to before it is scaled,
    differentiated and printed.
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
        _one_of("casts", self.casts, CASTS)
        for dtype in (self.param_dtype, self.compute_dtype, self.norm_dtype, self.loss_dtype):
            _one_of(f"policy {self.name!r}: element type", dtype, FLOAT_TYPES)
        if not isinstance(self.loss_scale, LossScale):
            raise ConfigError(f"policy {self.name!r}: loss_scale must be a tpuflow.amp.LossScale, got {self.loss_scale!r}.")

    @property
    def compute(self) -> Any:
        """The type of matrix operands (and of all arithmetic if `casts` is "all")."""
        return jnp.dtype(self.compute_dtype)

    def cast_params(self, tree: Any) -> Any:
        """The tree with every floating array in the type that parameters are stored in; other leaves are kept."""
        return cast_floats(tree, self.param_dtype)

    def cast_inputs(self, tree: Any) -> Any:
        """The tree with every floating array in the compute type if the policy computes everything in it; else as it is."""
        return cast_floats(tree, self.compute_dtype) if self.casts == "all" else tree


def cast_floats(tree: Any, dtype: Any) -> Any:
    """The tree with every floating-point array converted to `dtype`; integers, booleans and random keys stay as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


def is_float(leaf: Any) -> bool:
    """Whether a value is an array with a floating-point element type."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


_DYNAMIC = LossScale("dynamic", initial=2.0**16)

POLICIES = {
    row.name: row
    for row in (
        Policy("fp32", documented_by="torch-tpu, MindSpore"),
        Policy("O0", documented_by="MindSpore's name of fp32"),
        Policy("fp16", "float16", "float16", "float16", "float16", "all", documented_by="torch-tpu model.half()"),
        Policy("mixed", "float32", "float16", "float32", "float16", "list", _DYNAMIC, "torch-tpu autocast and GradScaler"),
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
    if policy in POLICIES:
        return POLICIES[policy]
    close = difflib.get_close_matches(str(policy), POLICIES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"unknown policy {policy!r}.{hint} Known policies: {', '.join(POLICIES)}; or pass a tpuflow.amp.Policy of your own.")
