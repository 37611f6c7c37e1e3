"""Softmaxes that XLA:CPU hands to YNNPACK as a whole, natively: which those are, and that no NaN is lost in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tpuflow.device.fast import virtual
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.softmaxes import Role, softmaxes
from tpuflow.isa import vector

SHAPE = (4, 64, 128)
SPECIAL = (np.nan, np.inf, -np.inf, np.nan)


def shifted(x: jax.Array) -> jax.Array:
    return x - x.max(-1, keepdims=True)


def divided(e: jax.Array) -> jax.Array:
    return e / e.sum(-1, keepdims=True)


HIDDEN: Mapping[str, Callable[[jax.Array], Any]] = {
    "softmax": jax.nn.softmax,
    "logarithm": jax.nn.log_softmax,
    "scaled and masked": lambda x: jax.nn.softmax(x * 0.125 + x[0]),
    "of a product": lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2)),
    "multiplied": lambda x: jax.nn.softmax(x) * 2 + 1,
    "cut": lambda x: jnp.maximum(jax.nn.softmax(x), 0.01),
}
SEEN: Mapping[str, Callable[[jax.Array], Any]] = {
    "exponentials": lambda x: jnp.exp(shifted(x)),
    "exponentials, too": lambda x: (divided(jnp.exp(shifted(x))), jnp.exp(shifted(x))),
    "differences, too": lambda x: (divided(jnp.exp(shifted(x))), shifted(x) * 2),
    "the maximum, too": lambda x: (jax.nn.softmax(x), x.max(-1)),
    "another array": lambda x: divided(jnp.exp(x[::-1] - x.max(-1, keepdims=True))),
    "a part of the sum": lambda x: jnp.exp(shifted(x)) / jnp.exp(shifted(x))[..., :64].sum(-1, keepdims=True),
    "comparisons": lambda x: divided(jnp.exp(shifted(x))) + (shifted(x) > -1),
    "sums that start elsewhere": lambda x: jnp.exp(shifted(x)) * jax.nn.sigmoid(jnp.exp(shifted(x)).sum(-1, keepdims=True)),
    "other rows' maxima": lambda x: divided(jnp.exp(x[0] - x[0].max(-1)[None, :64].repeat(2, 1))),
    "other rows' sums": lambda x: jnp.exp(shifted(x[0, :, :64])) / jnp.exp(shifted(x[0, :, :64])).sum(-1)[None, :],
    "columns": lambda x: jax.nn.softmax(x, axis=1),
    "rounded": lambda x: jax.nn.softmax(x.astype(jnp.bfloat16).astype(jnp.float32)),
    "a selection": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9)),
}


def array() -> np.ndarray:
    """Rows with special numbers, rows of nothing else, and rows without."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    for number, special in enumerate(SPECIAL):
        x[number, 2 * number, number] = special
        x[number, 2 * number + 20] = special
    x[0, 50, :2] = np.inf, np.nan
    return x


@pytest.mark.parametrize(("function", "hidden"), [(f, True) for f in HIDDEN.values()] + [(f, False) for f in SEEN.values()])
def test_maxima_lose_nan_where_nobody_sees_it(function, hidden, monkeypatch):
    found: list[Mapping[int, Role]] = []
    monkeypatch.setattr(virtual, "softmaxes", lambda *given: found.append(softmaxes(*given)) or found[-1])
    for translated in FastEngine(tpuflow.jit(function).program(jnp.asarray(array()))).translate():
        assert translated.as_text()
    assert any(found) == hidden


@pytest.mark.parametrize("function", [*HIDDEN.values(), *SEEN.values()], ids=[*HIDDEN, *SEEN])
def test_nan_and_infinities_are_where_bit_exact_code_has_them(function):
    x = jnp.asarray(array())
    native, exact = (jax.tree.leaves(tpuflow.jit(function, fidelity=fidelity)(x)) for fidelity in ("native", "bitexact"))
    for ours, theirs in zip(native, exact, strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs))
        both = np.isfinite(theirs)
        np.testing.assert_allclose(ours[both], theirs[both], rtol=1e-5, atol=1e-5)


def test_a_softmax_is_one_kernel():
    (translated,) = FastEngine(tpuflow.jit(jax.nn.softmax).program(jnp.asarray(array()))).translate()
    text = translated.compile().as_text()
    assert text[text.index("ENTRY") :].count(" fusion(") == 1 and "__ynn_fusion" in text


@pytest.mark.parametrize("which", [0, 1])
def test_a_maximum_or_a_sum_that_goes_to_other_rows_makes_no_softmax(which):
    """Its NaN, or that of its row, would not be theirs."""
    program = tpuflow.jit(jax.nn.softmax).program(jnp.asarray(array()))
    (kernel,) = program.kernels()
    broadcast = [i for i in kernel.body if isinstance(i, vector.Broadcast)][which]
    body = tuple(dataclasses.replace(i, axes=(1, 0)) if i is broadcast else i for i in kernel.body)
    found = [
        virtual.Lifting(k, program.buffers, LaxArithmetic(False), frozenset()).softmaxes
        for k in (kernel, dataclasses.replace(kernel, body=body))
    ]
    assert found[0] and not found[1]
