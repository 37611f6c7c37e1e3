"""Single operations for `bench.programs`, at sizes that networks have: name -> (function, its arguments)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Made = tuple[Callable[..., Any], tuple[Any, ...]]
Make = Callable[[], Made]

IMAGES, KERNEL = (8, 32, 32, 64), (3, 3, 64, 64)
PLANES = ("NHWC", "HWIO", "NHWC")
VOCABULARY, WIDTH, TOKENS = 30522, 256, (32, 128)


def floats(*shape: int) -> np.ndarray:
    """Standard normal numbers, the same in every run."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def integers(below: int, *shape: int) -> np.ndarray:
    """Numbers in [0, below), the same in every run."""
    return np.random.default_rng(0).integers(0, below, shape).astype(np.int32)


def convolution(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
    """SAME, images [N, H, W, C] and a kernel [H, W, C / groups, O]."""
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=PLANES, feature_group_count=groups)


def _weight_gradient(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: jnp.vdot(convolution(x, w), x))(w)


def _input_gradient(x: Any, w: Any, cotangent: Any) -> Any:
    return jax.vjp(lambda x: convolution(x, w), x)[1](cotangent)[0]


def _max_pool_gradient(x: Any) -> Any:
    return jax.grad(lambda x: nn.max_pool(x, (2, 2), (2, 2)).sum())(x)


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(square - mean * mean + 1e-6) * scale + bias


def _chain(x: Any, y: Any) -> Any:
    """A gate, as elementwise work in networks is."""
    return jax.nn.sigmoid(x) * jnp.tanh(y) + jax.nn.gelu(x * 0.5) - y * y


def _embedding_gradient(table: Any, ids: Any, rows: Any) -> Any:
    return jnp.zeros_like(table).at[ids].add(rows)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _normal(key: Any) -> Any:
    return jax.random.normal(key, (512, 512))


OPERATIONS: Mapping[str, Make] = {
    "matmul 512": lambda: (jnp.matmul, (floats(512, 512), floats(512, 512))),
    "batched matmul": lambda: (jnp.matmul, (floats(48, 128, 64), floats(48, 64, 128))),
    "matrix and vector": lambda: (jnp.matmul, (floats(2048, 2048), floats(2048))),
    "convolution 3x3": lambda: (convolution, (floats(*IMAGES), floats(*KERNEL))),
    "its weights' gradient": lambda: (_weight_gradient, (floats(*IMAGES), floats(*KERNEL))),
    "its images' gradient": lambda: (_input_gradient, (floats(*IMAGES), floats(*KERNEL), floats(*IMAGES))),
    "convolution 3x3, stride 2": lambda: (lambda x, w: convolution(x, w, 2), (floats(*IMAGES), floats(*KERNEL))),
    "depthwise convolution": lambda: (lambda x, w: convolution(x, w, 1, 64), (floats(*IMAGES), floats(3, 3, 1, 64))),
    "max pooling": lambda: (lambda x: nn.max_pool(x, (2, 2), (2, 2)), (floats(*IMAGES),)),
    "its gradient": lambda: (_max_pool_gradient, (floats(*IMAGES),)),
    "embedding gather": lambda: (lambda t, i: t[i], (floats(VOCABULARY, WIDTH), integers(VOCABULARY, *TOKENS))),
    "embedding scatter": lambda: (
        _embedding_gradient, (floats(VOCABULARY, WIDTH), integers(VOCABULARY, *TOKENS), floats(*TOKENS, WIDTH))
    ),
    "layer norm": lambda: (_layer_norm, (floats(32, 128, 512), floats(512), floats(512))),
    "softmax": lambda: (jax.nn.softmax, (floats(48, 128, 128),)),
    "attention": lambda: (_attention, (floats(4, 128, 8, 64), floats(4, 128, 8, 64), floats(4, 128, 8, 64))),
    "sort": lambda: (jnp.sort, (floats(256, 1024),)),
    "top k": lambda: (lambda x: lax.top_k(x, 8), (floats(256, 1024),)),
    "fft": lambda: (lambda x: jnp.abs(jnp.fft.rfft(x)), (floats(256, 1024),)),
    "cumulative sum": lambda: (lambda x: jnp.cumsum(x, axis=-1), (floats(256, 1024),)),
    "sum of rows": lambda: (lambda x: x.sum(-1), (floats(2048, 1024),)),
    "sum of columns": lambda: (lambda x: x.sum(0), (floats(2048, 1024),)),
    "argmax": lambda: (lambda x: x.argmax(-1), (floats(2048, 1024),)),
    "elementwise chain": lambda: (_chain, (floats(1024, 1024), floats(1024, 1024))),
    "transpose": lambda: (jnp.transpose, (floats(1024, 2048),)),
    "random normal": lambda: (_normal, (jax.random.key(0),)),
}  # fmt: skip
