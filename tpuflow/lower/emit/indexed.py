"""Indexed moves: rows gathered by, or scattered in the order of, an index array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tpuflow.dtypes import S32, DType
from tpuflow.isa.dma import LoadIndexed, StoreIndexed
from tpuflow.isa.instruction import Tile, Window, WindowAxis
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.map import emit_map
from tpuflow.lower.emit.move import copy_unless_in_place
from tpuflow.lower.emit.nest import Nest, walk, window, zero_fill
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.site import Plans, Site
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.graph.tiling import Space


def _sizes(table: Sequence[int], rows: int) -> tuple[int, ...]:
    """[R, elements of a row] of the moved rows; [R] when rows are single elements."""
    width = math.prod(table[1:])
    return (rows,) if width == 1 else (rows, width)


def _table_window(nest: Nest, buffer: int, rows: int, tile: Tile, fill: int | float | bool) -> Window:
    """The table with rows picked by an index tile: axis 0 stands still."""
    width = math.prod(nest.sizes[1:])
    columns = tuple(walk(axis, width, 1) for axis in nest.axes[1:])
    return Window(buffer, tile, (WindowAxis(rows, width, step=0), *columns), fill)


def _load_index(kernel: KernelBuilder, nest: Nest, buffer: int) -> Tile:
    index = kernel.tile(S32, nest.axes[:1])
    kernel.load(nest, window(nest, buffer, (0,), index, (0,)), (0,))
    return index


def _rows_tile(kernel: KernelBuilder, nest: Nest, dtype: DType) -> tuple[Tile, tuple[int, ...]]:
    return kernel.tile(dtype, nest.axes), tuple(range(len(nest.sizes)))


def emit_take_rows(site: Site) -> Plans:
    """result[r] = table[index[r]], or the fill where the index is out of range."""
    table, fill = site.node.inputs[0], site.node.attrs["fill"]
    if site.node.result.type.elems == 0:
        return ()
    if table.type.elems == 0:
        splat = Node("full", (), site.node.results, {"value": fill}, source=site.node.source)
        return emit_map(replace(site, region=Region((splat,), {}, site.region.outputs)))
    sizes = _sizes(table.shape, site.node.inputs[1].shape[0])

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        index = _load_index(kernel, nest, site.buffer(1))
        tile, axes = _rows_tile(kernel, nest, table.dtype)
        rows = _table_window(nest, site.buffer(0), table.shape[0], tile, fill)
        kernel.load(nest, rows, axes, index=site.buffer(1))
        kernel.emit(LoadIndexed(rows, index))
        kernel.store(nest, window(nest, site.target, axes, tile, axes), axes)
        return kernel

    return site.fit(attempt, Space(sizes), table.dtype.bytes)


def emit_scatter_rows(site: Site) -> Plans:
    """A copy of the table unless the result is in place; then row index[r] = mode(row, updates[r]) for r in order."""
    table, _, updates = site.node.inputs
    copy = copy_unless_in_place(site)
    if updates.type.elems == 0:
        return copy
    sizes = _sizes(table.shape, updates.shape[0])

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        index = _load_index(kernel, nest, site.buffer(1))
        tile, axes = _rows_tile(kernel, nest, table.dtype)
        kernel.load(nest, window(nest, site.buffer(2), axes, tile, axes), axes)
        rows = _table_window(nest, site.target, table.shape[0], tile, zero_fill(tile.dtype))
        kernel.store(nest, rows, axes, index=site.buffer(1))
        kernel.emit(StoreIndexed(site.node.attrs["mode"], rows, index))
        return kernel

    return copy + site.fit(attempt, Space(sizes, (0,)), table.dtype.bytes)
