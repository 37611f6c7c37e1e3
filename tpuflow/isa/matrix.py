"""Matrix instructions: initialise an accumulator, multiply-accumulate one K-tile, read and convert."""

from __future__ import annotations

import math
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import DType
from tpuflow.isa import instruction as field
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.bounds import Bound, Starts, exists
from tpuflow.isa.cost import Cost, ShapeOf
from tpuflow.isa.instruction import Instruction, Pair, Tile, TileAxis, instr
from tpuflow.isa.splitting import EXACT, PRECISIONS, SPLITS, multiplied


@instr(0x30, "mm_zero", "fills")
class MatmulZero(Instruction):
    """acc = 0 (an f32 or s32 tile in "acc")."""

    acc: Tile = field.dst()

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    def meaning(self, ar: Arithmetic, shape: tuple[int, ...]) -> Any:
        """Zeros."""
        return ar.full(shape, 0, self.acc.dtype)

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """Free: the array clears while it fills."""
        return Cost()


@instr(0x31, "mm_accumulate", "accumulates")
class MatmulAccumulate(Instruction):
    """acc = acc + round(a . b): one K-tile.

    Axes are named by small integers, as in einsum: a label in a, b and acc is a batch axis, in a and acc (b and acc) a row (column)
    axis, in a and b alone a contracted one. The products of the K-tile are summed in float64 in ascending order of the contracted
    positions (row-major in a's axis order), rounded once to f32, and added to the accumulator in f32. Integer operands sum exactly
    modulo 2^32.

    An axis of a that is in `pairs` carries two labels, its own and the pair's: at their positions i and r the operand is
    a[i * stride + r * dilation] along that axis, which is what makes the product a convolution. The tile's axis is the halo of the
    whole tile, (I - 1) * stride + (R - 1) * dilation + 1 elements; in the order of summation it stands for the axes i, r.

    `bounds` say where an operand has elements, and where zeros around or between them: those take part in no product. A bound is one of
    a if it is of both labels of a pair, its factors being the pair's stride and dilation, or of other labels of a; else of b.

    `precision` is how f32 operands enter the array: as they are (exact; so do all other types); rounded to bf16 or f16, in one pass; or
    as sums of two (bf16_x3) or three (bf16_x6) bf16 numbers, of which the three or six largest products are made. Each pass is summed
    and rounded as a K-tile; the passes are added in f32, smallest first, and their sum to the accumulator. Where all but the largest
    do not add up to a finite number, the largest alone counts.
    """

    acc: Tile = field.inout()
    a: Tile = field.src()
    b: Tile = field.src()
    acc_axes: tuple[int, ...] = field.axes_field()
    a_axes: tuple[int, ...] = field.axes_field()
    b_axes: tuple[int, ...] = field.axes_field()
    pairs: tuple[Pair, ...] = field.pairs_field()
    precision: str = field.choice(PRECISIONS, default=EXACT)
    bounds: tuple[Bound, ...] = field.bounds_field()

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    def sizes(self, shape_of: ShapeOf) -> dict[int, int]:
        """Length of every label. A pair's halo is no label's length: its labels are in acc or b too."""
        halos = {self.a_axes[p.axis] for p in self.pairs}
        found = {x: n for x, n in zip(self.a_axes, shape_of(self.a), strict=True) if x not in halos}
        return found | dict(zip(self.b_axes + self.acc_axes, (*shape_of(self.b), *shape_of(self.acc)), strict=True))

    @property
    def patch_axes(self) -> tuple[int, ...]:
        """Labels of a's axes once each pair is two of them."""
        inner = {p.axis: (p.label,) for p in self.pairs}
        return tuple(label for axis, own in enumerate(self.a_axes) for label in (own, *inner.get(axis, ())))

    @property
    def axis_of(self) -> dict[int, TileAxis]:
        """The tile axis of every label."""
        halos = {p.axis for p in self.pairs}
        own = {x: axis for n, (x, axis) in enumerate(zip(self.a_axes, self.a.axes, strict=True)) if n not in halos}
        return own | dict(zip(self.b_axes + self.acc_axes, self.b.axes + self.acc.axes, strict=True))

    def bounds_by_operand(self) -> tuple[tuple[Bound, ...], tuple[Bound, ...]]:
        """The bounds of a and those of b."""
        of_a = tuple(x for x in self.bounds if x.factors(self.a_axes, self.pairs) is not None)
        return of_a, tuple(x for x in self.bounds if x not in of_a)

    def meaning(self, ar: Arithmetic, acc: Any, a: Any, b: Any, start: Starts) -> Any:
        """The new accumulator; `start` says where every label stands."""
        sizes = dict(zip(self.b_axes + self.acc_axes, b.shape + acc.shape, strict=True))
        of_a, of_b = self.bounds_by_operand()
        a_exists = exists(of_a, self.a_axes, self.pairs, a.shape, start, ar.positions)
        b_exists = exists(of_b, self.b_axes, (), b.shape, start, ar.positions)
        for p in sorted(self.pairs, key=lambda p: -p.axis):
            cut = (p.axis, sizes[self.a_axes[p.axis]], sizes[p.label], p.stride, p.dilation)
            if a_exists is not None:
                a_exists = ar.patches(ar.broadcast(a_exists, a.shape, range(len(a.shape))), *cut)
            a = ar.patches(a, *cut)

        def multiply(x: Any, y: Any, dtype: DType) -> Any:
            return ar.matmul(x, y, self.patch_axes, self.b_axes, self.acc_axes, dtype, self.acc.dtype, a_exists, b_exists)

        product = multiplied(ar, a, b, self.a.dtype, self.precision, multiply)
        return ar.binary("add", acc, product, self.acc.dtype)

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """Cycles of the arrays for this tile's multiply-adds, whole blocks of them: a convolution's patches are rows like any other.

        A multiply-add counts once, however many passes it takes.
        """
        sizes = self.sizes(shape_of)
        a, b, out = set(self.patch_axes), set(self.b_axes), set(self.acc_axes)

        def length(labels: set[int]) -> int:
            return math.prod(sizes[label] for label in labels)

        batch, rows, columns, depth = length(a & b & out), length((a - b) & out), length((b - a) & out), length((a | b) - out)
        dtype, passes = self._entering()
        return Cost(passes * chip.matrix_cycles(batch, rows, columns, depth, dtype.name), macs=batch * rows * columns * depth)

    def _entering(self) -> tuple[DType, int]:
        """The type in which operands enter the array, and how often they do."""
        row = SPLITS.get(self.precision)
        return (row.dtype, len(row.passes)) if row else (self.a.dtype, 1)


@instr(0x32, "mm_read", "elementwise")
class MatmulRead(Instruction):
    """dst = acc, moved to vector memory, same type and bits."""

    dst: Tile = field.dst()
    acc: Tile = field.src()

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    def meaning(self, ar: Arithmetic, acc: Any) -> Any:
        """The same values."""
        return acc

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """The last sum leaves the array, then the accumulators drain through the vector lanes."""
        return Cost(chip.matrix_fill_cycles + chip.vector_cycles(shape_of(self.dst), self.dst.dtype.bytes))
