"""The one walk over a jaxpr: equation by equation, over whatever stands for its values."""

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
    """What stands for the results of a jaxpr, given what stands for its inputs.

    step: the results of an equation with these operands. constant: what stands for a literal, or the variable of a captured array, that
    has a value. around: where both are called for an equation; else as if it were traced there. What stands for a value is let go when the
    last equation that reads it is done.
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
    """For each equation the variables that nothing reads after it, its own results among them."""
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
