"""Reductions, running sums, order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuflow.torch.rows.elementwise import as_float
from tpuflow.torch.table import lowers

Axes = int | Sequence[int] | None


def _axes(dim: Axes) -> int | tuple[int, ...] | None:
    """No dimensions are all of them, as ATen has it."""
    return dim if dim is None or isinstance(dim, int) else tuple(dim) or None


def _enter(function: Callable[..., Any], *names: str) -> None:
    @lowers(*names)
    def row(x: Any, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        return function(x if dtype is None else x.astype(dtype), axis=_axes(dim), keepdims=keepdim)


_enter(jnp.sum, "aten.sum.default", "aten.sum.dim_IntList")
_enter(jnp.mean, "aten.mean.default", "aten.mean.dim")
_enter(jnp.prod, "aten.prod.default", "aten.prod.dim_int")
_enter(jnp.max, "aten.amax.default", "aten.max.default")
_enter(jnp.min, "aten.amin.default", "aten.min.default")
_enter(jnp.any, "aten.any.default", "aten.any.dim", "aten.any.dims")
_enter(jnp.all, "aten.all.default", "aten.all.dim", "aten.all.dims")
_enter(jax.scipy.special.logsumexp, "aten.logsumexp.default")
_enter(lambda x, axis, keepdims: jnp.argmax(x, axis, keepdims=keepdims), "aten.argmax.default")
_enter(lambda x, axis, keepdims: jnp.argmin(x, axis, keepdims=keepdims), "aten.argmin.default")


@lowers("aten.max.dim")
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return jnp.max(x, dim, keepdims=keepdim), jnp.argmax(x, dim, keepdims=keepdim)


@lowers("aten.min.dim")
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return jnp.min(x, dim, keepdims=keepdim), jnp.argmin(x, dim, keepdims=keepdim)


@lowers("aten.var_mean.correction")
def _var_mean(x: Any, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    return _var(x, dim, correction=correction, keepdim=keepdim), jnp.mean(x, _axes(dim), keepdims=keepdim)


@lowers("aten.var.correction")
def _var(x: Any, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return jnp.var(x, _axes(dim), ddof=1 if correction is None else correction, keepdims=keepdim)  # type: ignore[arg-type]


@lowers("aten.linalg_vector_norm.default")
def _vector_norm(x: Any, order: float = 2, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = as_float(x if dtype is None else x.astype(dtype))
    axes = tuple(range(x.ndim)) if (given := _axes(dim)) is None else given
    if order == 2:
        return jnp.sqrt(jnp.sum(x * x, axes, keepdims=keepdim))
    if abs(order) == float("inf"):
        return (jnp.max if order > 0 else jnp.min)(jnp.abs(x), axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum(x != 0, axes, keepdims=keepdim)
    return jnp.sum(jnp.abs(x) ** order, axes, keepdims=keepdim) ** (1.0 / order)


@lowers("aten.cumsum.default")
def _cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Of booleans and small integers, counted in 32 bits."""
    small = jnp.issubdtype(x.dtype, jnp.bool_) or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4)
    x = x.astype(dtype or (jnp.int32 if small else x.dtype))
    return lax.cumsum(x, dim % x.ndim) if x.ndim else x


@lowers("aten.cumprod.default")
def _cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    return jnp.cumprod(x, dim, dtype) if x.ndim else x


@lowers("aten.sort.default", "aten.sort.stable")
def _sort(x: Any, *args: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Any, Any]:
    """Always stable; the positional arguments of the two overloads are (dim, descending)."""
    axis, falling = (*args, *(dim, descending)[len(args) :])
    order = jnp.argsort(x, axis, stable=True, descending=bool(falling))
    return jnp.take_along_axis(x, order, axis), order


@lowers("aten.topk.default")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:
    values, order = _sort(x, dim, largest)
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(order, 0, k, axis=dim)


@lowers("aten.histc.default")
def _histc(x: Any, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """How many elements lie in each of `bins` equal stretches; with equal ends, those of the data. The last one holds its upper end."""
    least, most = (jnp.min(x), jnp.max(x)) if low == high else (jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype))
    least, most = jnp.where(least == most, least - 1, least), jnp.where(least == most, most + 1, most)
    place = jnp.floor((x.reshape(-1) - least) * bins / (most - least)).astype(jnp.int32)
    place = jnp.where(x.reshape(-1) == most, bins - 1, place)
    return jnp.sum(place[None, :] == jnp.arange(bins)[:, None], 1)


@lowers("aten._softmax.default")
def _softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.softmax(x.astype(jnp.float32) if half_to_float else x, dim)


@lowers("aten._log_softmax.default")
def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.log_softmax(x.astype(jnp.float32) if half_to_float else x, dim)
