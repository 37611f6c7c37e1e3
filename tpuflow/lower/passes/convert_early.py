"""ConvertEarly: narrow an array before the collective that moves it or the barrier that holds it, if every reader narrows the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tpuflow.dtypes import DType
from tpuflow.isa.collectives import KINDS
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.passes.analysis import narrows
from tpuflow.lower.passes.base import Pass

MOVES = frozenset(("reshape", "slice", "transpose"))
"""Moves that may lie between the collective or the barrier and the conversions."""


@dataclass(frozen=True, slots=True)
class ConvertEarly(Pass):
    """Convert an array before a collective that only moves it, or a barrier, where all that is read of its result is that conversion.

    Before: %1 = collective all_gather %0; %2 = reshape %1; %3 = convert %2.
    After: %4 = convert %0; %5 = collective all_gather %4; %3 = reshape %5.
    So half the bytes are sent, or kept from the forward pass for what is computed again in the backward pass.
    Needs: no fused nodes.    Keeps: every bit.
    Never: converts twice, or what something reads as it was after the collective or the barrier; nor holds an array beside an argument.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        if not any(node.op == "barrier" or _moves(node) for node in nodes):
            return replace(graph, nodes=tuple(nodes))
        converting = _Converting(_narrow(nodes, graph.outputs), _last_read(nodes, graph))
        made = tuple(new for at, node in enumerate(nodes) for new in converting.rewritten(at, node))
        return replace(graph, nodes=made, outputs=tuple(converting.renamed.get(v, v) for v in graph.outputs))


def _moves(node: Node) -> bool:
    return node.op == "collective" and not KINDS[node.attrs["kind"]].reduces


def _narrow(nodes: Sequence[Node], outputs: Sequence[Value]) -> Mapping[Value, DType]:
    """Values that are read as one narrower type only, themselves or through moves and barriers."""
    wanted: dict[Value, set[DType | None]] = {value: {None} for value in outputs}
    for node in reversed(nodes):
        for value, types in _read_as(node, wanted):
            wanted.setdefault(value, set()).update(types)
    return {value: dtype for value, types in wanted.items() if len(types) == 1 for dtype in types if dtype is not None}


def _read_as(node: Node, wanted: Mapping[Value, set[DType | None]]) -> Iterator[tuple[Value, set[DType | None]]]:
    """The types as which a node reads each of its operands; None is their own."""
    if node.op == "barrier":
        yield from ((value, wanted.get(result, set())) for value, result in zip(node.inputs, node.results, strict=True))
    elif node.op in MOVES:
        yield node.inputs[0], wanted.get(node.result, set())
    else:
        own: set[DType | None] = {node.result.dtype if narrows(node) else None}
        yield from ((value, own) for value in node.inputs)


def _last_read(nodes: Sequence[Node], graph: Graph) -> Mapping[Value, int]:
    """Where each value is read as it is for the last time, other than by conversions and barriers; arguments, views of them and results
    are to the end."""
    found = {v: at for at, node in enumerate(nodes) if node.op != "barrier" and not narrows(node) for v in node.inputs}
    staying = dict.fromkeys((*graph.inputs, *graph.outputs), len(nodes))
    staying |= {node.result: len(nodes) for node in nodes if node.op == "reshape" and node.inputs[0] in staying}
    return found | staying


@dataclass(frozen=True, slots=True)
class _Converting:
    """The types as which values are read, where they are last read as they are, and what has taken the place of a value."""

    narrow: Mapping[Value, DType]
    last_read: Mapping[Value, int]
    renamed: dict[Value, Value] = field(default_factory=dict)
    sent: set[Value] = field(default_factory=set)
    converted: dict[tuple[Value, DType], Value] = field(default_factory=dict)

    def rewritten(self, at: int, node: Node) -> list[Node]:
        """The nodes in the place of one."""
        if _moves(node) and node.result in self.narrow:
            return self._sent(node)
        if node.op == "barrier":
            return self._held(at, node)
        if node.inputs and node.inputs[0] in self.sent:
            return self._received(node)
        inputs = tuple(self.renamed.get(v, v) for v in node.inputs)
        if narrows(node):
            self.converted.setdefault((inputs[0], node.result.dtype), node.result)
        return [node if inputs == node.inputs else replace(node, inputs=inputs)]

    def _sent(self, node: Node) -> list[Node]:
        value, dtype = self.renamed.get(node.inputs[0], node.inputs[0]), self.narrow[node.result]
        convert = _convert(value, dtype, node)
        return [convert, replace(node, inputs=(convert.result,), results=(self._as(node.result, dtype),))]

    def _held(self, at: int, node: Node) -> list[Node]:
        """The barrier, and before it the conversions that nobody has made yet."""
        inputs, results, before = [], [], []
        for value, result in zip((self.renamed.get(v, v) for v in node.inputs), node.results, strict=True):
            dtype = self.narrow.get(result)
            if dtype is not None and value.dtype != dtype and self.last_read.get(value, -1) < at:
                if (value, dtype) not in self.converted:
                    before.append(_convert(value, dtype, node))
                    self.converted[value, dtype] = before[-1].result
                value = self.converted[value, dtype]
            inputs.append(value)
            results.append(result if value.dtype == result.dtype else self._as(result, value.dtype))
        return [*before, replace(node, inputs=tuple(inputs), results=tuple(results))]

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


def _convert(value: Value, dtype: DType, like: Node) -> Node:
    narrow = Value(TensorType(dtype, value.shape), value.name)
    return replace(like, op="convert", inputs=(value,), results=(narrow,), attrs=MappingProxyType({}))
