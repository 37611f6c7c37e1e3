"""Fourier transforms: what they are made of, and how accurate they are. `tests/cases/complex.py` has their values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tpuflow.isa.matrix import MatmulAccumulate


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
