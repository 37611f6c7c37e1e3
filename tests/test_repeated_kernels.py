"""Kernels that a Program repeats are translated once, to the same StableHLO as if each were translated by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tpuflow
from tpuflow.device.fast import repeated_kernels
from tpuflow.device.fast.engine import FastEngine
from tpuflow.isa.program import Program

LAYERS = 6


def _layers(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.fixture(scope="module")
def program() -> Program:
    return tpuflow.jit(_layers).program(jnp.ones((8, 16)), [jnp.ones((16, 16))] * LAYERS)


def _stablehlo(program: Program) -> str:
    return "".join(stage.as_text() for stage in FastEngine(program).translate())


def test_equal_kernels_are_translated_once(program: Program, monkeypatch: pytest.MonkeyPatch):
    translated = []
    own = repeated_kernels.translate_kernel
    monkeypatch.setattr(repeated_kernels, "translate_kernel", lambda kernel, *rest: translated.append(kernel) or own(kernel, *rest))
    engine = FastEngine(program)
    list(engine.translate())
    assert LAYERS <= len(list(program.kernels())) == len(engine.tiers)
    assert len(translated) < LAYERS


def test_what_xla_compiles_is_the_same(program: Program, monkeypatch: pytest.MonkeyPatch):
    shared = _stablehlo(program)
    monkeypatch.setattr(repeated_kernels, "_repeated", lambda forms: {})
    assert shared == _stablehlo(program)
