"""What everyone who reads jaxprs shares: a walk, the list of calls, binding again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpuflow
from tests.cases.control import _clipped_gradient, _own_batches, _own_tangent
from tpuflow.jaxprs.bind import bind_again, bind_scan, scan_parts
from tpuflow.jaxprs.calls import CALLS, called
from tpuflow.jaxprs.compat import Equation, opened, scope_of, source_of
from tpuflow.jaxprs.walk import array_of, walk

TABLE = np.arange(6, dtype=np.float32)
CALLING: dict[str, Callable[[Any], Any]] = {
    "composite": lambda x: lax.composite(jnp.sin, "mine")(x),
    "custom_jvp_call": _own_tangent,
    "custom_vjp_call": _clipped_gradient,
    "custom_vmap_call": _own_batches,
    "device_call": tpuflow.jit(jnp.sin),
    "jit": jax.jit(jnp.sin),
    "remat2": jax.checkpoint(jnp.sin),
}


def _mixture(x: Any) -> Any:
    with jax.named_scope("outside"):
        y = jax.checkpoint(lambda x: jnp.sin(x) * 2 + TABLE)(_own_tangent(x))
    total, rows = lax.scan(lambda c, r: (c + r, c * 0.5), jnp.float32(1), y)
    return lax.cond(total > 0, lambda r: r + 1, lambda r: r - 1, rows), lax.fori_loop(0, 3, lambda _, c: c * 2, total)


def _again(x: Any) -> Any:
    return walk(jax.make_jaxpr(_mixture)(TABLE), [x], bind_again, array_of)


def test_a_walk_that_binds_every_primitive_again_is_the_function() -> None:
    for got, want in zip(_again(TABLE), _mixture(TABLE), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_is_bound_again_keeps_its_lines_and_scopes() -> None:
    first, second = (jax.make_jaxpr(f)(TABLE).jaxpr.eqns for f in (_mixture, _again))
    assert [(e.primitive.name, source_of(e), scope_of(e)) for e in second] == [(e.primitive.name, source_of(e), scope_of(e)) for e in first]
    assert "outside" in {scope_of(e) for e in first} and all(source_of(e).startswith("test_jaxprs.py:") for e in first)


def test_a_scan_is_bound_again_around_another_body() -> None:
    def step(equation: Equation, operands: list[Any]) -> Any:
        if equation.primitive.name != "scan":
            return bind_again(equation, operands)
        _, carry, stacked = scan_parts(equation, operands)
        carry, made = bind_scan(equation, lambda c, r: ([c[0] - r[0]], [c[0]]), carry, stacked)
        return [*carry, *made]

    closed = jax.make_jaxpr(lambda x: lax.scan(lambda c, r: (c + r, c), jnp.float32(0), x, reverse=True))(TABLE)
    total, made = walk(closed, [TABLE], step, array_of)
    assert total == -TABLE.sum() and made[0] == -TABLE[1:].sum()


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"closed_call"}))  # which only JAX makes
def test_a_call_is_found_with_what_it_calls(name: str) -> None:
    calls = [e for e in jax.make_jaxpr(CALLING[name])(TABLE).jaxpr.eqns if e.primitive.name == name]
    assert [len(opened(called(e))[0].invars) for e in calls] == [1]
