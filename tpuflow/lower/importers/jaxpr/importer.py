"""The jaxpr importer: lowers every equation by its rule, and sets the user's source line and scope on the nodes that it emits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import numpy as np

from tpuflow.dtypes import STORAGE
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.errors import GraphError, UnsupportedDtypeError, UnsupportedPrimitiveError
from tpuflow.isa.calls import Call
from tpuflow.jaxprs import compat
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr
from tpuflow.jaxprs.expansions import EXPANSIONS
from tpuflow.jaxprs.walk import walk
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Value
from tpuflow.lower.importers.advice import advice, is_known
from tpuflow.lower.importers.jaxpr.registry import COMPLEX, KEYED, PLANEWISE, RULES, STORED, STRUCTURAL, Rule
from tpuflow.lower.importers.jaxpr.types import port_type, type_of, types_of
from tpuflow.lower.operations.complex import Complex, ComplexType, Number, Type, listed, plane_by_plane, planes
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.host_calls import call_host
from tpuflow.lower.operations.movement import token
from tpuflow.lower.operations.storage import by_computed, is_stored

_STORAGE = frozenset(dtype.numpy for dtype in STORAGE)


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
    types = [port_type(aval, where) for aval, where in zip(closed_jaxpr.in_avals, named, strict=True)]
    check_axes(closed_jaxpr, name)
    b = Builder(name, types, input_names)
    pruned = compat.prune(compat.discharged(closed_jaxpr))
    compat.check_calls(pruned.jaxpr)
    b.waits = compat.waits_for_host(pruned.jaxpr) or bool(compat.mesh_of(pruned))
    outputs = inline(b, pruned, b.inputs)
    for i, aval in enumerate(closed_jaxpr.out_avals):
        port_type(aval, f"result {i}")
    for port, value in enumerate(v for _, values in b.calls for v in values):
        b.outfeed(port, value)
    return b.finish(planes(outputs), output_names), tuple(call for call, _ in b.calls)


def check_axes(closed_jaxpr: ClosedJaxpr, name: str) -> None:
    """Check that no named axis is bound outside of the jaxpr, where its size would be unknown.

    Raises:
      UnsupportedPrimitiveError: one does.
    """
    for equation in closed_jaxpr.jaxpr.eqns:
        if axes := compat.axes_of(equation.effects):
            raise UnsupportedPrimitiveError(
                f"{compat.location_of(equation) or 'unknown source line'}: {equation.primitive.name!r} in {name!r} is over the axes "
                f"{axes} of a vmap, pmap or shard_map around the call to the device. Put that inside: tpuflow.jit(jax.pmap(step, "
                f"axis_name=...)) instead of jax.pmap(tpuflow.jit(step), axis_name=...)."
            )


def inline(b: Builder, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Number]) -> tuple[Number, ...]:
    """Append a jaxpr's equations to the builder with `operands` as its inputs; the values of its outputs."""
    return tuple(walk(jaxpr, operands, partial(_lower, b), partial(_constant, b), partial(_at, b)))


def _at(b: Builder, equation: Equation) -> AbstractContextManager[None]:
    """Nodes made within have the equation's line and scope; its results are of types that the device has."""
    _check_results(b, equation)
    scope = "/".join(filter(None, (b.scope, compat.scope_of(equation))))
    return b.at(compat.source_of(equation) or b.source, scope)


def _check_results(b: Builder, equation: Equation) -> None:
    """Check that the device has the types of an equation's results; the source line is looked up only for the error.

    Raises:
      UnsupportedDtypeError: it has not.
    """
    try:
        types_of(equation.outvars)
    except UnsupportedDtypeError:
        where = f"{_location(b, equation)}, in {equation.primitive.name}"
        for v in equation.outvars:
            type_of(v.aval, where)
        raise


def _constant(b: Builder, atom: Any, value: Any) -> Number:
    """A literal or captured array, which may be wider than the type JAX gives it."""
    if compat.is_token(atom.aval):
        return token(b)
    kind, data = type_of(atom.aval, b.source), compat.key_data(value)
    if isinstance(kind, ComplexType):
        return Complex(*(b.constant(np.array(part, np.float32)) for part in (np.real(data), np.imag(data))))
    return b.constant(data.astype(kind.dtype.numpy))


def _lower(b: Builder, equation: Equation, operands: list[Number]) -> tuple[Number, ...]:
    """Run the equation's rule and check its results against the types that JAX inferred."""
    expected = types_of(equation.outvars)
    try:
        results = _apply(b, equation, operands, expected)
    except UnsupportedForm as error:
        raise UnsupportedPrimitiveError(f"{_location(b, equation)}: {_described(equation)}: {error}") from error
    except (UnsupportedPrimitiveError, UnsupportedDtypeError) as error:
        source = compat.source_of(equation)
        if source and str(error).startswith(source):  # from inside of a cached jit, which knows this line without the file's path
            error.args = (f"{_location(b, equation)}{str(error).removeprefix(source)}",)
        raise
    except Exception as error:
        error.add_note(f"while lowering {_described(equation)} at {_location(b, equation)}")
        raise
    found = [v.type for v in results]
    if found != expected:
        made = f"{listed(found)} instead of {listed(expected)}"
        raise GraphError(f"{_location(b, equation)}: the rule of {_described(equation)} made {made}")
    return results


def _location(b: Builder, equation: Equation) -> str:
    """The equation's own line; if JAX has forgotten it (inside a cached jit), that of the call around it."""
    return compat.location_of(equation) or b.source or "unknown source line"


def _apply(b: Builder, equation: Equation, operands: list[Number], wanted: list[Type]) -> tuple[Number, ...]:
    """The results of an equation, of the `wanted` types, by what lowers it."""
    name = equation.primitive.name
    if (expand := EXPANSIONS.get(name)) is not None:
        with jax.disable_jit(False):  # loops stay loops
            expanded = expand(*(v.aval for v in equation.invars), **equation.params)
        return inline(b, expanded, operands)
    if (function := compat.host_function(equation)) is not None:
        return call_host(b, function, _location(b, equation), operands, wanted, per_chip=any(size > 1 for size in b.mesh.values()))
    rule = RULES.get(name) or COMPLEX.get(name)
    if rule is None and not is_known(name) and (defined := compat.own_definition(equation)) is not None:
        return inline(b, defined, operands)
    if rule is None:
        raise UnsupportedPrimitiveError(
            f"{_location(b, equation)}: no lowering rule for jaxpr primitive {_described(equation)}. {advice(name)}"
        )
    if name not in STRUCTURAL:
        types = [*(x.type for x in operands), *wanted]
        if any(isinstance(t, ComplexType) for t in types):
            return _apply_to_complex(b, rule, equation, operands)
        if name not in STORED and is_stored(types):
            computed = {key: _computed(value) for key, value in equation.params.items()}
            return by_computed(b, _DEVICES.get(name, name), partial(rule, params=computed), operands, wanted)
    if name in KEYED or not any(compat.is_key(v.aval) for v in (*equation.invars, *equation.outvars)):
        return rule(b, *operands, params=equation.params)
    return _apply_to_words(b, rule, equation, _real(operands))


_DEVICES = {
    "shift_right_logical": "shr_logical", "shift_right_arithmetic": "shr_arithmetic", "population_count": "popcnt",
}  # fmt: skip
"""Primitives on the bits of numbers -> their names on the device."""


def _computed(value: Any) -> Any:
    """A parameter; a storage-only dtype is replaced by the dtype in which it is computed."""
    return dtype_of(value).computed.numpy if isinstance(value, np.dtype) and value in _STORAGE else value


def _real(operands: Sequence[Number]) -> list[Value]:
    """Operands of which none is complex.

    Raises:
      UnsupportedForm: one is.
    """
    if any(isinstance(x, Complex) for x in operands):
        raise UnsupportedForm("complex numbers; give it their real and their imaginary part, x.real and x.imag")
    return [x for x in operands if isinstance(x, Value)]


def _apply_to_complex(b: Builder, rule: Rule, equation: Equation, operands: list[Number]) -> tuple[Number, ...]:
    """A rule for complex numbers, or one that moves elements, done with both planes."""
    name, params = equation.primitive.name, equation.params
    if (own := COMPLEX.get(name)) is not None:
        return own(b, *operands, params=params)
    if name not in PLANEWISE:
        raise UnsupportedForm("complex numbers; give it their real and their imaginary part, x.real and x.imag")
    of_plane = iter([{key: _part(value, part) for key, value in params.items()} for part in ("real", "imag")])
    return plane_by_plane(b, lambda b, *arrays: rule(b, *arrays, params=next(of_plane)), operands)


def _part(value: Any, part: str) -> Any:
    """A parameter for one plane: a complex number is replaced by its real or imaginary part."""
    return getattr(value, part) if isinstance(value, complex | np.complexfloating) else value


def _apply_to_words(b: Builder, rule: Rule, equation: Equation, operands: list[Value]) -> tuple[Value, ...]:
    """Apply a rule that moves elements to random keys: once for each word, and stack the results."""
    is_key = [compat.is_key(v.aval) for v in equation.invars]
    if not all(compat.is_key(v.aval) for v in equation.outvars):
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
