"""The device's arithmetic: golden vectors, and the same bits from NumPy and from XLA."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.arithmetic_values import (
    FIDELITIES,
    REFERENCE,
    assert_same_bits,
    bits,
    compile_lax,
    compute,
    every_value,
    finite_values,
    reduced,
    values,
)  # fmt: skip
from tpuflow.device.fast import half
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.engine import COMPILER_OPTIONS
from tpuflow.dtypes import BF16, COMPUTED, DTYPES, F16, F32, PRED, S8, S16, S32, U8, U32, DType
from tpuflow.errors import ProgramError
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.elementwise import BINARY, COMPARE, CUMULATIVE, REDUCE, UNARY
from tpuflow.isa.numpy_arithmetic import is_defined

pytestmark = pytest.mark.optimised

MATRICES = Contraction((0, 1), (1, 2), (0, 2))

FLOATS = (F32, F16, BF16)


def unary(op: str) -> Callable[..., Any]:
    return lambda ar, t, a: ar.unary(op, a, t)


def binary(op: str) -> Callable[..., Any]:
    return lambda ar, t, a, b: ar.binary(op, a, b, t)


def convert(to: DType) -> Callable[..., Any]:
    return lambda ar, t, a: ar.convert(a, t, to)


def _scale_and_back(ar: Any, t: DType, a: Any, b: Any) -> Any:
    """(a x b) / b, the product rounded (and overflowing) first."""
    return ar.binary("div", ar.binary("mul", a, b, t), b, t)


def _by_constants(first: float, second: float, op: str = "mul") -> Callable[..., Any]:
    def apply(ar: Any, t: DType, a: Any) -> Any:
        return ar.binary(op, ar.binary("mul", a, ar.full(a.shape, first, t), t), ar.full(a.shape, second, t), t)

    return apply


def _by_constant(op: str, constant: float) -> Callable[..., Any]:
    return lambda ar, t, a: ar.binary(op, a, ar.full(a.shape, constant, t), t)


def _product_plus(ar: Any, t: DType, a: Any, b: Any, c: Any) -> Any:
    return ar.binary("add", ar.binary("mul", a, b, t), c, t)


def _over_root(ar: Any, t: DType, a: Any, b: Any) -> Any:
    return ar.binary("div", a, ar.unary("sqrt", b, t), t)


def _sum_in_f32(ar: Any, t: DType, a: Any, b: Any) -> Any:
    """The product rounded to the short type, then summed in f32."""
    return reduced(ar, "add", ar.convert(ar.binary("mul", a, b, t), t, F32), (0,), F32)


def _max_in_f32(ar: Any, t: DType, a: Any, b: Any) -> Any:
    return reduced(ar, "max", ar.convert(ar.binary("mul", a, b, t), t, F32), (0,), F32)


def reduce(op: str) -> Callable[..., Any]:
    return lambda ar, t, a: reduced(ar, op, a, (0,), t)


@dataclass(frozen=True)
class Golden:
    """Operands and result as bits."""

    name: str
    dtype: DType
    function: Callable[..., Any]
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    result_dtype: DType | None = None
    native: bool = True  # promised in native fidelity too (but for the bits of NaN)


NAN32, INF32, NEG = 0x7FC00000, 0x7F800000, 0x80000000

GOLDEN = (
    Golden("fp16 overflow, then division, is inf", F16, _scale_and_back, ((0x4000,), (0x7B53,)), (0x7C00,)),
    Golden("fp16 overflow by a constant, then division by it, is inf", F16, _by_constants(60000, 60000, "div"), ((0x4000,),), (0x7C00,)),
    Golden("fp16 x / 3", F16, _by_constant("div", 3), ((0x3C00, 0x4700, 0x2E66),), (0x3555, 0x40AB, 0x2844)),
    Golden("f32 x / 3", F32, _by_constant("div", 3), ((0x3F800000, 0x40E00000, 0x3DCCCCCD),), (0x3EAAAAAB, 0x40155555, 0x3D088889)),
    Golden("(x * 1.1) * 1.3 in steps", F32, _by_constants(1.1, 1.3),
           ((0x3F800000, 0x3FC00000, 0x40400000),), (0x3FB70A3D, 0x400947AE, 0x408947AE)),
    Golden("x / sqrt(y) in steps", F32, _over_root, ((0x40400000, 0x40A00000), (0x40400000, 0x41100000)), (0x3FDDB3D8, 0x3FD55555)),
    Golden("a product is rounded before it is added to", F32, _product_plus,
           ((0x3F800001,), (0x3F800001,), (0xBF800002,)), (0,), native=False),
    Golden("an fp16 product is rounded before it is added to", F16, _product_plus, ((0x3C01,), (0x3C01,), (0xBC02,)), (0,)),
    Golden("a bf16 product is rounded before it is added to", BF16, _product_plus, ((0x3F81,), (0x3F81,), (0xBF82,)), (0,)),
    Golden("fp16 products are rounded before a sum in f32", F16, _sum_in_f32, ((0x3C01, 0x3C01), (0x3C01, 0x3C01)), (0x40004000,), F32),
    Golden("bf16 products are rounded before a sum in f32", BF16, _sum_in_f32, ((0x3F81, 0x3F81), (0x3F81, 0x3F81)), (0x40020000,), F32),
    Golden("fp16 products are rounded before a maximum", F16, _max_in_f32, ((0x3C01, 0x3C00), (0x3C01, 0x3C00)), (0x3F804000,), F32),
    Golden("bf16 products are rounded before a maximum", BF16, _max_in_f32, ((0x3F81, 0x3F80), (0x3F81, 0x3F80)), (0x3F820000,), F32),
    Golden("f32 sums read and write subnormals as zeros", F32, binary("add"),
           ((0x00400000, 0x80400000, 0x00800001), (0x00400000, NEG, 0x80800000)), (0, NEG, 0)),
    Golden("f32 products that are subnormal are zeros, sign kept", F32, binary("mul"),
           ((0x00800000, 0x80800000, 0x3F7FFFFF), (0x3F000000, 0x3F000000, 0x00800000)), (0, NEG, 0)),
    Golden("a product that rounds up to the smallest normal stays", F32, binary("mul"), ((0x3F7FFFFF,), (0x00800001,)), (0x00800000,)),
    Golden("bf16 flushes", BF16, binary("mul"), ((0x0080, 0x8080, 0x0040), (0x3F00, 0x3F00, 0x7F00)), (0, 0x8000, 0)),
    Golden("f16 keeps subnormals", F16, binary("mul"), ((0x0400, 0x8001, 0x0001), (0x3800, 0x3C00, 0x3800)), (0x0200, 0x8001, 0)),
    Golden("neg keeps subnormals", F32, unary("neg"), ((1, 0x807FFFFF, 0),), (0x80000001, 0x007FFFFF, NEG)),
    Golden("a subnormal exponent is exp(0)", F32, unary("exp"), ((1, NEG),), (0x3F800000, 0x3F800000)),
    Golden("log of a subnormal is log(0)", F32, unary("log"), ((1,),), (0xFF800000,)),
    Golden("f16 square root of a subnormal", F16, unary("sqrt"), ((0x0001,),), (0x0C00,)),
    Golden("maximum of zeros is +0", F32, binary("max"), ((0, NEG, NEG), (NEG, 0, NEG)), (0, 0, NEG)),
    Golden("minimum of zeros is -0", F32, binary("min"), ((0, NEG, 0), (NEG, 0, 0)), (NEG, NEG, 0)),
    Golden("-0 + -0 is -0, x - x is +0", F32, binary("add"), ((NEG, 0x3F800000), (NEG, 0xBF800000)), (NEG, 0)),
    Golden("an odd number of -0 sums to -0", F32, reduce("add"), ((NEG, NEG, NEG),), (NEG,)),
    Golden("ceil(-0.5) is -0", F32, unary("ceil"), ((0xBF000000, 1),), (NEG, 0)),
    Golden("rounding to even and away", F32, unary("round_even"),
           ((0x3F000000, 0x3FC00000, 0x40200000, 0x3EFFFFFF),), (0, 0x40000000, 0x40000000, 0)),
    Golden("rounding away from zero", F32, unary("round_away"), ((0x3F000000, 0xC0200000, 0x3EFFFFFF),), (0x3F800000, 0xC0400000, 0)),
    Golden("maximum hands on NaN", F32, binary("max"), ((0xFFC00123, 0x3F800000), (0x3F800000, 0x7F800001)), (NAN32, NAN32)),
    Golden("NaN is written as the canonical one", F32, binary("sub"), ((INF32, 0xFFFFFFFF), (INF32, 0)), (NAN32, NAN32)),
    Golden("f16 NaN is written as the canonical one", F16, binary("mul"), ((0xFE01, 0x7C00), (0x3C00, 0)), (0x7E00, 0x7E00)),
    Golden("bf16 NaN is written as the canonical one", BF16, binary("add"), ((0xFFC1, 0x7F80), (0, 0xFF80)), (0x7FC0, 0x7FC0)),
    Golden("f32 NaN with low bits only stays NaN in bf16", F32, convert(BF16), ((0x7F800001, 0xFF800001),), (0x7FC0, 0x7FC0), BF16),
    Golden("the remainder has the dividend's sign", F32, binary("rem"),
           ((0xC0E00000, 0x40E00000, 0xC0800000, INF32, 0x3F800000), (0x40400000, 0xC0400000, 0x40000000, 0x3F800000, INF32)),
           (0xBF800000, 0x3F800000, NEG, NAN32, 0x3F800000)),
    Golden("pow as IEEE defines it", F32, binary("pow"),
           ((NAN32, 0x3F800000, NEG, 0xC0000000), (0, NAN32, 0xBF800000, 0x40400000)), (0x3F800000, 0x3F800000, 0xFF800000, 0xC1000000)),
    Golden("s32 division", S32, binary("div"),
           ((7, 0xFFFFFFF9, 5, 0x80000000), (2, 2, 0, 0xFFFFFFFF)), (3, 0xFFFFFFFD, 0xFFFFFFFF, 0x80000000)),
    Golden("s32 remainder", S32, binary("rem"), ((7, 0xFFFFFFF9, 5, 0x80000000), (0xFFFFFFFE, 2, 0, 0xFFFFFFFF)), (1, 0xFFFFFFFF, 5, 0)),
    Golden("u8 division by zero", U8, binary("div"), ((5, 200), (0, 7)), (255, 28)),
    Golden("s8 arithmetic wraps", S8, binary("mul"), ((127, 0x80), (2, 0xFF)), (0xFE, 0x80)),
    Golden("shifts by the width or more", S32, binary("shl"), ((1, 1, 1), (31, 32, 0xFFFFFFFF)), (0x80000000, 0, 0)),
    Golden("arithmetic shifts leave the sign", S16, binary("shr_arithmetic"), ((0x8000, 0x4000), (99, 99)), (0xFFFF, 0)),
    Golden("the high half of a product", U32, binary("mulhi"), ((0xFFFFFFFF,), (0xFFFFFFFF,)), (0xFFFFFFFE,)),
    Golden("f32 to s32 truncates and saturates", F32, convert(S32),
           ((0xBFF33333, 0x4F000000, 0xFF800000, NAN32, 0x4EFFFFFF),), (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0, 0x7FFFFF80), S32),
    Golden("f32 to u8 saturates", F32, convert(U8), ((0x43960000, 0xBF800000, NAN32, 0x437F8000),), (255, 0, 0, 255), U8),
    Golden("f16 inf to s8", F16, convert(S8), ((0x7C00, 0xFC00, 0x7E00),), (127, 0x80, 0), S8),
    Golden("s32 to f32 rounds to even", S32, convert(F32), ((16777217, 16777219),), (0x4B800000, 0x4B800002), F32),
    Golden("s32 to f16 overflows", S32, convert(F16), ((65519, 65520),), (0x7BFF, 0x7C00), F16),
    Golden("s32 to bf16 rounds once", S32, convert(BF16), ((0x40400001, 0x40400000),), (0x4E81, 0x4E80), BF16),
    Golden("f32 to f16 keeps subnormals", F32, convert(F16), ((0x33800000, 0x33000000, 0x33000001),), (1, 0, 1), F16),
    Golden("f32 to bf16 keeps subnormals", F32, convert(BF16), ((0x00010000, 0x00008000, 0x00018000),), (1, 0, 2), BF16),
)  # fmt: skip


PROMISED = [(g, f) for g in GOLDEN for f in FIDELITIES if g.native or f != "native"]


@pytest.mark.parametrize(("golden", "fidelity"), PROMISED, ids=[f"{g.name.replace(' ', '_')}-{f}" for g, f in PROMISED])
def test_golden_vectors_of_the_device(golden: Golden, fidelity: str):
    result = golden.result_dtype or golden.dtype
    arrays = [np.array(x, np.uint32).astype(f"u{golden.dtype.bytes}").view(golden.dtype.numpy) for x in golden.operands]
    function = lambda ar, *xs: [golden.function(ar, golden.dtype, *xs)]  # noqa: E731
    (got,) = compute(fidelity, function, arrays, [golden.dtype] * len(arrays), [result])
    want = np.array(golden.result, np.uint32).astype(f"u{result.bytes}").view(result.numpy)
    if fidelity == "native" and result.is_float:
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(want.astype(np.float32)))
        got, want = (np.where(np.isnan(x.astype(np.float32)), 0, x).astype(result.numpy) for x in (got, want))
    assert_same_bits(golden.name, got, want)


def test_plain_jax_does_not_have_these_bits():
    """Why the compiler options and the hidden zero are there: without them XLA:CPU gives other results."""
    x = values(F32, 20_000, 0)
    x = x[np.isfinite(x) & (np.abs(x) > 1e-3) & (np.abs(x) < 1e3)]
    stepwise = (x * np.float32(1.1)) * np.float32(1.3)
    assert (bits(np.asarray(jax.jit(lambda x: (x * np.float32(1.1)) * np.float32(1.3))(x))) != bits(stepwise)).any()
    y, z = x[::-1].copy(), np.roll(x, 7)
    contracted = jax.jit(lambda x, y, z: x * y + z).lower(x, y, z).compile(compiler_options=COMPILER_OPTIONS)(x, y, z)
    assert (bits(np.asarray(contracted)) != bits(x * y + z)).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_are_never_contracted_into_sums(dtype: DType):
    a, b, c = (finite_values(dtype, (20_000,), seed) for seed in range(3))
    chain = lambda ar, a, b, c: [  # noqa: E731
        _product_plus(ar, dtype, a, b, c),
        ar.binary("sub", c, ar.binary("mul", a, b, dtype), dtype),
        ar.binary("add", ar.binary("mul", a, b, dtype), ar.binary("mul", b, c, dtype), dtype),
        reduced(ar, "add", ar.binary("mul", a, b, dtype), (0,), dtype),
    ]
    got = compute("bitexact", chain, (a, b, c), [dtype] * 3, [dtype] * 4)
    for name, g, w in zip(("a*b+c", "c-a*b", "a*b+b*c", "sum(a*b)"), got, chain(REFERENCE, a, b, c), strict=True):
        assert_same_bits(name, g, w, a, b, c)


@dataclass(frozen=True)
class Elementwise:
    """One operation on (a, b, pred) of a type."""

    name: str
    result: DType
    apply: Callable[..., Any]


def elementwise(t: DType) -> list[Elementwise]:
    """Every elementwise method of the arithmetic on operands of type t."""
    return [
        *(Elementwise(op, t, lambda ar, a, b, p, op=op: ar.unary(op, a, t)) for op in UNARY if is_defined(op, t)),
        *(Elementwise(op, t, lambda ar, a, b, p, op=op: ar.binary(op, a, b, t)) for op in BINARY if is_defined(op, t)),
        *(Elementwise(f"to {u}", u, lambda ar, a, b, p, u=u: ar.convert(a, t, u)) for u in DTYPES),
        *(Elementwise(f"as {u}", u, lambda ar, a, b, p, u=u: ar.bitcast(a, t, u)) for u in DTYPES if u.bits == t.bits >= 8 and u != PRED),
        Elementwise("select", t, lambda ar, a, b, p: ar.select(p, a, b, t)),
        *(_compared(t) if t in COMPUTED else ()),
    ]


def _compared(t: DType) -> list[Elementwise]:
    return [
        *(Elementwise(op, PRED, lambda ar, a, b, p, op=op: ar.compare(op, a, b, t)) for op in COMPARE),
        Elementwise("is_finite", PRED, lambda ar, a, b, p: ar.is_finite(a, t)),
        Elementwise("select the lesser", t, lambda ar, a, b, p: ar.select(ar.compare("lt", a, b, t), a, b, t)),
    ]


@functools.cache
def _compiled_elementwise(t: DType) -> Callable[..., list[np.ndarray]]:
    """All of them on XLA:CPU, of as many values as `_many` gives."""
    cases, operands = elementwise(t), (*_many(t, 1), values(PRED, _count(t), 9))
    return compile_lax(True, lambda ar, *xs: [c.apply(ar, *xs) for c in cases], operands, (t, t, PRED), [c.result for c in cases])


def _count(t: DType) -> int:
    return 1 << 16 if t in (F16, BF16) else 30_000


def _many(t: DType, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two operands: of 16 bits, every value beside another."""
    if t in (F16, BF16):
        return every_value(t), np.random.default_rng(seed).permutation(every_value(t))
    return values(t, _count(t), seed), values(t, _count(t), seed + 1000)


def _check_elementwise(t: DType, a: np.ndarray, b: np.ndarray) -> None:
    p = values(PRED, a.size, 9)
    for case, g in zip(elementwise(t), _compiled_elementwise(t)(a, b, p), strict=True):
        assert g.dtype == case.result.numpy
        assert_same_bits(f"{case.name} on {t}", g, np.asarray(case.apply(REFERENCE, a, b, p)), a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_and_xla_give_the_same_bits_elementwise(dtype: DType):
    _check_elementwise(dtype, *_many(dtype, 0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_and_xla_give_the_same_bits_for_a_million_values(dtype: DType):
    for seed in range(1, 1 + math.ceil(1_000_000 / _count(dtype))):
        _check_elementwise(dtype, *_many(dtype, seed))


@pytest.mark.parametrize("dtype", (F32, S32), ids=str)
def test_the_bits_of_an_array_that_threads_share_are_the_same(dtype: DType):
    """XLA:CPU gives each of its threads a part of a long array."""
    a, b = values(dtype, 1_000_001, 10), values(dtype, 1_000_001, 20)
    for op in ("add", "mul", "div"):
        both = lambda ar, a, b, op=op: [ar.binary(op, a, b, dtype)]  # noqa: E731
        (got,), (wanted,) = compute("bitexact", both, (a, b), (dtype, dtype), (dtype,)), both(REFERENCE, a, b)
        assert_same_bits(op, got, wanted, a, b)


SHAPES = (((6, 13), (0,)), ((6, 13), (1,)), ((5, 4, 7), (0, 2)), ((1, 3), (0,)), ((64, 33), (0, 1)), ((0, 3), (0,)), ((130,), (0,)))


def test_blocks_are_added_one_after_the_other_whatever_the_tile():
    x = values(F32, 300, 5).reshape(3, 100)
    one_tile = reduced(REFERENCE, "add", x, (0, 1), F32, block=50)
    parts = reduced(REFERENCE, "add", x[:1], (0, 1), F32, block=50)
    for rows in (x[1:2, :50], x[1:2, 50:], x[2:]):
        parts = REFERENCE.reduce("add", parts, rows, (0, 1), 50, F32)
    assert_same_bits("sum", parts, one_tile)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_and_xla_reduce_in_the_same_blocks_and_trees(dtype: DType):
    ops = [op for op in REDUCE if is_defined(op, dtype)]
    arrays = [finite_values(dtype, shape, 3) for shape, _ in SHAPES] + [values(dtype, 200, 4)]
    axes = [a for _, a in SHAPES] + [(0,)]
    cases = [(op, n, block) for op in ops for n in range(len(arrays)) for block in (1, 8, 100, 1 << 40)]
    both = lambda ar, *xs: [reduced(ar, op, xs[n], axes[n], dtype, block) for op, n, block in cases]  # noqa: E731
    names = [f"{op} of {arrays[n].shape} over {axes[n]} in blocks of {block}" for op, n, block in cases]
    got = compute("bitexact", both, arrays, [dtype] * len(arrays), [dtype] * len(names))
    for name, g, w in zip(names, got, both(REFERENCE, *arrays), strict=True):
        assert_same_bits(name, g, w)


def test_a_sum_is_a_halving_tree_rounded_at_every_step():
    x = np.array([2048, 1, 1, 1, 1], np.float16)  # (2048 + 1) + ..., padded to 8: ((2048 + 1) + 1) + (1 + 1)
    assert reduced(REFERENCE, "add", x, (0,), F16)[0] == np.float16(2050)
    in_a_row = np.float16(2048)
    for term in x[1:]:
        in_a_row += term
    assert in_a_row == np.float16(2048)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_and_xla_accumulate_left_to_right(dtype: DType):
    ops = [op for op in CUMULATIVE if is_defined(op, dtype)]
    x, down, across = finite_values(dtype, (19, 5), 5), finite_values(dtype, (1, 5), 6), finite_values(dtype, (19, 1), 7)
    both = lambda ar, x, d, a: [  # noqa: E731
        y for op in ops for axis, carry in ((0, d), (1, a)) for y in ar.cumulative(op, carry, x, axis, dtype)
    ]
    got = compute("bitexact", both, (x, down, across), [dtype] * 3, [dtype] * (4 * len(ops)))
    for g, w in zip(got, both(REFERENCE, x, down, across), strict=True):
        assert_same_bits("cumulative", g, w)


@pytest.mark.parametrize("fidelity", ("bitexact", "native"))
@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_numpy_and_xla_sort_alike(dtype: DType, fidelity: str):
    x, y = values(dtype, 400, 8).reshape(40, 10), values(F32, 400, 9).reshape(40, 10)

    def both(ar: Any, x: Any, y: Any) -> list[Any]:
        place = ar.iota(x.shape, 0, 0, S32)
        ways = ((0, 1, 40), (1, 2, 10), (0, 1, 5), (0, 1, 6), (0, 2, 3))  # few of a row, more, by two keys
        return [z for axis, keys, count in ways for z in ar.sort((x, y, place), (dtype, F32, S32), axis, keys, count)]

    for g, w in zip(compute(fidelity, both, (x, y), (dtype, F32), [dtype, F32, S32] * 5), both(REFERENCE, x, y), strict=True):
        assert_same_bits("sort", g, w)


def test_sort_is_stable_with_zeros_equal_and_nan_last():
    x = np.array([np.nan, 0.0, -0.0, 1e-40, -1.0, np.inf, -np.nan], np.float32)
    order = REFERENCE.sort((x, np.arange(7, dtype=np.int32)), (F32, S32), 0, 1, 7)[1]
    assert order.tolist() == [4, 1, 2, 3, 5, 0, 6]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_keep_every_bit(dtype: DType):
    x = values(dtype, 400, 10).reshape(40, 10)
    both = lambda ar, x: [  # noqa: E731
        x,
        ar.transpose(x, (1, 0)),
        ar.broadcast(x, (10, 3, 40), (2, 0)),
        ar.broadcast(ar.transpose(x, (1, 0)), (10, 40), (0, 1)),
    ]
    got = compute("bitexact", both, (x,), (dtype,), [dtype] * 4)
    for g, w in zip(got, (x, x.T, np.broadcast_to(x.T[:, None, :], (10, 3, 40)), x.T), strict=True):
        assert_same_bits("move", g, w)


@pytest.mark.parametrize("dtype", [t for t in COMPUTED if t != PRED], ids=str)
def test_numpy_and_xla_make_the_same_splats_and_iotas(dtype: DType):
    wanted = (1e-40, -0.0, float("nan"), float("inf"), 0.1, 65520.0, -3e38, 1 / 3) if dtype.is_float else (0, 1, -1, 100)
    both = lambda ar: [  # noqa: E731
        *(ar.full((2,), v, dtype) for v in wanted),
        ar.full((), 1, dtype),
        ar.iota((3, 5), 1, 7, dtype),
        ar.iota((3, 5), 0, np.int32(250), dtype),
    ]
    for g, w in zip(compute("bitexact", both, (), (), [dtype] * (len(wanted) + 3)), both(REFERENCE), strict=True):
        assert_same_bits("splat or iota", g, w)


@dataclass(frozen=True)
class Product:
    """Shapes and axis labels of a matrix product."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    a_axes: tuple[int, ...] = (0, 1)
    b_axes: tuple[int, ...] = (1, 2)
    out_axes: tuple[int, ...] = (0, 2)


PRODUCTS = (
    *(Product((m, k), (k, n)) for m, k, n in ((1, 0, 3), (1, 1, 5), (1, 300, 7), (5, 2048, 1), (3, 33, 17), (64, 784, 10))),
    Product((64, 20), (64, 30), (1, 0), (1, 2), (0, 2)),  # both contracted on their first axis, as a weight gradient is
    Product((40, 784), (784, 99)),  # this one and the next two are too large to be summed directly
    Product((150, 200), (150, 300), (1, 0), (1, 2), (0, 2)),
    Product((2, 3, 30, 30), (30, 30, 2, 500), (0, 1, 2, 3), (3, 2, 0, 4), (4, 0, 1)),
    Product((3, 20, 9), (20, 3, 4, 9), (0, 1, 5), (1, 0, 7, 5), (7, 0)),  # two contracted axes, a label each in rows and columns
    Product((4, 5, 30), (4, 6, 30), (0, 1, 2), (0, 3, 2), (0, 1, 3)),  # a batch
    Product((2, 3, 4, 5), (5, 4, 6, 2), (0, 1, 2, 3), (3, 2, 6, 0), (0, 6, 1)),
    Product((40,), (40,), (3,), (3,), ()),
    Product((5, 6), (7,), (0, 1), (2,), (0, 1, 2)),  # nothing contracted
)


def _operand(dtype: DType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Seed 0: ordinary numbers. 1: huge, small and zero ones that cancel. 2: anything."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 1 and dtype.is_float:
        return rng.choice([6e4, -6e4, 1.0, -1.0, 1e-7, 0.0, -0.0], shape).astype(dtype.numpy)
    if seed % 3 == 2:
        return values(dtype, int(np.prod(shape)), seed).reshape(shape)
    return (rng.normal(size=shape) * (1 if dtype.is_float else 50)).astype(dtype.numpy)


def _check_products(products: tuple[Product, ...], dtype: DType, seeds: range) -> None:
    acc = F32 if dtype.is_float else S32

    def both(ar: Any, *xs: Any) -> list[Any]:
        pairs = zip(xs[::2], xs[1::2], products, strict=True)
        return [ar.matmul(a, b, Contraction(p.a_axes, p.b_axes, p.out_axes), dtype, acc) for a, b, p in pairs]

    drawn = [[_operand(dtype, shape, seed) for p in products for shape in (p.a, p.b)] for seed in seeds]
    compiled = compile_lax(True, both, drawn[0], [dtype] * len(drawn[0]), [acc] * len(products))
    for arrays in drawn:
        for p, g, w in zip(products, compiled(*arrays), both(REFERENCE, *arrays), strict=True):
            assert_same_bits(f"{p} of {dtype}", g, w)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (F32, F16, BF16, S8, U8, S32), ids=str)
def test_numpy_and_xla_multiply_matrices_alike(dtype: DType):
    _check_products(PRODUCTS, dtype, range(6))


@pytest.mark.slow
@pytest.mark.parametrize("terms", (2, 7, 128, 257, 1024))  # blocks of contractions are that long at most, but for some kernels
def test_numpy_and_xla_multiply_matrices_of_every_size_alike(terms: int):
    """Lengths around those from which XLA:CPU multiplies by other code: a vector, few rows, whole registers and one more."""
    sizes = (1, 2, 3, 8, 9, 64, 512)
    left_out = {128: 0, 1024: 1}.get(terms)  # every pair of sizes has one of these two lengths, and all others
    for i, m in enumerate(sizes):
        taken = (n for j, n in enumerate(sizes) if (i + j) % 2 != left_out)
        products = tuple(Product((m, terms), (terms, n)) for n in taken if m * n * terms <= 1 << 26)
        _check_products(products, F32, range(3 * m, 3 * m + 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_matrix_product_is_the_ascending_float64_sum_rounded_once(dtype: DType):
    a, b = _operand(dtype, (7, 301), 0), _operand(dtype, (301, 9), 0)
    sums = np.zeros((7, 9))
    for k in range(301):
        sums += a[:, k : k + 1].astype(np.float64) * b[k].astype(np.float64)
    assert_same_bits("matmul", REFERENCE.matmul(a, b, MATRICES, dtype, F32), sums.astype(np.float32))


@pytest.mark.parametrize("fidelity", ("reference", "bitexact"))
def test_the_order_of_a_matrix_sum_shows_where_terms_cancel(fidelity: str):
    """2^54 swallows a 1 that is added to it; a 1 that comes after 2^54 is taken away again stays."""
    big = 2.0**27
    a = np.array([[big, 1.0, big], [big, big, 1.0], [1.0, big, big]], np.float32)
    b = np.array([[big, big, 1.0], [1.0, -big, big], [-big, 1.0, -big]], np.float32)
    product = lambda ar, a, b: [ar.matmul(a, b, MATRICES, F32, F32)]  # noqa: E731
    (got,) = compute(fidelity, product, (a, b), (F32, F32), (F32,))
    assert got[0, 0] == 0.0  # (2^54 + 1) - 2^54
    assert got[1, 1] == 1.0  # (2^54 - 2^54) + 1


@pytest.mark.parametrize("power", range(0, 14, 2))
def test_f16_terms_too_small_for_float64_are_lost_in_the_same_order(power: int):
    """2^p + many terms of about 2^-28 - 2^p: all are multiples of 2^-48, so that float64 adds them exactly up to p = 4, in any order."""
    rng = np.random.default_rng(power)
    a, b = (rng.uniform(2.0**-14, 2.0**-13, shape).astype(np.float16) for shape in ((64, 2000), (2000, 1)))
    large = 2.0 ** (power // 2)
    a[:, 0], a[:, -1], b[0], b[-1] = large, -large, large, large
    product = lambda ar, a, b: [ar.matmul(a, b, MATRICES, F16, F32)]  # noqa: E731
    (got,), (wanted,) = compute("bitexact", product, (a, b), (F16, F16), (F32,)), product(REFERENCE, a, b)
    assert_same_bits(f"2^{power}", got, wanted)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("bitexact", [False, True])
def test_what_lies_between_trips_keeps_every_bit_in_as_many_bytes_as_on_the_device(dtype: DType, bitexact: bool):
    def there_and_back(zero: jax.Array, x: jax.Array) -> jax.Array:
        ar = LaxArithmetic(bitexact, zero)
        lying = ar.rest(ar.take(ar.rest(x, dtype), dtype), dtype)
        assert lying.dtype.itemsize == dtype.bytes
        return ar.store(lying, dtype)

    stored = every_value(dtype)
    got = jax.jit(there_and_back, compiler_options=COMPILER_OPTIONS)(np.int32(0), stored)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), stored.view(np.uint16))


def test_soft_f16_conversions_equal_the_hardware_ones():
    stored = every_value(F16)
    wide = stored.astype(np.float32)
    nan = np.isnan(wide)
    got = np.asarray(jax.jit(half.widen_bits)(stored))
    assert_same_bits("f16 to f32", got[~nan], wide[~nan])
    assert np.isnan(got[nan]).all()
    ordered = np.sort(wide[np.isfinite(wide)])
    ties = (ordered[1:] + ordered[:-1]) / 2
    x = np.concatenate(
        [wide, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf)), values(F32, 100_000, 11)]
    )
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    got = np.asarray(jax.jit(half.narrow_bits)(x))
    nan = np.isnan(want)
    assert_same_bits("f32 to f16", got[~nan], want[~nan])
    assert np.isnan(got[nan]).all()


def test_float64_stays_inside_the_arithmetic():
    def trace(zero: Any, x: Any) -> Any:
        ar = LaxArithmetic(True, zero)
        y = ar.unary("exp", x, F32)
        z = ar.matmul(y, y, MATRICES, F32, F32)
        assert (jnp.arange(3).dtype, jnp.ones(3).dtype) == (jnp.int32, jnp.float32)
        return ar.unary("tanh", ar.convert(z, F32, F16), F16), ar.binary("mulhi", *[ar.convert(z, F32, S32)] * 2, S32)

    shapes = jax.eval_shape(trace, np.int32(0), np.ones((3, 3), np.float32))
    assert [s.dtype for s in shapes] == [jnp.float16, jnp.int32]


def test_bitexact_needs_the_run_time_zero():
    with pytest.raises(ValueError, match="run-time int32 zero"):
        LaxArithmetic(True)


@pytest.mark.parametrize("ar", (REFERENCE, LaxArithmetic(False)), ids=("numpy", "lax"))
def test_an_operation_without_meaning_on_a_type_names_those_that_have_one(ar: Any):
    with pytest.raises(ProgramError, match="'exp' is not defined on s32; unary operations on it: neg, abs"):
        ar.unary("exp", np.ones(3, np.int32), S32)
    with pytest.raises(ProgramError, match="'xor' is not defined on f32; binary operations on it: add"):
        ar.binary("xor", np.ones(3, np.float32), np.ones(3, np.float32), F32)


def digest() -> str:
    """Of the bits of every elementwise operation and of sums of products, in the types in which XLA:CPU computes by vector registers."""
    found = hashlib.sha256()
    for t in FLOATS:
        a, b = _operand(t, (64, 300), 0), _operand(t, (300, 33), 0)
        both = lambda ar, a, b, t=t: [  # noqa: E731
            ar.matmul(a, b, MATRICES, t, F32),
            reduced(ar, "add", ar.convert(a, t, F32), (1,), F32, 64),
        ]
        results = _compiled_elementwise(t)(*_many(t, 1), values(PRED, _count(t), 3))
        for x in results + compute("bitexact", both, (a, b), (t, t), (F32, F32)):
            found.update(x.tobytes())
    return found.hexdigest()


def _digest_with(flags: str) -> str:
    """The same in a process of its own."""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "from tests.test_arithmetic import digest; print(digest())"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 instruction sets")
def test_bits_do_not_depend_on_the_instruction_set_of_the_host():
    assert {_digest_with(f"--xla_cpu_max_isa={name}") for name in ("SSE4_2", "AVX2")} == {digest()}
