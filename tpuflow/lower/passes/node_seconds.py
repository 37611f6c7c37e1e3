"""What the nodes of a graph take at least, and what its collectives take on the links: by these a transfer is known to be hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tpuflow.chips import Chip
from tpuflow.chips.links import collective_seconds, sending_seconds
from tpuflow.errors import ConfigError
from tpuflow.isa.collectives import MeshAxis, farthest
from tpuflow.lower.graph.graph import Graph, Node
from tpuflow.lower.passes.kernel_cost import busy_seconds
from tpuflow.lower.passes.ordering import Times
from tpuflow.lower.passes.region_builder import bytes_of


def node_times(graph: Graph, chip: Chip, mesh: Sequence[MeshAxis]) -> Times:
    """Of every node of a region the seconds that the chip works on it at least; of a `start`, those until what it sends has arrived."""
    starts = {node for node in graph.nodes if node.op == "start"}
    sent = {node: link_seconds(node, chip, mesh, collective_seconds) for node in starts}
    worked = {node: least_seconds(node, chip) for node in graph.nodes if node not in starts}
    return Times(worked | sent, {node: link_seconds(node, chip, mesh, sending_seconds) for node in starts})


def least_seconds(node: Node, chip: Chip) -> float:
    """What a chip takes for a node at least: of a loop one trip, of a switch its shortest branch, of what has no kernel nothing."""
    if node.op == "fused":
        return busy_seconds(node, chip)
    within = [sum(least_seconds(n, chip) for n in region.nodes) for region in node.regions]
    return min(within) if node.op == "switch" else sum(within)


def link_seconds(start: Node, chip: Chip, mesh: Sequence[MeshAxis], form: Callable[..., float]) -> float:
    """What a collective takes by a closed form of `tpuflow.chips.links`; no end of it where neither the mesh nor the chip's row says how
    its chips are joined, so that nothing is taken to hide it."""
    number = {axis.name: n for n, axis in enumerate(mesh)}
    if not number.keys() >= set(start.attrs["axes"]):
        return math.inf
    axes = [number[name] for name in start.attrs["axes"]]
    sent, distance = bytes_of(start.inputs[0].type), farthest(start.attrs["pairs"], start.attrs["chips"])
    try:
        return form(chip, start.attrs["kind"], sent, [a.size for a in mesh], axes, distance, [a.joined for a in mesh])
    except ConfigError:  # the program can be compiled and run; only `time` cannot be told, which says so
        return math.inf
