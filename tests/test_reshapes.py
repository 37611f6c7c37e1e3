"""What XLA is given of reshapes that follow each other: one, or none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tpuflow.device.fast import reshapes
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.reshapes import reshaped, transposed, unreshaped

X = jax.ShapeDtypeStruct((4, 6), np.float32)
CASES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "one after the other": (lambda x: reshaped(reshaped(x, (2, 12)), (24,)), ["reshape"]),
    "there and back": (lambda x: reshaped(reshaped(x, (24,)), (4, 6)), []),
    "axes of one element": (lambda x: transposed(transposed(reshaped(x, (4, 1, 6)), (1, 0, 2)), (1, 2, 0)), ["reshape"]),
    "axes of more": (lambda x: transposed(reshaped(x, (4, 2, 3)), (0, 2, 1)), ["reshape", "transpose"]),
    "something in between": (lambda x: reshaped(jnp.sin(reshaped(x, (24,))), (4, 6)), ["reshape", "sine", "reshape"]),
    "what nothing changes": (lambda x: reshaped(x, (4, 6)), []),
}


@pytest.mark.parametrize("case", CASES)
def test_reshapes_become_one(case: str) -> None:
    function, wanted = CASES[case]
    lowered = jax.jit(lambda x: function(x)).lower(X)  # which drops what nobody reads
    assert re.findall(r"stablehlo\.(reshape|transpose|sine)", lowered.as_text()) == wanted
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(lowered.compile()(x), function(x))


def test_nothing_is_held_longer_than_its_trace() -> None:
    before = len(reshapes._sources)
    jax.make_jaxpr(lambda x: reshaped(reshaped(x, (24,)), (2, 12)))(X)
    assert len(reshapes._sources) == before


def test_arrays_outside_of_a_trace_are_as_they_are() -> None:
    x = jnp.arange(24.0)
    assert unreshaped(reshaped(x, (4, 6))).shape == (4, 6)


def test_kernels_of_several_layers_hand_on_arrays_without_reshapes() -> None:
    def layers(x: Any, weights: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x.reshape(32, 64) @ w).reshape(2, 16, 64)
        return x

    x, weights = np.ones((2, 16, 64), np.float32), [np.full((64, 64), 0.01, np.float32)] * 4
    (made,) = FastEngine(tpuflow.jit(layers).program(x, weights)).translate()
    assert made.as_text().count("stablehlo.reshape") == 2  # of the argument and of the result
