"""Stock JAX programs that run on two backends: by jax.jit on the CPU, and by the same on the simulated device. They know neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

EXACT, CLOSE = 0.0, 2e-5
"""Bit for bit; or relative to the largest element: f32 sums in another order, XLA's own special functions (tests/tolerances.py)."""

CASES: dict[str, tuple[float, Callable[[], Any]]] = {}
"""Name -> (how close, what is computed)."""


def case(close: float) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[function.__name__] = (close, function)
        return function

    return add


@case(EXACT)
def eager_arithmetic() -> Any:
    x = jnp.arange(12.0).reshape(3, 4)
    return x + 1, x * x / 4, x[1:, ::2], x.T, jnp.where(x > 5, x, -x), x.astype(jnp.int32) // 3, x.argmax()


@case(EXACT)
def scattered_and_gathered() -> Any:
    x, i = jnp.arange(12.0).reshape(3, 4), jnp.array([0, 2])
    return x[i], x.at[i].add(1.0), x.at[0, 1].set(7.0), jnp.take(x, i, axis=1)


@case(EXACT)
def random_bits() -> Any:
    key = jax.random.key(3)
    return jax.random.bits(key, (5,)), jax.random.split(jax.random.PRNGKey(0), 3), jax.random.randint(key, (6,), 0, 9)


@case(CLOSE)
def random_numbers() -> Any:
    key = jax.random.key(3)
    return jax.random.normal(key, (5,)), jax.random.uniform(key, (5,))


@case(CLOSE)
def product_by_algorithm() -> Any:
    """What jax.nn.dot_product_attention asks for in bf16."""
    a, b = jnp.sin(jnp.arange(40.0)).reshape(5, 8), jnp.cos(jnp.arange(48.0)).reshape(8, 6)
    preset = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return jax.lax.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), precision=preset, preferred_element_type=jnp.float32)


@case(EXACT)
def loops() -> Any:
    doubled = jax.jit(lambda x: jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, x))
    running = jax.lax.scan(lambda c, x: (c + x, c * x), 0.0, jnp.arange(5.0))
    return doubled(3), running, jax.lax.cond(running[0] > 3, lambda x: x + 1, lambda x: x - 1, 2.0)


@case(EXACT)
def sorted_numbers() -> Any:
    x = jnp.array([3.0, 1.0, jnp.nan, -0.0, 0.0, -2.0])
    return jnp.sort(x), jnp.argsort(x), jnp.median(x[:2]), jax.lax.top_k(x[3:], 2), jnp.unique(x[3:], size=3)


@case(CLOSE)
def gradients() -> Any:
    def f(x: Any) -> Any:
        return jnp.sin(x) * x

    x = jnp.arange(4.0)
    return jax.vmap(jax.grad(f))(x), jax.value_and_grad(lambda x: jax.nn.softmax(x).max())(x), jax.jit(jax.jacfwd(f))(x)


@case(EXACT)
def short_types() -> Any:
    x = np.arange(6, dtype=np.float32)
    return jnp.asarray(x, jnp.bfloat16) * 3, jnp.asarray(x, jnp.float16) / 2, jnp.asarray(x, jnp.int8) + 1, jnp.asarray(x, jnp.bool_)


@case(CLOSE)
def complex_arrays() -> Any:
    z = np.exp(1j * np.arange(12)).astype(np.complex64).reshape(3, 4)
    there = jnp.asarray(z[:, ::-1])
    halves = jax.jit(lambda z, w: (z + w, w, z.real), donate_argnums=0)(jnp.asarray(z), there)
    return there, there * 2j, jnp.abs(there), there @ there.T.conj(), halves, jnp.fft.fft(z), there[1, 2]


@case(CLOSE)
def convolution() -> Any:
    x, k = (jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.float32) for s in ((2, 8, 8, 3), (3, 3, 3, 4)))
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.jit(lambda x, k: jax.lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=numbers))(x, k)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(nn.relu(nn.LayerNorm()(nn.Dense(16)(x))))


@case(1e-4)  # what the first steps round differently goes through twenty updates, each divided by its own running size
def twenty_training_steps() -> Any:
    model, optimizer = Net(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 8)).astype(np.float32)
    y = x[:, :4].argmax(1).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), x)
    state = (params, jax.jit(optimizer.init)(params))

    def step(state: Any, x: Any, y: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(20):
        state, value = step(state, x, y)
        losses.append(value)
    assert losses[-1] < 0.9 * losses[0]
    return jnp.stack(losses), state[0]


def computed(name: str) -> list[np.ndarray]:
    """What a case gives, as arrays of the host; bf16 as f32."""
    leaves = jax.tree.leaves(CASES[name][1]())
    return [np.asarray(x).astype(np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in leaves]
