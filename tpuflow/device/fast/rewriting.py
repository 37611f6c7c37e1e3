"""What was traced, with parts of it replaced by what XLA:CPU has a quicker form for, natively."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import jax

from tpuflow.device.fast.lax_rounding import x64
from tpuflow.jaxprs.bind import bind_again
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr, Literal, in_place_of
from tpuflow.jaxprs.walk import array_of

Variable = Any
"""A variable of a jaxpr, as a key."""
Env = Mapping[Variable, Any]


class Replacement(Protocol):
    """Another way to some results of a jaxpr."""

    def values(self, env: Env) -> dict[Variable, Any]:
        """The results, by their variables, of what was computed before the first of them."""
        ...


_WIDE = ("int64", "uint64", "float64")
Finder = Callable[[Jaxpr, Env], Mapping[Variable, Replacement]]
"""(a jaxpr, those of its variables that are constants) -> the replacements found in it, by each of their results."""


def with_replacements(function: Callable[..., Any], finders: Sequence[Finder]) -> Callable[..., Any]:
    """The function with what is found in it replaced, in its loops and branches too."""

    @functools.wraps(function)
    def replaced(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        rewritten = _rewritten(closed, {}, finders)
        if rewritten is None:
            return function(*arguments)
        return jax.tree.unflatten(jax.tree.structure(shapes), rewritten(*jax.tree.leaves(arguments)))

    return replaced


def bound(equation: Equation, env: Env, **overrides: Any) -> Iterator[tuple[Variable, Any]]:
    """The results of an equation, traced anew with `overrides` in place of some of its parameters."""
    variables: list[Variable] = [*equation.invars, *equation.outvars]
    wide = any(v.aval.dtype.name in _WIDE for v in variables)
    with in_place_of(equation), x64() if wide else nullcontext():
        operands = [array_of(v, v.val) if isinstance(v, Literal) else env[v] for v in equation.invars]
        return zip(equation.outvars, bind_again(equation, operands, **overrides), strict=True)


def _rewritten(closed: ClosedJaxpr, known: Env, finders: Sequence[Finder]) -> Callable[..., list[Any]] | None:
    """A jaxpr as a function with its replacements; None if there are none. known: those of its inputs that are constants."""
    jaxpr = closed.jaxpr
    constants = {**known, **dict(zip(jaxpr.constvars, closed.consts, strict=True))}
    replacements = {v: r for find in finders for v, r in find(jaxpr, constants).items()}
    inner = {id(e): found for e in jaxpr.eqns if (found := dict(_inside(e, constants, finders)))}
    if not replacements and not inner:
        return None

    def evaluated(*arguments: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))
        for equation in jaxpr.eqns:
            replacement = next((replacements[v] for v in equation.outvars if v in replacements), None)
            if replacement is None:
                env.update(bound(equation, env, **inner.get(id(equation), {})))
            elif equation.outvars[0] not in env:
                env.update(replacement.values(env))
        return [array_of(v, v.val) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    return evaluated


def _inside(equation: Equation, constants: Env, finders: Sequence[Finder]) -> Iterator[tuple[str, Any]]:
    """The parameters of a loop or a choice that replacements were found in, with these."""

    def rewritten(closed: ClosedJaxpr, operands: Sequence[Any]) -> ClosedJaxpr:
        inputs = zip(closed.jaxpr.invars, operands, strict=False)
        found = _rewritten(closed, {v: constants[o] for v, o in inputs if not isinstance(o, Literal) and o in constants}, finders)
        return closed if found is None else jax.make_jaxpr(found)(*closed.in_avals)

    params = equation.params
    if equation.primitive.name == "while":
        first = params["cond_nconsts"]
        body = rewritten(params["body_jaxpr"], equation.invars[first : first + params["body_nconsts"]])
        if body is not params["body_jaxpr"]:
            yield "body_jaxpr", body
    if equation.primitive.name == "cond":
        branches = tuple(rewritten(branch, equation.invars[1:]) for branch in params["branches"])
        if any(x is not y for x, y in zip(branches, params["branches"], strict=True)):
            yield "branches", branches
