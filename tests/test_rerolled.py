"""Kernels that take their batches in two halves are translated as ones that take them at once, and others as they are.

That this changes no bit, `test_attention.py` shows, where both engines judge kernels of many kinds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tpuflow.device.fast import cache
from tpuflow.device.fast import kernel as kernels
from tpuflow.device.fast.rerolled import rerolled
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.instruction import Instruction
from tpuflow.isa.program import Kernel, Program

HEADS = {"whole halves": 2, "halves in blocks": 6}
"""How many heads a kernel has of two batches: it takes a batch at once, or three of its heads."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention."""
    scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), q @ k.swapaxes(2, 3), -1e9)
    return jax.nn.softmax(scores) @ v


def attend_by_place(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention that is the weaker, the farther away a key is."""
    place = jax.lax.broadcasted_iota(jnp.float32, (1, 1, 1, q.shape[2]), 3)
    return jax.nn.softmax(q @ k.swapaxes(2, 3) - place) @ v


def gradients(*arrays: jax.Array) -> Any:
    return jax.grad(lambda *xs: (attend(*xs) ** 2).sum(), (0, 1, 2))(*arrays)


def arrays(heads: int) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(n), (2, heads, 128, 64)) for n in range(3)]


def program(function: Callable[..., Any] = attend, heads: int = 6) -> Program:
    return tpuflow.jit(function).program(*arrays(heads))


def halved(found: Program) -> list[Kernel]:
    """The kernels that are translated for both halves at once."""
    return [k for k in found.kernels() if rerolled(k) is not k]


def changed(kernel: Kernel, which: Callable[[Instruction], bool], change: Callable[[Any], Instruction], nth: int = -1) -> Kernel:
    """The kernel with one of some instructions changed."""
    place = [n for n, i in enumerate(kernel.body) if which(i)][nth]
    return replace(kernel, body=(*kernel.body[:place], change(kernel.body[place]), *kernel.body[place + 1 :]))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("function", [attend, attend_by_place, gradients])
def test_what_is_done_for_both_halves_is_there_once(function, heads):
    found = halved(program(function, heads))
    assert found
    for kernel in found:
        once = rerolled(kernel)
        assert [g.size for g in once.grid] == ([4] if heads == 6 else []) and [g.size for g in kernel.grid] == ([2] if heads == 6 else [])
        assert not any(isinstance(i, dma.Signal | dma.Wait) for i in once.instructions)
        twice, alone = (Counter(type(i) for i in k.instructions) for k in (kernel, once))
        assert all(twice[kind] == 2 * alone[kind] for kind in (dma.Store, matrix.MatmulAccumulate, vector.ReduceInto))
        assert rerolled(once) is once


def results(function: Callable[..., Any], heads: int, fidelity: str) -> list[jax.Array]:
    """Those of an engine that is made anew."""
    cache.clear()
    return jax.tree.leaves(tpuflow.jit(function, fidelity=fidelity)(*arrays(heads)))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("function", [attend, attend_by_place, gradients])
@pytest.mark.parametrize(("fidelity", "tolerance"), [("bitexact", 0), ("native", 1e-5)])
def test_results_are_those_of_two_halves(function, heads, fidelity, tolerance, monkeypatch):
    ours = results(function, heads, fidelity)
    monkeypatch.setattr(kernels, "rerolled", lambda kernel: kernel)
    theirs = results(function, heads, fidelity)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def is_store(i: Instruction) -> bool:
    return isinstance(i, dma.Store)


def is_load(i: Instruction) -> bool:
    return isinstance(i, dma.Load)


def moved(i: Any) -> Instruction:
    axes = tuple(replace(a, origin=a.origin + 1) if a.origin else a for a in i.window.axes)
    return replace(i, window=replace(i.window, axes=axes))


NOT_ALIKE = {
    "another operation": (lambda i: isinstance(i, vector.Unary) and i.op == "exp", lambda i: replace(i, op="tanh")),
    "another number": (lambda i: isinstance(i, vector.Constant) and i.value == 0, lambda i: replace(i, value=-0.0)),
    "a maximum that starts elsewhere": (lambda i: isinstance(i, vector.Constant) and i.value == -math.inf, lambda i: replace(i, value=0.0)),
    "a store elsewhere": (is_store, moved),
    "a load elsewhere": (lambda i: is_load(i) and any(a.origin for a in i.window.axes), moved),
    "a load that is filled up": (is_load, lambda i: replace(i, window=replace(i.window, fill=-0.0))),
}


@pytest.mark.parametrize(("which", "change"), NOT_ALIKE.values(), ids=NOT_ALIKE)
def test_halves_that_differ_stay_apart(which, change):
    (kernel,) = halved(program())
    other = changed(kernel, which, change)
    assert repr(other) != repr(kernel) and rerolled(other) is other


def test_an_array_that_is_read_and_written_is_written_in_order():
    (kernel,) = halved(program())
    read = next(i.window.buffer for i in kernel.body if is_load(i))
    body = tuple(i.on({i.window.buffer: read}) if isinstance(i, dma.Store) else i for i in kernel.body)
    other = replace(kernel, body=body)
    assert rerolled(other) is other


def test_kernels_without_halves_are_what_they_were():
    found = tpuflow.jit(lambda x: (jnp.sort(x), jnp.cumsum(x), x @ x.T)).program(jnp.ones((8, 8)))
    assert not halved(found)
