"""Row kernels: reductions over whole rows and what is made of rows and of their reductions, while the rows are on the chip."""

from __future__ import annotations

import math

from tpuflow.isa.vector import Broadcast
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.nest import Unit, cut, merge
from tpuflow.lower.emit.reduce import add_sums, start_sums
from tpuflow.lower.emit.region import Level, LevelEmitter, Region, Roots, operands
from tpuflow.lower.emit.site import Kernels, Site
from tpuflow.lower.graph.graph import Node


def rows_and_reduced(region: Region) -> tuple[Region, Region]:
    """The region's work on rows, and that on what is left of them; reductions belong to neither."""
    first = region.find("reduce")[0]
    parts = []
    for shape in (first.inputs[0].shape, first.result.shape):
        nodes = tuple(n for n in region.nodes if n.op != "reduce" and n.result.shape == shape)
        parts.append(Region(nodes, region.inputs, tuple(entry for entry in region.outputs if entry[0].shape == shape)))
    return parts[0], parts[1]


def row_levels(region: Region) -> list[Roots]:
    """Rows with all their axes, and what is left of them; everything that is made is a root, since levels take turns."""
    first = region.find("reduce")[0]
    whole = tuple(range(len(first.inputs[0].shape)))
    kept = tuple(a for a in whole if a not in first.attrs["axes"])
    rows, reduced = rows_and_reduced(region)
    made = (*(n.result for n in rows.nodes), *(r.inputs[0] for r in region.find("reduce")), *rows.results)
    return [(made, whole), ((*(n.result for n in reduced.nodes), *reduced.results), kept)]


def emit_rows(site: Site) -> Kernels:
    """One kernel, its grid over the axes that are kept."""
    region = site.region
    first = region.find("reduce")[0]
    shape = first.inputs[0].shape
    if math.prod(shape) == 0:
        return ()
    rows, reduced = rows_and_reduced(region)
    whole, left = row_levels(region)
    merged = merge(dict(enumerate(shape)), operands(rows, [whole]) + operands(reduced, [left]))
    axes = tuple(range(len(merged.sizes)))
    along = tuple(sorted(merged.fold(first.attrs["axes"])))
    short = tuple(Unit(f"reduced {a}") if a in along else a for a in axes)

    def attempt(budget_bytes: int) -> KernelBuilder:
        nest = cut(merged.sizes, site.tile_sizes(merged.sizes, region.widest_bytes(), budget_bytes, along))
        kernel = site.kernel(nest.grid)
        above = LevelEmitter(kernel, rows, merged, nest, Level(whole[1], axes), {}, {})
        below = LevelEmitter(kernel, reduced, merged, nest, Level(left[1], short), {}, {})
        for node in region.nodes:
            kernel.source = node.source
            if not _crosses(kernel, node, above, below, along):
                (above if node in rows.nodes else below).emit([node.result])
        above.store(rows.outputs)
        below.store(reduced.outputs)
        return kernel

    return site.fit(attempt)


def _crosses(kernel: KernelBuilder, node: Node, above: LevelEmitter, below: LevelEmitter, along: tuple[int, ...]) -> bool:
    """Emit a node that leads from rows to what is left of them, or back; whether it is one."""
    if node.op == "reduce":
        start_sums(kernel, below, (node,))
        add_sums(kernel, above, below, (node,), along)
        return True
    if node.op == "broadcast" and node.inputs[0] in below.tiles:
        made = above.tiles[node.result] = above.new(node.result.dtype)
        kernel.emit(Broadcast(made, below.tiles[node.inputs[0]], tuple(range(len(above.axes)))))
        return True
    return False
