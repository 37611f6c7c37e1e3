"""NodeBuilder: collects the nodes of a graph one by one, with their result types, the user's source line and scope."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self

from tpuflow.errors import GraphError
from tpuflow.isa.calls import Call
from tpuflow.lower.graph.elementwise import fold_splats
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, OPS, has_effect, infer
from tpuflow.lower.graph.scalars import Scalar, scalar_of


class NodeBuilder:
    """Collects nodes in order; `finish` makes the graph. `region` gives a builder for a nested graph.

    source, scope: put on every node that is emitted while they are set; see `at`.
    calls: calls of the host's Python with their operands, which the importer sends to the host after the program.
    waits: whether some host call returns a result; then every call is a node at its place, and `calls` stays empty.
    mesh: name -> size of the mesh axes that enclose the code (of `shard_map`).
    ranges: value -> (lowest, highest) integer, where known from how the value was computed; see `operations.ranges`.

    A result without elements becomes `full`: apart from those with regions, no operation has empty operands or results. Integer
    operations on splats are folded at once, so that lowering rules see constant indices.
    """

    def __init__(self, name: str, inputs: Sequence[TensorType] = (), input_names: Sequence[str] = ()) -> None:
        self.name = name
        names = tuple(input_names) or ("",) * len(inputs)
        self.inputs = tuple(Value(t, n) for t, n in zip(inputs, names, strict=True))
        self.input_names = tuple(input_names)
        self.source = ""
        self.scope = ""
        self.calls: list[tuple[Call, tuple[Value, ...]]] = []
        self.waits = False
        self.mesh: Mapping[str, int] = {}
        self.ranges: dict[Value, tuple[int, int]] = {}
        self._nodes: list[Node] = []
        self._made_by: dict[Value, Node] = {}
        self._fulls: dict[Hashable, Value] = {}  # most nodes that are imported would be numbers, made again for each use

    def emit(
        self, op: str, inputs: Sequence[Value], attrs: dict[str, Any] | None = None,
        asked: Sequence[TensorType] = (), regions: Sequence[Graph] = (),
    ) -> Node:  # fmt: skip
        """Append a node; its result types are inferred, or checked against `asked` where operands do not determine them.

        Raises:
          GraphError: the operands, attributes or regions do not fit the operation.
        """
        inputs, regions, attrs = tuple(inputs), tuple(regions), attrs or {}
        try:
            types = infer(op, tuple(v.type for v in inputs), attrs, regions, tuple(asked))
        except GraphError as error:
            error.add_note(f"source: {self.source}")
            raise
        if len(types) == 1 and not types[0].elems and OPS[op].regions == 0 and not OPS[op].effect:
            op, inputs, attrs = "full", (), {"value": scalar_of(0, types[0].dtype)}
        elif (known := self._folded(op, inputs, attrs, types)) is not None:
            op, inputs, attrs = "full", (), {"value": known}
        node = Node(op, inputs, tuple(map(Value, types)), MappingProxyType(attrs), regions, self.source, self.scope)
        self._nodes.append(node)
        for value in node.results:
            self._made_by[value] = node
        return node

    def maker(self, value: Value) -> Node | None:
        """The node that defines a value; None for an input."""
        return self._made_by.get(value)

    @contextmanager
    def at(self, source: str, scope: str) -> Iterator[None]:
        """Set source and scope of the nodes made inside the block."""
        before = self.source, self.scope
        self.source, self.scope = source, scope
        try:
            yield
        finally:
            self.source, self.scope = before

    def region(self, name: str, inputs: Sequence[TensorType]) -> Self:
        """A builder for a nested graph, with this one's source and scope."""
        inner = type(self)(name, inputs)
        inner.source, inner.scope, inner.mesh, inner.waits = self.source, self.scope, self.mesh, self.waits
        return inner

    def finish(self, outputs: Sequence[Value], output_names: Sequence[str] = ()) -> Graph:
        """The finished graph, without dead nodes."""
        return Graph(self.name, self.inputs, _live(self._nodes, outputs), tuple(outputs), self.input_names, tuple(output_names))

    def inline(self, graph: Graph, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """Append a graph's nodes, with `inputs` substituted for the graph's; its outputs, as values of this builder."""
        if tuple(v.type for v in inputs) != tuple(v.type for v in graph.inputs):
            raise GraphError(f"graph {graph.name!r} cannot take operands of type {', '.join(str(v.type) for v in inputs)}")
        env = dict(zip(graph.inputs, inputs, strict=True))
        for node in graph.nodes:
            with self.at(node.source or self.source, node.scope or self.scope):
                operands = [env[v] for v in node.inputs]
                copy = self.emit(node.op, operands, dict(node.attrs), [v.type for v in node.results], node.regions)
            env.update(zip(node.results, copy.results, strict=True))
        return tuple(env[v] for v in graph.outputs)

    def _folded(self, op: str, inputs: tuple[Value, ...], attrs: dict[str, Any], types: Sequence[TensorType]) -> Scalar | None:
        """The scalar result of an elementwise operation on integer splats; None for any other operation."""
        if op not in ELEMENTWISE or any(t.dtype.is_float for t in (*types, *(v.type for v in inputs))):
            return None
        values = [self.known(v) for v in inputs]
        if None in values:
            return None
        return fold_splats(op, attrs, values, [v.dtype for v in inputs], types[0].dtype)  # type: ignore[arg-type]

    def known(self, x: Value) -> Scalar | None:
        """The scalar that fills x, if x is a splat (`full`); else None."""
        node = self._made_by.get(x)
        return node.attrs["value"] if node is not None and node.op == "full" else None


def _live(nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[Node, ...]:
    """The nodes that outputs or effects depend on, in order."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.results) or has_effect(node.op, node.regions):
            needed.update(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))
