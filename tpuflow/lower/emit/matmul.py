"""Matmul kernels: batch, row and column axes in parallel, contracted axes in sequence into an f32 (or s32) accumulator.

Operands keep the axis order of their buffers; the labels of `mm_accumulate` do all transposing. Elementwise work on the operands
runs before the product, elementwise work on the result after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tpuflow.isa.matrix import MatmulAccumulate, MatmulRead, MatmulZero
from tpuflow.isa.program import Kernel
from tpuflow.lower.emit.map import emit_map_with
from tpuflow.lower.emit.nest import Merged, Nest, cut, merge
from tpuflow.lower.emit.region import Level, LevelEmitter, Region, Roots, operands
from tpuflow.lower.emit.site import Kernels, Site
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.tiling import MATRIX_EDGE, MatmulSizes, matmul_tiles, shrinking

ROW, COLUMN, DEPTH = -1, -2, -3  # axes of size 1 that stand for rows, columns or a contraction that a product lacks


@dataclass(frozen=True, slots=True)
class DotLabels:
    """The labels of the axes of a dot's operands and result, and the length of each label."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    sizes: Mapping[int, int]


def dot_labels(node: Node) -> DotLabels:
    """Label lhs axes 0, 1, ...; rhs axes share the label of the lhs axis they meet, or get their own."""
    lhs_shape, rhs_shape = (value.shape for value in node.inputs)
    pairs = itertools.chain(
        zip(node.attrs["rhs_contract"], node.attrs["lhs_contract"], strict=True),
        zip(node.attrs["rhs_batch"], node.attrs["lhs_batch"], strict=True),
    )
    met = dict(pairs)
    lhs = tuple(range(len(lhs_shape)))
    rhs = tuple(met.get(j, len(lhs) + j) for j in range(len(rhs_shape)))
    batch = tuple(node.attrs["lhs_batch"])
    rows = tuple(x for x in lhs if x not in met.values())
    columns = tuple(x for x in rhs if x not in met.values())
    sizes = dict(zip(lhs, lhs_shape, strict=True)) | dict(zip(rhs, rhs_shape, strict=True))
    return DotLabels(lhs, rhs, (*batch, *rows, *columns), sizes)


@dataclass(frozen=True, slots=True)
class Product:
    """The merged axes of a product by kind, and of each operand and the result in buffer order."""

    merged: Merged
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]

    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Batch, row and column axes in result order, contracted axes in lhs order."""
        batch = tuple(a for a in self.out if a in self.lhs and a in self.rhs)
        rows = tuple(a for a in self.out if a in self.lhs and a not in batch)
        columns = tuple(a for a in self.out if a in self.rhs and a not in batch)
        return batch, rows, columns, tuple(a for a in self.lhs if a not in self.out)

    def nest(self, site: Site, edge: int) -> Nest:
        """Cut every axis for tiles with sides of at most `edge`."""
        kinds, sizes = self.kinds(), self.merged.sizes
        tiles = matmul_tiles(MatmulSizes(*(tuple(sizes[a] for a in kind) for kind in kinds)), site.chip, edge)
        tile_of: dict[int, int] = {}
        for kind, lengths in zip(kinds, (tiles.batch, tiles.rows, tiles.columns, tiles.contracted), strict=True):
            tile_of |= dict(zip(kind, lengths, strict=True))
        return cut(sizes, [tile_of[a] for a in range(len(sizes))], kinds[3])

    def levels(self, labels: DotLabels) -> tuple[Level, Level, Level]:
        """The levels of lhs, rhs and result; each product gets at least one row, column and contracted axis."""
        _, rows, columns, contracted = self.kinds()
        row, column, depth = (() if rows else (ROW,)), (() if columns else (COLUMN,)), (() if contracted else (DEPTH,))
        batch_end = len(self.out) - len(rows) - len(columns)
        out = (*self.out[:batch_end], *row, *self.out[batch_end:], *column)
        return Level(labels.lhs, (*self.lhs, *row, *depth)), Level(labels.rhs, (*self.rhs, *depth, *column)), Level(labels.out, out)


def the_dot(region: Region) -> Node:
    """The only product of a region."""
    (node,) = region.find("dot")
    return node


def dot_levels(region: Region) -> list[Roots]:
    """The left and the right operand of the product, and the results."""
    dot = the_dot(region)
    labels = dot_labels(dot)
    return [((dot.inputs[0],), labels.lhs), ((dot.inputs[1],), labels.rhs), (region.results, labels.out)]


def emit_matmul(site: Site) -> Kernels:
    """One kernel: zero, accumulate over the contracted tiles, read, and the elementwise rest."""
    region, dot = site.region, the_dot(site.region)
    labels = dot_labels(dot)
    if math.prod(dot.result.shape) == 0:
        return ()
    if math.prod(labels.sizes.values()) == 0:
        return emit_map_with(site, {dot: 0})
    lhs, rhs = dot.inputs
    merged = merge(labels.sizes, operands(region, dot_levels(region)))
    product = Product(merged, merged.fold(labels.lhs), merged.fold(labels.rhs), merged.fold(labels.out))
    levels = product.levels(labels)

    def attempt(edge: int) -> Kernel:
        nest = product.nest(site, edge)
        kernel = site.kernel(nest.grid)
        left, right, out = (LevelEmitter(kernel, region, merged, nest, level, {}, {}) for level in levels)
        acc = kernel.tile(dot.result.dtype, out.axes, "acc")
        numbers: dict[int, int] = {}
        kernel.section = "prologue"
        kernel.source = dot.source
        kernel.emit(MatmulZero(acc))
        kernel.section = "body"
        (a,), (b,) = left.emit([lhs]), right.emit([rhs])
        kernel.source = dot.source
        kernel.emit(MatmulAccumulate(acc, a, b, *(_numbered(level.axes, numbers) for level in (levels[2], levels[0], levels[1]))))
        kernel.section = "epilogue"
        out.tiles[dot.result] = out.new(dot.result.dtype)
        kernel.emit(MatmulRead(out.tiles[dot.result], acc))
        out.emit(region.results)
        out.store(region.outputs)
        return kernel.build()

    return site.fit(attempt, shrinking(MATRIX_EDGE))


def _numbered(axes: tuple[int, ...], numbers: dict[int, int]) -> tuple[int, ...]:
    """Small numbers for axes, in order of appearance."""
    return tuple(numbers.setdefault(a, len(numbers)) for a in axes)
