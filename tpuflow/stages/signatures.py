"""What a program is specialised on: of every argument shape, type, weakness, memory, and how it lies on several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.jaxprs.compat import TOKEN_TYPE, Token, Tracer, at_host, is_at_host, is_token
from tpuflow.stages.shardings import brought, in_host_memory

_WEAK_SCALARS = {
    bool: ((), np.dtype(np.bool_), False, False, None),
    int: ((), np.dtype(np.int32), True, False, None),
    float: ((), np.dtype(np.float32), True, False, None),
}
_TOKEN = ((), TOKEN_TYPE, False, False, None)
"""The signature of a token, which has a type and no elements that would have one."""


def signature(leaf: Any) -> Any:
    """What a program is specialised on: shape, type, whether the type is weak, whether it is in the host's memory, and how it lies on
    several devices."""
    scalar = _WEAK_SCALARS.get(type(leaf))
    if scalar is not None:
        return scalar
    if isinstance(leaf, jax.Array):
        aval = leaf.aval
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False), is_at_host(aval), _sharding_of(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.itemsize < 8:
        return leaf.shape, leaf.dtype, False, False, None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type, in_host_memory(leaf.sharding), brought(leaf.sharding)
    if isinstance(leaf, Token) or is_token(jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf):
        return _TOKEN
    try:
        aval = jax.typeof(jnp.asarray(leaf))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"tpuflow.jit: an argument holds {leaf!r} of type {type(leaf).__name__}, which is no array or number; arguments that are not "
            "data can be made compile-time constants with static_argnums or static_argnames."
        ) from error
    return aval.shape, aval.dtype, aval.weak_type, False, None


def spec_of(signature: Any) -> Any:
    """What is traced with for an argument of a signature."""
    shape, dtype, weak, is_there, _ = signature
    if is_token(dtype):
        return dtype
    spec = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    return at_host(spec) if is_there else spec


def _sharding_of(array: Any) -> Any:
    """How an array says that it lies on several devices."""
    return brought(jax.typeof(array).sharding if isinstance(array, Tracer) else array.sharding)
