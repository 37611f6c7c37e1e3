"""Kernels that run together: the straight-line code of several small ones, of any shapes, in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.map import emit_map, record_map
from tpuflow.lower.emit.onchip import DoesNotFit
from tpuflow.lower.emit.reduce import emit_reduce, record_reduce
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.site import Kernels, Site
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.tiling import TILE_BYTES

RECORD: Mapping[str, Callable[[Site, int], KernelBuilder]] = {"map": record_map, "reduce": record_reduce}
EMIT: Mapping[str, Callable[[Site], Kernels]] = {"map": emit_map, "reduce": emit_reduce}


def emit_several(site: Site) -> Kernels:
    """One kernel of all members whose arrays are one tile each; more where the chip's memory asks for it."""
    members = [_member(site, node) for node in site.region.nodes]
    recorded = [(m, RECORD[m.node.attrs["kind"]](m, TILE_BYTES)) for m in members]
    apart = tuple(k for m, builder in recorded if builder.grid for k in EMIT[m.node.attrs["kind"]](m))
    return _together(site, [entry for entry in recorded if not entry[1].grid]) + apart


def _member(site: Site, node: Node) -> Site:
    """A member as it would be emitted by itself."""
    buffers = {**site.region.inputs, **dict(site.region.outputs)}
    (graph,) = node.regions
    inputs = {own: buffers[outer] for own, outer in zip(graph.inputs, node.inputs, strict=True)}
    outputs = tuple((own, buffers[outer]) for own, outer in zip(graph.outputs, node.results, strict=True))
    return replace(site, node=node, region=Region(graph.nodes, inputs, outputs))


def _together(site: Site, recorded: Sequence[tuple[Site, KernelBuilder]]) -> Kernels:
    """As few kernels as the chip's memory allows."""
    if len(recorded) < 2:
        return tuple(k for m, _ in recorded for k in EMIT[m.node.attrs["kind"]](m))
    kernel = site.kernel()
    kernel.take(builder for _, builder in recorded)
    try:
        return (kernel.build(),)
    except DoesNotFit:
        half = len(recorded) // 2
        return _together(site, recorded[:half]) + _together(site, recorded[half:])
