"""Row kernels: reductions over whole rows and elementwise work on the rows and their reductions, while the rows are on the chip.

Products that make or consume rows run in the same kernel, so attention stores neither scores nor weights. Tiles of rows are sequential
then: operands that do not depend on the row (keys, values) are loaded once for all tiles, and sums over all rows (their gradients) stay in
accumulators.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.chips import Chip
from tpuflow.errors import CompileError
from tpuflow.isa.instruction import Tile
from tpuflow.isa.matrix import MatmulAccumulate, MatmulRead, MatmulZero
from tpuflow.isa.vector import Broadcast
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.matmul import entering_precision
from tpuflow.lower.emit.nest import Axis, Merged, Nest, Unit, cut_as, merge, walk
from tpuflow.lower.emit.reduce import accumulate, init_accumulators
from tpuflow.lower.emit.region import Level, LevelEmitter, Region, Roots, operands
from tpuflow.lower.emit.row_spaces import Product, Spaces, repeats
from tpuflow.lower.emit.site import Plans, Site, TileRule
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.products import block_of, sizes_of
from tpuflow.lower.graph.tiling import Space, Tiling
from tpuflow.lower.tiling import TILE_BYTES, rows_tile_bytes, shrinking

PARTS = 2  # into which a step's batches are divided in a kernel with products, so that vector and matrix unit overlap


def row_levels(region: Region) -> list[Roots]:
    """The levels of products, rows and per-row values: see `Spaces.levels`."""
    return Spaces.of(region).levels


def emit_rows(site: Site) -> Plans:
    """One kernel, its grid over the axes that are not reduced."""
    spaces = Spaces.of(site.region)
    if 0 in spaces.sizes.values():
        return ()
    parts = (*(work for p in spaces.products for work in p.work.values()), spaces.rows, spaces.per_row)
    labels = [used for part, level in zip(parts, spaces.levels, strict=True) for used in operands(part, [level])]
    apart = [(x,) for p in spaces.products for x in p.contracted if _block(p)]
    merged = merge(spaces.sizes, [*labels, spaces.kept, *(own for p in spaces.products for _, own in p.sides), *apart])

    by_place = {x for part, (_, own) in zip(parts, spaces.levels, strict=True) for x in part.walked_by_place(own)}
    cuts = _Cuts.of(spaces, merged, by_place)

    def candidates(rule: TileRule) -> Iterator[Tiling]:
        return (cuts.tiling(site, rule, budget, parts) for budget, parts in _sizes_to_try(spaces, site.chip))

    return site.plan_kernel(lambda tiling: _emitted(site, spaces, merged, cuts.nests(tiling)), candidates)


def _sizes_to_try(spaces: Spaces, chip: Chip) -> Iterator[tuple[int, int]]:
    """(bytes of a tile of rows, parts of the batches in a step) to try, from large to small; of one size, two parts come before one."""
    if not spaces.products:
        yield from ((budget, 1) for budget in shrinking(TILE_BYTES))
        return
    largest = rows_tile_bytes(chip)
    for budget in shrinking(largest):
        yield budget, PARTS
        yield budget if spaces.reduced else min(PARTS * budget, largest), 1


def _emitted(site: Site, spaces: Spaces, merged: Merged, nests: Sequence[Nest]) -> KernelBuilder:
    """All parts of the batches, software-pipelined: the products that make the rows of the next part precede the work on this one, and what
    is done with the results of products that consume rows comes last, so that the vector unit waits for no product between two parts.

    Tiles that one unit fills for the other need a single slot then: until the next step fills it again, the other part is worked on.
    """
    kernel = site.kernel(nests[0].grid)
    kernel.handed_slots = 1 if len(nests) == PARTS else kernel.handed_slots
    parts = [_RowEmitter.of(site, spaces, merged, nest, kernel) for nest in nests]
    parts[0].make_rows()
    for number, part in enumerate(parts, 1):
        for following in parts[number : number + 1]:
            following.make_rows()
        part.work_on_rows()
    for part in parts:
        part.finish()
    return kernel


@dataclass(frozen=True, slots=True)
class _Cuts:
    """How the merged axes of a row kernel may be tiled. `rows`: the axes of the rows; of these, `along` (the reduced ones) stay whole, and
    those that products contract are tiled in multiples of `units`. `in_turn`: the sequential axes. `batch`: the axis that is divided into
    parts for a step, if there is one.
    """

    merged: Merged
    rows: tuple[int, ...]
    along: tuple[int, ...]
    units: Mapping[int, int]
    in_turn: tuple[int, ...]
    batch: int | None

    @classmethod
    def of(cls, spaces: Spaces, merged: Merged, by_place: Container[int]) -> _Cuts:
        """The possible cuts of a kernel. Batches along which values depend on the position (labels `by_place`) are not divided."""
        rows, along = merged.fold((*spaces.kept, *spaces.reduced)), merged.fold(spaces.reduced)
        summed = {
            a: _block(p) or merged.sizes[a] for p in spaces.products for a in merged.fold(p.contracted) if a in rows and a not in along
        }
        fixed = merged.fold([x for x in spaces.kept if x in by_place])
        batches = merged.fold([x for x in spaces.kept if x in spaces.shared]) if spaces.products else ()
        batch = next((a for a in batches if a not in fixed and merged.sizes[a] % PARTS == 0), None)
        return cls(merged, rows, along, {a: summed[a] for a in sorted(summed)}, merged.fold(spaces.in_turn), batch)

    def space(self, parts: int) -> Space:
        """The iteration space of one part of the batches."""
        sizes = tuple(n // parts if a == self.batch else n for a, n in enumerate(self.merged.sizes))
        others = (a for a in range(len(sizes)) if a not in self.rows)
        return Space(sizes, self.in_turn, (*self.along, *others), self.units)

    def tiling(self, site: Site, rule: TileRule, budget_bytes: int, parts: int) -> Tiling:
        """The tiling in which a tile of rows of one part of the batches takes at most `budget_bytes`.

        While the vector unit is at the rows of one part, the matrix unit is at those of the next.
        """
        parts = 1 if self.batch is None else parts
        space = self.space(parts)
        of_rows = Space(
            tuple(space.sizes[a] for a in self.rows),
            whole=[self.rows.index(a) for a in self.along],
            units={self.rows.index(a): n for a, n in self.units.items()},
        )
        cut_rows = rule(of_rows, site.region.widest_bytes(), site.chip, budget_bytes)
        tile = dict(enumerate(space.sizes)) | dict(zip(self.rows, cut_rows, strict=True))
        return space.tiling(list(tile.values()), parts)

    def nests(self, tiling: Tiling) -> list[Nest]:
        """The nest of each part of the batches.

        Raises:
          CompileError: the tiling is none of this kernel.
        """
        if tiling.parts not in (1, PARTS if self.batch is not None else 1):
            raise CompileError(
                f"the tiling {tiling} takes batches in {tiling.parts} parts; this kernel can have {1 if self.batch is None else PARTS}."
            )
        nest = cut_as(self.space(tiling.parts), tiling)
        if tiling.parts == 1 or self.batch is None:
            return [nest]
        whole, length = self.merged.sizes[self.batch], nest.sizes[self.batch]
        walks = [walk(nest.axes[self.batch], whole, 1, origin=part * length) for part in range(tiling.parts)]
        return [replace(nest, sizes=self.merged.sizes, walks={self.batch: one}) for one in walks]


def _block(product: Product) -> int:
    """Contracted elements of a product that are summed with one rounding (`depth_block`); 0 if that is all of them."""
    sizes = sizes_of(product.node)
    block = block_of(product.node)
    return 0 if all(n == sizes[x] for x, n in block.items()) else math.prod(block.values())


@dataclass(slots=True)
class _RowEmitter:
    """The recording of one part of the batches: emitters of rows (`above`) and per-row values (`below`), and operands loaded so far."""

    site: Site
    spaces: Spaces
    merged: Merged
    nest: Nest
    kernel: KernelBuilder
    above: LevelEmitter
    below: LevelEmitter
    loaded: dict[tuple[Value, tuple[Axis, ...]], Tile] = field(default_factory=dict)
    results: list[tuple[Product, LevelEmitter]] = field(default_factory=list)

    @classmethod
    def of(cls, site: Site, spaces: Spaces, merged: Merged, nest: Nest, kernel: KernelBuilder) -> _RowEmitter:
        """The emitters for one part of the batches."""
        whole = (*spaces.kept, *spaces.reduced)
        rows, along = merged.fold(whole), merged.fold(spaces.reduced)
        short = tuple(Unit(f"reduced {a}") if a in along else a for a in rows)
        above = LevelEmitter(kernel, spaces.rows, merged, nest, Level(whole, rows), {}, {})
        below = LevelEmitter(kernel, spaces.per_row, merged, nest, Level(spaces.kept, short), {}, {})
        return cls(site, spaces, merged, nest, kernel, above, below)

    def make_rows(self) -> None:
        """Emit the products that make rows; their operands depend on no other part of the kernel."""
        self._in("body")
        for product in self.spaces.products:
            if product.makes_rows:
                self.kernel.source = product.node.source
                self._product(product)

    def work_on_rows(self) -> None:
        """Emit everything else, in program order, up to what is done with the results of products that consume rows."""
        products = {p.node: p for p in self.spaces.products}
        self._in("body")
        for node in self.site.region.nodes:
            self.kernel.source = node.source
            if node in products:
                if not products[node].makes_rows:
                    self._product(products[node])
            elif not self._crosses(node):
                for level in (self.above, self.below):
                    if node in level.region.nodes:
                        level.emit([node.result])
        self.above.store(self.spaces.rows.outputs)
        self.below.store(self.spaces.per_row.outputs)

    def finish(self) -> None:
        """Emit what is done with the results of products that consume rows."""
        for product, out in self.results:
            self.kernel.source = product.node.source
            self._in("epilogue" if self._is_summed(product) else "body")
            out.emit(out.region.results)
            out.store(out.region.outputs)
        self._in("body")

    def _crosses(self, node: Node) -> bool:
        """Emit a reduction of rows or a broadcast of a per-row value; whether the node is one of these."""
        if node.op == "reduce":
            along = tuple(i for i, a in enumerate(self.below.level.axes) if isinstance(a, Unit))
            init_accumulators(self.kernel, self.below, (node,))
            accumulate(self.kernel, self.above, self.below, (node,), along)
            return True
        if repeats(node, self.site.region.inputs):
            made = self.above.tiles[node.result] = self.above.new(node.result.dtype)
            self.kernel.emit(Broadcast(made, self.below.tiles[node.inputs[0]], tuple(range(len(self.above.axes)))))
            return True
        return False

    def _product(self, product: Product) -> None:
        """Zero, accumulate, read. A product that contracts a sequential axis is zeroed in the prologue and read in the epilogue."""
        (lhs, rhs), out = (self._operand(product, value, labels) for value, labels in product.sides[:2]), self._result(product)
        acc = self.kernel.tile(product.node.result.dtype, out.axes, "acc")
        summed = self._is_summed(product)
        self._in("prologue" if summed else "body").emit(MatmulZero(acc))
        self._in("body").emit(self._accumulate(product, acc, lhs, rhs, out.level.axes))
        self._in("epilogue" if summed else "body")
        out.tiles[product.node.result] = out.new(product.node.result.dtype)
        self.kernel.emit(MatmulRead(out.tiles[product.node.result], acc))
        if not product.makes_rows:
            self.results.append((product, out))
        self._in("body")

    def _is_summed(self, product: Product) -> bool:
        """Whether a product contracts an axis that is cut into sequential tiles."""
        return any(self._in_turn(x) for x in product.contracted)

    def _in(self, section: str) -> KernelBuilder:
        self.kernel.section = section
        return self.kernel

    def _in_turn(self, label: int) -> bool:
        """Whether an axis is cut into sequential tiles."""
        number = self.nest.axes[self.merged.axis_of[label]].grid if label in self.merged.axis_of else -1
        return number >= 0 and self.nest.grid[number].kind == "sequential"

    def _operand(self, product: Product, value: Value, labels: tuple[int, ...]) -> tuple[Tile, tuple[Axis, ...]]:
        """An operand's tile and its axes: rows, or an array that is loaded in the prologue if it has no sequential axis."""
        if value not in product.work:
            return self.above.value(value), self.above.level.axes
        axes = self._batches_first(labels)
        if (value, axes) not in self.loaded:
            self._in("body" if any(map(self._in_turn, labels)) else "prologue")
            level = LevelEmitter(self.kernel, product.work[value], self.merged, self.nest, Level(labels, axes), {}, {})
            (self.loaded[value, axes],) = level.emit([value])
            self._in("body")
        return self.loaded[value, axes], axes

    def _batches_first(self, labels: tuple[int, ...]) -> tuple[Axis, ...]:
        """The axes with the batches in front, since the last two axes of a tile are padded to registers."""
        shared = self.merged.fold([x for x in labels if x in self.spaces.shared])
        return (*shared, *(a for a in self.merged.fold(labels) if a not in shared))

    def _result(self, product: Product) -> LevelEmitter:
        if product.makes_rows:
            return self.above
        work, axes = product.work[product.node.result], self.merged.fold(product.out)
        return LevelEmitter(self.kernel, work, self.merged, self.nest, Level(product.out, axes), {}, {})

    def _accumulate(
        self, product: Product, acc: Tile, lhs: tuple[Tile, Sequence[Axis]], rhs: tuple[Tile, Sequence[Axis]], out: Sequence[Axis]
    ) -> MatmulAccumulate:
        numbers: dict[Axis, int] = {}
        of_acc, of_lhs, of_rhs = (tuple(numbers.setdefault(a, len(numbers)) for a in axes) for axes in (out, lhs[1], rhs[1]))
        precision = entering_precision(self.site.chip, product.node.attrs["precision"], lhs[0].dtype)
        block, depth = _block(product), math.prod(self.nest.axis(a).size for a in self.merged.fold(product.contracted))
        block = block if block < depth else 0
        return MatmulAccumulate(acc, lhs[0], rhs[0], of_acc, of_lhs, of_rhs, precision=precision, block=block)
