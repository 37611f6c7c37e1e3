"""Eager execution under `jax.disable_jit`: every operation of a function runs on the device as a Program of its own.

Python's `print`, `if` and debuggers work in the middle of such a function. It is slow, since every operation is compiled for each new
combination of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpuflow.jaxprs.bind import bind_primitive
from tpuflow.jaxprs.compat import (
    HOST_PRIMITIVES,
    ClosedJaxpr,
    Primitive,
    Token,
    is_at_host,
    is_transforming,
    operations_go_to,
    traced_under,
)
from tpuflow.stages.signatures import signature, spec_of
from tpuflow.stages.staging import CACHED, Target, run_jaxpr


def runs_one_by_one() -> bool:
    """Whether calls to the device are made operation by operation: `jax.disable_jit` is on, and no transformation is under way."""
    return jax.config.jax_disable_jit and not is_transforming()  # type: ignore[attr-defined]


def one_by_one(function: Callable[[], Any], target: Target) -> Any:
    """The result of a function whose operations run on the device, each as it comes."""

    def run(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if primitive in HOST_PRIMITIVES:
            return primitive.impl(*operands, **params)
        with jax.disable_jit(False):
            jaxpr = _operation(primitive, tuple(map(_signature, operands)), tuple(sorted(params.items())), traced_under())
            results = run_jaxpr(jaxpr, primitive.name, target, operands)
        return results if primitive.multiple_results else results[0]

    with operations_go_to(run):
        return function()


@functools.lru_cache(CACHED)
def _operation(primitive: Primitive, signatures: tuple[Any, ...], params: tuple[tuple[str, Any], ...], settings: Any) -> ClosedJaxpr:
    """One operation as a function of its operands; `settings` are JAX's that it is traced under."""
    return jax.make_jaxpr(lambda *operands: bind_primitive(primitive, operands, dict(params)))(*map(spec_of, signatures))


def _signature(operand: Any) -> Any:
    """As of `signature`, wherever the operand lies."""
    if isinstance(operand, Token):
        return signature(operand)
    aval = jax.typeof(operand)
    return aval.shape, aval.dtype, aval.weak_type, is_at_host(aval), None
