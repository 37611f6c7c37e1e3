"""Native fidelity: within stated bounds of the device's bits, and equal to them where no bound is stated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import tpuflow
from tests.arithmetic_values import REFERENCE, compute, every_value, finite_values, reduced, ulps_apart, values
from tests.program_builder import SEQUENTIAL, Builder, KernelBuilder
from tests.quick import quickly_compiled
from tests.tolerances import NATIVE_F32, NATIVE_SHORT_SPECIAL, sum_bound
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import BF16, COMPUTED, F16, F32, PRED, S32, DType
from tpuflow.isa import vector
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.elementwise import BINARY, COMPARE, CUMULATIVE, REDUCE, UNARY
from tpuflow.isa.numpy_arithmetic import is_defined
from tpuflow.isa.program import Program

pytestmark = pytest.mark.optimised

MATRICES = Contraction((0, 1), (1, 2), (0, 2))

FLOATS = (F32, F16, BF16)


def _bound(op: str, dtype: DType) -> int:
    if op not in NATIVE_F32:
        return 0
    return NATIVE_F32[op].ulps if dtype == F32 else NATIVE_SHORT_SPECIAL.ulps


def _check(dtype: DType, a: np.ndarray, b: np.ndarray) -> None:
    unary = [op for op in UNARY if is_defined(op, dtype)]
    binary = [op for op in BINARY if is_defined(op, dtype)]

    def both(ar: Any, a: Any, b: Any) -> list[Any]:
        return [
            *(ar.unary(op, a, dtype) for op in unary),
            *(ar.binary(op, a, b, dtype) for op in binary),
            *(ar.compare(op, a, b, dtype) for op in COMPARE),
            *(ar.convert(a, dtype, t) for t in COMPUTED),
        ]

    names = [*unary, *binary, *COMPARE, *(f"to {t}" for t in COMPUTED)]
    types = [*([dtype] * (len(unary) + len(binary))), *([PRED] * len(COMPARE)), *COMPUTED]
    got = compute("native", both, (a, b), (dtype, dtype), types)
    for name, t, g, w in zip(names, types, got, both(REFERENCE, a, b), strict=True):
        if not t.is_float:
            np.testing.assert_array_equal(g, w, err_msg=f"{name} on {dtype}")
            continue
        apart = ulps_apart(g, w, t)
        worst = int(apart.argmax())
        assert apart[worst] <= _bound(name, dtype), (
            f"{name} on {dtype}: {apart[worst]} ulps at {a[worst]}, {b[worst]}: {g[worst]}, not {w[worst]}"
        )


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_native_results_are_within_their_bounds(dtype: DType):
    if dtype in (F16, BF16):
        _check(dtype, every_value(dtype), np.random.default_rng(0).permutation(every_value(dtype)))
    else:
        _check(dtype, values(dtype, 100_000, 31), values(dtype, 100_000, 32))


@pytest.mark.slow
def test_native_results_are_within_their_bounds_for_three_million_values():
    _check(F32, values(F32, 3_000_000, 33), values(F32, 3_000_000, 34))


def test_the_bounds_are_not_slack():
    """Every function with a bound does differ from the device's bits: the table names nothing in vain."""
    a, b = values(F32, 100_000, 31), np.abs(values(F32, 100_000, 32))
    binary = ("pow", "atan2")
    both = lambda ar, a, b: [ar.binary(op, b, a, F32) if op in binary else ar.unary(op, a, F32) for op in NATIVE_F32]  # noqa: E731
    got = compute("native", both, (a, b), (F32, F32), [F32] * len(NATIVE_F32))
    for op, g, w in zip(NATIVE_F32, got, both(REFERENCE, a, b), strict=True):
        assert ulps_apart(g, w, F32).max() > 0, op


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_native_reductions_are_within_the_bound_of_their_order(dtype: DType):
    x, axes = finite_values(dtype, (37, 200), 35), (1,)
    ops = [op for op in REDUCE if op != "mul" and is_defined(op, dtype)]
    both = lambda ar, x: [reduced(ar, op, x, axes, dtype) for op in ops]  # noqa: E731
    for op, g, w in zip(ops, compute("native", both, (x,), (dtype,), [dtype] * len(ops)), both(REFERENCE, x), strict=True):
        if dtype == F32 and op == "add":
            size = np.abs(x.astype(np.float64)).sum(axis=1, keepdims=True)
            assert (np.abs(g.astype(np.float64) - w) <= sum_bound(200) * size).all()
        else:
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(
    "shape, axes",
    [((16, 32, 32, 16), (0, 1, 2)), ((32, 64, 28, 28), (0, 2, 3)), ((200_000,), (0,)), ((8, 50_000), (1,)), ((8, 99, 256), (0, 1))],
)
def test_native_sums_of_many_numbers_lose_hardly_more_than_those_of_jax_jit(shape: tuple[int, ...], axes: tuple[int, ...]):
    x = np.random.default_rng(40).random(shape, np.float32) + np.float32(0.1)
    for f in (lambda x: x.sum(axes), lambda x: jnp.square(x - 0.3).sum(axes), lambda x: jnp.exp(x).sum(axes)):
        with jax.enable_x64(True):
            exact = np.asarray(jax.jit(f)(x.astype(np.float64)))
        ours, theirs = (np.abs(np.asarray(run(f)(x)) / exact - 1).max() for run in (tpuflow.jit, jax.jit))
        assert ours <= max(3 * theirs, 5e-7)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
def test_native_extremes_are_those_of_integers_and_hand_on_nan_and_the_sign_of_zero(op: str, dtype: DType):
    x = np.array([[1, -np.inf, np.nan], [2, 1, -np.nan], [-0.0, 0.0, -0.0], [0.0, -0.0, 0.0], [np.inf, -1, 3], [-3, -2, -4]], np.float32)
    x = np.concatenate([x, np.broadcast_to(x[:, :1], (6, 40))], 1).astype(dtype.numpy)
    both = lambda ar, x: [reduced(ar, op, x, (axis,), dtype) for axis in (0, 1)]  # noqa: E731
    for got, expected in zip(compute("native", both, (x,), (dtype,), [dtype] * 2), both(REFERENCE, x), strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(got[expected == 0]), np.signbit(expected[expected == 0]))
    made = jax.make_jaxpr(lambda x: LaxArithmetic(False).reduce(op, x[:, :1], x, (1,), 43, dtype))(x.astype(np.float32))
    assert f"i{16 if dtype == BF16 else 32}[6] = reduce_{op}" in str(made)


def maxima(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


@pytest.mark.parametrize(
    "of, library",
    [
        (lambda x: x.sum(0), True),
        (lambda x: x.sum(1), True),
        (lambda x: (x * x).sum(0), True),
        (lambda x: (x * x).sum(1), False),  # never written to memory
        (jax.nn.softmax, True),  # with its maximum (test_softmaxes.py)
        (lambda x: maxima(x).sum(0), True),
        (lambda x: (x[:, None] - x[:8]).sum(0), False),  # 2^20 differences
        (lambda x: maxima(x).sum(1), False),
        (lambda x: maxima(x.sum(0)), True),
        (lambda x: jnp.minimum(x, 1).sum(), False),
    ],
)
def test_native_sums_are_ynnpack_s_if_their_terms_are_columns_or_in_memory(of: Callable[[jax.Array], Any], library: bool):
    x = finite_values(F32, (256, 512), 51) % 4
    x[3, 5], x[4, 6], x[:, 8] = np.inf, np.nan, -0.0
    (made,) = FastEngine(tpuflow.jit(of).program(x)).translate()
    text = made.compile().as_text()
    fused = [
        text[at : text.index("\n}", at)] for at in (text.index(f"{name} (") for name in re.findall(r"calls=(\S+?),.*__ynn_fusion", text))
    ]
    assert any(" reduce(" in f for f in fused) == library
    assert not any(operation in f for f in fused for operation in (" maximum(", " minimum("))  # YNNPACK's lose NaN
    for got, exact in zip(*(jax.tree.leaves(tpuflow.jit(of, fidelity=f)(x)) for f in ("native", "bitexact")), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-3)  # NaN where NaN is, and infinity


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("fidelity", ["native", "bitexact"])
def test_negative_zeros_sum_to_zero_where_the_sum_starts_from_it(axes: tuple[int, ...], fidelity: str):
    x = np.full((64, 256), -0.0, np.float32)
    for of in (lambda x: x.sum(axes), lambda x: (x * 2).sum(axes)):
        found = np.asarray(tpuflow.jit(of, fidelity=fidelity)(x))
        assert not found.any() and not np.signbit(found).any()


@pytest.mark.parametrize("made", [(), ("floor",), ("floor", "ceil")])
@pytest.mark.parametrize("rows, columns", [(100, 1000), (256, 256)])
def test_negative_zeros_sum_to_negative_zero_where_the_accumulator_starts_from_it(rows: int, columns: int, made: tuple[str, ...]):
    """Of what is loaded, of what is computed, and two sums in one kernel."""
    b = Builder()
    x = b.input("x", F32, (rows, columns))
    k = KernelBuilder(b, (), "sum")
    source, sums = k.load(k.window(x, k.tile(F32, [rows, columns]))), []
    for op in made or [""]:
        out, total, terms = b.new_output(f"out {op}", F32, (1, columns)), k.tile(F32, [1, columns]), source
        if op:
            terms = k.tile(F32, [rows, columns])
            k.emit(vector.Unary(op, terms, source))
        k.emit(vector.Constant(total, -0.0), vector.ReduceInto("add", total, terms, (0,), rows))
        sums.append((out, total))
    for out, total in sums:
        k.result(total, window=k.window(out, total))
    k.release()
    program = b.program(k.kernel())
    for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native")):
        found, _ = Executable(program, engine, fidelity).launch([np.full((rows, columns), -0.0, np.float32)])
        assert all(np.signbit(x).all() for x in found), fidelity


def test_a_sum_over_no_steps_is_what_it_starts_from():
    b = Builder()
    x, out = b.input("x", F32, (0, 128)), b.new_output("out", F32, (1, 128))
    k = KernelBuilder(b, [(0, SEQUENTIAL)], "sum")
    total = k.tile(F32, [1, 128], rate="point")
    k.emit(vector.Constant(total, 0.0), section="prologue")
    source = k.load(k.window(x, k.tile(F32, [k.axis(0, 8, 0), 128])))
    k.emit(vector.ReduceInto("add", total, source, (0,), 8))
    k.release()
    k.result(total, window=k.window(out, total), section="epilogue")
    program = b.program(k.kernel())
    for fidelity in ("bitexact", "native"):
        (found,), _ = Executable(program, "fast", fidelity).launch([np.ones((0, 128), np.float32)])
        assert not found.any() and not np.signbit(found).any(), fidelity


@pytest.mark.parametrize("rows", [320, 640])
def test_sums_of_columns_from_negative_zero_are_of_windows(rows: int):
    x = finite_values(F32, (rows, 768), 51)
    total = lambda x: LaxArithmetic(False).reduce("add", jnp.full_like(x[:1], -0.0), x, (0,), rows, F32)  # noqa: E731
    assert "window_dimensions=(32, 1)" in str(jax.make_jaxpr(total)(x))
    np.testing.assert_allclose(total(x), x.astype(np.float64).sum(0, keepdims=True), rtol=1e-4, atol=1e-4 * np.abs(x).max())


def two_sums(between: str = "", chain: int = 0) -> Program:
    """The sums of columns of x * x and x * y (`chain` operations more in each). between: what else happens to the first sum's tile before
    the second is added up: it is "read", or "written" anew after it was read."""
    b = Builder()
    x, y = (b.input(name, F32, (96, 256)) for name in "xy")
    outs = [b.new_output(name, F32, (1, 256)) for name in ("squares", "products", "doubled")]
    k = KernelBuilder(b, (), "sums")
    left, right = (k.load(k.window(i, k.tile(F32, [96, 256]))) for i in (x, y))
    squares, products = k.tile(F32, [96, 256]), k.tile(F32, [96, 256])
    first, second, doubled = (k.tile(F32, [1, 256]) for _ in range(3))
    k.emit(vector.Binary("mul", squares, left, left), vector.Binary("mul", products, left, right))
    for _ in range(chain):
        k.emit(vector.Unary("sqrt", squares, squares), vector.Unary("abs", products, products))
    k.emit(vector.Constant(first, 0.0), vector.Constant(second, 0.0))
    k.emit(vector.ReduceInto("add", first, squares, (0,), 96))
    if between:
        k.emit(vector.Binary("add", doubled, first, first))
    if between == "written":
        k.emit(vector.Constant(first, 7.0))
    k.emit(vector.ReduceInto("add", second, products, (0,), 96))
    if not between:
        k.emit(vector.Binary("add", doubled, first, first))
    for out, tile in zip(outs, (first, second, doubled), strict=True):
        k.result(tile, window=k.window(out, tile))
    k.release()
    return b.program(k.kernel())


@pytest.mark.parametrize("between, chain", [("", 0), ("", 1), ("read", 0), ("written", 0)])
def test_two_sums_of_one_kernel(between: str, chain: int):
    program = two_sums(between, chain)
    x, y = finite_values(F32, (96, 256), 53) % 4, finite_values(F32, (96, 256), 54) % 4
    x[3, 5], x[4, 6], y[5, 7], x[:, 8] = np.inf, -np.inf, np.nan, -0.0
    expected, _ = Executable(program, "reference", "bitexact").launch([x, y])
    for fidelity in ("bitexact", "native"):
        found, _ = Executable(program, "fast", fidelity).launch([x, y])
        for got, wanted in zip(found, expected, strict=True):
            rtol, atol = (1e-5, 1e-4) if fidelity == "native" else (0, 0)
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_accumulator_starts_from_what_reaches_its_sum(zero: float, reused: bool):
    """Not from what its tile holds afterwards."""
    b = Builder()
    x, out = b.input("x", F32, (100, 1000)), b.new_output("out", F32, (1, 1000))
    k = KernelBuilder(b, (), "sum")
    source, total = k.load(k.window(x, k.tile(F32, [100, 1000]))), k.tile(F32, [1, 1000])
    k.emit(vector.Constant(total, zero), vector.ReduceInto("add", total, source, (0,), 100))
    if reused:
        k.emit(vector.Unary("neg", total, total))
    k.result(total, vector.Unary("neg", total, total), window=k.window(out, total))
    k.release()
    program = b.program(k.kernel())
    (made,) = FastEngine(program, verified=True).translate()
    assert ("stablehlo.reduce_precision" in made.as_text()) == bool(np.signbit(zero))  # else YNNPACK's
    (found,), _ = Executable(program, "fast", "native").launch([np.full((100, 1000), -0.0, np.float32)])
    (expected,), _ = Executable(program, "reference", "bitexact").launch([np.full((100, 1000), -0.0, np.float32)])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def plain(x: jax.Array) -> jax.Array:
    """Multiplications and additions alone."""
    return ((x * 0.5 + 1) * x - 3) * x


def special(x: jax.Array) -> jax.Array:
    """With an exponential and a division."""
    return x / (1 + jnp.exp(-x))


@pytest.mark.parametrize("of, rows, once", [(special, 64, 0), (special, 512, 1), (plain, 64, 0), (plain, 512, 1)])
def test_what_a_kernel_stores_is_made_once_if_it_is_much(of: Callable[[jax.Array], jax.Array], rows: int, once: int):
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = of(x)
        return y, y @ w

    x, w = finite_values(F32, (rows, 256), 44) % 4, finite_values(F32, (256, 8), 45) % 4
    engine = FastEngine(tpuflow.jit(f).program(x, w))
    assert sum(translated.compile().as_text().count(" opt-barrier(") for translated in engine.translate()) == once
    (y, product), (exact, _) = tpuflow.jit(f)(x, w), tpuflow.jit(f, fidelity="bitexact")(x, w)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(product, np.asarray(y, np.float64) @ w, rtol=1e-4, atol=1e-2)


def test_what_a_kernel_only_gives_back_is_not_held_apart():
    x = finite_values(F32, (2048, 256), 46) % 4
    engine = FastEngine(tpuflow.jit(plain).program(x))
    assert not any("stablehlo.optimization_barrier" in translated.as_text() for translated in engine.translate())


@pytest.mark.parametrize("fidelity", ["native", "bitexact"])
def test_a_folded_key_is_made_apart_from_what_is_drawn_with_it(fidelity: str):
    """One loop over both took LLVM for ever to vectorize in some programs (`LONG_WORK`): the Jitter of `test_moe` is one."""

    def draw(key: jax.Array, i: jax.Array, x: jax.Array) -> jax.Array:
        return x * jax.random.uniform(jax.random.fold_in(key, i), x.shape)

    x = np.ones((4, 8), np.float32)
    engine = FastEngine(tpuflow.jit(draw).program(jax.random.key(0), np.int32(3), x), fidelity=fidelity)
    assert sum(translated.compile().as_text().count(" opt-barrier(") for translated in engine.translate()) >= 1
    drawn = tpuflow.jit(draw, fidelity=fidelity)(jax.random.key(0), np.int32(3), x)
    np.testing.assert_array_equal(drawn, jax.jit(draw)(jax.random.key(0), np.int32(3), x))


@pytest.mark.slow
@pytest.mark.parametrize("fidelity", ["native", "bitexact"])
@pytest.mark.parametrize("steps", [1, 3])
def test_weights_are_overwritten_where_they_lie_though_a_product_beside_the_update_reads_them(steps: int, fidelity: str):
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dy = jnp.tanh(x @ w)
        return w - 0.01 * (x.T @ dy), dy @ w.T

    def run(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return step(w, x) if steps == 1 else jax.lax.scan(lambda w, _: step(w, x), w, None, length=steps)

    w, x = (finite_values(F32, shape, 47) % 1 for shape in ((512, 256), (32, 512)))
    engine = FastEngine(tpuflow.jit(run, donate_argnums=0).program(w, x), fidelity=fidelity)
    text = "".join(translated.compile().as_text() for translated in engine.translate())
    assert "f32[512,256]" in text
    assert not re.search(r"= f32\[512,256\]\S* copy\(", text)
    for ours, theirs in zip(tpuflow.jit(run, fidelity=fidelity)(w, x), jax.jit(run)(w, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_native_running_combinations_are_within_the_bound_of_their_order(dtype: DType):
    x, carry = finite_values(dtype, (50, 8), 36), finite_values(dtype, (1, 8), 37)
    ops = [op for op in CUMULATIVE if op not in ("mul",) and is_defined(op, dtype)]
    both = lambda ar, c, x: [ar.cumulative(op, c, x, 0, dtype)[0] for op in ops]  # noqa: E731
    unit = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
    for op, g, w in zip(
        ops, compute("native", both, (carry, x), (dtype, dtype), [dtype] * len(ops)), both(REFERENCE, carry, x), strict=True
    ):
        if dtype.is_float and op == "add":
            size = np.cumsum(np.abs(x.astype(np.float64)), axis=0) + np.abs(carry.astype(np.float64))
            assert (np.abs(g.astype(np.float64) - w.astype(np.float64)) <= 2 * 51 * unit[dtype] * size).all()
        else:
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_native_matrix_products_are_within_the_bound_of_their_order(dtype: DType):
    a, b = finite_values(dtype, (33, 300), 38), finite_values(dtype, (300, 20), 39)
    both = lambda ar, a, b: [ar.matmul(a, b, MATRICES, dtype, F32)]  # noqa: E731
    (got,) = compute("native", both, (a, b), (dtype, dtype), (F32,))
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    assert (np.abs(got.astype(np.float64) - both(REFERENCE, a, b)[0]) <= sum_bound(301) * size).all()


@pytest.mark.parametrize("rows, columns", [(48, 6), (6, 48), (40, 48)])
@pytest.mark.parametrize("lhs", [(0, 1, 2), (1, 2, 0)], ids=["rows first", "terms first"])
@pytest.mark.parametrize("rhs", [(1, 2, 3), (3, 1, 2)], ids=["terms first", "columns first"])
def test_native_matrix_products_of_many_terms_are_the_same_however_operands_lie(
    rows: int, columns: int, lhs: tuple[int, ...], rhs: tuple[int, ...]
):
    length = {0: rows, 1: 8, 2: 200, 3: columns}
    a, b = (finite_values(F32, tuple(length[x] for x in labels), seed) for labels, seed in ((lhs, 42), (rhs, 43)))
    both = lambda ar, a, b: [ar.matmul(a, b, Contraction(lhs, rhs, (3, 0)), F32, F32)]  # noqa: E731
    (got,) = compute("native", both, (a, b), (F32, F32), (F32,))
    size = np.einsum(np.abs(a.astype(np.float64)), lhs, np.abs(b.astype(np.float64)), rhs, (3, 0))
    assert (np.abs(got.astype(np.float64) - both(REFERENCE, a, b)[0]) <= sum_bound(1601) * size).all()


def test_native_integer_matrix_products_are_exact():
    a, b = values(S32, 600, 40).reshape(20, 30), values(S32, 900, 41).reshape(30, 30)
    both = lambda ar, a, b: [ar.matmul(a, b, MATRICES, S32, S32)]  # noqa: E731
    np.testing.assert_array_equal(compute("native", both, (a, b), (S32, S32), (S32,))[0], both(REFERENCE, a, b)[0])


def test_a_trip_reads_its_row_of_an_array_in_the_shape_of_the_array():
    def f(xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, x: (carry + jnp.tanh(x), None), jnp.zeros_like(xs[0]), xs)[0]

    xs = finite_values(F32, (64, 32, 128), 46) % 4
    (loop,) = [text for t in FastEngine(tpuflow.jit(f).program(xs)).translate() if "while" in (text := t.as_text())]
    (read,) = [line for line in loop.splitlines() if "dynamic_slice" in line]
    assert "(tensor<64x32x128xf32>" in read


def _lax_product(whole: Contraction, formula: str, *shapes: tuple[int, ...]) -> str:
    """The jaxpr of a native product, whose values are compared with NumPy's."""
    operands = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)]

    def product(a: Any, b: Any) -> Any:
        return LaxArithmetic(False, jnp.int32(0)).matmul(a, b, whole, F32, F32)

    np.testing.assert_allclose(product(*operands), np.einsum(formula, *operands), rtol=1e-5, atol=1e-5)
    return str(jax.make_jaxpr(product)(*operands))


def test_a_product_that_keeps_outer_and_inner_axes_in_their_places_repeats_its_matrix_over_the_outer():
    made = _lax_product(Contraction((0, 1, 2), (1, 3), (0, 3, 2)), "rkn,km->rmn", (3, 5, 16), (5, 4))
    assert re.findall(r"transpose\[\s*permutation=\((.*?)\)", made) == ["1, 0"], "the repeated matrix's"


def test_a_batch_of_products_of_two_turned_operands_has_them_exchanged():
    made = _lax_product(Contraction((0, 1, 2), (0, 3, 1), (0, 3, 2)), "bkm,bnk->bnm", (2, 5, 3), (2, 4, 5))
    assert "dimension_numbers=(([2], [1]), ([0], [0]))" in made
    assert "transpose[" not in made


@pytest.mark.parametrize("channels, cached", [(32, True), (256, False)])
def test_convolutions_of_small_kernels_are_ynnpack_s(channels: int, cached: bool):
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = finite_values(F32, (1, 16, 16, channels), 47) % 4, finite_values(F32, (2, 2, channels, channels), 48) % 4
    (made,) = FastEngine(tpuflow.jit(f).program(x, w)).translate()
    text = made.compile().as_text()
    assert " convolution(" in text and ("ynn_fusion" in text) == cached
    np.testing.assert_allclose(tpuflow.jit(f)(x, w), jax.jit(f)(x, w), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("stride, dilation, features", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_depthwise_convolutions_and_their_gradients_are_made_element_by_element(stride: int, dilation: int, features: int):
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        dilations, planes = (dilation, dilation), ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, 1), "SAME", None, dilations, planes, feature_group_count=8)

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y, gradients = jax.vjp(convolve, x, w)
        return y, *gradients(y)

    x, w = finite_values(F32, (2, 9, 10, 8), 49) % 4, finite_values(F32, (3, 3, 1, 8 * features), 50) % 4
    (made,) = FastEngine(tpuflow.jit(f).program(x, w)).translate()
    text = made.as_text()
    assert ("stablehlo.convolution" in text or "batching_dims" in text) == (features > 1)
    with quickly_compiled():
        for got, expected in zip(tpuflow.jit(f)(x, w), jax.jit(f)(x, w), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-2)


def test_a_convolution_is_corrected_in_the_order_in_which_xla_gives_it():
    """XLA:CPU would copy the product into another order before the loop, by a kernel of its own."""

    def kernels(x: jax.Array, dy: jax.Array) -> jax.Array:
        def convolved(w: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        return jax.vjp(convolved, jnp.zeros((3, 3, 16, 32)))[1](dy)[0]

    program = tpuflow.jit(kernels).program(*(jax.ShapeDtypeStruct((2, 8, 8, channels), jnp.float32) for channels in (16, 32)))
    (translated,) = FastEngine(program).translate()
    (loop,) = [line for line in translated.as_text().splitlines() if "stablehlo.while" in line]
    assert "tensor<16x3x3x32xf32>" in loop


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("product", ["ik,kj->ij", "bik,bkj->bij", "ik,kj->ji", "ikj,k->ij", "ik,jk->ij"])
def test_products_with_nothing_to_sum_are_of_elements_and_of_the_device_s_bits(product: str, dtype: DType):
    left, right = product.split("->")[0].split(",")
    sizes = {"i": 12, "j": 20, "b": 3, "k": 1}
    x, y = (finite_values(dtype, tuple(sizes[n] for n in side), seed) for seed, side in enumerate((left, right), 61))
    x.flat[:3], y.flat[:1] = np.array([-0.0, np.inf, np.nan]).astype(x.dtype), np.array(0.0).astype(y.dtype)
    multiply = lambda x, y: jnp.einsum(product, x, y, preferred_element_type=jnp.float32)  # noqa: E731
    engine = FastEngine(tpuflow.jit(multiply).program(x, y))
    assert not any("stablehlo.dot" in translated.as_text() for translated in engine.translate())
    found, exact = (np.asarray(tpuflow.jit(multiply, fidelity=f)(x, y)) for f in ("native", "bitexact"))
    np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(np.signbit(found)[found == 0], np.signbit(exact)[exact == 0])


PAYLOADS = np.array([0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x3F80, 0x7F7F], np.uint16)
"""NaN of every kind, and numbers that make some, in the bits of bf16."""


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "sqrt"])
def test_nan_in_bf16_stays_nan_whatever_its_payload(op: str):
    """It is rounded as numbers are: this is right since its last 16 bits as f32 are zeros."""
    x, y = (a.reshape(-1).view(ml_dtypes.bfloat16) for a in np.meshgrid(PAYLOADS, PAYLOADS))
    of = {"sqrt": jnp.sqrt}.get(op) or (lambda x, y: getattr(lax, op)(x, y) * 1 + 0)
    operands = (x,) if op == "sqrt" else (x, y)
    native, exact = (np.asarray(tpuflow.jit(of, fidelity=fidelity)(*operands)) for fidelity in ("native", "bitexact"))
    np.testing.assert_array_equal(native.astype(np.float32), exact.astype(np.float32))
    assert np.isnan(native.astype(np.float32)).any()


def test_nan_in_f32_becomes_one_in_bf16_whatever_its_payload():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00001, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF, 0x3F800000], np.uint32)
    found = tpuflow.jit(lambda x: (x.astype(jnp.bfloat16), x.astype(jnp.bfloat16) + 1))(bits.view(np.float32))
    for x in found:
        assert list(np.isnan(np.asarray(x).astype(np.float32))) == [True] * 6 + [False]


@pytest.mark.parametrize("axis, other", [(0, 1), (1, 0), ((0, 1), 1)])
def test_arguments_in_bf16_are_summed_as_they_are_read(axis: Any, other: int):
    """By one sum of YNNPACK's, while others read them, too, another sum among them: XLA does not write f32 for it first."""
    x = np.random.default_rng(0).normal(size=(256, 512)).astype(ml_dtypes.bfloat16)
    x[3, 5], x[4, 6], x[:, 8], x[7] = np.inf, np.nan, -0.0, -0.0
    of = lambda x: (x.sum(axis), x.max(0), x[:, :256].sum(1), x.astype(jnp.float32).sum(other), x * x)  # noqa: E731
    step, exact = tpuflow.jit(of), tpuflow.jit(of, fidelity="bitexact")
    for native, want in zip(step(x), exact(x), strict=True):
        np.testing.assert_allclose(np.asarray(native, np.float32), np.asarray(want, np.float32), rtol=1e-2, atol=1e-2)
    (made,) = FastEngine(step.program(x)).translate()
    text = made.compile().as_text()
    library = [line for line in text[text.index("ENTRY") :].splitlines() if "__ynn_fusion" in line]
    assert sum("%kept_0_" in line.split("fusion(")[1] for line in library) == 1


@pytest.mark.parametrize("number", [1.0, -1.0, 2.0, 0.5, 0.0])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "max", "min", "atan2", "pow", "rem"])
def test_operations_with_a_known_number_are_as_exact_as_without(op: str, number: float):
    """Compilers make others of them: one made a wrong atan of atan2(x, 1), in the vectors of some processors."""
    x = np.abs(np.random.default_rng(0).normal(size=(20, 20)).astype(np.float32)) + np.float32(0.1)
    of = {"max": lax.max, "min": lax.min}.get(op) or getattr(lax, op)
    both = lambda x: (of(x, jnp.full_like(x, number)), of(jnp.full_like(x, number), x))  # noqa: E731
    for found, exact in zip(*(tpuflow.jit(both, fidelity=fidelity)(x) for fidelity in ("native", "bitexact")), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of", [jnp.arctan, jnp.arcsin, jnp.arccos, jnp.sinh, jnp.arcsinh, jnp.arctanh, jnp.tan, jax.scipy.special.erfc])
def test_functions_that_are_made_of_others_are_near_to_those_in_64_bits(of: Callable[[Any], Any]):
    x = np.random.default_rng(0).uniform(-0.95, 0.95, (20, 20)).astype(np.float32)
    with jax.enable_x64(True):
        exact = np.asarray(jax.jit(of)(x.astype(np.float64)))
    np.testing.assert_allclose(tpuflow.jit(of)(x), exact, rtol=2e-5, atol=1e-6)
