"""Small JAX functions for the compiler's tests: straight-line work, loops, branches, views, donation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr


@dataclass(frozen=True)
class CompileCase:
    """A function, arguments for it, and which of them it may overwrite."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    donated: tuple[bool, ...]

    def jaxpr(self) -> Any:
        return jax.make_jaxpr(self.function)(*self.arguments)

    def graph(self) -> Graph:
        return lower_jaxpr(self.jaxpr(), self.name)

    def expected(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.function)(*self.arguments))]


CASES: dict[str, CompileCase] = {}
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def integers(high: int, *shape: int) -> np.ndarray:
    return np.asarray(RNG.integers(0, high, shape), np.int32)


def case(*arguments: np.ndarray, donated: tuple[bool, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table under its own name."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        CASES[name] = CompileCase(name, function, arguments, donated or (False,) * len(arguments))
        return function

    return enter


# --- straight-line work -------------------------------------------------------------------------------------------------


@case(floats(8, 16), floats(16, 4), floats(4))
def dense_layer(x, w, b):
    return jax.nn.relu(x @ w + b)


@case(floats(8, 16))
def softmax(x):
    return jax.nn.softmax(x)


@case(floats(8, 16))
def gradient_of_log_softmax(x):
    return jax.grad(lambda x: jax.nn.log_softmax(x)[:, 1].sum())(x)


@case(floats(6, 5))
def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


@case(floats(4, 5), floats(5, 6))
def products_turned(a, b):
    return a @ b, b.T @ a.T, (a @ b).T, jnp.einsum("ij,jk->ki", a, b)


@case(floats(2, 4, 5), floats(2, 5, 6))
def batched_products_turned(a, b):
    return jnp.einsum("bij,bjk->bik", a, b), jnp.einsum("bij,bjk->bki", a, b), jnp.einsum("bij,bjk->ibk", a, b)


@case(floats(4, 5).astype(np.float16), floats(5, 6))
def mixed_precision(a, b):
    h = a @ b.astype(jnp.float16)
    return h, h.astype(jnp.float32).sum(), (h * 2).astype(jnp.float32), h.astype(jnp.float32).astype(jnp.float16)


@case(floats(5, 6, 7))
def sibling_reductions(x):
    return x.sum((0, 2)), (x * x).sum((0, 2)), x.max((0, 2)), x.mean(), x.sum()


@case(floats(10, 3))
def many_kinds(x):
    return jnp.cumsum(x, 0), jnp.sort(x, 0), jnp.argmax(x, 1), x.std(), jnp.concatenate([x, x * 2], 0), x[::-1, 1:]


@case(floats(3, 4), floats())
def paddings(x, v):
    return jnp.pad(x, ((1, 2), (0, 1)), constant_values=2.0), lax.pad(x, v, ((0, 1, 1), (-1, 0, 0)))


@case(floats(2, 3, 4))
def turned_twice(x):
    return jnp.transpose(jnp.transpose(x, (2, 0, 1)), (1, 2, 0)), x.transpose(1, 0, 2).reshape(3, 8).T


@case(floats(4), floats(), integers(10))
def scalars(x, s, n):
    t = s * 2 + n.astype(jnp.float32)
    u = jnp.where(t > 0, t, -t)
    return x * u, u, n + 1, jnp.sqrt(u) / 3


@case(floats(4))
def constants(x):
    row = jnp.array([1.0, 2.0, 3.0, 4.0])
    return x * row, jnp.arange(4), jnp.zeros((2, 2)), jnp.float32(3), row


@case(floats(0, 3), floats(3))
def empty_arrays(x, b):
    return x + b, x.sum(0), jnp.concatenate([x, b[None]])


@case(np.uint32(3))
def random_numbers(n):
    key = jax.random.fold_in(jax.random.key(0), n)
    return jax.random.normal(key, (5,)), jax.random.key_data(key)


# --- who owns which buffer ----------------------------------------------------------------------------------------------


@case(floats(3), floats(3))
def inputs_returned(a, b):
    return a, b, a, a.reshape(3, 1), a + b


@case(floats(3), floats(3), donated=(True, True))
def donated_inputs_returned(a, b):
    return b, a, a, b.reshape(1, 3)


@case(floats(6, 4), floats(2, 4), integers(4))
def updated_slice_of_a_kept_input(x, u, s):
    return lax.dynamic_update_slice(x, u, (s, 0)), x + 1


@case(floats(6, 4), floats(2, 4), integers(4), donated=(True, False, False))
def updated_slice_of_a_donated_input(x, u, s):
    return lax.dynamic_update_slice(x, u, (s, 0))


@case(floats(6, 4), integers(6, 3), floats(3, 4), donated=(True, False, False))
def scattered(x, i, u):
    return x.at[i].add(u)


@case(floats(6, 4), integers(6, 3))
def gathered(x, i):
    return x[i]


# --- loops and branches -------------------------------------------------------------------------------------------------


@case(floats(4), floats(4))
def carries_swapped(a, b):
    return lax.fori_loop(0, 5, lambda i, c: (c[1], c[0] + 1), (a, b))


@case(floats(4), floats(4), floats(4), donated=(True, True, True))
def carries_rotated(a, b, c):
    return lax.fori_loop(0, 7, lambda i, s: (s[1], s[2], s[0]), (a, b, c))


@case(floats(4))
def one_init_for_two_carries(a):
    return lax.while_loop(lambda c: c[0].sum() < 20, lambda c: (c[0] + jnp.abs(c[1]) + 1, c[1] * 0.5), (a, a))


@case(floats(3, 3))
def predicate_carried(x):
    return lax.while_loop(lambda c: c[1], lambda c: (c[0] + 1, c[0].sum() < 5), (x, jnp.array(True)))


@case(integers(1, 1), integers(5, 1))
def control_in_views(flag, trips):
    branch = lax.switch(flag[0], [lambda: jnp.float32(1), lambda: jnp.float32(2)])
    return branch, lax.fori_loop(0, trips[0], lambda i, c: c + 1.0, branch), lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, trips)


@case(floats(5, 3), floats(3))
def scan_with_results(xs, c):
    return lax.scan(lambda c, x: (c * 0.9 + x, (c.sum(), c)), c, xs)


@case(floats(8, 4), floats(4, 4))
def recurrent_gradient(xs, w):
    def loss(w):
        h, hs = lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros(4), xs)
        return (hs**2).sum() + h.sum()

    return jax.value_and_grad(loss)(w)


@case(floats(4), floats(4))
def carries_nobody_needs(a, b):
    return lax.fori_loop(0, 4, lambda i, c: (c[0] + 1, c[1] * c[2], c[2]), (a, b, b))[0]


@case(floats(4), floats(4), integers(5))
def work_that_no_trip_changes(a, b, n):
    return lax.fori_loop(0, n, lambda i, c: c * 0.5 + jnp.tanh(b).sum() + jnp.arange(4.0)[::-1], a)


@case(floats(3), integers(2))
def branches_that_pass_through(x, p):
    return lax.cond(p > 0, lambda x: (x * 2, x), lambda x: (x, x + 1), x)


@case(floats(3), floats(3), integers(2), donated=(True, True, False))
def branches_that_swap(a, b, p):
    return lax.cond(p > 0, lambda a, b: (b, a), lambda a, b: (a, b), a, b)


@case(floats(6, 8), floats(6, 8), floats(6, 8), floats(6, 8), donated=(True, True, True, False))
def an_update_that_overflow_skips(weights, mean, square, grads):
    finite = jnp.isfinite(grads).all()
    new_mean, new_square = 0.9 * mean + 0.1 * grads, 0.99 * square + 0.01 * grads * grads
    update = jnp.where(finite, -1e-3 * new_mean / (jnp.sqrt(new_square) + 1e-8), -0.0)
    return weights + update, jnp.where(finite, new_mean, mean), jnp.where(finite, new_square, square)


@case(floats(3), integers(3))
def three_branches(x, p):
    return lax.switch(p, [lambda x: x + 1, lambda x: x * 3, lambda x: -x], x)


@case(floats(4, 4), floats(4, 4))
def nested(a, b):
    def outer(i, carry):
        x, y = lax.fori_loop(0, 2, lambda j, d: (d[1], d[0] @ b), carry[::-1])
        return lax.cond(i % 2 == 0, lambda x, y: (x + 1, y), lambda x, y: (x, y * 2), x, y)

    return lax.fori_loop(0, 3, outer, (a, a))
