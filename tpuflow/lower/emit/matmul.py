"""Matmul kernels: batch, row and column axes in parallel, contracted axes in sequence into an f32 (or s32) accumulator.

Operands keep the axis order of their buffers; the labels of `mm_accumulate` do all transposing. Elementwise work on the operands
runs before the product, elementwise work on the result after it. A convolution is the same kernel with halo tiles of its left operand
(`tpuflow.lower.emit.sliding`). Where an operand stays on the chip, all of the contraction is one step, and the tiles of the other
operand, and of the result with it, come in sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.chips import Chip
from tpuflow.dtypes import BF16, F16, F32, DType
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.matrix import MatmulAccumulate, MatmulRead, MatmulZero
from tpuflow.isa.splitting import EXACT
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.map import emit_map_with
from tpuflow.lower.emit.nest import Axis, Merged, Nest, Unit, cut, merge
from tpuflow.lower.emit.reduce import accumulate, init_accumulators, live_reductions, sum_units
from tpuflow.lower.emit.region import Level, LevelEmitter, Region, Roots
from tpuflow.lower.emit.region import operands as used_labels
from tpuflow.lower.emit.site import Plans, Site
from tpuflow.lower.emit.sliding import MergedSliding, halo_labels, merged_bound, with_halos
from tpuflow.lower.graph.blocking import depth_block, has_few_blocks, unmergeable
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.graph.products import PRECISIONS, contraction_of, sizes_of
from tpuflow.lower.graph.tiling import Space, Tiling
from tpuflow.lower.tiling import MATRIX_EDGE, SLOTS, MatmulSizes, Operands, Stationary, matmul_tiles, shrinking, tiles_seconds

_NARROWED = {
    "bf16": {"default": "bf16", "high": "bf16_x3", "highest": "bf16_x6"},
    "f16": dict.fromkeys(PRECISIONS, "f16"),
}
"""How f32 operands enter matrix arrays of a narrower type, by precision: in up to six bf16 passes on TPUs, in one of f16 on Ascend."""

ROW, COLUMN, DEPTH = (Unit(name) for name in ("row", "column", "depth"))  # axes of size 1 for a role that a product lacks


def entering_precision(chip: Chip, precision: str, dtype: DType) -> str:
    """The instruction's precision: exact, unless operands are f32 and the chip's matrix arrays take a narrower type."""
    return EXACT if dtype != F32 or chip.matrix_f32_as == F32.name else _NARROWED[chip.matrix_f32_as][precision]


@dataclass(frozen=True, slots=True)
class Product:
    """A product in merged axes. `lhs`: the axes of the left operand in buffer order, a halo axis in place of every sliding one.

    `patches`: the contraction of the left operand's patches (im2col) with the right one, in merged axes. `depth`: the length of a block of
    the contraction along each axis. `rhs_bounds`: where the right operand has elements, in the graph's labels.
    """

    merged: Merged
    lhs: tuple[int, ...]
    patches: Contraction
    sliding: tuple[MergedSliding, ...]
    depth: Mapping[int, int]
    rhs_bounds: tuple[Bound, ...]

    @classmethod
    def of(cls, node: Node, region: Region) -> Product:
        """The product of a region."""
        whole, shape = contraction_of(node), node.inputs[0].shape
        halos = halo_labels(whole)
        sizes = {**sizes_of(node), **{h: max(2, shape[s.axis]) for h, s in halos.items()}}
        block = depth_block(whole, sizes)
        apart = [(x,) for h, s in halos.items() for x in (h, whole.lhs[s.axis], s.label)]  # these merge with nothing
        apart += [(x,) for x in unmergeable(whole, sizes, block)]
        apart += [(x,) for bound in whole.rhs_bounds for x, _ in bound.terms]
        merged = merge(sizes, [*used_labels(region, dot_levels(region)), *apart])
        depth = {a: math.prod(block[x] for x in whole.contracted if merged.axis_of.get(x) == a) for a in merged.axis_of.values()}
        sliding = tuple(MergedSliding.of(merged.axis_of, h, s, whole, sizes) for h, s in halos.items())
        extents = {s.axis: s.bound.extent for s in sliding}
        merged = replace(merged, sizes=tuple(extents.get(a, n) for a, n in enumerate(merged.sizes)))
        lhs, patch, rhs, out = (merged.fold(x) for x in (with_halos(whole), whole.patch, whole.rhs, whole.out))
        return cls(merged, lhs, Contraction(patch, rhs, out), sliding, depth, whole.rhs_bounds)

    def space(self, sums: Sequence[Node] = (), stationary: Stationary = Stationary.RESULT) -> Space:
        """The iteration space. With `sums` of the results, batch and rows are sequential. With a stationary operand the axes that only the
        other one has are sequential, and the contraction is whole. Else the contraction is sequential, in its blocks.
        """
        sizes = self.merged.sizes
        batch, rows, columns, contracted = self.patches.roles
        apart = [a for a in range(len(sizes)) if not any(a in kind for kind in self.patches.roles)]
        if stationary is not Stationary.RESULT and not sums:
            return Space(sizes, columns if stationary is Stationary.LHS else rows, (*apart, *contracted))
        if not sums:
            return Space(sizes, contracted, apart, exact={a: self.depth[a] for a in contracted})
        summed = (*batch, *rows)
        units = dict(zip(summed, sum_units(sums, [sizes[a] for a in summed]), strict=True))
        return Space(sizes, summed, (*apart, *contracted), units)

    def stationary(self, tiling: Tiling) -> Stationary:
        """What is stationary under a tiling of a product without sums: the result if the contraction is sequential, else the operand
        without the sequential axes.
        """
        _, rows, columns, contracted = self.patches.roles
        sequential = {a for a, axis in enumerate(tiling.axes) if axis.sequential}
        if sequential.isdisjoint((*rows, *columns)) or not sequential.isdisjoint(contracted):
            return Stationary.RESULT
        return Stationary.RHS if sequential.isdisjoint(columns) else Stationary.LHS

    @property
    def stationary_of_sums(self) -> Stationary:
        """What is stationary in a product with sums, whose contraction is one step: the right operand, unless there are batch axes."""
        return Stationary.RESULT if self.patches.batch else Stationary.RHS

    @property
    def one_step(self) -> bool:
        """Whether one instruction can do the whole contraction."""
        placed = {a for s in self.sliding for a in (s.outer, s.inner) if a is not None}
        placed |= {self.merged.axis_of[x] for bound in self.rhs_bounds for x, _ in bound.terms if x in self.merged.axis_of}
        return has_few_blocks(self.patches.contracted, dict(enumerate(self.merged.sizes)), self.depth, placed)

    def block(self, nest: Nest) -> int:
        """The instruction's `block` (elements summed with one rounding); 0 where a tile is one block."""
        return next((self.depth[a] for a in self.patches.contracted if self.depth[a] < nest.axes[a].size), 0)

    def operands(self, site: Site, sums: Sequence[Node]) -> Operands:
        """The operands' sizes, from which tiles are chosen."""
        space, step = self.space(sums), dict(enumerate(self.merged.sizes)) if sums else self.depth
        depth = tuple(step[a] for a in self.patches.contracted)
        return replace(
            _operands(site.region, functools.cache(functools.partial(self._lhs_elems, space)), depth),  # asked several times of a tile
            overlapping=self._overlapping(),
            sum_units=tuple(space.units.values()) if sums else None,
            one_step=self.one_step and not sums,
            prices=site.prices,
        )

    def tilings(self, chip: Chip, operands: Operands, sums: Sequence[Node]) -> Iterator[Tiling]:
        """The tilings to try, with ever smaller tiles."""
        spaces = {one: self.space(sums, one) for one in Stationary}
        whole = self.lengths_by_role(self.merged.sizes)
        for edge in shrinking(MATRIX_EDGE):
            yield from (self._tiling(spaces[tiles.stationary], tiles) for tiles in matmul_tiles(whole, chip, operands, edge))

    def _overlapping(self) -> tuple[int, ...]:
        """Positions, among the rows, of the shorter one of the two axes of each sliding pair: the kernel's axes of a convolution."""
        short = {min((s.outer, s.inner), key=self.merged.sizes.__getitem__) for s in self.sliding if s.slides}  # type: ignore[arg-type]
        return tuple(i for i, a in enumerate(self.patches.rows) if a in short)

    def lengths_by_role(self, sizes: Sequence[int]) -> MatmulSizes:
        """The lengths of all axes by their role: batch, rows, columns, contracted."""
        batch, rows, columns, contracted = (tuple(sizes[a] for a in kind) for kind in self.patches.roles)
        return MatmulSizes(batch, rows, columns, contracted)

    def _lhs_elems(self, space: Space, tiles: MatmulSizes) -> int:
        """Elements of a tile of the left operand, halos included."""
        axes = self._cut(space, self._tiling(space, tiles)).axes
        return math.prod(axes[a].size for a in self.lhs)

    def _tiling(self, space: Space, tiles: MatmulSizes) -> Tiling:
        kinds = self.patches.roles
        tile_of = {a: n for kind, lengths in zip(kinds, tiles.kinds, strict=True) for a, n in zip(kind, lengths, strict=True)}
        return space.tiling([tile_of.get(a, n) for a, n in enumerate(space.sizes)])

    def nest(self, space: Space, tiling: Tiling) -> Nest:
        """The axes cut as a tiling says.

        Raises:
          CompileError: the tiling is none of this product.
        """
        space.check(tiling)
        return self._cut(space, tiling)

    def _cut(self, space: Space, tiling: Tiling) -> Nest:
        """The tiled loop nest; the tiles of sliding axes, with their halos, follow from those of their two labels."""
        nest = cut(space.sizes, tiling.tile, space.sequential)
        for sliding in self.sliding:
            nest = sliding.cut(nest)
        return nest

    def levels(self, whole: Contraction) -> tuple[Level, Level, Level]:
        """The levels of lhs, rhs and result; each product gets at least one row, column and contracted axis."""
        batch, rows, columns, contracted = self.patches.roles
        row, column, depth = (() if rows else (ROW,)), (() if columns else (COLUMN,)), (() if contracted else (DEPTH,))
        points = tuple(s.own for s in self.sliding if isinstance(s.own, Unit))
        out, batch_end = self.patches.out, len(batch)
        left = Level(with_halos(whole), (*self.lhs, *row, *depth))
        right = Level(whole.rhs, (*points, *self.patches.rhs, *depth, *column))
        return left, right, Level(whole.out, (*out[:batch_end], *row, *out[batch_end:], *column))

    def summed(self, out: Level, whole: Contraction) -> Level:
        """The level of the sums over rows: the axes of the results, all but the columns with size 1."""
        columns = self.patches.columns
        return Level(whole.columns, tuple(a if a in columns else Unit(f"summed {i}") for i, a in enumerate(out.axes)))

    def accumulate_fields(self, levels: tuple[Level, Level, Level]) -> dict[str, Any]:
        """acc_axes, a_axes, b_axes, pairs and bounds of the instruction: labels are small numbers, in order of appearance."""
        numbers: dict[Axis, int] = {}
        left, right, out = (level.axes for level in levels)
        own: dict[Axis, Axis] = {s.axis: s.own for s in self.sliding}
        named = tuple(tuple(numbers.setdefault(a, len(numbers)) for a in axes) for axes in (out, tuple(own.get(a, a) for a in left), right))
        pairs = tuple(s.sliding(left.index(s.axis), numbers[s.inner]) for s in self.sliding if s.outer is not None and s.inner is not None)
        bounds = tuple(replace(x, terms=tuple((numbers[a], factor) for a, factor in terms)) for x, terms in self._bounds())
        return {"acc_axes": named[0], "a_axes": named[1], "b_axes": named[2], "pairs": pairs, "bounds": bounds}

    def _bounds(self) -> Iterator[tuple[Bound, Sequence[tuple[Axis, int]]]]:
        """The bounds that do not hold everywhere, with their terms in merged axes.

        A kernel that is read from its end is counted from there. A single position of a sliding axis stands at 0 of an axis of size 1.
        """
        sizes = dict(enumerate(self.merged.sizes))
        reversed_ = {s.inner: sizes[s.inner] for s in self.sliding if s.reverse and s.inner is not None}
        yield from ((s.bound, s.bound.terms or ((s.own, 1),)) for s in self.sliding if not s.bound.always(sizes))
        of_rhs = (merged_bound(x, self.merged.axis_of).from_the_end(reversed_) for x in self.rhs_bounds)
        yield from ((x, x.terms) for x in of_rhs if not x.always(sizes))


def product_of(region: Region) -> Node:
    """The only product of a region."""
    (node,) = (n for op in PRODUCTS for n in region.find(op))
    return node


def rounded_result(region: Region) -> Value:
    """The value that leaves the accumulators: the product converted to a 16-bit float if that is its only use, else the product itself."""
    sums = product_of(region).result
    users = [n for n in region.nodes if sums in n.inputs]
    rounding = len(users) == 1 and users[0].op == "convert" and sums.dtype == F32 and users[0].result.dtype in (BF16, F16)
    return users[0].result if rounding and sums not in region.results else sums


def _operands(region: Region, lhs_elems: Callable[[MatmulSizes], int], depth: tuple[int, ...]) -> Operands:
    """Bytes per element of a product's tiles: of its operands as loaded, and of its result with all epilogue operands and outputs."""
    product = product_of(region)
    made_from = {n.result: n.inputs[0] for n in region.find("convert")}
    entering = [v if v in region.inputs else made_from.get(v, v) for v in product.inputs]
    others = (*(v for v in region.inputs if v not in entering), *region.results)

    def beside(leaving: Value) -> int:
        return sum(SLOTS * v.dtype.bytes for v in dict.fromkeys((*others, leaving)) if v.shape == product.result.shape)

    lhs, rhs = (v.dtype.bytes for v in entering)
    return Operands(lhs, rhs, beside(product.result), beside(rounded_result(region)), lhs_elems, depth)


def dot_levels(region: Region) -> list[Roots]:
    """The levels of a product: left operand, right operand, results, and, if there are sums of the results over all rows, their values."""
    node, reductions = product_of(region), live_reductions(region)
    whole = contraction_of(node)
    made, sums = region.results_by_stage
    levels: list[Roots] = [((node.inputs[0],), with_halos(whole)), ((node.inputs[1],), whole.rhs)]
    levels.append(((*made, *(r.inputs[0] for r in reductions)), whole.out))
    return [*levels, (sums, whole.columns)] if sums else levels


def product_seconds(site: Site) -> float:
    """The estimated time of a product's kernel with the best tiles, without its elementwise work; endless if no tiles may fit."""
    product, sums = Product.of(product_of(site.region), site.region), live_reductions(site.region)
    whole, operands = product.lengths_by_role(product.merged.sizes), product.operands(site, sums)
    tried = (tiles for edge in shrinking(MATRIX_EDGE) for tiles in matmul_tiles(whole, site.chip, operands, edge))
    best = next((tiles for tiles in tried if operands.may_fit(tiles, site.chip)), None)
    return math.inf if best is None else tiles_seconds(whole, best, site.chip, operands)[0]


def emit_matmul(site: Site, fallback: Callable[[], Plans] | None = None) -> Plans:
    """One kernel: zero the accumulators, accumulate over the contracted tiles, read, and the elementwise epilogue, with sums over the rows.

    (Then the contraction is one block: results are there after one step.) `fallback`: the plans to use where no tiling fits on the chip.
    """
    region, dot = site.region, product_of(site.region)
    whole = contraction_of(dot)
    lhs, rhs = dot.inputs
    if math.prod(dot.result.shape) == 0:
        return ()
    if 0 in (*lhs.shape, *rhs.shape):
        return emit_map_with(site, {dot: 0})
    product, reductions = Product.of(dot, region), live_reductions(region)
    levels, (made, sums) = product.levels(whole), region.results_by_stage
    fields, operands = product.accumulate_fields(levels), product.operands(site, reductions)

    def attempt(tiling: Tiling) -> KernelBuilder:
        stays = product.stationary_of_sums if reductions else product.stationary(tiling)
        nest = product.nest(product.space(reductions, stays), tiling)
        start, end = ("prologue", "epilogue") if stays is Stationary.RESULT and not sums else ("body", "body")
        kernel = site.kernel(nest.grid)
        left, right, out = (LevelEmitter(kernel, region, product.merged, nest, level, {}, {}) for level in levels)
        below = LevelEmitter(kernel, region, product.merged, nest, product.summed(levels[2], whole), {}, {})
        acc = kernel.tile(dot.result.dtype, out.axes, "acc")
        kernel.section = "prologue"
        init_accumulators(kernel, below, reductions)
        kernel.section = start
        kernel.source = dot.source
        kernel.emit(MatmulZero(acc))
        kernel.section = "prologue" if stays is Stationary.LHS else "body"
        (a,) = left.emit([lhs])
        kernel.section = "prologue" if stays is Stationary.RHS else "body"
        (b,) = right.emit([rhs])
        kernel.section, kernel.source = "body", dot.source
        precision = entering_precision(site.chip, dot.attrs["precision"], a.dtype)
        kernel.emit(MatmulAccumulate(acc, a, b, **fields, precision=precision, block=product.block(nest)))
        kernel.section = end
        leaving = rounded_result(region) if operands.rounds(product.lengths_by_role(tiling.tile), site.chip) else dot.result
        out.tiles[leaving] = out.new(leaving.dtype)
        kernel.emit(MatmulRead(out.tiles[leaving], acc))
        out.emit((*made, *(r.inputs[0] for r in reductions)))  # all is loaded before results are stored in an operand's place
        out.store(region.stored(made))
        accumulate(kernel, out, below, reductions, below.level.missing)
        kernel.section = "epilogue"
        below.emit(sums)
        below.store(region.stored(sums))
        return kernel

    return site.plan_kernel(attempt, lambda rule: product.tilings(site.chip, operands, reductions), fallback)
