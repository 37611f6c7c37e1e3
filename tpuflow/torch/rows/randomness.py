"""Random numbers: JAX's, from the key that each operation gets; not the bits of PyTorch's generators, but the same distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow.torch.rows.elementwise import as_float
from tpuflow.torch.table import lowers

Sizes = Sequence[int]


def _type(dtype: Any) -> Any:
    return jnp.float32 if dtype is None else dtype


def _draws(name: str, draw: Callable[..., Any]) -> None:
    """The rows of a distribution: of given sizes, and as an array is."""
    lowers(f"aten.{name}.default", random=True)(lambda key, size, dtype=None: draw(key, tuple(size), _type(dtype)))
    lowers(f"aten.{name}_like.default", random=True)(lambda key, x, dtype=None: draw(key, x.shape, dtype or x.dtype))


_draws("rand", jax.random.uniform)
_draws("randn", jax.random.normal)


@lowers("aten.uniform.default", random=True)
def _uniform(key: Any, x: Any, low: float = 0.0, high: float = 1.0) -> Any:
    return jax.random.uniform(key, x.shape, x.dtype, low, high)


@lowers("aten.normal_functional.default", random=True)
def _normal(key: Any, x: Any, mean: float = 0.0, std: float = 1.0) -> Any:
    return jax.random.normal(key, x.shape, x.dtype) * std + mean


@lowers("aten.exponential.default", random=True)
def _exponential(key: Any, x: Any, rate: float = 1.0) -> Any:
    return jax.random.exponential(key, x.shape, x.dtype) / rate


@lowers("aten.bernoulli.default", random=True)
def _bernoulli(key: Any, probabilities: Any) -> Any:
    return jax.random.bernoulli(key, probabilities)


@lowers("aten.bernoulli.p", random=True)
def _bernoulli_p(key: Any, x: Any, p: float = 0.5) -> Any:
    return jax.random.bernoulli(key, p, x.shape)


@lowers("aten.bernoulli.Tensor", random=True)
def _bernoulli_tensor(key: Any, x: Any, p: Any) -> Any:
    return jax.random.bernoulli(key, jnp.broadcast_to(as_float(p), x.shape))


@lowers("aten.native_dropout.default", random=True)
def _native_dropout(key: Any, x: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """(what is left, scaled; where it is)."""
    if train is False:
        return x, jnp.ones(x.shape, jnp.bool_)
    kept = jax.random.bernoulli(key, 1.0 - p, x.shape)
    return jnp.where(kept, x * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), jnp.zeros_like(x)), kept


@lowers("aten.randint.default", random=True)
def _randint(key: Any, high: int, size: Sizes, dtype: Any = None) -> Any:
    return jax.random.randint(key, tuple(size), 0, high, jnp.int32)


@lowers("aten.randint.low", random=True)
def _randint_from(key: Any, low: int, high: int, size: Sizes, dtype: Any = None) -> Any:
    return jax.random.randint(key, tuple(size), low, high, jnp.int32)


@lowers("aten.randint_like.default", random=True)
def _randint_like(key: Any, x: Any, high: int, dtype: Any = None) -> Any:
    return jax.random.randint(key, x.shape, 0, high, jnp.int32)


@lowers("aten.randint_like.low_dtype", random=True)
def _randint_like_from(key: Any, x: Any, low: int, high: int, dtype: Any = None) -> Any:
    return jax.random.randint(key, x.shape, low, high, jnp.int32)


@lowers("aten.randperm.default", random=True)
def _randperm(key: Any, n: int, dtype: Any = None) -> Any:
    return jax.random.permutation(key, n)


@lowers("aten.multinomial.default", random=True)
def _multinomial(key: Any, weights: Any, count: int, replacement: bool = False) -> Any:
    """Without replacement: the largest of the logarithms with Gumbel noise."""
    logits = jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(key, logits, -1, (count, *logits.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argsort(noisy, -1, descending=True)[..., :count]
