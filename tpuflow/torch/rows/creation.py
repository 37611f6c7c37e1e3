"""Arrays made of nothing. What PyTorch leaves uninitialised is zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tpuflow.torch.table import lowers

Sizes = Sequence[int]


@lowers("aten.full.default")
def _full(size: Sizes, value: Any, dtype: Any = None) -> Any:
    return jnp.full(tuple(size), value, dtype)


@lowers("aten.full_like.default")
def _full_like(x: Any, value: Any, dtype: Any = None) -> Any:
    return jnp.full(x.shape, value, dtype or x.dtype)


@lowers("aten.new_full.default")
def _new_full(x: Any, size: Sizes, value: Any, dtype: Any = None) -> Any:
    return jnp.full(tuple(size), value, dtype or x.dtype)


@lowers("aten.scalar_tensor.default")
def _scalar_tensor(value: Any, dtype: Any = None) -> Any:
    return jnp.asarray(value, dtype)


@lowers("aten.empty.memory_format", "aten.empty_permuted.default", "aten.empty_strided.default", "aten.zeros.default")
def _zeros(size: Sizes, *_: Any, dtype: Any = None) -> Any:
    return jnp.zeros(tuple(size), dtype or jnp.float32)


@lowers("aten.new_empty.default", "aten.new_empty_strided.default", "aten.new_zeros.default")
def _new_zeros(x: Any, size: Sizes, *_: Any, dtype: Any = None) -> Any:
    return jnp.zeros(tuple(size), dtype or x.dtype)


@lowers("aten.empty_like.default", "aten.zeros_like.default")
def _zeros_like(x: Any, dtype: Any = None) -> Any:
    return jnp.zeros(x.shape, dtype or x.dtype)


@lowers("aten.ones.default")
def _ones(size: Sizes, dtype: Any = None) -> Any:
    return jnp.ones(tuple(size), dtype or jnp.float32)


@lowers("aten.ones_like.default")
def _ones_like(x: Any, dtype: Any = None) -> Any:
    return jnp.ones(x.shape, dtype or x.dtype)


@lowers("aten.arange.start", "aten.arange.start_step")
def _arange(start: float, end: float, step: float = 1, dtype: Any = None) -> Any:
    return jnp.arange(start, end, step, dtype)


@lowers("aten.arange.default")
def _arange_to(end: float, dtype: Any = None) -> Any:
    return jnp.arange(end, dtype=dtype)


@lowers("prims.iota.default")
def _iota(length: int, *, start: int, step: int, dtype: Any, requires_grad: bool = False) -> Any:
    return jnp.arange(length, dtype=dtype) * step + start


@lowers("aten.eye.default", "aten.eye.m")
def _eye(n: int, m: int | None = None, dtype: Any = None) -> Any:
    return jnp.eye(n, m, dtype=dtype)


@lowers("aten.tril.default")
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowers("aten.triu.default")
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)
