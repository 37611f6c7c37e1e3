"""Calls of the host's Python: told after the step, or asked in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tpuflow.dtypes import S32
from tpuflow.isa.calls import ArrayType, HostCall, HostFunction
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value


def call_host(
    b: Builder, function: Callable[..., Any], source: str, operands: Sequence[Value], types: Sequence[TensorType]
) -> tuple[Value, ...]:
    """The results, of these types, of a function on the host, which is called at the user's line `source`.

    In a program that waits for none of its calls they are made after it, with what it sends."""
    if b.waits or types:
        return b.call_host(HostFunction(function, source, _signature(v.type for v in operands), _signature(types)), operands)
    b.calls.append((HostCall(function, len(operands), source), tuple(operands) or (b.scalar(0, S32),)))
    return ()


def _signature(types: Iterable[TensorType]) -> tuple[ArrayType, ...]:
    return tuple((t.dtype, t.shape) for t in types)
