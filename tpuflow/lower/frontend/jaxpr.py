"""The walk over a jaxpr: every equation goes to its rule, with the user's source line and scope on every node made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tpuflow.dtypes import S32
from tpuflow.errors import GraphError, UnsupportedDtypeError, UnsupportedPrimitiveError
from tpuflow.isa.calls import Call, HostCall
from tpuflow.lower.frontend import jax_compat
from tpuflow.lower.frontend.advice import advice
from tpuflow.lower.frontend.jax_compat import ClosedJaxpr, Equation, Jaxpr, Literal
from tpuflow.lower.frontend.registry import RULES, Rule, UnsupportedForm
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value


def lower_jaxpr(closed_jaxpr: ClosedJaxpr, name: str, *, input_names: Sequence[str] = (), output_names: Sequence[str] = ()) -> Graph:
    """The graph of a closed jaxpr, which calls nothing on the host; see `lower_with_calls`."""
    graph, calls = lower_with_calls(closed_jaxpr, name, input_names=input_names, output_names=output_names)
    assert not calls
    return graph


def lower_with_calls(
    closed_jaxpr: ClosedJaxpr, name: str, *, input_names: Sequence[str] = (), output_names: Sequence[str] = ()
) -> tuple[Graph, tuple[Call, ...]]:
    """The graph of a closed jaxpr: one input per jaxpr input, one output per jaxpr output, random keys as u32[..., 2]; and the calls that
    it makes on the host, whose arrays it sends to the first outfeed ports.

    Raises:
      UnsupportedPrimitiveError: a primitive, or a form of one, has no rule, or is over a named axis that is bound outside of the jaxpr.
      UnsupportedDtypeError: a value has a type that the device does not have.
    """
    named = tuple(input_names) or tuple(f"argument {i}" for i in range(len(closed_jaxpr.in_avals)))
    types = [jax_compat.type_of(aval, where) for aval, where in zip(closed_jaxpr.in_avals, named, strict=True)]
    check_axes(closed_jaxpr, name)
    b = Builder(name, types, input_names)
    pruned = jax_compat.prune(closed_jaxpr)
    outputs = inline(b, pruned, b.inputs)
    for port, value in enumerate(v for _, values in b.calls for v in values):
        b.outfeed(port, value)
    return b.finish(outputs, output_names), tuple(call for call, _ in b.calls)


def check_axes(closed_jaxpr: ClosedJaxpr, name: str) -> None:
    """That no named axis comes from outside of what is lowered: how many devices it has would not be known.

    Raises:
      UnsupportedPrimitiveError: one does.
    """
    for equation in closed_jaxpr.jaxpr.eqns:
        if axes := jax_compat.axes_of(equation.effects):
            raise UnsupportedPrimitiveError(
                f"{jax_compat.location_of(equation) or 'unknown source line'}: {equation.primitive.name!r} in {name!r} is over the axes "
                f"{axes} of a vmap, pmap or shard_map around the call to the device. Put that inside: tpuflow.jit(jax.pmap(step, "
                f"axis_name=...)) instead of jax.pmap(tpuflow.jit(step), axis_name=...)."
            )


def inline(b: Builder, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Value]) -> tuple[Value, ...]:
    """Append a jaxpr's equations to the builder with `operands` as its inputs; the values of its outputs."""
    inner, consts = jax_compat.opened(jaxpr)
    outer_scope = b.scope
    env: dict[Any, Value] = dict(zip(inner.invars, operands, strict=True))
    env.update((v, _constant(b, c, v.aval)) for v, c in zip(inner.constvars, consts, strict=True))
    for equation in inner.eqns:
        scope = "/".join(filter(None, (outer_scope, jax_compat.scope_of(equation))))
        with b.at(jax_compat.source_of(equation) or b.source, scope):
            env.update(zip(equation.outvars, _lower(b, equation, env), strict=True))
    return tuple(_read(b, env, v) for v in inner.outvars)


def _read(b: Builder, env: dict[Any, Value], atom: Any) -> Value:
    return _constant(b, atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]


def _constant(b: Builder, value: Any, aval: Any) -> Value:
    """A literal or captured array, which may be wider than the type JAX gives it."""
    return b.constant(jax_compat.key_data(value).astype(jax_compat.type_of(aval, b.source).dtype.numpy))


def _lower(b: Builder, equation: Equation, env: dict[Any, Value]) -> tuple[Value, ...]:
    """Run the equation's rule and hold its results against the types JAX gave them."""
    where = _location(b, equation)
    types = {v: _checked_type(v.aval, equation, where) for v in (*equation.outvars, *equation.invars) if not isinstance(v, Literal)}
    operands = [_read(b, env, v) for v in equation.invars]
    try:
        results = _apply(b, equation, operands)
    except UnsupportedForm as error:
        raise UnsupportedPrimitiveError(f"{where}: {_described(equation)}: {error}") from error
    except (UnsupportedPrimitiveError, UnsupportedDtypeError) as error:
        source = jax_compat.source_of(equation)
        if source and str(error).startswith(source):  # from inside of a cached jit, which knows this line without the file's path
            error.args = (f"{where}{str(error).removeprefix(source)}",)
        raise
    except Exception as error:
        error.add_note(f"while lowering {_described(equation)} at {where}")
        raise
    expected = tuple(types[v] for v in equation.outvars)
    found = tuple(v.type for v in results)
    if found != expected:
        raise GraphError(f"{where}: the rule of {_described(equation)} made {_listed(found)} instead of {_listed(expected)}")
    return results


def _location(b: Builder, equation: Equation) -> str:
    """The equation's own line; if JAX has forgotten it (inside a cached jit), that of the call around it."""
    return jax_compat.location_of(equation) or b.source or "unknown source line"


def _checked_type(aval: Any, equation: Equation, where: str) -> TensorType:
    return jax_compat.type_of(aval, f"{where}, in {equation.primitive.name}")


def _apply(b: Builder, equation: Equation, operands: list[Value]) -> tuple[Value, ...]:
    name = equation.primitive.name
    if (expand := jax_compat.EXPANSIONS.get(name)) is not None:
        with jax.disable_jit(False):  # loops stay loops
            expanded = expand(*(v.aval for v in equation.invars), **equation.params)
        return inline(b, expanded, operands)
    if (function := jax_compat.host_function(equation)) is not None:
        call = HostCall(function, len(operands), _location(b, equation))
        b.calls.append((call, tuple(operands) or (b.scalar(0, S32),)))
        return ()
    rule = RULES.get(name)
    if rule is None:
        raise UnsupportedPrimitiveError(
            f"{_location(b, equation)}: no lowering rule for jaxpr primitive {_described(equation)}. {advice(name)}"
        )
    if rule.keys or not any(jax_compat.is_key(v.aval) for v in (*equation.invars, *equation.outvars)):
        return rule(b, *operands, params=equation.params)
    return _apply_to_words(b, rule, equation, operands)


def _apply_to_words(b: Builder, rule: Rule, equation: Equation, operands: list[Value]) -> tuple[Value, ...]:
    """A rule that moves elements, on keys: once for each word of the keys, the results put together again."""
    is_key = [jax_compat.is_key(v.aval) for v in equation.invars]
    if not all(jax_compat.is_key(v.aval) for v in equation.outvars):
        raise UnsupportedForm("random keys can be moved and selected here, not computed with")
    words = operands[is_key.index(True)].shape[-1]
    results = [
        rule(b, *(_word(b, x, i) if key else x for x, key in zip(operands, is_key, strict=True)), params=equation.params)
        for i in range(words)
    ]
    stacked = ([b.reshape(x, (*x.shape, 1)) for x in parts] for parts in zip(*results, strict=True))
    return tuple(b.concatenate(parts, len(parts[0].shape) - 1) for parts in stacked)


def _word(b: Builder, keys: Value, i: int) -> Value:
    axis = len(keys.shape) - 1
    return b.reshape(b.slice_axis(keys, axis, i, i + 1), keys.shape[:-1])


def _described(equation: Equation) -> str:
    operands = ", ".join(v.aval.str_short() for v in equation.invars)
    return f"{equation.primitive.name!r} on ({operands})"


def _listed(types: Sequence[TensorType]) -> str:
    return f"({', '.join(map(str, types))})"
