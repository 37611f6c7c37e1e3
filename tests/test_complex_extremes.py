"""Functions of complex numbers where numbers end: near the largest and the smallest, at infinities, at NaN, on branch cuts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpuflow
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable

SIZES = (0, 1.2e-38, 1e-30, 1e-19, 1e-8, 0.25, 1 - 2**-24, 1, 1 + 2**-23, 2, 100, 1e8, 1e19, 1e30, 3e38, np.inf)
ENDS = np.array([*SIZES, *(-x for x in SIZES), np.nan], np.float32)
REAL, IMAG = (x.ravel() for x in np.meshgrid(ENDS, ENDS, indexing="ij"))
LEAST, MOST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def _log1p(z: np.ndarray) -> np.ndarray:
    """NumPy's own has no digits near 0."""
    size = np.log1p(z.real * (z.real + 2) + z.imag**2) / 2
    return np.where(np.abs(1 + z) < 0.5, np.log(1 + z), size + 1j * np.arctan2(z.imag, 1 + z.real))


# Of a part's size, or (whole) of the number's: near its zeros and along its branch cuts a logarithm has a part without digits. A power's
# exponential multiplies the rounding of its argument, up to 2.5 log(3e38).
PART, WHOLE, POWER = 2e-6, 1e-6, 4e-5
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], float]] = {
    "sqrt": (jnp.sqrt, np.sqrt, PART),
    "log": (jnp.log, np.log, WHOLE),
    "log1p": (jnp.log1p, _log1p, WHOLE),
    "arcsin": (jnp.arcsin, np.arcsin, PART),
    "arccos": (jnp.arccos, np.arccos, PART),
    "arctan": (jnp.arctan, np.arctan, PART),
    "arcsinh": (jnp.arcsinh, np.arcsinh, PART),
    "arccosh": (jnp.arccosh, np.arccosh, PART),
    "arctanh": (jnp.arctanh, np.arctanh, PART),
    "to the power of 2.5": (lambda z: lax.pow(z, jnp.full_like(z, 2.5)), lambda z: z**2.5, POWER),
    "to the power of -0.5": (lambda z: lax.pow(z, jnp.full_like(z, -0.5)), lambda z: z**-0.5, POWER),
    "to the power of 1j": (lambda z: lax.pow(z, jnp.full_like(z, 1j)), lambda z: z**1j, POWER),
}


def _numbers() -> np.ndarray:
    z = np.empty(REAL.shape, np.complex64)
    z.real, z.imag = REAL, IMAG
    return z


def _parts(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag])


def _computed(function: Callable[[Any], Any], fidelity: str) -> np.ndarray:
    def of_parts(x: Any, y: Any) -> tuple[Any, Any]:
        z = function(lax.complex(x, y))
        return z.real, z.imag

    results, _ = Executable(compile_function(of_parts, (REAL, IMAG), name="f"), fidelity=fidelity).launch([REAL, IMAG])
    return np.stack([np.asarray(x) for x in results])


def _same(found: np.ndarray, expected: np.ndarray, bound: float, size: np.ndarray) -> np.ndarray:
    """Where they are both NaN, equal (zeros of one sign), or within the bound."""
    near = np.abs(found - expected) <= bound * size
    return (
        (np.isnan(found) & np.isnan(expected)) | (found == expected) & (np.signbit(found) == np.signbit(expected)) | near & (expected != 0)
    )


def wrong(name: str, fidelity: str) -> list[str]:
    """The numbers at which a function is neither that of float64 nor, where that has a part that no f32 is, or the number itself has a zero
    or is not finite, what JAX makes of it on its CPU backend."""
    function, exactly, bound = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        exact = _parts(exactly(_numbers().astype(np.complex128)))
        found = _computed(function, fidelity).astype(np.float64)
        of_jax = _parts(np.asarray(jax.jit(function)(_numbers()))).astype(np.float64)
        size = np.abs(exact) if bound == PART else np.hypot(*exact)
        ordinary = np.isfinite(REAL) & np.isfinite(IMAG) & (REAL != 0) & (IMAG != 0)
        has_digits = ordinary & (np.abs(exact) >= LEAST) & (np.maximum(np.abs(exact), size) <= MOST)
        rounded = np.where(np.abs(exact) > MOST, np.copysign(np.inf, exact), exact)
        near_zero = ordinary & (np.abs(found - rounded) <= LEAST)
        no_number = np.isnan(of_jax) & (size > MOST)
        as_jax = _same(found, of_jax, bound, np.abs(of_jax)) | no_number
        is_right = np.where(has_digits, np.abs(found - exact) <= bound * size, near_zero | (found == rounded) | as_jax)
    rows = zip(*(x[~is_right] for x in (np.stack([REAL] * 2), np.stack([IMAG] * 2), found, of_jax, exact)), strict=True)
    return [f"{name}({x}, {y}): {z}, of JAX {j}, exactly {e}" for x, y, z, j, e in rows]


QUICK = ("sqrt", "log", "arcsin")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS])
def test_a_function_is_right_wherever_it_has_digits_and_else_what_jax_has(name: str) -> None:
    for fidelity in ("bitexact", "native"):
        assert wrong(name, fidelity) == []


@functools.cache
def _ordered() -> np.ndarray:
    """Rows with ties in one part or both, infinities, and NaN in either part."""
    rng = np.random.default_rng(0)
    few = np.array([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan], np.float32)
    z = np.empty((200, 5), np.complex64)
    z.real, z.imag = (rng.choice(few, z.shape, p=[0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]) for _ in range(2))
    return z


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_the_first_extreme_place_is_that_of_numpy(engine: str) -> None:
    """By the real part, then the imaginary one; NaN comes first. JAX itself compares no complex numbers there."""
    z = _ordered()
    places = tpuflow.jit(lambda z: (jnp.argmax(z, 1), jnp.argmin(z, 1), jnp.argmax(z, 0), jnp.argmin(z)), engine=engine)(z)
    expected = np.argmax(z, 1), np.argmin(z, 1), np.argmax(z, 0), np.argmin(z)
    jax.tree.map(np.testing.assert_array_equal, places, expected)
