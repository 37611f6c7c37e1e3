"""Python scalars as the element types hold them, and the values that reductions start from."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import numpy as np

from tpuflow.dtypes import PRED, DType, exactly
from tpuflow.isa.numpy_rounding import splat

Scalar = bool | int | float


def scalar_of(value: Scalar, dtype: DType) -> Scalar:
    """The value as the element type holds it, as a Python scalar of the fitting kind."""
    return _rounded(exactly(value), value, dtype)


@functools.lru_cache(maxsize=1024)
def _rounded(key: Hashable, value: Scalar, dtype: DType) -> Scalar:
    """key: tells numbers apart that are equal, such as zeros of either sign."""
    return splat(value, dtype).item()


def identity(op: str, dtype: DType) -> Scalar:
    """The identity element of a reduction: 0 for add, or and xor; 1 for mul; all ones for and; an infinity or bound."""
    if op in ("max", "min") and dtype.is_float:
        return -float("inf") if op == "max" else float("inf")
    if op in ("max", "min"):
        bounds = np.iinfo(dtype.numpy)
        return int(bounds.min if op == "max" else bounds.max)
    ones = True if dtype == PRED else -1
    return scalar_of({"add": 0, "or": 0, "xor": 0, "mul": 1, "and": ones}[op], dtype)
