"""Operations on arrays with one axis of any length: what compiles must not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32, S32 = np.dtype(np.float32), np.dtype(np.int32)


def _array(*shape: int, dtype: np.dtype[Any] = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _index() -> jax.ShapeDtypeStruct:
    return _array(dtype=S32)


def _rows() -> jax.ShapeDtypeStruct:
    return _array(16, dtype=S32)


def _convolution(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def _max_pool(x: Any, padding: str = "VALID") -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (3,), (2,), padding)


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "elementwise": (lambda x: jnp.sin(x) * 2, lambda n: (_array(n),)),
    "elementwise with broadcasts": (lambda x, b: x * b + b[:, :1], lambda n: (_array(n, 4), _array(1, 4))),
    "sum": (lambda x: x.sum(), lambda n: (_array(n),)),
    "maximum along the long axis": (lambda x: x.max(1), lambda n: (_array(4, n),)),
    "maximum along the short axis": (lambda x: x.max(1), lambda n: (_array(n, 4),)),
    "argmax": (lambda x: jnp.argmax(x), lambda n: (_array(n),)),
    "dot": (lambda x, y: x @ y, lambda n: (_array(n), _array(n))),
    "product with long rows": (lambda x, y: x @ y, lambda n: (_array(4, n), _array(n, 8))),
    "product with many rows": (lambda x, y: x @ y, lambda n: (_array(n, 4), _array(4, 8))),
    "transpose": (lambda x: x.T, lambda n: (_array(n, 4),)),
    "reshape": (lambda x: x.reshape(4, -1), lambda n: (_array(n),)),
    "reshape and transpose": (lambda x: x.reshape(-1, 2, 8).transpose(1, 2, 0), lambda n: (_array(n),)),
    "slice": (lambda x: x[3:-5], lambda n: (_array(n),)),
    "strided slice": (lambda x: x[1::3], lambda n: (_array(n),)),
    "reverse": (lambda x: x[::-1], lambda n: (_array(n),)),
    "pad": (lambda x: jnp.pad(x, (2, 3)), lambda n: (_array(n),)),
    "pad inside": (lambda x: lax.pad(x, 0.0, ((1, 2, 1),)), lambda n: (_array(n // 2),)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y, x]), lambda n: (_array(n), _array(n))),
    "interleave": (lambda x, y: jnp.stack([x, y], 1).reshape(-1), lambda n: (_array(n), _array(n))),
    "roll": (lambda x: jnp.roll(x, 7), lambda n: (_array(n),)),
    "tile": (lambda x: jnp.tile(x, 3), lambda n: (_array(n),)),
    "repeat": (lambda x: jnp.repeat(x, 3), lambda n: (_array(n),)),
    "convolution": (_convolution, lambda n: (_array(1, n, 2), _array(3, 2, 4))),
    "strided convolution": (lambda x, w: _convolution(x, w, 2), lambda n: (_array(1, n, 2), _array(3, 2, 4))),
    "gradient of a strided convolution": (
        jax.grad(lambda x, w: _convolution(x, w, 2).sum(), (0, 1)), lambda n: (_array(1, n, 2), _array(3, 2, 4)),
    ),
    "pooling": (_max_pool, lambda n: (_array(n),)),
    "gradient of pooling": (jax.grad(lambda x: _max_pool(x).sum()), lambda n: (_array(n),)),
    "gradient of padded pooling": (jax.grad(lambda x: _max_pool(x, "SAME").sum()), lambda n: (_array(n),)),
    "gradient of a strided slice": (jax.grad(lambda x: (x[1::3] ** 2).sum()), lambda n: (_array(n),)),
    "transposed convolution": (lambda x, w: lax.conv_transpose(x, w, (2,), "SAME"), lambda n: (_array(1, n, 2), _array(3, 2, 4))),
    "strided update": (lambda x, y: x.at[::2].set(y), lambda n: (_array(n), _array(n // 2))),
    "cumulative sum": (jnp.cumsum, lambda n: (_array(n),)),
    "cumulative sum of short rows": (lambda x: jnp.cumsum(x, 1), lambda n: (_array(n, 4),)),
    "gather": (lambda x, i: x[i], lambda n: (_array(n, 4), _rows())),
    "long gather": (lambda x, i: x[i], lambda n: (_array(16, 4), _array(n, dtype=S32))),
    "scatter": (lambda x, i, u: x.at[i].add(u), lambda n: (_array(n, 4), _rows(), _array(16, 4))),
    "long scatter": (lambda x, i, u: x.at[i].add(u), lambda n: (_array(16, 4), _array(n, dtype=S32), _array(n, 4))),
    "sort of short rows": (lambda x: jnp.sort(x, 1), lambda n: (_array(n, 4),)),
    "top_k": (lambda x: lax.top_k(x, 2), lambda n: (_array(n, 4),)),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (i,), (x.size // 2,)), lambda n: (_array(n), _index())),
    "dynamic update": (lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)), lambda n: (_array(n), _array(n // 2), _index())),
    "iota": (lambda x: x + lax.iota(np.float32, x.size), lambda n: (_array(n),)),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (x.size, 3)), lambda n: (_array(n),)),
    "softmax along the short axis": (lambda x: jax.nn.softmax(x, -1), lambda n: (_array(n, 4),)),
    "softmax along the long axis": (lambda x: jax.nn.softmax(x, 0), lambda n: (_array(n),)),
    "triangle": (lambda x: jnp.where(jnp.tri(x.shape[0], 4, dtype=bool), x, 0), lambda n: (_array(n, 4),)),
    "loop": (lambda x: lax.fori_loop(0, 5, lambda i, c: c[::-1] * 0.5, x), lambda n: (_array(n),)),
    "scan over the long axis": (lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x), lambda n: (_array(n, 4),)),
}  # fmt: skip
"""Name -> (function, shapes of its arguments for a length)."""
