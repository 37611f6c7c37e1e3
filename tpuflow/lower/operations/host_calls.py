"""Callbacks of the host's Python: made after the program if they return nothing, else at their place, where the device waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tpuflow.dtypes import S32
from tpuflow.isa.calls import ArrayType, HostCall, HostFunction
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.operations.complex import ComplexType, Number, Type, packed, plane_types, planes


def call_host(
    b: Builder, function: Callable[..., Any], source: str, operands: Sequence[Number], types: Sequence[Type], *, per_chip: bool = False
) -> tuple[Number, ...]:
    """The results, of these types, of a function on the host, which is called at the user's line `source`; complex numbers cross as their
    planes. per_chip: every chip of several calls it.

    In a program that waits for none of its calls they are made after it, with what it sends."""
    function = _of_planes(function, [isinstance(x.type, ComplexType) for x in operands], [isinstance(t, ComplexType) for t in types])
    sent, received = planes(operands), plane_types(types)
    if b.waits or types:
        waited = HostFunction(function, source, _signature(v.type for v in sent), _signature(received), per_chip)
        return packed(b.call_host(waited, sent), types)
    b.calls.append((HostCall(function, len(sent), source), tuple(sent) or (b.scalar(0, S32),)))
    return ()


def _signature(types: Iterable[TensorType]) -> tuple[ArrayType, ...]:
    return tuple((t.dtype, t.shape) for t in types)


def _of_planes(function: Callable[..., Any], operands: Sequence[bool], results: Sequence[bool]) -> Callable[..., Any]:
    """The function wrapped so that complex operands and results are passed as two planes; the flags say which are complex."""
    if not any((*operands, *results)):
        return function

    def call(*arrays: Any) -> list[np.ndarray]:
        left = iter(arrays)
        found = function(*[_joined(next(left), next(left)) if is_complex else next(left) for is_complex in operands])
        made = [np.asarray(x) for x in found or ()]
        if len(made) != len(results):
            return made  # which is refused
        return [plane for x, is_complex in zip(made, results, strict=True) for plane in _apart(x, is_complex)]

    return call


def _joined(real: Any, imag: Any) -> np.ndarray:
    whole = np.empty(np.shape(real), np.complex64)
    whole.real, whole.imag = real, imag
    return whole


def _apart(x: np.ndarray, is_complex: bool) -> Iterator[np.ndarray]:
    """Its planes, if it is complex and is to be; one array otherwise, which is then not what is expected."""
    return iter((np.real(x), np.imag(x)) if is_complex and np.iscomplexobj(x) else (x,))
