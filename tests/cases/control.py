"""Cases of calls, loops, branches and random bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.cases.case import BOOL, F16, F32, S32, U32, Arg, Case
from tpuflow.jaxprs.versions import KEY_IMPLEMENTATIONS


@jax.custom_vjp
def _clipped_gradient(x: Any) -> Any:
    return x * 2


_clipped_gradient.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.clip(g, -0.5, 0.5),))


@jax.custom_jvp
def _own_tangent(x: Any) -> Any:
    return jnp.sin(x)


_own_tangent.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 3 * tangents[0]))


@jax.custom_batching.custom_vmap
def _own_batches(x: Any) -> Any:
    return jnp.sin(x)


_own_batches.def_vmap(lambda size, batched, x: (jnp.sin(x) * 2, batched[0]))


def _rnn(h: Any, xs: Any, w: Any, *, reverse: bool = False) -> Any:
    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(h @ w + x)
        return h, h.sum(-1)

    return lax.scan(step, h, xs, reverse=reverse)


def _nested(x: Any) -> Any:
    def inner(c: Any, row: Any) -> tuple[Any, Any]:
        return c + row, c * row

    return lax.scan(lambda c, m: lax.scan(inner, c, m), x[0, 0], x)


def _collatz(n: Any) -> Any:
    def body(state: Any) -> Any:
        n, steps = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    return lax.while_loop(lambda s: s[0] != 1, body, (n, jnp.int32(0)))


def _newton(a: Any) -> Any:
    return lax.while_loop(lambda x: jnp.max(jnp.abs(x * x - a)) > 1e-3, lambda x: 0.5 * (x + a / x), a)


def _random(draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda words: draw(jax.random.wrap_key_data(words))


_WORDS = {"rbg": 4, "unsafe_rbg": 4, "philox2x32": 1, "philox4x32": 2, "threefry4x32": 4}
_GENERATORS = {name: words for name, words in _WORDS.items() if name in KEY_IMPLEMENTATIONS}
"""The generators of jax.random beside threefry2x32, and how many words their keys have."""


def _drawn(impl: str) -> Callable[[Any], Any]:
    def draw(words: Any) -> Any:
        first, second = jax.random.split(jax.random.wrap_key_data(words, impl=impl))
        bits = jax.vmap(lambda key: jax.random.bits(key, (5,)))(jax.random.split(second, 3))
        folded = jax.random.key_data(jax.random.fold_in(first, 7))
        return bits, folded, jax.random.uniform(first, (9,)), jax.random.normal(second, (4,), np.float32)

    return draw


def _halved(x: Any) -> Any:
    return jax.custom_derivatives.linear_call(lambda _, y: y / 2, lambda _, z: z / 2, None, x)


def _changed_in_place(x: Any) -> Any:
    total, rows = jax.new_ref(jnp.zeros(())), jax.new_ref(x)

    def step(i: Any, _: Any) -> None:
        total[...] += rows[i].sum()
        rows[i] = rows[i] * 2

    lax.fori_loop(0, x.shape[0], step, None)
    return total[...], jax.freeze(rows)


def _state_scan(state: Any) -> Any:
    return lax.scan(lambda state, _: lax.rng_bit_generator(state, (3, 5)), state, None, length=3)


def _threefry_words(state: Any, shape: tuple[int, ...], dtype: Any = np.uint32) -> Any:
    return lax.rng_bit_generator(state, shape, dtype, algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)


def _dropped_product(words: Any, x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(words, impl="rbg"), 0.9, y.shape), y / 0.9, 0)


def _dropped_rows(words: Any, x: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.wrap_key_data(words, impl="rbg"), 0.7, x.shape)
    return jnp.where(kept, jax.nn.softmax(x), 0) @ x.swapaxes(1, 2)


def _key_scan(key: Any) -> Any:
    def step(key: Any, _: Any) -> tuple[Any, Any]:
        key, now = jax.random.split(key)
        return key, jax.random.bits(now, (3,))

    key, bits = lax.scan(step, key, None, length=4)
    return jax.random.key_data(key), bits


def _case(name: str, fn: Callable[..., Any], *args: Arg, grad: bool = False, tolerance: str = "exact") -> Case:
    return Case(name, fn, args, grad, tolerance)


_KEY = Arg((2,), U32, "key")
PHILOX = lax.RandomAlgorithm.RNG_PHILOX
_CALLS = [
    _case("jit-nested", jax.jit(lambda x: jax.jit(lambda y: y * 2)(x) + 1), Arg((33,)), grad=True),
    _case("custom_vjp", _clipped_gradient, Arg((33,)), grad=True),
    _case("custom_vmap", lambda x: _own_batches(x) + jax.vmap(_own_batches)(x), Arg((33,)), tolerance="function"),
    _case("custom_jvp", _own_tangent, Arg((33,)), grad=True, tolerance="function"),
    _case("checkpoint", jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), Arg((33,)), grad=True, tolerance="composed"),
    _case("linear_call", lambda x: _halved(x) + 1, Arg((9,)), grad=True),
    _case("new_ref", _changed_in_place, Arg((5, 3), F32, "ties")),
    _case("jvp", lambda x, t: jax.jvp(jnp.tanh, (x,), (t,)), Arg((33,)), Arg((33,)), tolerance="composed"),
    _case("second-derivative", jax.vmap(jax.grad(jax.grad(lambda x: jnp.exp(x) * x))), Arg((9,)), tolerance="composed"),
    _case(
        "vmap-of-grad", jax.vmap(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0)), Arg((5,)), Arg((7, 3, 5)), tolerance="composed"
    ),
]
_LOOPS = [
    _case("scan-rnn", _rnn, Arg((4, 5)), Arg((6, 4, 5)), Arg((5, 5)), grad=True, tolerance="composed"),
    _case(
        "scan-reverse",
        lambda h, xs, w: _rnn(h, xs, w, reverse=True),
        Arg((4, 5)),
        Arg((6, 4, 5)),
        Arg((5, 5)),
        grad=True,
        tolerance="composed",
    ),
    _case("scan-nested", _nested, Arg((3, 4, 5)), grad=True, tolerance="composed"),
    _case("scan-length-one", lambda x: lax.scan(lambda c, y: (c + y, c * y), 2.0, x), Arg((1,)), grad=True),
    _case("scan-length-zero", lambda x: lax.scan(lambda c, y: (c + y, c), jnp.float32(2), x), Arg((0,))),
    _case("scan-without-inputs", lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=5), Arg((3,), S32)),
    _case(
        "scan-mixed-types",
        lambda x, p: lax.scan(lambda c, y: ((c[0] + y[0], c[1] ^ y[1]), y[1]), (jnp.float16(0), False), (x, p)),
        Arg((9,), F16, "ties"),
        Arg((9,), BOOL),
    ),
    _case("fori-loop", lambda x: lax.fori_loop(0, 5, lambda i, c: c * 2 + i, x), Arg((7,), S32)),
    _case(
        "fori-loop-bound-at-run-time", lambda n, x: lax.fori_loop(0, n, lambda i, c: c + i * x, x), Arg((), S32, "count", 7), Arg((7,), S32)
    ),
    _case("while-collatz", _collatz, Arg((), S32, "above_one")),
    _case("while-newton", _newton, Arg((9,), F32, "positive"), tolerance="composed"),
    _case("while-never", lambda x: lax.while_loop(lambda c: c.sum() > 1e9, lambda c: c + 1, x), Arg((5,), F32)),
    _case("while-batched", jax.vmap(lambda n: lax.while_loop(lambda c: c < 100, lambda c: c * 3, n)), Arg((5,), S32, "above_one")),
    _case("associative_scan", lambda x: lax.associative_scan(jnp.add, x), Arg((13, 3)), grad=True, tolerance="sum"),
    _case("map", lambda x: lax.map(lambda r: jnp.sort(r), x), Arg((5, 9))),
]
_BRANCHES = [
    _case("cond", lambda p, x: lax.cond(p, lambda y: y * 2, lambda y: y - 1, x), Arg((), BOOL), Arg((7,)), grad=True),
    _case(
        "switch",
        lambda i, x: lax.switch(i, [lambda y: y, lambda y: -y, lambda y: y * y], x),
        Arg((), S32, "index", 3),
        Arg((7,)),
        grad=True,
    ),
    _case("cond-closure", lambda x, y: lax.cond(x.sum() > y.sum(), lambda: x, lambda: y * 3), Arg((7,)), Arg((7,)), grad=True),
    _case("cond-batched", jax.vmap(lambda p, x: lax.cond(p, lambda y: y * 2, lambda y: y - 1, x)), Arg((5,), BOOL), Arg((5, 3))),
    _case(
        "cond-in-scan",
        lambda x: lax.scan(lambda c, y: (lax.cond(y > 0, lambda: c + y, lambda: c), c), 0.0, x),
        Arg((9,), F32, "ties"),
        grad=True,
    ),
    _case(
        "cond-several-results",
        lambda p, x: lax.cond(p, lambda: (x, x.sum()), lambda: (-x, x.max())),
        Arg((), BOOL),
        Arg((7,)),
        tolerance="sum",
    ),
    _case(
        "finite-guard",
        lambda g, p: jax.tree.map(lambda a: jnp.where(jnp.isfinite(g).all(), p - g, a), p),
        Arg((9,), F32, "edges"),
        Arg((9,)),
    ),
]
_RANDOM = [
    _case("random-bits", _random(lambda k: jax.random.bits(k, (13, 33))), _KEY),
    _case("random-bits-uint8", _random(lambda k: jax.random.bits(k, (13, 5), np.uint8)), _KEY),
    _case("random-uniform", _random(lambda k: jax.random.uniform(k, (130,))), _KEY),
    _case("random-uniform-f16", _random(lambda k: jax.random.uniform(k, (33,), np.float16)), _KEY),
    _case("random-normal", _random(lambda k: jax.random.normal(k, (130,))), _KEY, tolerance="composed"),
    _case("random-split", _random(lambda k: jax.random.key_data(jax.random.split(k, 3))), _KEY),
    _case("random-fold-in", lambda w, i: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(w), i)), _KEY, Arg((), S32)),
    _case("random-seed", lambda s: jax.random.key_data(jax.random.key(s)), Arg((), S32)),
    _case("random-legacy-key", lambda s: jax.random.uniform(jax.random.PRNGKey(s), (5,)), Arg((), S32)),
    _case("random-bernoulli", _random(lambda k: jax.random.bernoulli(k, 0.3, (130,))), _KEY),
    _case(
        "random-dropout",
        lambda w, x: jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(w), 0.5, x.shape), x / 0.5, 0),
        _KEY,
        Arg((13, 9)),
        grad=True,
    ),
    _case("random-integers", _random(lambda k: jax.random.randint(k, (33,), -5, 17)), _KEY),
    _case("random-permutation", _random(lambda k: jax.random.permutation(k, 33)), _KEY),
    _case("random-categorical", lambda w, x: jax.random.categorical(jax.random.wrap_key_data(w), x), _KEY, Arg((13, 9))),
    _case("random-truncated-normal", _random(lambda k: jax.random.truncated_normal(k, -2, 2, (33,))), _KEY, tolerance="composed"),
    _case("random-keys-moved", _random(lambda k: jax.random.key_data(jax.random.split(k, 6).reshape(3, 2)[::-1, 1])), _KEY),
    _case("random-keys-vmapped", _random(lambda k: jax.vmap(lambda s: jax.random.uniform(s, (4,)))(jax.random.split(k, 3))), _KEY),
    _case("random-keys-scanned", _random(_key_scan), _KEY),
    _case(
        "random-gamma",
        lambda w, a: jax.random.gamma(jax.random.wrap_key_data(w), a),
        _KEY,
        Arg((9,), F32, "positive"),
        tolerance="composed",
    ),
    *(_case(f"random-{impl}", _drawn(impl), Arg((words,), U32, "key"), tolerance="composed") for impl, words in _GENERATORS.items()),
    _case("rng_bit_generator", lambda state: lax.rng_bit_generator(state, (3, 7)), Arg((4,), U32, "key")),
    _case("rng_bit_generator-uint8", lambda state: lax.rng_bit_generator(state, (9,), np.uint8), Arg((4,), U32, "key")),
    _case("rng_bit_generator-uint16", lambda state: lax.rng_bit_generator(state, (5, 1, 3), np.uint16), Arg((4,), U32, "key")),
    _case("rng_bit_generator-0d", lambda state: lax.rng_bit_generator(state, ()), Arg((4,), U32, "key")),
    _case("rng_bit_generator-none", lambda state: lax.rng_bit_generator(state, (0, 3)), Arg((4,), U32, "key")),
    _case("rng_bit_generator-philox", lambda state: lax.rng_bit_generator(state, (131,), algorithm=PHILOX), Arg((4,), U32, "key")),
    *(
        _case(f"rng_bit_generator-threefry-{len(shape)}d-{n}", functools.partial(_threefry_words, shape=shape), Arg((4,), U32, "key"))
        for n, shape in enumerate([(), (7,), (2, 3, 6), (3, 2, 5), (3, 5), (3, 3), (0, 3)])
    ),
    _case("rng_bit_generator-threefry-uint8", functools.partial(_threefry_words, shape=(9,), dtype=np.uint8), Arg((4,), U32, "key")),
    _case("rng_bit_generator-threefry-carries", lambda x: _threefry_words(x | np.uint32(0xFFFFFFFE), (5, 8)), Arg((4,), U32, "key")),
    _case("rng_bit_generator-carries", lambda x: lax.rng_bit_generator(x | np.uint32(0xFFFFFFFE), (40,)), Arg((4,), U32, "key")),
    _case("rng_bit_generator-moved", lambda state: lax.rng_bit_generator(state, (3, 4, 5))[1].T[1:], Arg((4,), U32, "key")),
    _case("rng_bit_generator-vmapped", jax.vmap(lambda state: lax.rng_bit_generator(state, (5,))), Arg((3, 4), U32, "key")),
    _case("rng_bit_generator-scanned", _state_scan, Arg((4,), U32, "key")),
    _case("dropout-product", _dropped_product, Arg((4,), U32, "key"), Arg((9, 20)), Arg((20, 33)), tolerance="composed"),
    _case("dropout-rows", _dropped_rows, Arg((4,), U32, "key"), Arg((2, 9, 33)), tolerance="composed"),
    _case("random-scalar", _random(lambda k: jax.random.uniform(k)), _KEY),
]
CASES = [*_CALLS, *_LOOPS, *_BRANCHES, *_RANDOM]
