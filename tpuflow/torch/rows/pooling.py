"""Pooling and its gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.torch.table import lowers

Sizes = Sequence[int]


class Windows:
    """Pooling windows over the last dimensions of an array, in PyTorch's words."""

    def __init__(self, x: Any, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes = (1,), ceil_mode: bool = False, *, dims: int):
        self.lead = x.ndim - dims
        self.size = x.shape[self.lead :]
        self.kernel, self.padding, self.dilation = (for_each(v, dims) for v in (kernel, padding, dilation))
        self.stride = for_each(stride, dims) if len(stride) else self.kernel
        self.out = tuple(self._out(d, ceil_mode=ceil_mode) for d in range(dims))
        self.pads = [(self.padding[d], self._after(d)) for d in range(dims)]

    def _span(self, d: int) -> int:
        return self.dilation[d] * (self.kernel[d] - 1) + 1

    def _out(self, d: int, *, ceil_mode: bool) -> int:
        """In ceil mode a window may hang over the end, but none begins in the padding there."""
        room = self.size[d] + 2 * self.padding[d] - self._span(d)
        if not ceil_mode:
            return room // self.stride[d] + 1
        out = -(-room // self.stride[d]) + 1
        return out - 1 if (out - 1) * self.stride[d] >= self.size[d] + self.padding[d] else out

    def _after(self, d: int) -> int:
        return max(0, (self.out[d] - 1) * self.stride[d] + self._span(d) - self.size[d] - self.padding[d])

    def reduce(self, x: Any, start: Any, function: Callable[[Any, Any], Any]) -> Any:
        """One value of each window."""
        ones, none = (1,) * self.lead, [(0, 0)] * self.lead
        y = lax.reduce_window(
            x, start, function, (*ones, *self.kernel), (*ones, *self.stride), [*none, *self.pads], window_dilation=(*ones, *self.dilation)
        )
        return y[(..., *map(slice, self.out))]

    def slices(self, x: Any, fill: Any) -> list[tuple[tuple[int, ...], Any]]:
        """For each place in the window: the place, and that element of every window."""
        padded = lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * self.lead + [(a, b, 0) for a, b in self.pads])
        return [(place, self._slice(padded, place)) for place in itertools.product(*map(range, self.kernel))]

    def _slice(self, padded: Any, place: tuple[int, ...]) -> Any:
        for d, at in enumerate(place):
            first = at * self.dilation[d]
            padded = lax.slice_in_dim(padded, first, first + (self.out[d] - 1) * self.stride[d] + 1, self.stride[d], self.lead + d)
        return padded

    def first(self, d: int) -> Any:
        """Where each window begins along one dimension, shaped to broadcast over the others."""
        starts = jnp.arange(self.out[d], dtype=jnp.int32) * self.stride[d] - self.padding[d]
        return starts.reshape(-1, *(1,) * (len(self.out) - d - 1))


def for_each(values: Sizes, count: int) -> tuple[int, ...]:
    """One value for each dimension, of as many or of one for all."""
    return tuple(values) * count if len(values) == 1 else tuple(values)


def lowest(dtype: Any) -> Any:
    """What every element is at least."""
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _max_pool_with_indices(
    x: Any, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), dilation: Sizes = (1,), ceil_mode: bool = False, *, dims: int
) -> tuple[Any, Any]:
    """The largest element of each window, and where in the plane it lies: the first of equals, the last NaN."""
    windows = Windows(x, kernel, stride, padding, dilation, ceil_mode, dims=dims)
    candidates = []
    for place, values in windows.slices(x, lowest(x.dtype)):
        positions = [windows.first(d) + k * windows.dilation[d] for d, k in enumerate(place)]
        inside = [(at >= 0) & (at < n) for at, n in zip(positions, windows.size, strict=True)]
        candidates.append((values, positions, inside))
    return _largest(candidates, windows.size, x.dtype)


def _adaptive_max_pool(x: Any, size: Sizes, *, dims: int) -> tuple[Any, Any]:
    """The largest element of stretches that divide each dimension, and where in the plane it lies."""
    lengths = x.shape[x.ndim - dims :]
    starts, ends = zip(*(_ends(length, out) for length, out in zip(lengths, size, strict=True)), strict=True)
    candidates = []
    for place in itertools.product(*(range(int((end - start).max())) for start, end in zip(starts, ends, strict=True))):
        values, positions, inside = x, [], []
        for d, k in enumerate(place):
            at = np.minimum(starts[d] + k, lengths[d] - 1)
            values = jnp.take(values, at, x.ndim - dims + d)
            shape = (-1, *(1,) * (dims - d - 1))
            positions.append(jnp.asarray(at).reshape(shape))
            inside.append(jnp.asarray(starts[d] + k < ends[d]).reshape(shape))
        candidates.append((values, positions, inside))
    return _largest(candidates, lengths, x.dtype)


def _largest(candidates: Sequence[tuple[Any, Sequence[Any], Sequence[Any]]], size: Sizes, dtype: Any) -> tuple[Any, Any]:
    """Of (values, their positions in each dimension, whether these count): the largest values, and their places in a plane of `size`."""
    best = jnp.full(candidates[0][0].shape, lowest(dtype), dtype)
    found = jnp.full(best.shape, -1, jnp.int32)
    for values, positions, inside in candidates:
        place = functools.reduce(lambda flat, row: flat * row[0] + row[1], zip(size, positions, strict=True), jnp.int32(0))
        better = functools.reduce(jnp.logical_and, inside, (values > best) | jnp.isnan(values) | (found < 0))
        best, found = jnp.where(better, values, best), jnp.where(better, place, found)
    return best, found


def _max_pool_backward(grad: Any, x: Any, *options: Any, dims: int) -> Any:
    """To the places that the indices, the last argument, name: added up where windows share one."""
    rows = _product(x.shape[: x.ndim - dims])
    flat, indices = grad.reshape(rows, -1), options[-1].reshape(rows, -1)
    zeros = jnp.zeros((rows, x.size // max(1, rows)), grad.dtype)
    return zeros.at[jnp.arange(rows, dtype=jnp.int32)[:, None], indices].add(flat).reshape(x.shape)


def _product(sizes: Sizes) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def _avg_pool(
    x: Any, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil_mode: bool = False, count_include_pad: bool = True,
    divisor: int | None = None, *, dims: int,
) -> Any:  # fmt: skip
    windows = Windows(x, kernel, stride, padding, ceil_mode=ceil_mode, dims=dims)
    total = windows.reduce(x, x.dtype.type(0), lax.add)  # a literal, by which JAX knows a sum
    if divisor is not None:
        return total / divisor
    counts = functools.reduce(lambda a, b: a * b, (_counts(windows, d, padded=count_include_pad) for d in range(dims)))
    return total / counts.astype(x.dtype)


def _counts(windows: Windows, d: int, *, padded: bool) -> Any:
    """How many elements of a window count along one dimension: what hangs over the padding never does."""
    first = windows.first(d)
    low, high = (-windows.padding[d], windows.size[d] + windows.padding[d]) if padded else (0, windows.size[d])
    return jnp.minimum(first + windows.kernel[d], high) - jnp.maximum(first, low)


def _avg_pool_backward(grad: Any, x: Any, *options: Any, dims: int) -> Any:
    _, pull = jax.vjp(lambda x: _avg_pool(x, *options, dims=dims), x)
    return pull(grad)[0]


def _adaptive_avg_pool(x: Any, size: Sizes, *, dims: int) -> Any:
    """Means of stretches that divide each dimension: a product with a matrix of weights for each."""
    for d, out in enumerate(size):
        axis, length = x.ndim - dims + d, x.shape[x.ndim - dims + d]
        x = jnp.moveaxis(jnp.matmul(jnp.moveaxis(x, axis, -1), _stretches(length, out).astype(x.dtype)), -1, axis)
    return x


def _stretches(length: int, out: int) -> Any:
    """[length, out]: the weight of each element in each mean."""
    starts, ends = _ends(length, out)
    places = np.arange(length)[:, None]
    return jnp.asarray(((places >= starts) & (places < ends)) / (ends - starts), jnp.float32)


def _ends(length: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each of `out` stretches begins, and where it has ended."""
    o = np.arange(out)
    return o * length // out, -(-(o + 1) * length // out)


def _adaptive_avg_pool_backward(grad: Any, x: Any, *, dims: int) -> Any:
    _, pull = jax.vjp(lambda x: _adaptive_avg_pool(x, grad.shape[x.ndim - dims :], dims=dims), x)
    return pull(grad)[0]


for _dims in (2, 3):
    for _name, _row in {
        f"max_pool{_dims}d_with_indices": _max_pool_with_indices,
        f"max_pool{_dims}d_with_indices_backward": _max_pool_backward,
        f"adaptive_max_pool{_dims}d": _adaptive_max_pool,
        f"adaptive_max_pool{_dims}d_backward": _max_pool_backward,
        f"avg_pool{_dims}d": _avg_pool,
        f"avg_pool{_dims}d_backward": _avg_pool_backward,
        f"_adaptive_avg_pool{_dims}d": _adaptive_avg_pool,
        f"_adaptive_avg_pool{_dims}d_backward": _adaptive_avg_pool_backward,
    }.items():
        lowers(f"aten.{_name}.default")(functools.partial(_row, dims=_dims))
