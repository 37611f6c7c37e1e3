"""Binding the primitive of an equation again, with other operands or bodies, in the function that is being traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from tpuflow.jaxprs import versions
from tpuflow.jaxprs.compat import Equation, Primitive

T = TypeVar("T")


def bind_again(equation: Equation, operands: Sequence[Any], **overrides: Any) -> list[Any]:
    """The equation's primitive applied to other operands, with `overrides` in place of some of its parameters."""
    return bind_primitive(equation.primitive, operands, {**equation.params, **overrides})


def bind_primitive(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """A primitive applied to operands, always with a list of results; `params` are as an equation has them."""
    results = versions.bind(primitive, operands, params)
    return list(results) if primitive.multiple_results else [results]


def scan_parts(equation: Equation, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """The operands of a `scan`: (constants, initial carries, stacked operands, which are sliced along their first axis)."""
    first = equation.params["num_consts"]
    last = first + equation.params["num_carry"]
    return list(operands[:first]), list(operands[first:last]), list(operands[last:])


def bind_scan(equation: Equation, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, stacked: Any) -> tuple[Any, Any]:
    """The equation's `scan` with another body, (carries, slices) -> (carries, outputs of a trip)."""
    p = equation.params
    return jax.lax.scan(body, carry, stacked, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])


def bind_shard_map(equation: Equation, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """The equation's `shard_map` of another function, with the same mesh and specs."""
    p = equation.params
    specs = {"in_specs": tuple(p["in_specs"]), "out_specs": tuple(p["out_specs"])}
    options = {"axis_names": set(versions.manual_axes(p)), "check_vma": p["check_vma"]}
    return jax.shard_map(function, mesh=p["mesh"], **specs, **options)(*operands)
