"""ConvertBeforeSending: narrow an array before a collective that moves it, if every reader narrows the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tpuflow.dtypes import DType
from tpuflow.isa.collectives import KINDS
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.passes.analysis import narrows
from tpuflow.lower.passes.base import Pass

MOVES = frozenset(("reshape", "slice", "transpose"))
"""Moves that may lie between the collective and the conversions."""


@dataclass(frozen=True, slots=True)
class ConvertBeforeSending(Pass):
    """Convert an array before a collective that only moves it, where all that is read of its result is that conversion.

    Before: %1 = collective all_gather %0; %2 = reshape %1; %3 = convert %2.
    After: %4 = convert %0; %5 = collective all_gather %4; %3 = reshape %5.
    Needs: no fused nodes.    Keeps: every bit.    Never: converts twice, or what something reads as it was.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        if not any(_moves(node) for node in nodes):
            return replace(graph, nodes=tuple(nodes))
        converting = _Converting(_narrow(nodes, graph.outputs))
        made = tuple(new for node in nodes for new in converting.rewritten(node))
        return replace(graph, nodes=made, outputs=tuple(converting.renamed.get(v, v) for v in graph.outputs))


def _moves(node: Node) -> bool:
    return node.op == "collective" and not KINDS[node.attrs["kind"]].reduces


def _narrow(nodes: Sequence[Node], outputs: Sequence[Value]) -> Mapping[Value, DType]:
    """Values that are read as one narrower type only, themselves or through moves."""
    wanted: dict[Value, set[DType | None]] = {value: {None} for value in outputs}
    for node in reversed(nodes):
        for value in node.inputs:
            wanted.setdefault(value, set()).update(_read_as(node, wanted))
    return {value: dtype for value, types in wanted.items() if len(types) == 1 for dtype in types if dtype is not None}


def _read_as(node: Node, wanted: Mapping[Value, set[DType | None]]) -> set[DType | None]:
    """The types as which a node reads its operands; None is their own."""
    if narrows(node):
        return {node.result.dtype}
    return wanted.get(node.result, set()) if node.op in MOVES else {None}


@dataclass(frozen=True, slots=True)
class _Converting:
    """The types as which values are read, and what has taken the place of a value."""

    narrow: Mapping[Value, DType]
    renamed: dict[Value, Value] = field(default_factory=dict)
    sent: set[Value] = field(default_factory=set)

    def rewritten(self, node: Node) -> list[Node]:
        """The nodes in the place of one."""
        if _moves(node) and node.result in self.narrow:
            return self._sent(node)
        if node.inputs and node.inputs[0] in self.sent:
            return self._received(node)
        inputs = tuple(self.renamed.get(v, v) for v in node.inputs)
        return [node if inputs == node.inputs else replace(node, inputs=inputs)]

    def _sent(self, node: Node) -> list[Node]:
        value, dtype = self.renamed.get(node.inputs[0], node.inputs[0]), self.narrow[node.result]
        first = Value(TensorType(dtype, value.shape), value.name)
        convert = replace(node, op="convert", inputs=(value,), results=(first,), attrs=MappingProxyType({}))
        return [convert, replace(node, inputs=(first,), results=(self._as(node.result, dtype),))]

    def _received(self, node: Node) -> list[Node]:
        """A move of what has been converted, or the conversion that is not needed any more."""
        value = self.renamed[node.inputs[0]]
        if node.op == "convert":
            self.renamed[node.result] = value
            return []
        return [replace(node, inputs=(value,), results=(self._as(node.result, value.dtype),))]

    def _as(self, value: Value, dtype: DType) -> Value:
        self.sent.add(value)
        self.renamed[value] = Value(TensorType(dtype, value.shape), value.name)
        return self.renamed[value]
