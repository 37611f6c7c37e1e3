"""The element types of the device: one row a type."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tpuflow.errors import UnsupportedDtypeError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type: its short name (HLO's), NumPy type, bytes an element, and kind (float, int, uint, pred or storage).

    There is one object for each type, so types are compared by identity, which is faster: half of the compiler's hash keys contain types.

    The device moves, selects and converts elements of kind storage, but does not compute with them: arithmetic is done in `wide`, a type
    that represents all their values. Each takes one byte, also the types of 4 and 2 bits, since tiles do not pack elements.
    """

    name: str
    numpy: np.dtype
    bytes: int
    kind: str
    code: int
    wide: DType | None = None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        """Pickling and copying give the same object."""
        return _named, (self.name,)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def computed(self) -> DType:
        """The type in which arithmetic on it is done: `wide` of a type of kind storage, else itself."""
        return self.wide or self

    @property
    def bits(self) -> int:
        """The bits of one element's value; in memory it takes a whole byte at least."""
        return 8 * self.bytes if self.wide is None or self.wide.is_float else int(ml_dtypes.iinfo(self.numpy).bits)


F32 = DType("f32", np.dtype(np.float32), 4, "float", 1)
F16 = DType("f16", np.dtype(np.float16), 2, "float", 2)
BF16 = DType("bf16", np.dtype(ml_dtypes.bfloat16), 2, "float", 3)
S32 = DType("s32", np.dtype(np.int32), 4, "int", 4)
S16 = DType("s16", np.dtype(np.int16), 2, "int", 5)
S8 = DType("s8", np.dtype(np.int8), 1, "int", 6)
U32 = DType("u32", np.dtype(np.uint32), 4, "uint", 7)
U16 = DType("u16", np.dtype(np.uint16), 2, "uint", 8)
U8 = DType("u8", np.dtype(np.uint8), 1, "uint", 9)
PRED = DType("pred", np.dtype(np.bool_), 1, "pred", 10)
F8E4M3FN = DType("f8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), 1, "storage", 11, F32)
F8E5M2 = DType("f8e5m2", np.dtype(ml_dtypes.float8_e5m2), 1, "storage", 12, F32)
F8E4M3B11FNUZ = DType("f8e4m3b11fnuz", np.dtype(ml_dtypes.float8_e4m3b11fnuz), 1, "storage", 13, F32)
F8E4M3FNUZ = DType("f8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz), 1, "storage", 14, F32)
F8E5M2FNUZ = DType("f8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz), 1, "storage", 15, F32)
F8E4M3 = DType("f8e4m3", np.dtype(ml_dtypes.float8_e4m3), 1, "storage", 16, F32)
F8E3M4 = DType("f8e3m4", np.dtype(ml_dtypes.float8_e3m4), 1, "storage", 17, F32)
S4 = DType("s4", np.dtype(ml_dtypes.int4), 1, "storage", 18, S32)
U4 = DType("u4", np.dtype(ml_dtypes.uint4), 1, "storage", 19, U32)
S2 = DType("s2", np.dtype(ml_dtypes.int2), 1, "storage", 20, S32)
U2 = DType("u2", np.dtype(ml_dtypes.uint2), 1, "storage", 21, U32)

STORAGE = (F8E4M3FN, F8E5M2, F8E4M3B11FNUZ, F8E4M3FNUZ, F8E5M2FNUZ, F8E4M3, F8E3M4, S4, U4, S2, U2)
COMPUTED = (F32, F16, BF16, S32, S16, S8, U32, U16, U8, PRED)
DTYPES = (*COMPUTED, *STORAGE)
BY_NAME = {d.name: d for d in DTYPES}
BY_CODE = {d.code: d for d in DTYPES}
_BY_NUMPY = {d.numpy: d for d in DTYPES}


def _named(name: str) -> DType:
    return BY_NAME[name]


def from_numpy(dtype: object, where: str = "") -> DType:
    """The device type of a NumPy or JAX dtype.

    Raises:
      UnsupportedDtypeError: 64-bit and complex types, which the device does not have.
    """
    found = _BY_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]
    if found is None:
        prefix = f"{where}: " if where else ""
        raise UnsupportedDtypeError(
            f"{prefix}the device has no element type {np.dtype(dtype).name!r}; it has "  # type: ignore[call-overload]
            f"{', '.join(str(d.numpy) for d in DTYPES)}. {_instead(np.dtype(dtype))}"  # type: ignore[call-overload]
        )
    return found


def exactly(number: Any) -> Hashable:
    """A number as a key: True, 1 and 1.0 differ, and so do zeros of either sign."""
    return type(number), repr(number)


def _instead(dtype: np.dtype) -> str:
    """What to use instead of a type that the device lacks, for the message."""
    if dtype.kind == "c":
        return "Carry the real and the imaginary part as two float32 arrays; tpuflow.jit does so with complex64."
    if dtype.itemsize == 8 and dtype.kind in "fiu":
        return f"Cast the array, x.astype({dtype.name.replace('64', '32')!r}), or leave jax_enable_x64 off."
    return "Cast the array with x.astype(...)."
