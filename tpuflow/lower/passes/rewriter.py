"""The rewriter: rebuilds a region node by node, trying local rules on each node and giving equal nodes one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tpuflow.dtypes import DType
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.memories import HOST_ARRAY, PUT
from tpuflow.lower.passes.analysis import effectful, live_nodes, node_key

Values = tuple[Value, ...]
Rule = Callable[["Rewriter", Node], "Value | Values | None"]


class Rewriter:
    """A region under construction. A rule returns the values that replace the node's results, or None to leave it as it is.

    Rules see operands that are themselves rewritten already, and may make new nodes with `emit`, which the rules see in turn.
    """

    def __init__(self, rules: Mapping[str, Sequence[Rule]]) -> None:
        self.rules = rules
        self.nodes: list[Node] = []
        self._made: dict[Value, Node] = {}
        self._seen: dict[Any, Values] = {}
        self._source, self._scope = "", ""

    def rebuild(self, graph: Graph) -> Graph:
        """The graph after the rules, common subexpressions and dead nodes removed."""
        env: dict[Value, Value] = {}
        for node in graph.nodes:
            self.inline_node(node, env)
        outputs = tuple(env.get(v, v) for v in graph.outputs)
        return replace(graph, nodes=live_nodes(self.nodes, outputs), outputs=outputs)

    def inline_node(self, node: Node, env: dict[Value, Value]) -> None:
        """Add a node whose operands are renamed by `env`; `env` learns what became of its results."""
        inputs = tuple([env.get(v, v) for v in node.inputs])
        if inputs != node.inputs:
            node = node.on(inputs, node.results)
        for old, new in zip(node.results, self.insert(node), strict=True):
            if new is not old:
                env[old] = new

    def inline(self, graph: Graph, inputs: Sequence[Value]) -> Values:
        """Inline a region, with `inputs` substituted for the region's; its outputs, as values here."""
        env = dict(zip(graph.inputs, inputs, strict=True))
        for node in graph.nodes:
            self.inline_node(node, env)
        return tuple(env.get(v, v) for v in graph.outputs)

    def insert(self, node: Node) -> Values:
        """Add a node, or what the rules make of it; the values of its results."""
        before = self._source, self._scope
        self._source, self._scope = node.source, node.scope
        try:
            new = self._rewritten(node)
            return self.keep(node) if new is None else new
        finally:
            self._source, self._scope = before

    def emit(self, op: str, inputs: Sequence[Value], type: TensorType, /, **attrs: Any) -> Value:
        """A new node with one result, with the source line of the node being rewritten."""
        node = Node(op, tuple(inputs), (Value(type),), MappingProxyType(attrs), (), self._source, self._scope)
        return self.insert(node)[0]

    def maker(self, value: Value, op: str = "") -> Node | None:
        """The node that makes a value, if it is known and (when `op` is given) is that operation."""
        node = self._made.get(value)
        return node if node is not None and op in ("", node.op) else None

    def equal(self, node: Node) -> Values | None:
        """The results of an equal node (without regions) that was added before, if there is one."""
        return self._seen.get(node_key(node))

    def splat(self, value: Value) -> int | float | bool | None:
        """The number that fills a value, if it is a `full`."""
        node = self.maker(value, "full")
        return None if node is None else node.attrs["value"]

    def full(self, dtype: DType, shape: Sequence[int], value: int | float | bool) -> Value:
        """A splat."""
        return self.emit("full", (), TensorType(dtype, tuple(shape)), value=value)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """x under another shape."""
        return x if x.shape == tuple(shape) else self.emit("reshape", (x,), TensorType(x.dtype, tuple(shape)))

    def _rewritten(self, node: Node) -> Values | None:
        for rule in self.rules.get(node.op, ()):
            new = rule(self, node)
            if new is not None:
                return new if isinstance(new, tuple) else (new,)
        return None

    def keep(self, node: Node) -> Values:
        """Add a node as it is, past the rules; equal nodes share their results, but not what is put at the host or back."""
        if not node.regions and not effectful(node) and node.op not in (PUT, HOST_ARRAY):
            results = self._seen.setdefault(node_key(node), node.results)
            if results is not node.results:
                return results
        self.nodes.append(node)
        for value in node.results:
            self._made[value] = node
        return node.results
