"""The choice of tile sizes, from the chip's lanes and matrix arrays, a byte budget and a cost model; called by emission templates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tpuflow.chips import Chip
from tpuflow.chips.split_k import divide, partial_sums
from tpuflow.lower.graph.blocking import ceil_div, even_blocks, fill_product
from tpuflow.lower.graph.tiling import Space

TILE_BYTES = 512 * 1024  # large enough to hide a DMA's start-up behind its transfer, small enough for ten double-buffered tiles
LEAST_ROWS_TILE_BYTES = 8 * TILE_BYTES  # of the largest tile of rows that are tried beside products, whatever the chip
LONG_ROW_BYTES = 8192 * 4  # a row of this length, or a shorter one, is tried with as many others as fill a matrix array
MATRIX_EDGE = 512  # rows and columns of a usual product tile: a few matrix arrays long
LONGER = 2  # the longest side of a product tile that is tried, in edges
SHORTEST_SIDES = 4  # the shortest side of a product tile that is tried, in columns of the matrix array
ACCUMULATOR_BYTES = 4
PATCH_EDGES = 4  # the longest side of a tile with a convolution's whole kernel, in edges
UNHIDDEN = 2  # turns to fill and drain the pipeline: the first tile's load and the last one's store overlap with nothing
PARTS = tuple(2 ** (-step / 4) for step in range(25))  # fractions of a tile's byte budget to try, down to a 64th
ROOM_MOVES = 0.5
"""Price of a byte of VMEM that tiles take from resident arrays, in HBM moves of a byte. Tried on the step of BERT-base on tpu-v6e,
modelled: 0 gives 5.77 ms, 0.5 5.62, 1 5.64, 2 5.66."""
LEAST_SHARE = 0.75  # equal blocks for all cores are at least this share of the longest possible block
MOST_COUNTS = 64  # numbers of equal blocks per core that are tried
SLOTS = 2  # of a tile that a DMA fills or empties: double buffering
MORE_SLOTS = 2  # additional slots at most, where moves are short
HIDDEN_SHARE = 1 / 8  # a DMA start-up below this share of a step's moves is not worth another slot


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..limit that fits; 1 when none does. `fits` must be monotone."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def core_blocks(extent: int, limit: int, chip: Chip, multiple: int = 1) -> int:
    """The block size of an outermost axis: as `even_blocks`, but on a chip whose cores have memories of their own equal blocks, the same
    number for every core, unless they would be much shorter. Then no core accesses another one's part (tpuflow/isa/core_parts.py).
    """
    block = even_blocks(extent, limit, multiple)
    unit = multiple if limit >= multiple else 1
    cores, pieces = chip.keeping_cores, ceil_div(extent, limit - limit % unit)
    if cores == 1 or block == extent or extent % unit:
        return block
    first = ceil_div(pieces, cores) * cores
    counts = range(first, min(int(pieces / LEAST_SHARE), first + MOST_COUNTS * cores) + 1, cores)
    return next((extent // n for n in counts if extent // unit % n == 0), block)


def fill_tile(space: Space, element_bytes: int, chip: Chip, budget_bytes: int = TILE_BYTES) -> tuple[int, ...]:
    """Tile sizes for a row-major space: whole axes from the minor one up as long as the padded tile fits, one axis cut, the rest 1.

    If the minor axis is cut, the second minor one fills the sublanes to which several rows are padded. The axes `whole` are not cut
    even if the tile does not fit then. Those in `units` are summed in order: each is cut into multiples of its unit (a block's box, which
    the tile has even if it does not fit), and only the first of them, from the minor one up, that is not whole.
    """
    sizes, whole, units = space.sizes, space.whole, space.units
    tile = [n if axis in whole else units.get(axis, 1) for axis, n in enumerate(sizes)]
    registers = (chip.vector_lanes, chip.vector_sublanes * 4 // element_bytes)  # of the minor and of the second minor axis
    second = len(sizes) - 2
    if second >= 0 and second not in whole and second not in units:
        tile[second] = min(sizes[second], registers[1])  # which a cut minor axis leaves room for

    def fits(axis: int, n: int) -> bool:
        return chip.tile_bytes((*tile[:axis], n, *tile[axis + 1 :]), element_bytes) <= budget_bytes

    in_order = True
    for back, axis in enumerate(reversed(range(len(sizes)))):
        if axis in whole:
            continue
        size, unit = sizes[axis], units.get(axis, 1)
        if axis not in units or in_order:
            room = unit * largest(ceil_div(size, unit), lambda n, axis=axis, unit=unit: fits(axis, n * unit))
            multiple = unit if axis in units else registers[back] if back < 2 else 1
            tile[axis] = even_blocks(size, room, multiple) if axis else core_blocks(size, room, chip, multiple)
        in_order = in_order and (axis not in units or tile[axis] == size)
        if tile[axis] < size and back > 0:
            break
    return tuple(tile)


def share_tile(space: Space, element_bytes: int, chip: Chip, budget_bytes: int = TILE_BYTES) -> tuple[int, ...]:
    """`fill_tile` with the part of the budget that minimises the time of the busiest core.

    A core's time is that of its tiles with their DMA start-ups, and of `UNHIDDEN` more to fill and drain the pipeline. So small arrays are
    divided among all cores, large ones evenly, and none so finely that start-ups dominate.
    """
    start_up_bytes = chip.dma_seconds * chip.core_bandwidth(chip.cores)

    def busiest(tile: tuple[int, ...]) -> float:
        turns = ceil_div(math.prod(map(ceil_div, space.sizes, tile)), chip.cores)
        return (turns + UNHIDDEN) * (chip.tile_bytes(tile, element_bytes) + start_up_bytes)

    tried = (fill_tile(space, element_bytes, chip, int(part * budget_bytes)) for part in PARTS)
    return min(dict.fromkeys(tried), key=busiest)


@dataclass(frozen=True, slots=True)
class Prices:
    """What a product takes from the other kernels of a program, from 0 to 1 (`tpuflow/lower/bus_price.py`): `bus`, the worth of a second of
    the memory bus; `room`, that of VMEM in which arrays could be resident, as a share of `ROOM_MOVES`.
    """

    bus: float = 0.0
    room: float = 1.0


ALONE = Prices()
"""Those of a product without other kernels."""


class Stationary(Enum):
    """The stationary operand of a product: what stays on the chip at a grid point while the others are streamed, step by step."""

    RESULT = "result"  # both operands are streamed, a block of the contraction per step (output-stationary)
    LHS = "lhs"  # some rows with the whole contraction; the columns are streamed
    RHS = "rhs"  # some columns with the whole contraction; the rows are streamed (weight-stationary)


@dataclass(frozen=True, slots=True)
class MatmulSizes:
    """One size for every batch, row, column and contracted axis of a product: of the whole axes, or of their tiles."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    contracted: tuple[int, ...]
    stationary: Stationary = Stationary.RESULT

    def tiles(self, tile: MatmulSizes) -> tuple[int, int, int]:
        """The number of tiles of a size: (parallel, over batch and rows; parallel, over columns; sequential, over the contraction)."""
        count = [math.prod(map(ceil_div, whole, part)) for whole, part in zip(self.kinds, tile.kinds, strict=True)]
        return count[0] * count[1], count[2], count[3]

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The axes by kind, in the order of the fields."""
        return self.batch, self.rows, self.columns, self.contracted

    @property
    def products(self) -> tuple[int, int, int, int]:
        """Lengths of batch, rows, columns and contraction as one axis each."""
        batch, rows, columns, contracted = map(math.prod, self.kinds)
        return batch, rows, columns, contracted


@dataclass(frozen=True, slots=True)
class Operands:
    """Bytes of an element of a product's left and right operand, as loaded; and what every element of the result takes on chip where sums
    leave the accumulators as they are, and where they leave them rounded, if the product's sums are only rounded (else the same).

    `lhs_elems` counts the elements of a tile of the left operand: fewer than rows times depth where they overlap, as patches do.
    `overlapping` has the positions among the rows of those along which they do (a convolution's kernel). Contracted axes are cut into
    blocks of `depth`; where results are summed over batch and rows in the same kernel, these into multiples of `sum_units`.
    `one_step`: a step may take in all of the contraction, so that an operand can stay on the chip while the other one passes.
    `prices`: of what the product takes from other kernels.
    """

    lhs_bytes: int
    rhs_bytes: int
    out_bytes: int
    rounded_bytes: int
    lhs_elems: Callable[[MatmulSizes], int]
    depth: tuple[int, ...]
    overlapping: tuple[int, ...] = ()
    sum_units: tuple[int, ...] | None = None
    one_step: bool = False
    prices: Prices = ALONE

    @property
    def summed(self) -> bool:
        """Whether results are summed over the rows."""
        return self.sum_units is not None

    def of(self, tile: MatmulSizes) -> tuple[int, int]:
        """Bytes of the tiles of the two operands."""
        batch, _, n, k = tile.products
        return self.lhs_elems(tile) * self.lhs_bytes, batch * k * n * self.rhs_bytes

    def may_fit(self, tile: MatmulSizes, chip: Chip) -> bool:
        """Whether an accumulator and two slots of what is moved find room on the chip, if nothing else takes any."""
        accumulator_bytes = math.prod(tile.products[:3]) * ACCUMULATOR_BYTES
        return accumulator_bytes <= chip.acc_bytes and self.held_bytes(tile, chip) <= chip.vmem_bytes

    def held_bytes(self, tile: MatmulSizes, chip: Chip) -> int:
        """The bytes of VMEM that tiles take."""
        return self._held_bytes(tile, self.rounded_bytes if self.rounds(tile, chip) else self.out_bytes)

    def rounds(self, tile: MatmulSizes, chip: Chip) -> bool:
        """Whether sums leave the accumulators rounded: where nothing else becomes of them, and there is no room for them as they are."""
        return self.rounded_bytes < self.out_bytes and self._held_bytes(tile, self.out_bytes) > chip.vmem_bytes

    def _held_bytes(self, tile: MatmulSizes, out_bytes: int) -> int:
        return SLOTS * sum(self.of(tile)) + math.prod(tile.products[:3]) * out_bytes

    def walk(self, whole: MatmulSizes, tile: MatmulSizes) -> Walk:
        """The grid of a product in tiles."""
        by_rows, by_columns, steps = whole.tiles(tile)
        (lhs, rhs), batch = self.of(tile), math.prod(map(ceil_div, whole.batch, tile.batch))
        if self.summed:
            return Walk(by_columns, by_rows, 0, lhs + rhs) if whole.batch else Walk(by_columns, by_rows, rhs, lhs)
        return {
            Stationary.RESULT: Walk(by_rows * by_columns, steps, 0, lhs + rhs),
            Stationary.LHS: Walk(by_rows, by_columns, lhs, rhs),
            Stationary.RHS: Walk(batch * by_columns, by_rows // batch, rhs, lhs),
        }[tile.stationary]


@dataclass(frozen=True, slots=True)
class Walk:
    """A product's grid: its parallel points and the sequential steps of each; bytes that a point loads once, and that every step loads."""

    points: int
    steps: int
    stationary_bytes: int
    streamed_bytes: int


def matmul_tiles(whole: MatmulSizes, chip: Chip, operands: Operands, edge: int = MATRIX_EDGE) -> Iterator[MatmulSizes]:
    """Tiles to try, those that take least time first: with sides of at most `LONGER` edges, the contraction cut into its blocks.

    Small products are taken several at a time. A convolution's kernel rather stays whole than its channels: neighbouring tiles along it
    would read nearly the same of the left operand. Longer sides are fewer steps, so fewer start-ups, of moves and of the arrays; shorter
    ones take less of the chip's memories, and make more tiles where there would be fewer than cores, and what these work out for each
    other has to be added up, tile by tile. An operand that stays while the other one passes is loaded once, but takes the more memory.
    """
    sides = tuple(shrinking(LONGER * edge, min(edge, SHORTEST_SIDES * chip.matrix_columns)))
    tried = [_tiles(whole, chip, rows, columns, operands) for rows, columns in itertools.product(sides, sides)]
    if operands.overlapping and not operands.summed:
        most = (PATCH_EDGES * edge, *sides)
        lanes = (chip.vector_lanes, chip.vector_lanes // 2)  # the less channels, the less that is made of sums beside them
        tried += [_tiles(whole, chip, rows, columns, operands, patches=n) for n, rows, columns in itertools.product(lanes, most, sides)]
    if operands.one_step:
        tried = [*_stationary_tiles(whole, chip, sides, operands), *tried]
    fitting = [tile for tile in dict.fromkeys(tried) if operands.may_fit(tile, chip)] or tried[-1:]
    yield from sorted(fitting, key=lambda tile: _cost(whole, tile, chip, operands))


def _stationary_tiles(whole: MatmulSizes, chip: Chip, sides: Sequence[int], operands: Operands) -> Iterator[MatmulSizes]:
    """Tiles with the whole contraction and a stationary operand. Where not all of it stays, those of the other one may be short: that
    leaves room for more of what stays, which saves loads of what passes, whose own tiles do not change how often it is loaded.

    Only those that divide the steps among cores as evenly as separate points would, since the epilogue takes time as well.
    """
    one_step = replace(operands, depth=whole.contracted)
    shares = {max(ceil_div(math.prod(whole.columns), chip.cores), chip.matrix_columns)}.difference(sides)  # a part of them for every core
    wide, short = (*sides, *shares), tuple(shrinking(sides[-1] // 2, chip.matrix_columns))
    sizes = [(stays, *size) for size in itertools.product(sides, wide) for stays in (Stationary.LHS, Stationary.RHS)]
    sizes += [(Stationary.LHS, rows, n) for rows, n in itertools.product(sides, short) if rows < math.prod(whole.rows)]
    sizes += [(Stationary.RHS, n, columns) for n, columns in itertools.product(short, wide) if columns < math.prod(whole.columns)]
    for stays, rows, columns in sizes:
        tile = replace(_tiles(whole, chip, rows, columns, one_step), stationary=stays)
        walk = operands.walk(whole, tile)
        if walk.steps > 1 and ceil_div(walk.points, chip.cores) * walk.steps == ceil_div(walk.points * walk.steps, chip.cores):
            yield tile


def _cost(whole: MatmulSizes, tile: MatmulSizes, chip: Chip, operands: Operands) -> float:
    """The cost of a tiling in seconds: the product's own time, and the price of the bandwidth and the VMEM that it takes from others."""
    own, move = tiles_seconds(whole, tile, chip, operands)
    others = move + _straying_seconds(whole, tile, chip, operands)
    return own + operands.prices.bus * others + operands.prices.room * _room_seconds(tile, chip, operands)


def _room_seconds(tile: MatmulSizes, chip: Chip, operands: Operands) -> float:
    """The price of the tiles' VMEM on a chip where arrays could be resident in it instead."""
    return ROOM_MOVES * operands.held_bytes(tile, chip) / chip.core_bandwidth(1) if chip.array_space == "vmem" else 0.0


def _straying_seconds(whole: MatmulSizes, tile: MatmulSizes, chip: Chip, operands: Operands) -> float:
    """The traffic of a product with sums whose left operand and results cannot be resident in the cores' own memories, because cores divide
    the columns, or the steps unevenly; 0 for other products.
    """
    walk, cores = operands.walk(whole, tile), chip.keeping_cores
    if cores == 1 or not operands.summed or (walk.points == 1 and walk.steps % cores == 0):
        return 0.0
    count_bytes = operands.of(whole)[0] + math.prod(whole.products[:3]) * operands.rounded_bytes // SLOTS
    return count_bytes / (cores * chip.core_bandwidth(cores)) if count_bytes <= chip.resident_bytes else 0.0


def fill_units(sizes: Sequence[int], units: Sequence[int], limit: int, chip: Chip) -> tuple[int, ...]:
    """Tile sizes with a product of at most `limit` (at least one block): multiples of `units`, the shape of a block, contiguous."""
    tile, room = list(units), max(limit // max(math.prod(units), 1), 1)  # in units
    for axis in reversed(range(len(sizes))):
        most = min(sizes[axis], room * units[axis])
        tile[axis] = even_blocks(sizes[axis], most, units[axis]) if axis else core_blocks(sizes[axis], most, chip, units[axis])
        room //= ceil_div(tile[axis], max(units[axis], 1))
        if tile[axis] < sizes[axis]:
            break
    return tuple(tile)


def _tiles(whole: MatmulSizes, chip: Chip, most_rows: int, most_columns: int, operands: Operands, *, patches: int = 0) -> MatmulSizes:
    """Tiles of at most `most_rows` and `most_columns`; with `patches`, a convolution's whole kernel and multiples of so many channels."""
    columns = fill_product(whole.columns, most_columns, chip.matrix_columns)
    if operands.sum_units is not None:
        rows = fill_units((*whole.batch, *whole.rows), operands.sum_units, most_rows, chip)
        return MatmulSizes(rows[: len(whole.batch)], rows[len(whole.batch) :], columns, operands.depth)
    multiple, first = (patches, operands.overlapping) if patches else (chip.vector_sublanes, ())
    rows = _for_cores(whole.rows, fill_product(whole.rows, most_rows, multiple, first), multiple, chip)
    m, n, k = math.prod(rows), math.prod(columns), math.prod(operands.depth)
    together = most_rows * most_columns // max(m * n, m * k, k * n)
    return MatmulSizes(fill_product(whole.batch, max(together, 1)), rows, columns, operands.depth)


def _for_cores(sizes: Sequence[int], tile: tuple[int, ...], multiple: int, chip: Chip) -> tuple[int, ...]:
    """Tile sizes whose outermost one is cut for all cores, if it is cut."""
    if not tile or tile[0] == sizes[0]:
        return tile
    return (core_blocks(sizes[0], tile[0], chip, multiple), *tile[1:])


def useful_slots(step_bytes: int, chip: Chip) -> int:
    """The number of slots for a step's tiles that hides DMA start-ups: more than two where a step moves few bytes.

    With n slots, n steps are in flight at a time, and one completes every (start-up + move + work) / n.
    """
    start_up_bytes = chip.dma_seconds * chip.core_bandwidth(chip.cores)
    return SLOTS + min(MORE_SLOTS, math.ceil(start_up_bytes / step_bytes - HIDDEN_SHARE)) if step_bytes else SLOTS


def tiles_seconds(whole: MatmulSizes, tile: MatmulSizes, chip: Chip, operands: Operands) -> tuple[float, float]:
    """(estimated seconds of a product's busiest core, seconds of its moves alone), with reading accumulators, once for every tile of the
    result, and the addition of partial sums that other cores send (tpuflow/chips/split_k.py).

    With sums over rows, or a stationary operand, the cores stream the same tiles side by side, each with columns or rows of its own.
    """
    batch, m, n, k = tile.products
    walk, side_by_side = operands.walk(whole, tile), operands.summed or tile.stationary is not Stationary.RESULT
    shape = (n,) if operands.summed else (batch, m, n)
    shared = divide(chip, walk.points, walk.steps, splits=tile.stationary is Stationary.RESULT)
    work = shared.points * shared.steps
    rate = chip.core_bandwidth(shared.cores)
    a_step = walk.stationary_bytes + walk.streamed_bytes
    reuse_distance_bytes = shared.cores * a_step if side_by_side else walk.steps * a_step  # what is moved before a tile is read again
    is_cached = reuse_distance_bytes <= chip.cache_bytes and not (side_by_side and walk.points > chip.cores)
    cached = chip.core_cache_bytes_per_second if is_cached else 0.0
    moved = shared.points * walk.stationary_bytes + work * walk.streamed_bytes
    once = min(moved, sum(operands.of(whole)) // shared.cores)
    move = once / rate + (moved - once) / max(rate, cached)
    read = chip.matrix_fill_cycles + chip.vector_cycles((batch * m, n), ACCUMULATOR_BYTES) + chip.issue_cycles
    reads = work if side_by_side else shared.points
    multiply = (work * (chip.matrix_cycles(batch, m, n, k, "f16") + chip.issue_cycles) + reads * read) / chip.clock_hz
    turns = (move + multiply + work * chip.dma_seconds) / useful_slots(walk.streamed_bytes, chip)
    sums = partial_sums(chip, ((shape, ACCUMULATOR_BYTES),), shared.cores_per_point)
    add = sums.cycles / chip.clock_hz + sums.piece_bytes / rate
    collected = add + sums.collected_bytes / rate
    first = walk.stationary_bytes / rate + move / work
    pipeline = max(move + multiply / work, multiply + first, turns)  # nothing hides the first move and the last product
    return max(pipeline, shared.points * shared.other_steps * add) + collected, move


def rows_tile_bytes(chip: Chip) -> int:
    """The size of the largest tile of rows that is tried in a kernel with products."""
    return max(LEAST_ROWS_TILE_BYTES, chip.matrix_columns * LONG_ROW_BYTES)


def shrinking(start: int, stop: int = 1) -> Iterator[int]:
    """start, start/2, start/4, ... down to stop: the sizes to try until a kernel fits on the chip."""
    while start >= stop:
        yield start
        start //= 2
