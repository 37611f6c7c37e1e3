"""KeepOnHost: what a program puts into the host's memory stays there until it is put back, or the program is told that it does not."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import PUT, at_host, is_to_host
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.unit_seconds import total_bytes


@dataclass(frozen=True, slots=True)
class KeepOnHost(Pass):
    """Settle which arrays are at the host: those that are only put back into HBM, in the region that put them there, or leave the program.

    A barrier holds back what is computed, not what lies at the host, so that it can be fetched before. What something else reads, or a
    loop carries, stays in HBM, which is said in a warning.
    Before: %1 = device_put{host} %0; %2, %3 = barrier %1, %y; %4 = device_put{hbm} %2.
    After: %1 = device_put{host} %0; %3 = barrier %y; %4 = device_put{hbm} %1.
    Needs: no fused nodes.    Keeps: every bit.    Never: drops an array that is at the host without saying so.
    """

    def __call__(self, graph: Graph) -> Graph:
        refused: list[Node] = []
        made = _settled(graph, refused, is_program=True)
        if refused:
            warnings.warn(_text(refused), UserWarning, stacklevel=2)
        return made


def _text(refused: Sequence[Node]) -> str:
    lines = dict.fromkeys(node.source or "unknown source line" for node in refused)
    size = total_bytes(node.result for node in refused)
    return (
        f"{', '.join(lines)}: {len(refused)} array{'s' * (len(refused) > 1)} of {size / 2**20:.2f} MiB that should go to the host's memory "
        f"stay{'s' * (len(refused) == 1)} in HBM, and the peak counts them there: something other than a move back to the device reads "
        f"them, or they are stacked or carried by a loop. Move each back with jax.device_put(x, jax.memory.Space.Device), in the same "
        f"function or loop body, before it is read."
    )


def _settled(graph: Graph, refused: list[Node], *, is_program: bool = False) -> Graph:
    """A region with its nested ones."""
    nodes = [replace(n, regions=tuple(_settled(r, refused) for r in n.regions)) if n.regions else n for n in graph.nodes]
    if not any(node.op == PUT for node in nodes):
        return replace(graph, nodes=tuple(nodes))
    released = _Renaming(nodes, graph.outputs)
    released.past_barriers()
    kept = released.kept(is_program=is_program)
    refused += [node for node in released.nodes if is_to_host(node) and node.result not in kept]
    released.without_moves(kept)
    return replace(graph, nodes=tuple(released.nodes), outputs=released.outputs)


@dataclass(slots=True)
class _Renaming:
    """The nodes and outputs of a region, with values that have taken the places of others."""

    nodes: list[Node]
    outputs: tuple[Value, ...]
    renamed: dict[Value, Value] = field(default_factory=dict)

    def past_barriers(self) -> None:
        """Take what is at the host out of barriers."""
        host: set[Value] = set()
        made = []
        for node in map(self._on_renamed, self.nodes):
            if is_to_host(node):
                host.add(node.result)
            if node.op == "barrier" and not host.isdisjoint(node.inputs):
                pairs = list(zip(node.inputs, node.results, strict=True))
                self.renamed |= {result: v for v, result in pairs if v in host}
                pairs = [(v, result) for v, result in pairs if v not in host]
                node = replace(node, inputs=tuple(v for v, _ in pairs), results=tuple(r for _, r in pairs))
            if node.op != "barrier" or node.results:
                made.append(node)
        self._take(made)

    def kept(self, *, is_program: bool) -> set[Value]:
        """Values at the host that nothing but moves back read."""
        host = at_host(self.nodes)
        read = {v for node in self.nodes if node.op != PUT or is_to_host(node) for v in node.inputs}
        left = {v for v in host if self.outputs.count(v) > is_program}
        return host - read - left

    def without_moves(self, kept: set[Value]) -> None:
        """Leave out moves to the host of what does not stay there, and moves back of what is not there."""
        made = []
        for node in map(self._on_renamed, self.nodes):
            if node.op == PUT and node.result not in kept and node.inputs[0] not in kept:
                self.renamed[node.result] = node.inputs[0]
            else:
                made.append(node)
        self._take(made)

    def _on_renamed(self, node: Node) -> Node:
        if self.renamed.keys().isdisjoint(node.inputs):
            return node
        return replace(node, inputs=tuple(self.renamed.get(v, v) for v in node.inputs))

    def _take(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.outputs = tuple(self.renamed.get(v, v) for v in self.outputs)
