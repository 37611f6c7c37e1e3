"""Reading and writing at places that are data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.torch.table import lowers


def _index(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index_of(x: Any, indices: Sequence[Any]) -> Any:
    """NumPy's advanced indexing; None takes all of a dimension."""
    if any(map(_is_mask, indices)):
        raise UnsupportedPrimitiveError("x[mask] has as many elements as the mask has ones; keep the shape: torch.where(mask, x, 0).")
    return x[_index(indices)]


@lowers("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    if any(map(_is_mask, indices)):
        return _masked_put(x, indices, values, accumulate)
    at = x.at[_index(indices)]
    return at.add(values) if accumulate else at.set(values)


def _masked_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    """x[mask] = value, with one value for all."""
    if len(indices) != 1 or values.size != 1:
        raise UnsupportedPrimitiveError(
            "x[mask] = values takes as many values as the mask has ones; keep the shape: torch.where(mask, values, x) with values like x."
        )
    (mask,) = indices
    mask = mask.astype(jnp.bool_).reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    value = values.reshape(())
    return jnp.where(mask, x + value if accumulate else value, x)


@lowers("aten.put.default")
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """At places of the flattened array."""
    return _index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate).reshape(x.shape)


@lowers("aten.take.default")
def _take(x: Any, index: Any) -> Any:
    return x.reshape(-1)[index]


@lowers("aten.embedding.default")
def _embedding(weight: Any, indices: Any, *_: Any) -> Any:
    return jnp.take(weight, indices, 0, mode="clip")


@lowers("aten.index_select.default")
def _index_select(x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, index, dim, mode="clip") if x.ndim else x


def _grid(index: Any, dim: int) -> tuple[Any, ...]:
    """Full indices of the elements that gather and scatter name: `index` along `dim`, every other position as it is."""
    places = [jnp.arange(n, dtype=jnp.int32).reshape(-1, *(1,) * (index.ndim - d - 1)) for d, n in enumerate(index.shape)]
    places[dim] = index
    return tuple(jnp.broadcast_arrays(*places))


@lowers("aten.gather.default")
def _gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """`index` may be smaller than `x` in the other dimensions."""
    if not index.ndim or not x.ndim:
        return x.reshape(-1)[index]
    cut = x[tuple(slice(None) if d == dim % x.ndim else slice(n) for d, n in enumerate(index.shape))]
    return jnp.take_along_axis(cut, index, dim, mode="clip")


def _one_in_each(x: Any, dim: int, index: Any) -> bool:
    """Whether exactly one place along `dim` is named for all others: such a scatter is a choice, element by element."""
    return index.ndim == x.ndim and all(n == (1 if d == dim else x.shape[d]) for d, n in enumerate(index.shape))


@lowers("aten.scatter.src", "aten.scatter.value")
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    dim = dim % max(1, x.ndim)
    values = jnp.asarray(source, x.dtype)
    if _one_in_each(x, dim, index):
        places = jnp.arange(x.shape[dim], dtype=jnp.int32).reshape(-1, *(1,) * (x.ndim - dim - 1))
        return jnp.where(places == index, values if not values.ndim else _like(values, index), x)
    return x.at[_grid(index, dim)].set(values if not values.ndim else _like(values, index))


def _like(source: Any, index: Any) -> Any:
    """The part of a source that an index of no larger shape names."""
    return source[tuple(map(slice, index.shape))]


@lowers("aten.scatter_add.default")
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_grid(index, dim % max(1, x.ndim))].add(_like(source, index))


_REDUCED = {"sum": "add", "add": "add", "prod": "multiply", "multiply": "multiply", "amax": "max", "amin": "min"}
_NEUTRAL = {"add": 0, "multiply": 1}


@lowers("aten.scatter_reduce.two")
def _scatter_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    if reduce not in _REDUCED:
        raise UnsupportedPrimitiveError(f"scatter_reduce has no row for reduce={reduce!r}; those of {', '.join(_REDUCED)} have.")
    grid, method = _grid(index, dim % max(1, x.ndim)), _REDUCED[reduce]
    start = x if include_self else x.at[grid].set(_neutral(method, x.dtype))
    return getattr(start.at[grid], method)(_like(source, index))


def _neutral(method: str, dtype: Any) -> Any:
    if method in _NEUTRAL:
        return _NEUTRAL[method]
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return info.min if method == "max" else info.max
