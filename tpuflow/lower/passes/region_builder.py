"""RegionBuilder: builds the regions of `fused` nodes from those of others; and size queries for fused nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.passes.analysis import live_nodes, node_key

LARGE_TILE_BYTES = 16 * 1024
TILES_BYTES = 1024 * 1024  # the smallest on-chip memory, which must hold double-buffered tiles of LARGE_TILE_BYTES


def bytes_of(type: TensorType) -> int:
    """Size of an array in memory."""
    return type.elems * type.dtype.bytes


def fits_on_chip(types: Iterable[TensorType]) -> bool:
    """Whether double-buffered tiles of all these arrays fit on the chip at once, each of LARGE_TILE_BYTES, so that DMAs are efficient, or
    of the whole array if that is smaller.
    """
    arrays = list(types)
    few = len(arrays) * 2 * LARGE_TILE_BYTES <= TILES_BYTES
    return few or sum(2 * min(bytes_of(t), LARGE_TILE_BYTES) for t in arrays) <= TILES_BYTES


def is_kernel(node: Node, *kinds: Kind) -> bool:
    """Whether a node is fused and of one of the kinds."""
    return node.op == "fused" and node.attrs["kind"] in kinds


@dataclass(slots=True)
class RegionBuilder:
    """A region under construction, into which nodes of others are inlined, without duplicates. `inputs`: outer value -> its name inside."""

    inputs: dict[Value, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    seen: dict[Any, tuple[Value, ...]] = field(default_factory=dict)

    def operand(self, outer: Value) -> Value:
        """The region's name for a value from outside."""
        if outer not in self.inputs:
            self.inputs[outer] = Value(outer.type, outer.name)
        return self.inputs[outer]

    def inline(self, nodes: Iterable[Node], env: dict[Value, Value]) -> None:
        """Add nodes whose operands `env` renames; `env` learns the names of their results."""
        for node in nodes:
            inputs = tuple([env[v] for v in node.inputs])
            key = node_key(node, inputs)
            results = self.seen.get(key)
            if results is None:
                results = self.seen[key] = tuple([Value(v.type, v.name) for v in node.results])
                self.nodes.append(node.on(inputs, results))
            env.update(zip(node.results, results, strict=True))

    def inline_region(self, node: Node, known: Mapping[Value, Value] | None = None) -> tuple[Value, ...]:
        """Add the whole region of a fused node; the names of its outputs. `known` names those of its operands that are made here."""
        (region,) = node.regions
        known = known or {}
        env = {own: known.get(outer) or self.operand(outer) for own, outer in zip(region.inputs, node.inputs, strict=True)}
        self.inline(region.nodes, env)
        return tuple(env[v] for v in region.outputs)

    def fused(self, like: Node, outputs: Sequence[Value], results: Sequence[Value]) -> Node:
        """The fused node of `like`'s kind, source and scope, without what its outputs do not need."""
        nodes = live_nodes(self.nodes, outputs)
        used = {v for n in nodes for v in n.inputs}.union(outputs)
        inputs = {outer: own for outer, own in self.inputs.items() if own in used}
        region = Graph(like.attrs["kind"].value, tuple(inputs.values()), nodes, tuple(outputs))
        return replace(like, inputs=tuple(inputs), results=tuple(results), regions=(region,))
