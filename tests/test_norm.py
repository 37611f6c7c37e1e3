"""models/norm.py: what batch normalisation computes, how exactly, and what kernels it becomes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from models.norm import BatchNorm, _normalised
from tests.tolerances import NORM_STATISTICS, NORM_VALUES, PLAIN_SQUARES
from tpuflow.compiler import compile_function
from tpuflow.device.timing.calibration import Calibration
from tpuflow.device.timing.program import time_program

SHAPE = (8, 5, 6, 4)
MICROSECONDS = 71  # of a small layer's five kernels; with statistics in a kernel of their own 85, of six
EPSILON = 1e-5


def batch(offset: float, seed: int = 0) -> np.ndarray:
    """Channels of deviations 1 to 4 around a mean, as fp32 has them."""
    return (offset + np.random.default_rng(seed).standard_normal(SHAPE) * np.arange(1.0, 5.0)).astype(np.float32)


def plain(x, scale, bias):
    """The definition, for autodiff: mean, mean of squared differences, and what they normalise."""
    mean = x.mean((0, 1, 2))
    var = jnp.square(x - mean).mean((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + EPSILON) * scale + bias, mean, var


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_values_and_gradients_of_batch_norm_are_those_of_its_definition(offset):
    x, scale, bias = batch(offset), np.linspace(0.5, 2.0, 4), np.linspace(-1.0, 1.0, 4)
    weights = batch(0.0, 1), np.linspace(1.0, 2.0, 4), np.linspace(-3.0, 0.5, 4)  # the statistics are asked for too

    def weighted(normalise):
        return lambda *arguments: sum((w * out).sum() for w, out in zip(weights, normalise(*arguments), strict=True))

    with jax.enable_x64(True):
        exact = plain(x.astype(np.float64), scale, bias), jax.grad(weighted(plain), (0, 1, 2))(x.astype(np.float64), scale, bias)
    single = [jnp.asarray(a, jnp.float32) for a in (x, scale, bias)]
    normalise = partial(_normalised, (EPSILON, None), near=jnp.full(4, 0.9 * offset))
    found = normalise(*single), jax.grad(weighted(normalise), (0, 1, 2))(*single)
    names = ("y", "mean", "variance", "dx", "dscale", "dbias")
    for name, ours, want in zip(names, jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, want, rtol=0, atol=NORM_VALUES * float(np.abs(want).max()), err_msg=name)


def test_a_variance_does_not_cancel_a_thousand_deviations_from_zero_once_the_running_mean_is_near():
    x = batch(1000.0)
    _, state = BatchNorm(EPSILON, 0.0).apply(
        {"params": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}, "batch_stats": {"mean": jnp.full(4, 990.0), "var": jnp.ones(4)}},
        x, True, mutable=["batch_stats"],
    )  # fmt: skip
    samples = x.size // 4
    unbiased = x.astype(np.float64).var((0, 1, 2)) * samples / (samples - 1)
    np.testing.assert_allclose(state["batch_stats"]["var"], unbiased, rtol=NORM_STATISTICS)


def test_a_variance_far_from_the_running_mean_is_as_flax_has_it_by_default_and_never_negative():
    x, ones, zeros = batch(1000.0), jnp.ones(4), jnp.zeros(4)
    _, _, ours = _normalised((EPSILON, None), x, ones, zeros, zeros)
    variables = {"params": {"scale": ones, "bias": zeros}, "batch_stats": {"mean": zeros, "var": zeros}}
    _, flax = nn.BatchNorm(use_running_average=False, momentum=0.0).apply(variables, x, mutable=["batch_stats"])
    exact = x.astype(np.float64).var((0, 1, 2))
    for found in (ours, flax["batch_stats"]["var"]):
        np.testing.assert_allclose(found, exact, rtol=0, atol=PLAIN_SQUARES * 1000.0**2)
    assert float(_normalised((EPSILON, None), jnp.full(SHAPE, 1e4), ones, zeros, zeros)[2].min()) >= 0.0


def test_a_channel_of_one_value_has_no_variance():
    y, mean, var = _normalised((EPSILON, None), jnp.full(SHAPE, 7.3), jnp.ones(4), jnp.full(4, 0.25), jnp.full(4, 7.3))
    assert float(jnp.abs(var).max()) == 0.0 and float(jnp.ptp(mean)) == 0.0
    np.testing.assert_array_equal(y, np.full(SHAPE, 0.25, np.float32))


class Layer(nn.Module):
    """A 1x1 convolution, its batch normalisation and a ReLU."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, H, W, 64]."""
        return nn.relu(BatchNorm(EPSILON)(nn.Conv(64, (1, 1), use_bias=False)(x), True))


def test_a_normalised_layer_passes_over_its_batch_once_for_statistics_and_once_for_values_each_way():
    x = jax.ShapeDtypeStruct((16, 28, 28, 64), jnp.float16)
    variables = jax.eval_shape(lambda x: Layer().init(jax.random.key(0), x), x)

    def both(params, stats, x, dy):
        """Forward and backward; dy is there from the start, so that the two passes for values can be one kernel."""

        def forward(params, x):
            y, state = Layer().apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return y.astype(x.dtype), state

        y, back, state = jax.vjp(forward, params, x, has_aux=True)
        return y, state, back(dy)

    program = compile_function(both, (variables["params"], variables["batch_stats"], x, x), chip="ascend910")
    time = time_program(program, calibration=Calibration(kernel_seconds=5e-6))
    kinds = [row.time.name.split()[0] for row in time.kernels]
    assert kinds == ["dot", "reduce", "map", "dot", "dot"]
    assert round(time.device_seconds * 1e6) == MICROSECONDS
