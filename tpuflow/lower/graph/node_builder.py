"""NodeBuilder: collects the nodes of a graph one by one, with their result types, the user's source line and scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self

from tpuflow.errors import GraphError
from tpuflow.isa.calls import Call
from tpuflow.lower.graph.elementwise import of_splats
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, OPS, has_effect, infer
from tpuflow.lower.graph.scalars import Scalar, scalar_of


class NodeBuilder:
    """Collects nodes in order; `finish` makes the graph. `region` gives a builder for a nested graph.

    `source` and `scope` go on every node made while they are set; use `at` to set them for a while. `calls` are those of the host's
    Python that the rules have met, with their values: whoever finishes the graph says how these leave it; if the
    program `waits` for the host there are none, for each is made where it stands. `mesh` has the sizes of the mesh
    axes around what is made, by their names. `ranges`: the least and the largest number that an integer may be, where that is known from
    how it was made.
    Whatever has no elements, or is made from no elements, becomes `full`: no other operation ever sees an empty operand or makes an empty
    result, regions apart. Integer arithmetic on splats is done at once, so that indices known now are known to the rules.
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
        """The node that made a value; None for an input."""
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
        """The graph of everything that the outputs (or the host) need; nodes nobody uses are left out."""
        return Graph(self.name, self.inputs, _live(self._nodes, outputs), tuple(outputs), self.input_names, tuple(output_names))

    def inline(self, graph: Graph, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """Append a graph's nodes with `inputs` in place of its own; the values of its outputs."""
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
        """The value of an elementwise operation on integer splats; None if it is not one."""
        if op not in ELEMENTWISE or any(t.dtype.is_float for t in (*types, *(v.type for v in inputs))):
            return None
        values = [self.known(v) for v in inputs]
        if None in values:
            return None
        return of_splats(op, attrs, values, [v.dtype for v in inputs], types[0].dtype)  # type: ignore[arg-type]

    def known(self, x: Value) -> Scalar | None:
        """The value that x has everywhere, if it is a splat."""
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
