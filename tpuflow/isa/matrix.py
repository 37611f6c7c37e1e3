"""Matrix instructions: initialise an accumulator, multiply-accumulate one K-tile, read and convert."""

from __future__ import annotations

import math
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import DType
from tpuflow.isa import instruction as field
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction, SlidingAxis, Starts
from tpuflow.isa.cost import Cost, ShapeOf
from tpuflow.isa.instruction import Instruction, Tile, instr
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

    An axis of a that is in `pairs` slides: it carries two labels, its own and the pair's. At their positions i and r the operand is
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
    pairs: tuple[SlidingAxis, ...] = field.pairs_field()
    precision: str = field.choice(PRECISIONS, default=EXACT)
    bounds: tuple[Bound, ...] = field.bounds_field()

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    @property
    def contraction(self) -> Contraction:
        """The product's labels: a is lhs, b is rhs."""
        return Contraction(self.a_axes, self.b_axes, self.acc_axes, self.pairs, self.bounds)

    def meaning(self, ar: Arithmetic, acc: Any, a: Any, b: Any, start: Starts) -> Any:
        """The new accumulator; `start` says where every label stands."""
        whole = self.contraction
        sizes = whole.by_label(a.shape, b.shape, acc.shape)
        a_exists = whole.lhs_exists(a.shape, start, ar.positions)
        b_exists = whole.rhs_exists(b.shape, start, ar.positions)
        if a_exists is not None and whole.sliding:
            a_exists = whole.patches(ar.broadcast(a_exists, a.shape, range(len(a.shape))), sizes, ar.patches)
        a, product = whole.patches(a, sizes, ar.patches), whole.of_patches()

        def multiply(x: Any, y: Any, dtype: DType) -> Any:
            return ar.matmul(x, y, product, dtype, self.acc.dtype, a_exists, b_exists)

        summed = multiplied(ar, a, b, self.a.dtype, self.precision, multiply)
        return ar.binary("add", acc, summed, self.acc.dtype)

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """Cycles of the arrays for this tile's multiply-adds, whole blocks of them: a convolution's patches are rows like any other.

        A multiply-add counts once, however many passes it takes.
        """
        whole = self.contraction
        sizes = whole.by_label(shape_of(self.a), shape_of(self.b), shape_of(self.acc))
        batch, rows, columns, depth = (math.prod(sizes[x] for x in labels) for labels in whole.roles)
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
