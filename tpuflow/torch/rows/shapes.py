"""Operations that move elements and compute none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.torch.table import lowers

Sizes = Sequence[int]


@lowers("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.view_copy.default", "aten._reshape_alias.default")
def _view(x: Any, size: Sizes, *_: Any) -> Any:
    return jnp.reshape(x, size)


@lowers("aten.view.dtype", "aten.view_copy.dtype")
def _view_bits(x: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(x, dtype)


@lowers("aten.permute.default", "aten.permute_copy.default", "prims.transpose.default")
def _permute(x: Any, dims: Sizes) -> Any:
    return jnp.transpose(x, dims)


@lowers("aten.transpose.int")
def _transpose(x: Any, a: int, b: int) -> Any:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@lowers("aten.t.default")
def _t(x: Any) -> Any:
    return x.T


@lowers("aten.unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@lowers("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze(x: Any, dims: int | Sizes | None = None) -> Any:
    """Only dimensions of one element go."""
    wanted = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple({d % x.ndim for d in wanted if x.shape[d] == 1})) if x.ndim else x


@lowers("aten.expand.default")
def _expand(x: Any, size: Sizes, implicit: bool = False) -> Any:
    """-1 keeps a dimension."""
    own = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [o if s == -1 else s for s, o in zip(size, own, strict=True)])


@lowers("prims.broadcast_in_dim.default")
def _broadcast_in_dim(x: Any, shape: Sizes, dims: Sizes) -> Any:
    return lax.broadcast_in_dim(x, tuple(shape), tuple(dims))


@lowers("aten.repeat.default")
def _repeat(x: Any, repeats: Sizes) -> Any:
    return jnp.tile(x, repeats)


@lowers("aten.cat.default")
def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    """An empty vector joins anything, as it always did in PyTorch."""
    kept = [p for p in parts if p.shape != (0,)] or parts[:1]
    return jnp.concatenate(kept, dim)


@lowers("aten.stack.default")
def _stack(parts: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack(parts, dim)


@lowers("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split_with_sizes(x: Any, sizes: Sizes, dim: int = 0) -> list[Any]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


@lowers("aten.split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> list[Any]:
    return jnp.split(x, list(range(size, x.shape[dim], size)), dim)


@lowers("aten.unbind.int")
def _unbind(x: Any, dim: int = 0) -> list[Any]:
    return list(jnp.moveaxis(x, dim, 0))


def _slice(length: int, start: int | None, end: int | None, step: int) -> slice:
    return slice(*slice(start, end, step).indices(length))


@lowers("aten.slice.Tensor", "aten.slice_copy.Tensor")
def _slice_of(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    at = _slice(x.shape[dim], start, end, step)
    return lax.slice_in_dim(x, at.start, max(at.start, at.stop), step, dim % x.ndim)


@lowers("aten.slice_scatter.default")
def _slice_scatter(x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """`x` with a slice replaced: parts put together, where the slice has no steps."""
    at = _slice(x.shape[dim], start, end, step)
    if step != 1:
        return x.at[(slice(None),) * (dim % x.ndim) + (at,)].set(source)
    before = lax.slice_in_dim(x, 0, at.start, axis=dim)
    return jnp.concatenate([before, source.astype(x.dtype), lax.slice_in_dim(x, max(at.start, at.stop), None, axis=dim)], dim)


@lowers("aten.select.int", "aten.select_copy.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@lowers("aten.select_scatter.default")
def _select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    at = index % x.shape[dim]
    return _slice_scatter(x, jnp.expand_dims(source, dim), dim, at, at + 1)


@lowers("aten.flip.default")
def _flip(x: Any, dims: Sizes) -> Any:
    return jnp.flip(x, tuple(dims)) if dims else x


@lowers("aten.roll.default")
def _roll(x: Any, shifts: Sizes, dims: Sizes = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)


@lowers("aten.constant_pad_nd.default")
def _constant_pad(x: Any, pad: Sizes, value: float = 0) -> Any:
    """`pad` has pairs from the last dimension on; negative ones cut."""
    pairs = [(low, high, 0) for low, high in zip(pad[::2], pad[1::2], strict=True)]
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1])


_PADDED = {"replication": "edge", "reflection": "reflect"}


def _enter_pad_gradient(name: str, mode: str, dims: int) -> None:
    @lowers(f"aten.{name}_pad{dims}d_backward.default")
    def row(grad: Any, x: Any, pad: Sizes) -> Any:
        widths = [(0, 0)] * (x.ndim - dims) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
        _, pull = jax.vjp(lambda x: jnp.pad(x, widths, mode), x)
        return pull(grad)[0]


for _name, _mode in _PADDED.items():
    for _dims in (1, 2, 3):
        _enter_pad_gradient(_name, _mode, _dims)


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("aten.unfold.default")
def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows of `size` every `step` along a dimension; a window's elements are the last dimension."""
    starts = range(0, x.shape[dim] - size + 1, step)
    windows = jnp.asarray([[s + i for i in range(size)] for s in starts], jnp.int32)
    return jnp.moveaxis(jnp.take(x, windows, dim % x.ndim), dim % x.ndim + 1, -1)


def flat_places(size: Sizes, stride: Sizes, offset: int) -> np.ndarray:
    """Where in memory the elements of a strided view lie."""
    places = np.full(tuple(size), offset, np.int32)
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        places += (np.arange(length, dtype=np.int32) * step).reshape(-1, *(1,) * (len(size) - axis - 1))
    return places


def _is_whole(places: np.ndarray, elems: int) -> bool:
    return places.size == elems and bool((places.reshape(-1) == np.arange(elems)).all())


@lowers("aten.as_strided.default", "aten.as_strided_copy.default")
def _as_strided(x: Any, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Any:
    """Of an array that lies in memory in order; the interpreter sees to that."""
    places = flat_places(size, stride, storage_offset or 0)
    return x.reshape(tuple(size)) if _is_whole(places, x.size) else x.reshape(-1)[places]


@lowers("aten.as_strided_scatter.default")
def _as_strided_scatter(x: Any, source: Any, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Any:
    places = flat_places(size, stride, storage_offset or 0)
    if _is_whole(places, x.size):
        return source.reshape(x.shape)
    return x.reshape(-1).at[places].set(source).reshape(x.shape)
