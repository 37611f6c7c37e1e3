"""`walk`: the loop of every jaxpr interpreter in tpuflow, over values of any kind (arrays, graph nodes, types, booleans)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax.numpy as jnp

from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr, Literal, in_place_of, opened

T = TypeVar("T")


def walk(
    jaxpr: ClosedJaxpr | Jaxpr,
    operands: Sequence[T],
    step: Callable[[Equation, list[T]], Sequence[T]],
    constant: Callable[[Any, Any], T],
    around: Callable[[Equation], AbstractContextManager[Any]] = in_place_of,
) -> list[T]:
    """Interpret a jaxpr: returns the interpreter's values of its results, given those of its inputs.

    step: (equation, operands) -> results. constant: (literal or constant variable, its array) -> the interpreter's value. around: equation
    -> a context in which both are called; by default the one in which JAX traces as if at the equation's place. Each value is dropped after
    the last equation that reads it.
    """
    inner, consts = opened(jaxpr)
    env: dict[Any, T] = dict(zip(inner.invars, operands, strict=True))
    env.update((v, constant(v, value)) for v, value in zip(inner.constvars, consts, strict=True))

    def read(atom: Any) -> T:
        return constant(atom, atom.val) if isinstance(atom, Literal) else env[atom]

    for equation, done in zip(inner.eqns, _last_reads(inner), strict=True):
        with around(equation):
            results = step(equation, [read(v) for v in equation.invars])
        env.update(zip(equation.outvars, results, strict=True))
        for v in done:
            env.pop(v, None)
    return [read(v) for v in inner.outvars]


def _last_reads(jaxpr: Jaxpr) -> list[list[Any]]:
    """For each equation, the variables (its results included) that no later equation reads."""
    read = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    done: list[list[Any]] = []
    for equation in reversed(jaxpr.eqns):
        variables = {v for v in (*equation.invars, *equation.outvars) if not isinstance(v, Literal)}
        done.append([v for v in variables if v not in read])
        read |= variables
    return done[::-1]


def array_of(atom: Any, value: Any) -> Any:
    """The value of a literal, or of a captured array's variable, as an array of the type that the jaxpr gives it."""
    dtype = atom.aval.dtype  # a literal's own may be wider
    return value if hasattr(value, "dtype") and not isinstance(atom, Literal) else jnp.asarray(value, dtype)
