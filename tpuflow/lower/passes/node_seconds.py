"""Durations for the scheduler: lower bounds of nodes, and times of collectives, from which it follows whether a transfer is hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tpuflow.chips import Chip
from tpuflow.chips.links import collective_seconds, sending_seconds
from tpuflow.errors import ConfigError
from tpuflow.isa.collectives import MeshAxis, farthest
from tpuflow.lower.graph.graph import Graph, Node
from tpuflow.lower.passes.kernel_cost import kernel_seconds
from tpuflow.lower.passes.ordering import Times
from tpuflow.lower.passes.region_builder import bytes_of


def node_times(graph: Graph, chip: Chip, mesh: Sequence[MeshAxis]) -> Times:
    """A lower bound of the chip's seconds for every node of a region; for a `start`, the latency of its transfer."""
    starts = {node for node in graph.nodes if node.op == "start"}
    sent = {node: link_seconds(node, chip, mesh, collective_seconds) for node in starts}
    worked = {node: least_seconds(node, chip) for node in graph.nodes if node not in starts}
    return Times(worked | sent, {node: link_seconds(node, chip, mesh, sending_seconds) for node in starts})


def least_seconds(node: Node, chip: Chip) -> float:
    """A lower bound of the chip's seconds for a node: one trip of a loop, the shortest branch of a switch, 0 without a kernel."""
    if node.op == "fused":
        return kernel_seconds(node, chip)
    within = [sum(least_seconds(n, chip) for n in region.nodes) for region in node.regions]
    return min(within) if node.op == "switch" else sum(within)


def link_seconds(start: Node, chip: Chip, mesh: Sequence[MeshAxis], form: Callable[..., float]) -> float:
    """The time of a collective by a closed form of `tpuflow.chips.links`; infinite where neither the mesh nor the chip's row describes the
    links, so that it counts as never hidden.
    """
    number = {axis.name: n for n, axis in enumerate(mesh)}
    if not number.keys() >= set(start.attrs["axes"]):
        return math.inf
    axes = [number[name] for name in start.attrs["axes"]]
    sent, distance = bytes_of(start.inputs[0].type), farthest(start.attrs["pairs"], start.attrs["chips"])
    try:
        return form(chip, start.attrs["kind"], sent, [a.size for a in mesh], axes, distance, [a.joined for a in mesh])
    except ConfigError:  # the program can be compiled and run; only `time` cannot be told, which says so
        return math.inf
