"""Rules for random numbers in [0, 1): multiples k / 2^m that are made by putting k into the mantissa of 1.0 and subtracting 1."""

from __future__ import annotations

import math

import numpy as np

from tpuflow.dtypes import BF16, F16, F32, PRED, DType
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites

_MANTISSA_BITS = {F32: 23, F16: 10, BF16: 7}
_NEUTRAL = {"mul": 1.0, "add": 0.0, "max": 0.0}


@rewrites(*_NEUTRAL)
def _neutral(rw: Rewriter, node: Node) -> Value | None:
    """u * 1, u + 0 and max(u, 0) are u: it is 0 or normal, and never -0 or NaN."""
    for x, y in (node.inputs, node.inputs[::-1]):
        if rw.splat(y) == _NEUTRAL[node.op] and _numerator(rw, x) is not None:
            return x
    return None


@rewrites("compare")
def _below(rw: Rewriter, node: Node) -> Value | None:
    """k / 2^m < p is k < p * 2^m, which is exact, rounded up; and so are the bits of which k are the upper ones, of integers."""
    x, y = node.inputs
    limit, numerator = rw.splat(y), _numerator(rw, x)
    if node.attrs["direction"] != "lt" or limit is None or numerator is None or not 2.0**-14 <= limit <= 1:  # of all three types normal
        return None
    bits = numerator.inputs[0]
    least = math.ceil(limit * 2 ** _MANTISSA_BITS[x.dtype]) << x.dtype.bits - _MANTISSA_BITS[x.dtype]
    if least == 1 << x.dtype.bits:
        return rw.full(PRED, x.shape, True)
    return rw.emit("compare", (bits, rw.full(bits.dtype, bits.shape, least)), TensorType(PRED, bits.shape), direction="lt")


def _numerator(rw: Rewriter, x: Value) -> Node | None:
    """The shift to the right that makes k, if x is k / 2^m: (the bits of 1.0 | k) - 1, where k has m bits."""
    mantissa = _MANTISSA_BITS.get(x.dtype)
    less = rw.maker(x, "sub")
    cast = None if mantissa is None or less is None or rw.splat(less.inputs[1]) != 1.0 else rw.maker(less.inputs[0], "bitcast")
    made = None if cast is None else rw.maker(cast.inputs[0], "or")
    shift = None if made is None or rw.splat(made.inputs[1]) != _one(x.dtype) else rw.maker(made.inputs[0], "shr_logical")
    if mantissa is None or shift is None or rw.splat(shift.inputs[1]) != x.dtype.bits - mantissa or shift.result.dtype.kind != "uint":
        return None
    return shift


def _one(dtype: DType) -> int:
    return int(np.ones((), dtype.numpy).view(f"u{dtype.bytes}"))
