"""A step's operations on the device, each by itself: equal operations are one Program, which is compiled once.

A step is thousands of operations of which few differ: the 13000 of YOLOv5's are 1100 primitives, parameters and types. So what there is
to compile grows with the kinds of operations and not with their number, and every result is in the host's memory, where it is measured.
No pass of the compiler changes a bit of any result, so these results are those of the step as one Program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tpuflow.jaxprs.bind import bind_primitive
from tpuflow.jaxprs.compat import Equation, Primitive, traced_under, varying_axes
from tpuflow.jaxprs.versions import manual_axes
from tpuflow.stages.staging import DeviceFunction, Target

COMPILED = 4096
"""How many different operations are kept compiled: those of a few steps, so that precisions that are compared share theirs."""
Signature = tuple[tuple[int, ...], Any, tuple[str, ...]]
"""Shape and type of an operand, and the axes of the `shard_map` around it that it varies along."""


class Shards(NamedTuple):
    """The `shard_map` of one device that an operation is in, whose axes its parameters may name."""

    mesh: Any
    axis_names: frozenset[Any]
    check_vma: bool

    @staticmethod
    def of(equation: Equation) -> Shards:
        """Those of a `shard_map`."""
        p = equation.params
        return Shards(p["mesh"], manual_axes(p), p["check_vma"])

    def around(self, function: Callable[..., list[Any]], signatures: Sequence[Signature]) -> Callable[..., list[Any]]:
        """A function of shards as one of whole arrays: what varies along axes enters, and everything leaves, along an axis of size 1."""

        def shard(*operands: Any) -> list[Any]:
            own = [x[0] if varying else x for x, (_, _, varying) in zip(operands, signatures, strict=True)]
            return [x[None] for x in function(*own)]

        in_specs = tuple(jax.P(varying) if varying else jax.P() for _, _, varying in signatures)
        out_specs = jax.P(tuple(self.axis_names))
        mapped = jax.shard_map(shard, in_specs=in_specs, out_specs=out_specs, **self._asdict())

        def whole(*operands: Any) -> list[Any]:
            own = [x[None] if varying else x for x, (_, _, varying) in zip(operands, signatures, strict=True)]
            return [x[0] for x in mapped(*own)]

        return whole


def run_operation(equation: Equation, operands: Sequence[Any], target: Target, shards: Shards | None = None, **overrides: Any) -> list[Any]:
    """The results of an equation's primitive applied to arrays, with `overrides` in place of some of its parameters.

    Raises:
      UnsupportedPrimitiveError, OutOfMemoryError: as compiling any function does.
    """
    params = equation.params | overrides
    if "weak_type" in params:
        params = params | {"weak_type": False}  # it is about what is traced further on, and nothing is
    signatures = tuple((x.shape, x.dtype, varying_axes(v.aval)) for x, v in zip(operands, equation.invars, strict=True))
    return _compiled(equation.primitive, signatures, tuple(sorted(params.items())), target, shards, traced_under())(operands)


@functools.lru_cache(COMPILED)
def _compiled(
    primitive: Primitive,
    signatures: Sequence[Signature],
    params: Sequence[tuple[str, Any]],
    target: Target,
    shards: Shards | None,
    settings: Any,
) -> DeviceFunction:
    """One operation as a function of operands of these shapes and types; `settings` are JAX's that it is traced under."""

    def operation(*operands: Any) -> list[Any]:
        return bind_primitive(primitive, operands, dict(params))

    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in signatures]
    function = operation if shards is None else shards.around(operation, signatures)
    return DeviceFunction(jax.make_jaxpr(function)(*specs), primitive.name, target)
