"""Types that are only stored, beside NumPy: all their numbers, what JAX's CPU backend cannot judge, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tests.cases.storage import FP8, SMALL
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import STORAGE
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble

pytestmark = pytest.mark.optimised


def _everywhere(fn: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """The one result by the reference engine, and by the fast one in both fidelities."""
    program = compile_function(fn, arrays, name="stored")
    ways = (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native"))
    return [np.asarray(Executable(program, engine=e, fidelity=f).launch(list(arrays))[0][0]) for e, f in ways]


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_f32_is_rounded_as_ml_dtypes_does_at_every_midpoint_and_beyond_the_largest_number(dtype: np.dtype) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.unique(every[np.isfinite(every)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(side), dtype=np.float32) for side in (np.inf, -np.inf)]
    x = np.concatenate([numbers, ties, *beside, numbers[[0, -1]] * 2, np.float32([np.inf, -np.inf, np.nan, 1e-30, -1e-30])])
    with np.errstate(invalid="ignore"):
        expected = x.astype(dtype)
    for got in _everywhere(lambda x: x.astype(dtype), x):
        assert got.dtype == dtype
        assert np.array_equal(got.astype(np.float32), expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", [d for d in SMALL if d.itemsize], ids=str)
def test_all_small_integers_go_and_come(dtype: np.dtype) -> None:
    x = np.arange(-20, 20).astype(np.int32)
    for got in _everywhere(lambda x: x.astype(dtype).astype(jnp.int32), x):
        assert np.array_equal(got, x.astype(dtype).astype(np.int32))


def test_products_of_int4_are_summed_in_32_bits() -> None:
    x = np.resize(np.arange(-8, 8), (5, 300)).astype(SMALL[0])
    expected = x.astype(np.int32) @ x.T.astype(np.int32)
    for got in _everywhere(lambda x: jnp.dot(x, x.T, preferred_element_type=jnp.int32), x):
        assert np.array_equal(got, expected)


def test_ones_and_leading_zeros_are_those_of_the_numbers_own_bits() -> None:
    x = np.arange(-8, 8).astype(SMALL[0])
    bits = [f"{int(v) & 15:04b}" for v in x]
    counted = np.array([word.count("1") for word in bits]).astype(SMALL[0])
    leading = np.array([len(word) - len(word.lstrip("0")) for word in bits]).astype(SMALL[0])
    for got in _everywhere(jax.lax.population_count, x):
        assert np.array_equal(got, counted)
    for got in _everywhere(jax.lax.clz, x):
        assert np.array_equal(got, leading)


def test_a_buffer_has_a_byte_a_number() -> None:
    for dtype in STORAGE:
        x = np.zeros((16, 128), dtype.numpy)
        program = compile_function(lambda x: x[::-1], (x,), name="moved")
        assert [program.buffers[p.buffer].bytes for p in (*program.inputs, *program.outputs)] == [2048, 2048]


def test_a_program_with_them_survives_its_text() -> None:
    weights = np.arange(-6, 6).astype(np.float32)
    for dtype in STORAGE:
        known = weights.astype(dtype.numpy)
        program = compile_function(lambda x, known=known: x[:12] == known, (np.zeros(12, dtype.numpy),), name="known").strip()
        assert assemble(disassemble(program)) == program


@pytest.mark.parametrize("dtype", FP8, ids=lambda t: np.dtype(t).name)
def test_a_step_to_the_next_fp8_number_is_that_of_the_ordered_numbers(dtype) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype)
    wide = every.astype(np.float32)
    ordered = np.unique(wide[~np.isnan(wide)])  # -0 is 0
    for towards in (-np.inf, 3.0, np.inf):
        target = min(max(np.float32(towards), ordered[0]), ordered[-1])
        got = np.asarray(tpuflow.jit(jax.lax.nextafter)(every, np.full(256, target, dtype))).astype(np.float32)
        place = np.searchsorted(ordered, wide)
        step = place + (target > wide) - (target < wide)
        np.testing.assert_array_equal(got, np.where(np.isnan(wide), np.nan, ordered[np.clip(step, 0, len(ordered) - 1)]))
