"""PJRT's codes of element types, and the NumPy types that the host has for them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tpuflow.pjrt.failures import Unimplemented

NUMPY: dict[int, np.dtype] = {
    code: np.dtype(kind)
    for code, kind in {
        1: np.bool_,
        2: np.int8,
        3: np.int16,
        4: np.int32,
        5: np.int64,
        6: np.uint8,
        7: np.uint16,
        8: np.uint32,
        9: np.uint64,
        10: np.float16,
        11: np.float32,
        12: np.float64,
        13: ml_dtypes.bfloat16,
        14: np.complex64,
        15: np.complex128,
        16: ml_dtypes.float8_e5m2,
        17: ml_dtypes.float8_e4m3fn,
        18: ml_dtypes.float8_e4m3b11fnuz,
        19: ml_dtypes.float8_e5m2fnuz,
        20: ml_dtypes.float8_e4m3fnuz,
        21: ml_dtypes.int4,
        22: ml_dtypes.uint4,
        24: ml_dtypes.int2,
        25: ml_dtypes.uint2,
        26: ml_dtypes.float8_e4m3,
        27: ml_dtypes.float8_e3m4,
        28: ml_dtypes.float8_e8m0fnu,
    }.items()
}
"""Of all that can lie in HBM; what the device can compute with is `tpuflow.dtypes.DTYPES`, and for the compiler to say."""

TOKEN = 23
"""The code of a token, which has no values: under it lies an array of nothing."""

PACKED = frozenset({21, 22, 24, 25})
"""Codes of those of which the host's XLA keeps several in a byte; arrays of the caller have one in each."""

CODES = {dtype: code for code, dtype in NUMPY.items()}


def numpy_type(code: int) -> np.dtype:
    """The NumPy type of a code.

    Raises:
      Unimplemented: the simulated device cannot hold it.
    """
    if code not in NUMPY:
        raise Unimplemented(f"PJRT element type {code} cannot lie on the simulated device; it holds {', '.join(map(str, NUMPY.values()))}.")
    return NUMPY[code]
