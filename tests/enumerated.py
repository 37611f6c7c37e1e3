"""Convolutions and pooling by enumeration in float64: every pair of a kernel position and an image element that meet, and no other.

What JAX gives on a CPU is no judge of infinities at a border: it multiplies the zeros of the padding too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Window:
    """How a kernel slides over images [N, spatial, C]: one entry a spatial axis; `groups` of features, or of images if `by_image`."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    spread: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    by_image: bool = False

    def outputs(self, image: Sequence[int]) -> tuple[int, ...]:
        """Output positions along every axis of an image; none or fewer where the kernel is longer."""
        rows = zip(image, self.size, self.strides, self.padding, self.spread, self.dilation, strict=True)
        return tuple(((n - 1) * e + sum(pad) - (k - 1) * d) // s + 1 for n, k, s, pad, e, d in rows)

    def meetings(self, image: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """(output position, kernel position, image element) of every product that there is."""
        along = [list(self._along(axis, n, out)) for axis, (n, out) in enumerate(zip(image, self.outputs(image), strict=True))]
        for pairs in itertools.product(*along):
            output, tap, element = zip(*pairs, strict=True)
            yield output, tap, element

    def _along(self, axis: int, size: int, outputs: int) -> Iterator[tuple[int, int, int]]:
        for o, k in itertools.product(range(outputs), range(self.size[axis])):
            place = o * self.strides[axis] + k * self.dilation[axis] - self.padding[axis][0]
            element = place // self.spread[axis]
            if place % self.spread[axis] == 0 and 0 <= element < size:
                yield o, k, element

    def convolution(self, x: Any, w: Any) -> Any:
        """JAX's: images [N, spatial, C], kernel [spatial, C / groups, F] -> f32 [N, spatial, F]."""
        spatial = "DHW"[: len(self.size)]
        names = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
        counts = (1, self.groups) if self.by_image else (self.groups, 1)
        return lax.conv_general_dilated(
            x, w, self.strides, self.padding, self.spread, self.dilation, names, *counts, preferred_element_type=jnp.float32
        )

    def pooling(self, x: Any, op: str) -> Any:
        """JAX's, of images [N, spatial, C]: the largest ("max"), smallest ("min") or sum ("add") of every window."""
        start = {"max": -jnp.inf, "min": jnp.inf, "add": 0.0}[op]
        combine = {"max": lax.max, "min": lax.min, "add": lax.add}[op]
        strides, size, spread, dilation = ((1, *row, 1) for row in (self.strides, self.size, self.spread, self.dilation))
        padding = ((0, 0), *self.padding, (0, 0))
        return lax.reduce_window(x, np.asarray(start, x.dtype), combine, size, strides, padding, spread, dilation)


def flushed(x: np.ndarray) -> np.ndarray:
    """float64, the subnormals of f32 and bf16 as zeros: what the device reads."""
    wide = x.astype(np.float64)
    return wide if x.dtype == np.float16 else np.where(np.abs(wide) < 2.0**-126, 0.0, wide)


def _parts(window: Window, x: np.ndarray, features: int) -> Iterator[tuple[Any, Any, Any]]:
    """Every group's slices of the images, of their channels, and of the features."""
    count, n, c, f = window.groups, x.shape[0], x.shape[-1], features
    for g in range(count):
        mine = slice(g * f // count, (g + 1) * f // count)
        if window.by_image:
            yield slice(g * n // count, (g + 1) * n // count), slice(None), mine
        else:
            yield slice(None), slice(g * c // count, (g + 1) * c // count), mine


@np.errstate(invalid="ignore")
def convolution(window: Window, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """See `Window.convolution`; float64."""
    images = x.shape[0] // (window.groups if window.by_image else 1)
    out = np.zeros((images, *window.outputs(x.shape[1:-1]), w.shape[-1]))
    for o, k, at in window.meetings(x.shape[1:-1]):
        for n, c, f in _parts(window, x, w.shape[-1]):
            out[(slice(None), *o, f)] += _product(flushed(x[(n, *at, c)]), flushed(w[(*k, slice(None), f)]))
    return out


@np.errstate(invalid="ignore")
def gradients(window: Window, x: np.ndarray, w: np.ndarray, cotangent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the images and of the kernel, given that of the result; float64."""
    of_x, of_w = np.zeros(x.shape), np.zeros(w.shape)
    for o, k, at in window.meetings(x.shape[1:-1]):
        for n, c, f in _parts(window, x, w.shape[-1]):
            change = flushed(cotangent[(slice(None), *o, f)])
            of_x[(n, *at, c)] += _product(change, flushed(w[(*k, slice(None), f)]).T)
            of_w[(*k, slice(None), f)] += _product(flushed(x[(n, *at, c)]).T, change)
    return of_x, of_w


def jax_gradients(window: Window, x: Any, w: Any, cotangent: Any) -> tuple[Any, Any]:
    """The same as JAX derives it."""
    return jax.vjp(window.convolution, x, w)[1](cotangent)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[I, K] x [K, J], every product made (BLAS need not)."""
    return (a[:, :, None] * b[None]).sum(axis=1)


def pooling(window: Window, x: np.ndarray, op: str) -> np.ndarray:
    """See `Window.pooling`; float64."""
    start = {"max": -np.inf, "min": np.inf, "add": 0.0}[op]
    combine = {"max": np.maximum, "min": np.minimum, "add": np.add}[op]
    out = np.full((x.shape[0], *window.outputs(x.shape[1:-1]), x.shape[-1]), start)
    for o, _, at in window.meetings(x.shape[1:-1]):
        out[(slice(None), *o)] = combine(out[(slice(None), *o)], flushed(x[(slice(None), *at)]))
    return out


@np.errstate(invalid="ignore")
def sum_gradient(window: Window, x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    """Of the images of a pooling by sums; float64."""
    out = np.zeros(x.shape)
    for o, _, at in window.meetings(x.shape[1:-1]):
        out[(slice(None), *at)] += flushed(cotangent[(slice(None), *o)])
    return out


def extreme_gradient(window: Window, x: np.ndarray, cotangent: np.ndarray, op: str) -> np.ndarray:
    """Of the images of a pooling by extremes: all to the first of a window that nothing in it beats; float64. Of images without NaN."""
    beats = {"max": np.greater, "min": np.less}[op]
    shape = (x.shape[0], *window.outputs(x.shape[1:-1]), x.shape[-1])
    best, place = np.zeros(shape), np.full(shape, -1)
    for o, _, at in window.meetings(x.shape[1:-1]):
        here, there = flushed(x[(slice(None), *at)]), (slice(None), *o)
        wins = (place[there] < 0) | beats(here, best[there])
        best[there] = np.where(wins, here, best[there])
        place[there] = np.where(wins, np.ravel_multi_index(at, x.shape[1:-1]), place[there])
    out = np.zeros(x.shape)
    for n, *o, c in np.ndindex(shape):
        if (at := place[(n, *o, c)]) >= 0:
            out[(n, *np.unravel_index(at, x.shape[1:-1]), c)] += flushed(cotangent[(n, *o, c)])
    return out
