"""Lowering of `shard` and `unshard`: at the ports of a program, where the host cuts arrays, else to slices and all-gathers on the chips.

A `shard` takes a chip's piece of an array that all chips have, an `unshard` puts such an array together. An input that is only ever
sharded one way is a piece from the start, and an output that is unsharded stays one. What is left becomes slices at the chip's position,
and all-gathers: what a program does outside of `shard_map`, every chip does with the whole array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.isa.collectives import Cut, MeshAxis
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.operations import collectives
from tpuflow.lower.operations.collectives import NamedCut

WHOLE: NamedCut = ()


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the host's arrays are sharded, one entry per input and output; empty for arrays that every chip has whole."""

    inputs: tuple[NamedCut, ...]
    outputs: tuple[NamedCut, ...]


UNCUT = Cuts((), ())


def cut_ports(graph: Graph, carries: int = 0) -> tuple[Graph, Cuts]:
    """The graph with sharded inputs and outputs where possible, and how they are sharded. The first `carries` inputs and outputs are
    paired: both of a pair are sharded alike, or neither is.
    """
    inputs = [_sharded(graph, v) for v in graph.inputs]
    makers = {v: node for node in graph.nodes for v in node.results}
    outputs = [_unsharded(makers.get(v)) for v in graph.outputs]
    for i in range(carries):
        if inputs[i] != outputs[i]:
            inputs[i] = outputs[i] = WHOLE
    env: dict[Value, Value] = {}
    own = tuple(_piece(graph, v, env) if cut else v for v, cut in zip(graph.inputs, inputs, strict=True))
    nodes = tuple(_renamed(n, env) for n in graph.nodes if not env.keys() >= set(n.results) or n.op != "shard")
    ends = tuple(makers[v].inputs[0] if cut else v for v, cut in zip(graph.outputs, outputs, strict=True))
    made = replace(graph, inputs=own, nodes=nodes, outputs=tuple(env.get(v, v) for v in ends))
    return made, Cuts(tuple(inputs), tuple(outputs))


def _users(graph: Graph, value: Value) -> list[Node]:
    return [node for node in graph.nodes if value in node.inputs]


def _sharded(graph: Graph, value: Value) -> NamedCut:
    """The only sharding in which an input is used; WHOLE if there are several, or if it is also used whole."""
    users = _users(graph, value)
    cuts = {node.attrs["cut"] for node in users if node.op == "shard"}
    return cuts.pop() if len(cuts) == 1 and all(node.op == "shard" for node in users) and value not in graph.outputs else WHOLE


def _unsharded(maker: Node | None) -> NamedCut:
    return maker.attrs["cut"] if maker is not None and maker.op == "unshard" else WHOLE


def _piece(graph: Graph, value: Value, env: dict[Value, Value]) -> Value:
    """A sharded input in place of a whole one; `env` maps the results of its `shard` nodes to it."""
    users = _users(graph, value)
    piece = Value(users[0].result.type, value.name)
    env.update((node.result, piece) for node in users)
    return piece


def _renamed(node: Node, env: Mapping[Value, Value]) -> Node:
    inputs = tuple(env.get(v, v) for v in node.inputs)
    return node if inputs == node.inputs else replace(node, inputs=inputs)


def on_chips(graph: Graph, mesh: Sequence[MeshAxis]) -> Graph:
    """The graph without `shard` and `unshard`, regions included."""
    sizes = {axis.name: axis.size for axis in mesh}
    b = Builder(graph.name, [v.type for v in graph.inputs], graph.input_names)
    b.inputs = graph.inputs
    env: dict[Value, Value] = {v: v for v in graph.inputs}
    for node in graph.nodes:
        with b.at(node.source, node.scope):
            results = _placed(b, node, [env[v] for v in node.inputs], sizes, mesh)
        env.update(zip(node.results, results, strict=True))
    return b.finish([env[v] for v in graph.outputs], graph.output_names)


def _placed(b: Builder, node: Node, operands: list[Value], sizes: Mapping[str, int], mesh: Sequence[MeshAxis]) -> Sequence[Value]:
    if node.op in _PLACED:
        return (_PLACED[node.op](b, operands[0], node.attrs["cut"], sizes),)
    regions = tuple(on_chips(region, mesh) for region in node.regions)
    return b.emit(node.op, operands, dict(node.attrs), [v.type for v in node.results], regions).results


_PLACED: Mapping[str, Any] = {"shard": collectives.shard, "unshard": collectives.unshard}


def numbered(cut: NamedCut, mesh: Sequence[MeshAxis]) -> Cut:
    """A sharding with mesh axes by number instead of name; empty if nothing is cut."""
    numbers = {axis.name: n for n, axis in enumerate(mesh)}
    return tuple(tuple(numbers[name] for name in names) for names in cut) if any(cut) else ()
