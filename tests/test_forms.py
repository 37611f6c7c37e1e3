"""Forms of nodes: what is alike is found out once, what differs is told apart, and nothing of it outlives the nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any

import pytest

from tpuflow.chips import get_chip
from tpuflow.dtypes import BF16, F32, DType
from tpuflow.lower.emit import in_place
from tpuflow.lower.emit.in_place import overwritable
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.tiling import Tiling
from tpuflow.lower.passes import kernel_cost
from tpuflow.lower.passes.forms import by_form, form_of
from tpuflow.lower.passes.kernel_cost import memory_and_compute_seconds

SHAPE = (8, 16)


def kernel(dtype: DType = F32, factor: float = 2.0, *, squared: bool = False) -> Node:
    """x * (y * factor), of values of its own; or x * (x * factor)."""
    x, y, inner_x, inner_y, scaled, number, made, result = (Value(TensorType(dtype, SHAPE)) for _ in range(8))
    factors = Node("full", (), (number,), MappingProxyType({"value": factor}), source="somewhere.py:1")
    second = inner_x if squared else inner_y
    nodes = (factors, Node("mul", (second, number), (scaled,)), Node("mul", (inner_x, scaled), (made,)))
    region = Graph("map", (inner_x, inner_y), nodes, (made,))
    return Node("fused", (x, y), (result,), MappingProxyType({"kind": Kind.MAP}), (region,))


def test_nodes_that_are_alike_share_a_form_whatever_their_values_and_places() -> None:
    one = kernel()
    assert form_of(one) is form_of(kernel()) is form_of(replace(one, scope="a layer", source="elsewhere.py:2"))


@pytest.mark.parametrize(
    "other",
    [kernel(BF16), kernel(factor=-2.0), kernel(squared=True), replace(kernel(), tilings=(Tiling.of(SHAPE, (8, 8)),))],
    ids=["type", "attribute of an inner node", "operand of an inner node", "tiling"],
)
def test_what_differs_has_another_form(other: Node) -> None:
    one = kernel()
    assert form_of(one) is not form_of(other)


def test_minus_zero_is_not_zero() -> None:
    assert form_of(zero := kernel(factor=0.0)) is not form_of(minus := kernel(factor=-0.0)), (zero, minus)


def test_a_function_of_forms_is_called_once_for_each_form_and_its_arguments() -> None:
    calls: list[tuple[Node, int]] = []

    @by_form
    def operands(node: Node, more: int = 0) -> int:
        calls.append((node, more))
        return len(node.inputs) + more

    one, alike, other = kernel(), kernel(), kernel(BF16)
    assert [operands(node) for node in (one, alike, other)] == [2, 2, 2]
    assert operands(alike, 1) == operands(one, 1) == 3
    assert calls == [(one, 0), (other, 0), (alike, 1)]


@pytest.mark.parametrize(
    ("asked", "module", "work"),
    [
        (overwritable, in_place, "_read_elsewhere"),
        (lambda node: memory_and_compute_seconds(node, get_chip("tpu-v4")), kernel_cost, "work_seconds"),
    ],
    ids=["what may be overwritten", "seconds"],
)
def test_passes_find_out_once_what_is_true_of_all_kernels_that_are_alike(
    asked: Callable[[Node], Any], module: ModuleType, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    own = getattr(module, work)
    monkeypatch.setattr(module, work, lambda *args: calls.append(args) or own(*args))
    one, alike, other = kernel(factor=11.0), kernel(factor=11.0), kernel(factor=13.0)
    for node, count in ((one, 1), (alike, 1), (other, 2)):
        asked(node)
        assert len(calls) == count


def test_an_operand_that_a_kernel_may_overwrite_is_its_own() -> None:
    one, alike = kernel(), kernel()
    assert overwritable(one) == set(one.inputs) and overwritable(alike) == set(alike.inputs)


def test_forms_end_with_their_nodes() -> None:
    node, alike = kernel(factor=7.0), kernel(factor=7.0)  # of which no other test keeps one
    form = weakref.ref(form_of(node))
    assert form() is form_of(alike)
    del node
    assert form() is form_of(alike)
    del alike
    assert form() is None
