"""Sort kernels: the sorted axis resident in one tile, the other axes in parallel."""

from __future__ import annotations

from dataclasses import replace

from tpuflow.isa.instruction import TileAxis
from tpuflow.isa.vector import Sort
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.move import emit_plain_copy
from tpuflow.lower.emit.nest import Nest, merge, window
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.site import Plans, Site
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.tiling import Space


def emit_sort(site: Site) -> Plans:
    """One kernel: load all operands, sort them together, store the first `count` elements of each row."""
    node, shape = site.node, site.node.inputs[0].shape
    if node.results[0].type.elems == 0:
        return ()
    if shape[node.attrs["axis"]] == 1:
        return tuple(k for i in range(len(node.results)) for k in emit_plain_copy(_single(site, i)))
    merged = merge(dict(enumerate(shape)), [range(len(shape)), (node.attrs["axis"],)])
    (axis,) = merged.fold((node.attrs["axis"],))
    widest = max(value.dtype.bytes for value in node.results)
    axes = tuple(range(len(merged.sizes)))

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        sources = tuple(kernel.tile(value.dtype, nest.axes) for value in node.inputs)
        wanted = _shortened(nest, axis, node.attrs["count"])
        sorted_ = tuple(kernel.tile(value.dtype, wanted.axes) for value in node.results)
        for i, tile in enumerate(sources):
            kernel.load(nest, window(nest, site.buffer(i), axes, tile, axes), axes)
        kernel.emit(Sort(sorted_, sources, axis, node.attrs["keys"]))
        for (_, buffer), tile in zip(site.region.outputs, sorted_, strict=True):
            kernel.store(wanted, window(wanted, buffer, axes, tile, axes), axes)
        return kernel

    return site.fit(attempt, Space(merged.sizes, whole=(axis,)), widest)


def _shortened(nest: Nest, axis: int, count: int) -> Nest:
    """The nest of what has `count` elements along an axis that is not cut."""
    sizes = tuple(count if n == axis else size for n, size in enumerate(nest.sizes))
    return replace(nest, sizes=sizes, axes=tuple(TileAxis(count) if n == axis else tile for n, tile in enumerate(nest.axes)))


def _single(site: Site, i: int) -> Site:
    """The site of operand i alone."""
    value: Value = site.node.inputs[i]
    node = Node("copy", (value,), (site.node.results[i],), source=site.node.source)
    return replace(site, node=node, region=Region((node,), {value: site.buffer(i)}, (site.region.outputs[i],)))
