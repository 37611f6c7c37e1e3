"""Scan kernels: a cumulative operation along one axis, its tiles in sequence, a carry tile from each to the next."""

from __future__ import annotations

from dataclasses import replace

from tpuflow.isa.instruction import Tile, TileAxis, Window
from tpuflow.isa.vector import Constant, Cumulative
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.move import emit_plain_copy
from tpuflow.lower.emit.nest import Nest, merge, walk, window
from tpuflow.lower.emit.site import Plans, Site
from tpuflow.lower.graph.builder import identity
from tpuflow.lower.graph.tiling import Space


def _window(nest: Nest, buffer: int, tile: Tile, axis: int, *, reverse: bool) -> Window:
    """The whole of the buffer, the scanned axis back to front if `reverse`."""
    axes = tuple(range(len(nest.sizes)))
    made = window(nest, buffer, axes, tile, axes)
    if not reverse:
        return made
    n = nest.sizes[axis]
    backwards = walk(nest.axes[axis], n, made.axes[axis].pitch, origin=n - 1, step=-1)
    return replace(made, axes=(*made.axes[:axis], backwards, *made.axes[axis + 1 :]))


def emit_cumulative(site: Site) -> Plans:
    """One kernel: carry = identity; step by step dst, carry = cumulative(carry, a)."""
    node = site.node
    op, scanned, reverse = (node.attrs[k] for k in ("op", "axis", "reverse"))
    shape, dtype = node.result.shape, node.result.dtype
    if node.result.type.elems == 0:
        return ()
    if shape[scanned] == 1:
        return emit_plain_copy(site)
    merged = merge(dict(enumerate(shape)), [range(len(shape)), (scanned,)])
    (axis,) = merged.fold((scanned,))

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        carry = kernel.tile(dtype, tuple(TileAxis(1) if i == axis else whole for i, whole in enumerate(nest.axes)))
        kernel.section = "prologue"
        kernel.emit(Constant(carry, identity(op, dtype)))
        kernel.section = "body"
        a, dst = kernel.tile(dtype, nest.axes), kernel.tile(dtype, nest.axes)
        axes = range(len(nest.sizes))
        kernel.load(nest, _window(nest, site.buffer(0), a, axis, reverse=reverse), axes)
        kernel.emit(Cumulative(op, dst, carry, a, axis))
        kernel.store(nest, _window(nest, site.target, dst, axis, reverse=reverse), axes)
        return kernel

    return site.fit(attempt, Space(merged.sizes, (axis,)), dtype.bytes)
