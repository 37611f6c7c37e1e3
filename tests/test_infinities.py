"""Infinities, NaN and subnormals: they come where the products, sums and choices that there are put them, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import enumerated
from tests.enumerated import Window
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.importers.jaxpr import lower_jaxpr

EXAMPLES = max(1, int(os.environ.get("TPUFLOW_RANDOM_PROGRAMS", "40")) // 10)
SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40)
DTYPES = ("float32", "float16", "bfloat16")
ENGINES = (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native"))


def _special(shape: Sequence[int], dtype: str, seed: int, count: int = 2) -> np.ndarray:
    """Ordinary numbers, `count` of them replaced by special ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(tuple(shape)).astype(np.float32)
    if x.size and count:
        x.reshape(-1)[rng.integers(0, x.size, count)] = np.array(SPECIAL, np.float32)[rng.integers(0, len(SPECIAL), count)]
    return np.asarray(jnp.asarray(x).astype(dtype))


def _agree(got: np.ndarray, wanted: np.ndarray, where: Any) -> None:
    """Infinities and NaN in the same places, all else near."""
    x, y = got.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=f"NaN of {where}")
    np.testing.assert_array_equal(np.where(np.isinf(x), x, 0), np.where(np.isinf(y), y, 0), err_msg=f"infinities of {where}")
    finite = np.isfinite(y)
    np.testing.assert_allclose(x[finite], y[finite], rtol=0.02, atol=0.02, err_msg=str(where))


def _judge(function: Callable[..., Any], arrays: Sequence[np.ndarray], wanted: Sequence[np.ndarray], engines: Any = ENGINES) -> None:
    """All engines, and the oracle of graphs, give what is wanted; those that compute the device's bits give the same ones."""
    program = compile_function(function, arrays)
    found = {name: [np.asarray(x) for x in Executable(program, engine=name[0], fidelity=name[1]).launch(arrays)[0]] for name in engines}
    graph = lower_jaxpr(jax.make_jaxpr(function)(*arrays), "graph")
    for name, results in (*found.items(), (("graph", "oracle"), interpret(graph, *arrays))):
        for x, y in zip(results, wanted, strict=True):
            _agree(np.asarray(x), y, name)
    exact = [[x.tobytes() for x in results] for (_, fidelity), results in found.items() if fidelity == "bitexact"]
    assert all(bits == exact[0] for bits in exact)


# --- convolutions: a table for every commit, and random ones ----------------------------------------------------------------

PLAIN = ((1, 1), (1, 1))
WINDOWS = {
    "padded": Window((3, 3), (1, 1), PLAIN, (1, 1), (1, 1)),
    "strided": Window((3, 3), (2, 2), PLAIN, (1, 1), (1, 1)),
    "transposed": Window((3, 3), (1, 1), ((2, 1), (1, 2)), (2, 2), (1, 1)),
    "transposed by more than its kernel": Window((2, 2), (1, 1), PLAIN, (3, 3), (1, 1)),
    "transposed with an even kernel": Window((4, 4), (1, 1), ((2, 2), (3, 3)), (2, 2), (1, 1)),
    "transposed and strided": Window((3, 2), (2, 3), ((3, 1), (2, 2)), (3, 2), (1, 1)),
    "dilated": Window((3, 3), (1, 1), ((2, 2), (2, 2)), (1, 1), (2, 2)),
    "dilated on both sides": Window((2, 3), (1, 1), ((2, 1), (3, 2)), (2, 3), (2, 2)),
    "cut by negative padding": Window((3, 2), (1, 2), ((-1, 2), (1, -1)), (1, 2), (1, 1)),
    "of one position, padded": Window((1, 1), (2, 1), ((1, 2), (2, 2)), (1, 2), (1, 1)),
    "of one output": Window((5, 6), (1, 1), ((1, 0), (1, 1)), (1, 1), (1, 1)),
    "that meets nothing": Window((1, 1), (9, 9), ((2, 0), (0, 0)), (1, 1), (1, 1)),
    "in groups": Window((3, 3), (2, 1), PLAIN, (1, 2), (1, 1), groups=2),
    "in groups of images": Window((3, 3), (1, 1), PLAIN, (1, 1), (1, 1), groups=2, by_image=True),
    "along one axis": Window((3,), (1,), ((2, 2),), (2,), (1,)),
    "along three axes": Window((2, 2, 2), (1, 1, 2), ((1, 0),) * 3, (2, 1, 1), (1, 1, 1)),
}


def _operands(window: Window, dtype: str, seed: int, specials: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images of 4 to 5 positions an axis, a kernel, and a cotangent of the result."""
    image = (4, 5, 4)[: len(window.size)]
    x = _special((2, *image, 2 if window.by_image else 2 * window.groups), dtype, seed, specials)
    w = _special((*window.size, 2, 2 * window.groups), dtype, seed + 1, specials)
    images = 2 // window.groups if window.by_image else 2
    ct = _special((images, *window.outputs(image), 2 * window.groups), "float32", seed + 2, specials)
    return x, w, ct


def _judge_convolution(window: Window, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], engines: Any) -> None:
    def both(x: Any, w: Any, ct: Any) -> tuple[Any, ...]:
        wide = (x.astype(jnp.float32), w.astype(jnp.float32))
        return window.convolution(x, w), *enumerated.jax_gradients(window, *wide, ct)

    x, w, ct = arrays
    _judge(both, arrays, [enumerated.convolution(window, x, w), *enumerated.gradients(window, x, w, ct)], engines)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_convolution_makes_no_product_of_padding(name: str) -> None:
    _judge_convolution(WINDOWS[name], _operands(WINDOWS[name], "float32", seed=len(name)), engines=ENGINES[:1])


@pytest.mark.parametrize("specials", [0, 3])
def test_a_convolution_that_xla_pads_and_cuts_into_phases_makes_no_product_of_padding(specials: int) -> None:
    window = WINDOWS["strided"]
    _judge_convolution(window, _operands(window, "float32", 2, specials), engines=(ENGINES[0], ENGINES[2]))


windows = (
    st.integers(1, 3)
    .flatmap(
        lambda rank: st.builds(
            Window,
            *(st.tuples(*[entry] * rank) for entry in (st.integers(1, 4 if rank < 3 else 2), st.integers(1, 3))),
            st.tuples(*[st.tuples(st.integers(-1, 3), st.integers(-1, 3))] * rank),
            st.tuples(*[st.integers(1, 3)] * rank),
            st.tuples(*[st.integers(1, 2)] * rank),
            st.sampled_from((1, 1, 2)),
            st.booleans(),
        )
    )
    .filter(lambda window: min(window.outputs((4, 5, 4)[: len(window.size)])) > 0)
)
often = settings(max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@often
@given(windows, st.sampled_from(DTYPES), st.integers(0, 2**16), st.integers(0, 4), st.sampled_from(ENGINES[1:]))
def test_random_convolutions_and_their_gradients_agree_with_enumeration(
    window: Window, dtype: str, seed: int, specials: int, fast: tuple[str, str]
) -> None:
    _judge_convolution(window, _operands(window, dtype, seed, specials), (ENGINES[0], fast))


# --- pooling ----------------------------------------------------------------------------------------------------------------

POOLED = [name for name, window in WINDOWS.items() if window.groups == 1 and min(window.outputs((4, 5, 4)[: len(window.size)])) > 0]
DERIVED = [name for name in POOLED if {*WINDOWS[name].spread, *WINDOWS[name].dilation} == {1} and np.min(WINDOWS[name].padding) >= 0]


def _images(window: Window, seed: int) -> np.ndarray:
    return _special((2, *(4, 5, 4)[: len(window.size)], 2), "float32", seed, count=6)


@pytest.mark.parametrize("op", ["max", "min", "add"])
@pytest.mark.parametrize("name", POOLED)
def test_pooling_takes_in_no_padding(name: str, op: str) -> None:
    window, x = WINDOWS[name], _images(WINDOWS[name], seed=len(name))
    _judge(lambda x: window.pooling(x, op), [x], [enumerated.pooling(window, x, op)], ENGINES[:1])


@pytest.mark.parametrize("op", ["max", "min", "add"])
@pytest.mark.parametrize("name", DERIVED)
def test_the_gradient_of_a_pooling_goes_to_what_was_pooled(name: str, op: str) -> None:
    window = WINDOWS[name]
    x = np.nan_to_num(_images(window, seed=len(name)), nan=1.0, posinf=np.inf, neginf=-np.inf)
    ct = _special((2, *window.outputs(x.shape[1:-1]), 2), "float32", seed=7, count=4)
    wanted = enumerated.sum_gradient(window, x, ct) if op == "add" else enumerated.extreme_gradient(window, x, ct, op)
    _judge(lambda x, ct: jax.vjp(lambda x: window.pooling(x, op), x)[1](ct)[0], [x, ct], [wanted], ENGINES[:1])


# --- reductions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [jnp.max, jnp.min])
@pytest.mark.parametrize("axis", [None, 1])
def test_a_nan_among_thousands_is_not_lost(op: Callable[..., Any], axis: int | None) -> None:
    x = np.random.default_rng(0).standard_normal((64, 80)).astype(np.float32)
    x[17, 43] = np.nan
    wanted = [np.asarray({jnp.max: np.max, jnp.min: np.min}[op](x, axis))]
    _judge(lambda x: op(x, axis), [x], wanted, ENGINES[1:])
