"""What native code replaces of what it has traced: floats that become integers and the same floats again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tpuflow.compiler import compile_function
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.lax_rounding import turned
from tpuflow.device.fast.rewriting import with_replacements
from tpuflow.device.fast.round_trips import MOST_OPERATIONS, round_trips
from tpuflow.device.runtime import Executable


def _words(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.float32)


def _right(x: Any, by: int) -> Any:
    return lax.shift_right_logical(x, jnp.full_like(x, by))


def _signs(x: Any) -> Any:
    return lax.shift_right_arithmetic(x, jnp.full_like(x, 31))


def _ordered(x: Any) -> Any:
    return x ^ _right(_signs(x), 1)


def _choice(x: Any, on_true: Any, on_false: Any, least: int = 0) -> Any:
    return lax.select(lax.lt(x, jnp.full_like(x, least)), on_true, on_false)


def _times(n: int, function: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(n):
        x = function(x)
    return x


SAME: dict[str, Callable[[Any], Any]] = {
    "the order of floats and back": lambda x: _floats(turned(~~_ordered(_words(x)))),
    "in another shape": lambda x: _floats(turned(_ordered(_words(x)).reshape(4, -1))),
    "behind a barrier": lambda x: _floats(turned(lax.optimization_barrier((_signs(_words(x)), _ordered(_words(x))))[1])),
    "by signs alone": lambda x: _floats(_words(x) ^ _signs(_words(x)) ^ _signs(_words(x))),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "one bit differs": lambda x: _floats(turned(_ordered(_words(x))) ^ np.int32(1 << 30)),
    "one bit of negative numbers differs": lambda x: _floats(turned(_words(x) ^ _right(_signs(_words(x)), 2))),
    "another array behind a barrier": lambda x: _floats(turned(lax.optimization_barrier((_signs(_words(x)), _ordered(_words(x))))[0])),
    "bits are lost": lambda x: _floats(_right(_words(x), 1)),
    "a choice by another number": lambda x: _floats(_choice(_words(x), _words(x), _words(x) ^ np.int32(1), 5)),
    "bits that are not sums modulo 2": lambda x: _floats(_words(x) & (_words(x) | _right(_words(x), 1))),
    "two arrays": lambda x: _floats(_words(x) ^ _words(x[::-1]) ^ _words(x[::-1])),
    "one number for all": lambda x: _floats(jnp.broadcast_to(_words(x)[:1], x.shape)),
    "a long way": lambda x: _floats(_times(2 * MOST_OPERATIONS, jnp.invert, _words(x))),
}


def _all_kinds() -> np.ndarray:
    """Numbers of every kind: zeros, subnormals, infinities and NaN of either sign, with payloads."""
    random = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32)
    ends = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    words = np.concatenate([random, np.array([e | s for e in ends for s in (0, 1 << 31)] + [5, 6], np.uint32)])
    return words.view(np.float32)


@pytest.mark.parametrize("name", [*SAME, *OTHERS])
def test_floats_that_come_back_as_they_were_are_found_and_no_others(name: str):
    function, x = {**SAME, **OTHERS}[name], _all_kinds()
    found = round_trips(jax.make_jaxpr(function)(x).jaxpr, {})
    assert bool(found) == (name in SAME)
    plain, replaced = (np.asarray(jax.jit(f)(x)).view(np.uint32) for f in (function, with_replacements(function, [round_trips])))
    np.testing.assert_array_equal(plain, replaced)


@pytest.mark.parametrize("shape, axis", [((5, 204), -1), ((3, 4, 85), -1)])
def test_the_largest_numbers_are_taken_from_what_is_given(shape: tuple[int, ...], axis: int):
    """NaN, infinities, zeros and subnormals are ordered as ever."""
    x = _all_kinds().reshape(shape)
    program = compile_function(lambda x: lax.top_k(x, 8, axis=axis), (x,))
    (text,) = (translated.as_text() for translated in FastEngine(program).translate())
    assert "xor" not in text and "shift_right" not in text
    native, exact, reference = (
        Executable(program, engine, fidelity).launch([x])[0]
        for engine, fidelity in (("fast", "native"), ("fast", "bitexact"), ("reference", "bitexact"))
    )
    for a, b, c in zip(native, exact, reference, strict=True):
        np.testing.assert_array_equal(*(np.asarray(v).view(np.uint32) for v in (a, b)))
        np.testing.assert_array_equal(b, c)


def _with_wide_numbers(x: Any) -> Any:
    """With sorts, which go by 64-bit integers, beside what is replaced, and in a loop."""
    largest, places = lax.top_k(x, 8)
    rows = lax.fori_loop(0, 40, lambda _, x: jnp.sort(jnp.abs(jnp.fft.fft(x))) / 9, x)
    return largest, places, jnp.argsort(x), rows


def test_what_is_computed_in_64_bits_stays_so():
    x = np.random.default_rng(0).standard_normal((64, 200)).astype(np.float32)
    program = compile_function(_with_wide_numbers, (x,))
    native, exact = (Executable(program, "fast", fidelity).launch([x])[0] for fidelity in ("native", "bitexact"))
    for a, b in zip(native[:3], exact[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(native[3], exact[3], rtol=1e-4, atol=1e-5)
