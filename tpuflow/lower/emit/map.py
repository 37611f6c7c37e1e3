"""Map kernels: elementwise regions over one iteration space. A space of one element runs on the scalar queue, in registers."""

from __future__ import annotations

import math
from dataclasses import replace

from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.nest import Nest, merge
from tpuflow.lower.emit.region import Level, LevelEmitter, Region, Roots, operands
from tpuflow.lower.emit.site import Plans, Site
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.graph.tiling import Space


def map_levels(region: Region) -> list[Roots]:
    """The one level of a map: its results over the iteration space."""
    return [(region.results, tuple(range(len(region.space))))]


def emit_map(site: Site) -> Plans:
    """One kernel: load the inputs, compute, store every output. All grid axes are parallel."""
    region, shape = site.region, site.region.space
    if math.prod(shape) == 0:
        return ()
    levels = map_levels(region)
    merged = merge(dict(enumerate(shape)), operands(region, levels))
    axes = tuple(range(len(merged.sizes)))
    level = Level(levels[0][1], axes, "vmem" if axes else "smem")

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        emitter = LevelEmitter(kernel, region, merged, nest, level, {}, {})
        emitter.emit(region.results)
        emitter.store(region.outputs)
        return kernel

    return site.fit(attempt, Space(merged.sizes), region.widest_bytes())


def emit_map_with(site: Site, substitutes: dict[Node, int | float | bool]) -> Plans:
    """A map kernel of the region with some of its nodes replaced by constants (what a sum over nothing is)."""
    nodes = tuple(
        Node("full", (), n.results, {"value": substitutes[n]}, source=n.source) if n in substitutes else n for n in site.region.nodes
    )
    return emit_map(replace(site, region=replace(site.region, nodes=nodes)))
