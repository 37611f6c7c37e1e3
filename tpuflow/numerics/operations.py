"""A step's operations on the device, each by itself: equal operations are one Program, which is compiled once.

A step is thousands of operations of which few differ: the 13000 of YOLOv5's are 1100 primitives, parameters and types. So what there is
to compile grows with the kinds of operations and not with their number, and every result is in the host's memory, where it is measured.
No pass of the compiler changes a bit of any result, so these results are those of the step as one Program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from tpuflow.jaxprs.bind import bind_primitive
from tpuflow.jaxprs.compat import Equation, Primitive
from tpuflow.stages.staging import DeviceFunction, Target

COMPILED = 4096
"""How many different operations are kept compiled: those of a few steps, so that precisions that are compared share theirs."""


def run_operation(equation: Equation, operands: Sequence[Any], target: Target, mesh: Any = None, **overrides: Any) -> list[Any]:
    """The results of an equation's primitive applied to arrays, with `overrides` in place of some of its parameters.

    mesh: that of the `shard_map` around the equation, of one device, whose axes its parameters may name; None outside of any.

    Raises:
      UnsupportedPrimitiveError, OutOfMemoryError: as compiling any function does.
    """
    params = equation.params | overrides
    if "weak_type" in params:
        params = params | {"weak_type": False}  # which matters to what is traced further on, and nothing is
    named = tuple(sorted(params.items()))
    signatures = tuple((x.shape, x.dtype) for x in operands)
    return _compiled(equation.primitive, signatures, named, target, mesh)(operands)


@functools.lru_cache(COMPILED)
def _compiled(primitive: Primitive, signatures: Any, params: Sequence[tuple[str, Any]], target: Target, mesh: Any) -> DeviceFunction:
    """One operation as a function of operands of these shapes and types."""

    def operation(*operands: Any) -> list[Any]:
        return bind_primitive(primitive, operands, dict(params))

    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signatures]
    whole = jax.P()
    function = operation if mesh is None else jax.shard_map(operation, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return DeviceFunction(jax.make_jaxpr(function)(*specs), primitive.name, target)
