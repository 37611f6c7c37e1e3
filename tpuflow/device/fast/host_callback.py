"""The call of a host function in the middle of an XLA executable, for `CallHost` blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpuflow.device.fast.arithmetic import words
from tpuflow.dtypes import DType
from tpuflow.isa.calls import HostFunction
from tpuflow.jaxprs.python_calls import call_python


def call_host(function: HostFunction, called: Any, sent: Sequence[Any]) -> list[Any]:
    """[`called`, dependent on this call, so that calls are made in order, *the function's results]; arrays are in the form of `words`."""
    types = types_of(function)

    def call(called: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        return [np.array(called), *_answer(function, types, arrays)]

    return call_python(call, [_CALLED, *types], [called, *sent])


def call_host_for_each(function: HostFunction, called: Any, calling: Any, sent: Sequence[Any]) -> list[Any]:
    """The same of several chips, which are the first axis of all arrays: one call for each that is `calling` (pred[chips]), in their
    order. The results of the others are zeros."""
    types = types_of(function)
    rows = [jax.ShapeDtypeStruct((len(calling), *t.shape), t.dtype) for t in types]

    def call(called: np.ndarray, calling: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        found = [np.zeros(t.shape, t.dtype) for t in rows]
        for chip in np.flatnonzero(calling):
            for row, x in zip(found, _answer(function, types, [np.asarray(x)[chip] for x in arrays]), strict=True):
                row[chip] = x
        return [np.array(called), *found]

    return call_python(call, [_CALLED, *rows], [called, calling, *sent])


_CALLED = jax.ShapeDtypeStruct((), np.int32)


def types_of(function: HostFunction) -> list[jax.ShapeDtypeStruct]:
    """Of its results, in the form of `words`."""
    return [jax.eval_shape(words, jax.ShapeDtypeStruct(shape, dtype.numpy)) for dtype, shape in function.results]


def _answer(function: HostFunction, types: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    given = [_out_of_words(np.array(x), dtype) for x, (dtype, _) in zip(arrays, function.operands, strict=True)]
    found = function.answer(given)
    return [_in_words(x, dtype, t.dtype) for x, (dtype, _), t in zip(found, function.results, types, strict=True)]


def _out_of_words(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The inverse of `words`."""
    return _moved(x, dtype, dtype.numpy)


def _in_words(x: np.ndarray, dtype: DType, word: np.dtype[Any]) -> np.ndarray:
    return _moved(x, dtype, word)


def _moved(x: np.ndarray, dtype: DType, to: np.dtype[Any]) -> np.ndarray:
    """An array in another type: floats keep their bits, integers their values."""
    if x.dtype == to:
        return x
    return np.ascontiguousarray(x).view(to) if dtype.is_float or dtype.computed.is_float else x.astype(to)
