"""From JAX's types to those of the graph."""

from __future__ import annotations

from typing import Any

import jax

from tpuflow.dtypes import U32
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.errors import UnsupportedDtypeError
from tpuflow.jaxprs.compat import KEY_IMPLEMENTATIONS, is_key, key_words, opened
from tpuflow.lower.graph.graph import TensorType


def type_of(aval: Any, where: str = "") -> TensorType:
    """The graph type of a JAX type; random keys become u32 words along a last axis.

    Raises:
      UnsupportedDtypeError: 64-bit, complex and other types that the device does not have; keys of a generator that is not JAX's.
    """
    if not hasattr(aval, "dtype"):
        raise UnsupportedDtypeError(f"{where}: the device has no values of type {aval}; arrays and random keys only.")
    if is_key(aval):
        implementation, key_shape = key_words(aval)
        if implementation not in KEY_IMPLEMENTATIONS:
            known = ", ".join(KEY_IMPLEMENTATIONS)
            raise UnsupportedDtypeError(f"{where}: random keys of {implementation!r} are not known; use one of {known}.")
        return TensorType(U32, (*aval.shape, *key_shape))
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        raise UnsupportedDtypeError(f"{where}: the device has no element type {aval.dtype}.")
    return TensorType(dtype_of(aval.dtype, where), tuple(map(int, aval.shape)))


def result_types(jaxpr: Any) -> list[TensorType]:
    """The graph types of a jaxpr's outputs."""
    return [type_of(v.aval) for v in opened(jaxpr)[0].outvars]
