"""Functions that `graphs` substitutes for ATen operations: max-pooling that keeps no indices, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from tpuflow.torch.rows.pooling import Windows, lowest

Sizes = Sequence[int]


def max_pool(x: Any, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), dilation: Sizes = (1,), ceil_mode: bool = False) -> Any:
    """The largest element of each window over the last `len(kernel)` dimensions."""
    windows = Windows(x, kernel, stride, padding, dilation, ceil_mode, dims=len(kernel))
    return windows.reduce(x, lowest(x.dtype), lax.max)


def max_pool_backward(grad: Any, x: Any, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool) -> Any:
    """The gradient of `max_pool`: that of each window goes to the first of its largest elements, as the indices would say."""
    _, pull = jax.vjp(lambda x: max_pool(x, kernel, stride, padding, dilation, ceil_mode), x)
    return pull(grad)[0]
