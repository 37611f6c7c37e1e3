"""Matmul kernels: batch, row and column axes in parallel, contracted axes in sequence into an f32 (or s32) accumulator.

Operands keep the axis order of their buffers; the labels of `mm_accumulate` do all transposing. Elementwise work on the operands
runs before the product, elementwise work on the result after it. A convolution is the same kernel with halo axes in its left operand
(`tpuflow.lower.emit.halo`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.chips import Chip
from tpuflow.dtypes import F32, DType
from tpuflow.isa.bounds import Bound
from tpuflow.isa.instruction import Pair
from tpuflow.isa.matrix import MatmulAccumulate, MatmulRead, MatmulZero
from tpuflow.isa.splitting import EXACT
from tpuflow.lower.emit.halo import NONE, Halo, halo_labels
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.map import emit_map_with
from tpuflow.lower.emit.nest import Merged, Nest, cut, merge
from tpuflow.lower.emit.reduce import add_sums, live_reductions, start_sums, sum_units
from tpuflow.lower.emit.region import Level, LevelEmitter, Region, Roots, operands
from tpuflow.lower.emit.site import Kernels, Site
from tpuflow.lower.graph.blocking import depth_block, unmergeable
from tpuflow.lower.graph.conv import PRECISIONS, ConvLabels, product_labels
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.tiling import LONGER, MATRIX_EDGE, MatmulSizes, Operands, matmul_tiles, shrinking

_NARROWED = {
    "bf16": {"default": "bf16", "high": "bf16_x3", "highest": "bf16_x6"},
    "f16": dict.fromkeys(PRECISIONS, "f16"),
}
"""How f32 operands enter arrays of a narrower type, at each precision: a TPU's in more passes, Ascend's always in one."""

ROW, COLUMN, DEPTH = -1, -2, -3  # axes of size 1 that stand for rows, columns or a contraction that a product lacks
_SUMMED = -100  # axes of size 1 that stand for those that are summed over: -100, -101, ...


def _precision(chip: Chip, precision: str, dtype: DType) -> str:
    """The precision of the instruction: exact unless operands are f32 and the chip's arrays are not."""
    return EXACT if dtype != F32 or chip.matrix_f32_as == F32.name else _NARROWED[chip.matrix_f32_as][precision]


@dataclass(frozen=True, slots=True)
class Product:
    """The merged axes of a product by kind, and of each operand and the result in buffer order; `lhs` has halos, `patch` their labels.

    `depth`: how long a block of the contraction is along a merged axis.
    `rhs_bounds`: where the right operand has elements, in the labels of the graph.
    """

    merged: Merged
    lhs: tuple[int, ...]
    patch: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    halos: tuple[Halo, ...]
    depth: Mapping[int, int]
    rhs_bounds: tuple[Bound, ...]

    @classmethod
    def of(cls, node: Node, region: Region) -> Product:
        """The product of a region."""
        labels = product_labels(node)
        halos = halo_labels(labels)
        shape = node.inputs[0].shape
        sizes = labels.sizes(shape, node.inputs[1].shape) | {h: max(2, shape[s.axis]) for h, s in halos.items()}
        block = depth_block(labels, sizes)
        apart = [(x,) for h, s in halos.items() for x in (h, labels.lhs[s.axis], s.label)]  # these merge with nothing
        apart += [(x,) for x in unmergeable(labels, sizes, block)]
        apart += [(x,) for bound in labels.bounds for x, _ in bound.terms]
        merged = merge(sizes, [*operands(region, dot_levels(region)), *apart])
        depth = {a: math.prod(block[x] for x in labels.contracted if merged.axis_of.get(x) == a) for a in merged.axis_of.values()}
        made = tuple(Halo.of(merged.axis_of, h, s, labels, shape, sizes) for h, s in halos.items())
        extents = {h.axis: h.extent for h in made}
        merged = replace(merged, sizes=tuple(extents.get(a, n) for a, n in enumerate(merged.sizes)))
        lhs, patch, rhs, out = (merged.fold(x) for x in (_with_halos(labels), labels.patch, labels.rhs, labels.out))
        return cls(merged, lhs, patch, rhs, out, made, depth, labels.bounds)

    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Batch, row and column axes in result order, contracted axes in the order of the sum."""
        batch = tuple(a for a in self.out if a in self.patch and a in self.rhs)
        rows = tuple(a for a in self.out if a in self.patch and a not in batch)
        columns = tuple(a for a in self.out if a in self.rhs and a not in batch)
        return batch, rows, columns, tuple(a for a in self.patch if a not in self.out)

    def nests(self, site: Site, sums: Sequence[Node] = ()) -> Iterator[Nest]:
        """Ways to cut every axis, of ever smaller tiles. Where results are summed over the rows, these come in sequence."""
        whole, summed = self._by_kind(self.merged.sizes), bool(sums)
        batch, rows, _, contracted = self.kinds()
        operands = replace(
            _operands(site.region, self._lhs_elems, tuple(self.depth[a] for a in contracted)),
            overlapping=self._overlapping(),
            sum_units=sum_units(sums, [self.merged.sizes[a] for a in (*batch, *rows)]) if summed else None,
        )
        for edge in shrinking(MATRIX_EDGE):
            longer = matmul_tiles(whole, site.chip, operands, edge, LONGER * edge)
            yield self._cut(longer, summed=summed)
            if (shorter := matmul_tiles(whole, site.chip, operands, edge)) != longer:
                yield self._cut(shorter, summed=summed)

    def _overlapping(self) -> tuple[int, ...]:
        """Positions among the rows of the shorter axis of every pair that addresses a halo."""
        short = {min(h.outer, h.inner, key=self.merged.sizes.__getitem__) for h in self.halos if h.is_pair}
        return tuple(i for i, a in enumerate(self.kinds()[1]) if a in short)

    def _by_kind(self, sizes: Sequence[int]) -> MatmulSizes:
        return MatmulSizes(*(tuple(sizes[a] for a in kind) for kind in self.kinds()))

    def _lhs_elems(self, tile: MatmulSizes) -> int:
        """Elements of a tile of the left operand, halos as they are."""
        axes = self._cut(tile).axes
        return math.prod(axes[a].size for a in self.lhs)

    def _cut(self, tiles: MatmulSizes, *, summed: bool = False) -> Nest:
        kinds, sizes = self.kinds(), self.merged.sizes
        tile_of = {a: n for kind, lengths in zip(kinds, tiles.kinds, strict=True) for a, n in zip(kind, lengths, strict=True)}
        nest = cut(sizes, [tile_of.get(a, n) for a, n in enumerate(sizes)], (*kinds[0], *kinds[1]) if summed else kinds[3])
        for halo in self.halos:
            nest = halo.cut(nest)
        return nest

    def levels(self, labels: ConvLabels) -> tuple[Level, Level, Level]:
        """The levels of lhs, rhs and result; each product gets at least one row, column and contracted axis."""
        _, rows, columns, contracted = self.kinds()
        row, column, depth = (() if rows else (ROW,)), (() if columns else (COLUMN,)), (() if contracted else (DEPTH,))
        points = tuple(h.own for h in self.halos if h.own < 0)
        batch_end = len(self.out) - len(rows) - len(columns)
        out = (*self.out[:batch_end], *row, *self.out[batch_end:], *column)
        left = Level(_with_halos(labels), (*self.lhs, *row, *depth))
        return left, Level(labels.rhs, (*points, *self.rhs, *depth, *column)), Level(labels.out, out)

    def summed(self, out: Level, labels: ConvLabels) -> Level:
        """The level of the results' sums over the rows: of the same axes, of which only the columns are left."""
        columns = self.kinds()[2]
        return Level(labels.columns, tuple(a if a in columns else _SUMMED - i for i, a in enumerate(out.axes)))

    def accumulate(self, levels: tuple[Level, Level, Level]) -> dict[str, Any]:
        """acc_axes, a_axes, b_axes, pairs and bounds of the instruction: labels are small numbers, in order of appearance."""
        numbers: dict[int, int] = {}
        left, right, out = (level.axes for level in levels)
        own = {h.axis: h.own for h in self.halos}
        named = tuple(tuple(numbers.setdefault(a, len(numbers)) for a in axes) for axes in (out, tuple(own.get(a, a) for a in left), right))
        pairs = tuple(Pair(left.index(h.axis), numbers[h.inner], h.stride, h.dilation) for h in self.halos if h.is_pair)
        found = tuple(replace(x, terms=tuple((numbers[axis], factor) for axis, factor in x.terms)) for x in self._bounds())
        return {"acc_axes": named[0], "a_axes": named[1], "b_axes": named[2], "pairs": pairs, "bounds": found}

    def _bounds(self) -> Iterator[Bound]:
        """The bounds that do not hold everywhere, in merged axes; a kernel that is read from its end is counted from there."""
        sizes = dict(enumerate(self.merged.sizes))
        reversed_ = {h.inner: sizes[h.inner] for h in self.halos if h.reverse and h.inner != NONE}
        of_rhs = (
            replace(x, terms=tuple((self.merged.axis_of[label], factor) for label, factor in x.terms if label in self.merged.axis_of))
            for x in self.rhs_bounds
        )
        yield from (x for x in (*(h.bound for h in self.halos), *(x.from_the_end(reversed_) for x in of_rhs)) if not x.always(sizes))


def _with_halos(labels: ConvLabels) -> tuple[int, ...]:
    """The labels of lhs, a halo in place of the outer label of every slide."""
    halos = {s.axis: h for h, s in halo_labels(labels).items()}
    return tuple(halos.get(axis, label) for axis, label in enumerate(labels.lhs))


def the_product(region: Region) -> Node:
    """The only product of a region."""
    (node,) = (n for op in PRODUCTS for n in region.find(op))
    return node


def _operands(region: Region, lhs_elems: Callable[[MatmulSizes], int], depth: tuple[int, ...]) -> Operands:
    """Bytes that a product's tiles take: of operands as they are loaded, of the result with what is loaded, stored and made beside it."""
    product = the_product(region)
    made_from = {n.result: n.inputs[0] for n in region.find("convert")}
    lhs, rhs = (made_from.get(v, v).dtype.bytes if v not in region.inputs else v.dtype.bytes for v in product.inputs)
    beside = [v for v in (*region.inputs, *region.results) if v.shape == product.result.shape]
    return Operands(lhs, rhs, sum(2 * v.dtype.bytes for v in beside) + 4 * region.widest_bytes(), lhs_elems, depth)


def dot_levels(region: Region) -> list[Roots]:
    """The left and the right operand of the product, the results, and what is made of sums of these over all rows, if there are any."""
    node, reductions = the_product(region), live_reductions(region)
    labels = product_labels(node)
    made, sums = region.parted
    levels: list[Roots] = [((node.inputs[0],), _with_halos(labels)), ((node.inputs[1],), labels.rhs)]
    levels.append(((*made, *(r.inputs[0] for r in reductions)), labels.out))
    return [*levels, (sums, labels.columns)] if sums else levels


def emit_matmul(site: Site) -> Kernels:
    """One kernel: zero, accumulate over the contracted tiles, read, and the elementwise rest; what is summed over the rows is summed on.

    (Then the contraction is one block: results are there after one step.)
    """
    region, dot = site.region, the_product(site.region)
    labels = product_labels(dot)
    lhs, rhs = dot.inputs
    if math.prod(dot.result.shape) == 0:
        return ()
    if 0 in (*lhs.shape, *rhs.shape):
        return emit_map_with(site, {dot: 0})
    product, reductions = Product.of(dot, region), live_reductions(region)
    levels, (made, sums) = product.levels(labels), region.parted
    fields = product.accumulate(levels)

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        left, right, out = (LevelEmitter(kernel, region, product.merged, nest, level, {}, {}) for level in levels)
        below = LevelEmitter(kernel, region, product.merged, nest, product.summed(levels[2], labels), {}, {})
        acc = kernel.tile(dot.result.dtype, out.axes, "acc")
        kernel.section = "prologue"
        start_sums(kernel, below, reductions)
        kernel.section = "body" if sums else "prologue"
        kernel.source = dot.source
        kernel.emit(MatmulZero(acc))
        kernel.section = "body"
        (a,), (b,) = left.emit([lhs]), right.emit([rhs])
        kernel.source = dot.source
        kernel.emit(MatmulAccumulate(acc, a, b, **fields, precision=_precision(site.chip, labels.precision, a.dtype)))
        kernel.section = "body" if sums else "epilogue"
        out.tiles[dot.result] = out.new(dot.result.dtype)
        kernel.emit(MatmulRead(out.tiles[dot.result], acc))
        out.emit(made)
        out.store(region.stored(made))
        add_sums(kernel, out, below, reductions, below.level.missing)
        kernel.section = "epilogue"
        below.emit(sums)
        below.store(region.stored(sums))
        return kernel

    return site.first_fitting(attempt, product.nests(site, reductions))
