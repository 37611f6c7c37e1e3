"""Values and runners for testing the device's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.engine import COMPILER_OPTIONS
from tpuflow.dtypes import BF16, F16, F32, PRED, DType
from tpuflow.isa.numpy_arithmetic import NumpyArithmetic, identity

Array = np.ndarray[Any, Any]
REFERENCE = NumpyArithmetic()
Method = Callable[..., Sequence[Any]]
FIDELITIES = ("reference", "bitexact", "native")

# Zeros, smallest and largest subnormal and normal, ones, infinities, NaNs (quiet, negative, signalling), ties, integer limits.
_SPECIAL_F32 = (
    0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x3F000000, 0x3EFFFFFF,
    0x3F7FFFFF, 0x40200000, 0x40400000, 0x4B000000, 0x4B000001, 0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0x33000000, 0x33000001,
    0x387FE000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x42B17218, 0x42CFF1B5, 0x40490FDB, 0x00FFFFFF, 0x1F800000, 0x20000000,
)  # fmt: skip
_SPECIAL_F16 = (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x3800, 0x37FF, 0x4100, 0x6400, 0x0200)


def reduced(ar: Any, op: str, a: Any, axes: tuple[int, ...], dtype: DType, block: int = 1 << 30) -> Any:
    """A reduction onto what changes nothing, by default of one block."""
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(a.shape))
    return ar.reduce(op, ar.full(kept, identity(op, dtype), dtype), a, axes, block, dtype)


def special(dtype: DType) -> Array:
    """Values at which arithmetic goes wrong first, of both signs."""
    if dtype == PRED:
        return np.array([False, True])
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        return np.array([0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, -1, -2, limits.max, limits.min, limits.min + 1]).astype(dtype.numpy)
    short = dtype.bytes == 2
    bits = np.array(_SPECIAL_F16, np.uint32) if dtype == F16 else np.array(_SPECIAL_F32, np.uint32) >> (16 if dtype == BF16 else 0)
    both = np.concatenate([bits, bits | np.uint32(0x8000 if short else 0x80000000)])
    return both.astype(f"u{dtype.bytes}").view(dtype.numpy)


def values(dtype: DType, count: int, seed: int) -> Array:
    """A mixture: any bits, numbers of ordinary size, special values."""
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 256, (count, dtype.bytes), dtype=np.uint8)
    drawn = any_bits[:, 0] > 127 if dtype == PRED else any_bits.view(dtype.numpy)[:, 0]
    chosen = special(dtype)[rng.integers(0, len(special(dtype)), count)]
    ordinary = rng.integers(-9, 40, count) if dtype.is_integer else rng.normal(size=count) * np.exp2(rng.integers(-12, 9, count))
    kind = rng.integers(0, 4, count)
    mixed = np.where(kind == 0, chosen, np.where(kind == 1, ordinary.astype(dtype.numpy), drawn))
    return mixed if dtype.bits >= 8 else (mixed.view(np.uint8) & np.uint8((1 << dtype.bits) - 1)).view(dtype.numpy)


def finite_values(dtype: DType, shape: tuple[int, ...], seed: int) -> Array:
    """Like `values`, without infinities and NaN, large ones scaled down: sums of them stay finite."""
    drawn = values(dtype, int(np.prod(shape)), seed).reshape(shape)
    if not dtype.is_float:
        return drawn
    with np.errstate(invalid="ignore"):
        wide = drawn.astype(np.float64)
    rng = np.random.default_rng(seed)
    return np.where(np.isfinite(wide) & (np.abs(wide) < 1e3), wide, rng.normal(size=shape)).astype(dtype.numpy)


def bits(x: Array) -> Array:
    """The bits, as unsigned integers."""
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def every_value(dtype: DType) -> Array:
    """All 65,536 values of a 16-bit type."""
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype.numpy)


def compute(fidelity: str, function: Method, arrays: Sequence[Array], dtypes: Sequence[DType], results: Sequence[DType]) -> list[Array]:
    """function(arithmetic, *values) in one of the three arithmetics, from stored arrays to stored arrays."""
    if fidelity == "reference":
        computed = [np.asarray(x) for x in function(REFERENCE, *arrays)]
    else:
        computed = compile_lax(fidelity == "bitexact", function, arrays, dtypes, results)(*arrays)
    assert [x.dtype for x in computed] == [t.numpy for t in results]
    return computed


def compile_lax(
    bitexact: bool, function: Method, arrays: Sequence[Array], dtypes: Sequence[DType], results: Sequence[DType]
) -> Callable[..., list[Array]]:
    """function(LaxArithmetic, *values) compiled as the fast engine does for stored arrays of these shapes."""

    def run(zero: Any, *stored: Any) -> list[Any]:
        ar = LaxArithmetic(bitexact, zero)
        loaded = [ar.load(x, t) for x, t in zip(stored, dtypes, strict=True)]
        return [ar.store(x, t) for x, t in zip(function(ar, *loaded), results, strict=True)]

    executable = jax.jit(run).lower(np.int32(0), *arrays).compile(compiler_options=COMPILER_OPTIONS)
    return lambda *stored: [np.asarray(x) for x in executable(np.int32(0), *stored)]


def assert_same_bits(name: str, got: Array, want: Array, *operands: Array) -> None:
    """Equal shapes, types and bits; a failure shows the first operands for which they differ."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    differ = bits(got) != bits(want)
    if differ.any():
        first = tuple(i[0] for i in np.nonzero(differ))
        shown = [f"{x[first]!r} ({int(bits(x)[first]):#x})" for x in (*operands, got, want) if x.shape == got.shape]
        raise AssertionError(f"{name}: {differ.sum()} of {differ.size} differ; operands, got, want: {', '.join(shown)}")


def ulps_apart(got: Array, want: Array, dtype: DType) -> Array:
    """Distance in units in the last place; two NaNs are 0 apart, a NaN and a number very far; f32 and bf16 subnormals count as zero."""
    smallest = {F32: 0x800000, BF16: 0x80, F16: 1}[dtype]

    def place(x: Array) -> Array:
        sign_bit = np.int64(1) << (8 * dtype.bytes - 1)
        word = bits(x).astype(np.int64)
        size = np.maximum((word & (sign_bit - 1)) - (smallest - 1), 0)
        return np.where(word & sign_bit, -size, size)

    nan = np.isnan(got.astype(np.float32)), np.isnan(want.astype(np.float32))
    apart = np.where(nan[0] | nan[1], 1 << 40, np.abs(place(got) - place(want)))
    return np.where(nan[0] & nan[1], 0, apart)
