"""From JAX's types to those of the graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuflow.dtypes import U32
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.errors import UnsupportedDtypeError
from tpuflow.jaxprs.compat import is_key, is_token, key_words, opened
from tpuflow.jaxprs.versions import KEY_IMPLEMENTATIONS
from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.operations.complex import ComplexType, Type
from tpuflow.lower.operations.movement import TOKEN


def type_of(aval: Any, where: str = "") -> Type:
    """The graph type of a JAX type; random keys become u32 words along a last axis, complex64 two planes, tokens arrays of nothing.

    Raises:
      UnsupportedDtypeError: 64-bit and other types that the device does not have; keys of a generator that is not JAX's.
    """
    if is_token(aval):
        return TOKEN
    if not hasattr(aval, "dtype"):
        raise UnsupportedDtypeError(f"{where}: the device has no values of type {aval}; arrays and random keys only.")
    if not isinstance(aval.dtype, np.dtype):
        return _extended_type(aval, where)
    try:
        return _plain_type(aval.dtype, aval.shape)
    except UnsupportedDtypeError:
        dtype_of(aval.dtype, where)
        raise


@functools.lru_cache(maxsize=4096)
def _plain_type(dtype: np.dtype, shape: Sequence[int]) -> Type:
    """The graph type of an array: one object for all of them, since those of an equation are asked for again and again."""
    sizes = tuple(map(int, shape))
    return ComplexType(sizes) if dtype == np.complex64 else TensorType(dtype_of(dtype), sizes)


def _extended_type(aval: Any, where: str) -> TensorType:
    """The graph type of elements that are JAX's own: random keys."""
    if not is_key(aval):
        raise UnsupportedDtypeError(f"{where}: the device has no element type {aval.dtype}.")
    implementation, key_shape = key_words(aval)
    if implementation not in KEY_IMPLEMENTATIONS:
        known = ", ".join(KEY_IMPLEMENTATIONS)
        raise UnsupportedDtypeError(f"{where}: random keys of {implementation!r} are not known; use one of {known}.")
    return TensorType(U32, (*aval.shape, *key_shape))


def port_type(aval: Any, where: str = "") -> TensorType:
    """The graph type of what goes in or out, which is never complex.

    Raises:
      UnsupportedDtypeError: as `type_of`, and complex types.
    """
    found = type_of(aval, where)
    return found if isinstance(found, TensorType) else TensorType(dtype_of(aval.dtype, where), found.shape)


def types_of(variables: Sequence[Any]) -> list[Type]:
    """The graph types of a jaxpr's variables."""
    return [type_of(v.aval) for v in variables]


def result_types(jaxpr: Any) -> list[Type]:
    """The graph types of a jaxpr's outputs."""
    return types_of(opened(jaxpr)[0].outvars)


def argument_types(jaxpr: Any) -> list[Type]:
    """The graph types of a jaxpr's inputs."""
    return types_of(opened(jaxpr)[0].invars)
