"""Fourier transforms: what they are made of, how accurate they are, and that native code leaves them to XLA:CPU.

`tests/cases/complex.py` has their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpuflow
from tests.tolerances import sum_bound
from tpuflow.compiler import compile_function
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.samples import NotLinear, Sample, constant, result, source
from tpuflow.device.runtime import Executable
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Program
from tpuflow.jaxprs.walk import walk


def _magnitudes(x: Any) -> Any:
    return jnp.abs(jnp.fft.rfft(x))


def test_nothing_is_only_moved_in_a_transform_of_two_factors():
    x = jax.ShapeDtypeStruct((64, 1024), np.float32)
    program = tpuflow.jit(_magnitudes).lower(x).compile().executable.program
    products = [any(isinstance(i, MatmulAccumulate) for i in kernel.instructions) for kernel in program.kernels()]
    assert products == [True, False, True, False], "the two products, the twiddle factors, and the magnitudes"


@pytest.mark.parametrize("length", [128, 1024, 13**3])
def test_transforms_are_as_accurate_as_f32_allows(length: int):
    x = np.random.default_rng(0).standard_normal((4, length)).astype(np.float32)
    exact = np.abs(np.fft.rfft(x.astype(np.float64)))
    errors = {jit: np.linalg.norm(jit(_magnitudes)(x) - exact) / np.linalg.norm(exact) for jit in (tpuflow.jit, jax.jit)}
    assert errors[tpuflow.jit] < 4 * max(errors[jax.jit], np.finfo(np.float32).eps)


def _planes(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Of a function of complex numbers, from parts to parts."""

    def of_parts(x: Any, y: Any) -> Any:
        z = function(lax.complex(x, y))
        return (z.real, z.imag) if jnp.iscomplexobj(z) else z

    return of_parts


def _alternating(z: Any) -> Any:
    """Transforms in a loop, and in one of its branches."""

    def trip(z: Any, forth: Any) -> tuple[Any, None]:
        return lax.cond(forth, lambda z: jnp.fft.fft(z) / 16, lambda z: z * 2, z), None

    return lax.scan(trip, z, jnp.arange(40) % 2 == 0)[0]


TRANSFORMS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "fft": (jnp.fft.fft, 1),
    "ifft": (jnp.fft.ifft, 1),
    "rfft": (lambda z: jnp.fft.rfft(z.real), 1),
    "rfft of the first": (lambda z: jnp.fft.rfft(z.real)[:, :7], 1),
    "ifft of real numbers": (lambda z: jnp.fft.ifft(z.real), 1),
    "irfft": (lambda z: jnp.fft.irfft(z[:, :106]), 1),
    "two axes": (lambda z: jnp.fft.fft2(jnp.stack([z, z * 2], -1), axes=(0, 1)), 1),
    "a filter": (lambda z: jnp.fft.irfft(jnp.fft.rfft(z.real) * np.exp(-np.arange(106, dtype=np.float32) / 99)), 2),
    "a length with a large prime factor": (lambda z: jnp.fft.fft(z[:, :199]), 2),
    "a loop with a branch": (_alternating, 1),
    "a single row": (lambda z: jnp.fft.fft(z.reshape(-1)), 1),
    "few numbers": (lambda z: jnp.fft.fft(z[:30]), 0),
}


def _transforms(program: Program, fidelity: str = "native") -> int:
    """How many transforms XLA is given."""
    engine = FastEngine(program, fidelity=fidelity)
    return sum(translated.as_text().count("call @fft") for translated in engine.translate())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_left_to_xla_in_native_fidelity_only(name: str):
    function, count = TRANSFORMS[name]
    parts = [np.random.default_rng(seed).standard_normal((41, 210)).astype(np.float32) for seed in range(2)]
    program = compile_function(_planes(function), parts)
    assert (_transforms(program), _transforms(program, "bitexact")) == (count, 0)
    native, exact = (Executable(program, "fast", fidelity).launch(parts)[0] for fidelity in ("native", "bitexact"))
    for x, y in zip(native, exact, strict=True):
        assert np.abs(x - y).max() <= 2e-6 * np.abs(y).max()


def test_a_transform_differs_by_no_more_than_sums_in_another_order():
    x = np.random.default_rng(0).standard_normal((8, 1024)).astype(np.float32)
    program = compile_function(lambda x: _planes(jnp.fft.fft)(x, jnp.zeros_like(x)), (x,))
    native, exact = (Executable(program, "fast", fidelity).launch([x])[0] for fidelity in ("native", "bitexact"))
    for a, b in zip(native, exact, strict=True):
        assert (np.abs(np.subtract(a, b, dtype=np.float64)) <= sum_bound(x.shape[1]) * np.abs(x).sum(1, keepdims=True)).all()


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 3e38])
def test_what_is_not_finite_is_so_in_the_same_places(number: float):
    """3e38: a sum that overflows; whether one of other multiples of two such numbers does, depends on the order of its terms."""
    x = np.random.default_rng(0).standard_normal((41, 210)).astype(np.float32)
    x[2, 17] = x[2, 18] = x[4, 0] = number
    program = compile_function(lambda x: _planes(jnp.fft.fft)(x, jnp.zeros_like(x)), (x,))
    assert _transforms(program) == 1
    native, exact = (Executable(program, "fast", fidelity).launch([x])[0] for fidelity in ("native", "bitexact"))
    for a, b in zip(map(np.asarray, native), map(np.asarray, exact), strict=True):
        sums = slice(0, 1) if np.isfinite(number) else slice(None)
        for where in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(where(a[:, sums]), where(b[:, sums]))
        assert not np.isfinite(b).all() and np.isfinite(b[[0, 1, 3]]).all()
        assert np.abs(a[[0, 1, 3]] - b[[0, 1, 3]]).max() <= 2e-6 * np.abs(b[[0, 1, 3]]).max()


ROWS, FIRST, SECOND = 52, 10, 16


def _roots(n: int, *sides: int) -> np.ndarray:
    return np.exp(-2j * np.pi * np.outer(*map(np.arange, sides)) / n)


def _by_hand(roots: np.ndarray, twiddles: np.ndarray) -> Callable[[Any], Any]:
    """The real parts of a transform of 160 numbers by 10 and by 16, as a user might write it."""
    a, b = roots.astype(np.complex64), _roots(SECOND, SECOND, SECOND).astype(np.complex64)
    turns = twiddles.astype(np.complex64)

    def transform(x: Any) -> Any:
        x = x.reshape(ROWS, FIRST, SECOND).swapaxes(1, 2)
        once = [(x @ p).swapaxes(1, 2) for p in (a.real, a.imag)]  # [ROWS, FIRST, SECOND]
        turned = once[0] * turns.real - once[1] * turns.imag, once[0] * turns.imag + once[1] * turns.real
        found = [(p @ q).swapaxes(1, 2) for p, q in zip(turned, (b.real, b.imag), strict=True)]
        return jnp.exp(found[0] - found[1])

    return transform


def test_a_transform_is_found_whatever_it_was_written_as_and_nothing_else_is():
    """Other matrices, other factors, or other ones of a single row, which is not among those that are sampled."""
    x = np.zeros((ROWS, FIRST * SECOND), np.float32)
    roots, twiddles = _roots(FIRST, FIRST, FIRST), _roots(FIRST * SECOND, FIRST, SECOND)
    assert _transforms(compile_function(_by_hand(roots, twiddles), (x,))) == 1
    bent = roots.copy()
    bent[3, 4] += 1e-4
    assert _transforms(compile_function(_by_hand(bent, twiddles), (x,))) == 0
    bent = twiddles.copy()
    bent[3, 4] += 1e-4
    assert _transforms(compile_function(_by_hand(roots, bent), (x,))) == 0
    each = np.repeat(twiddles[None], ROWS, 0)
    each[3, 3, 4] += 1e-4
    assert _transforms(compile_function(_by_hand(roots, each), (x,))) == 0


MATRIX = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
LINEAR: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.reshape(28, 3, 2),
    "transpose": lambda x: x.reshape(7, 4, 6).transpose(0, 2, 1),
    "rev": lambda x: x.reshape(7, 4, 6)[:, ::-1],
    "a slice": lambda x: x[:, 2:21:3],
    "one place of each row": lambda x: lax.slice(x.reshape(28, 6), (2, 1), (27, 5), (4, 2)),
    "broadcast": lambda x: lax.broadcast_in_dim(x, (7, 5, 24), (0, 2)),
    "sums": lambda x: -x + x[:, ::-1] - (x + np.float32(0)),
    "factors": lambda x: x * np.arange(24, dtype=np.float32) * 3,
    "a product": lambda x: x.reshape(28, 6) @ MATRIX,
    "a product of inner axes": lambda x: lax.dot_general(x.reshape(7, 6, 4), MATRIX, (((1, 2), (0, 1)), ((), ()))),
    "a batch": lambda x: lax.dot_general(lax.broadcast_in_dim(MATRIX, (7, 6, 4), (1, 2)), x.reshape(7, 4, 6), (((2,), (1,)), ((0,), (0,)))),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "rows in another order": lambda x: x[::-1],
    "rows left out": lambda x: x[1:],
    "another place of some rows": lambda x: lax.slice(x.reshape(28, 6), (2, 1), (27, 5), (5, 2)),
    "places that are rows": lambda x: x.reshape(7, 4, 6).transpose(1, 0, 2),
    "rows that are parts of rows": lambda x: x.reshape(24, 7),
    "a product of rows": lambda x: lax.dot_general(x.reshape(7, 24), MATRIX.reshape(-1)[:7], (((0,), (0,)), ((), ()))),
    "a sum with a constant": lambda x: x + np.float32(1),
    "a product with itself": lambda x: x * x,
    "factors of their own": lambda x: x * np.arange(168, dtype=np.float32).reshape(7, 24),
    "a function": jnp.exp,
}  # fmt: skip


def _sampled(function: Callable[[Any], Any]) -> tuple[Sample, Sample]:
    """The samples of an argument and of a function's result."""
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((7, 24), np.float32))
    given = source(closed.jaxpr.invars[0], 7, 0)

    def step(equation: Any, operands: list[Any]) -> list[Sample]:
        return [result(equation, operands)]

    (found,) = walk(closed, [given], step, constant)
    assert found is not None
    return given, found


@pytest.mark.parametrize("name", LINEAR)
def test_a_sample_is_what_the_first_rows_become(name: str):
    given, found = _sampled(LINEAR[name])
    whole = LINEAR[name](jnp.asarray(np.resize(given.values, (7, 24)), jnp.float32))
    first = np.asarray(whole)[: len(whole) // 7 * 2]
    np.testing.assert_allclose(found.values, first, rtol=1e-5, atol=1e-5)
    assert (found.rows, found.sources) == (7, given.sources)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_linear_row_by_row_has_no_sample(name: str):
    with pytest.raises(NotLinear):
        _sampled(OTHERS[name])
