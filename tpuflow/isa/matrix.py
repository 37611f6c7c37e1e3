"""Matrix instructions: initialise an accumulator, multiply-accumulate one K-tile, read and convert."""

from __future__ import annotations

from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.isa import instruction as field
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.instruction import Instruction, Tile, instr


@instr(0x30, "mm_zero")
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

    def cost(self, chip: Chip) -> float:
        """Free: the array clears while it fills."""
        return 0.0


@instr(0x31, "mm_accumulate")
class MatmulAccumulate(Instruction):
    """acc = acc + round(a . b): one K-tile.

    Axes are named by small integers, as in einsum: a label in a, b and acc is a batch axis, in a and acc (b and acc) a row (column)
    axis, in a and b alone a contracted one. The products of the K-tile are summed in float64 in ascending order of the contracted
    positions (row-major in a's axis order), rounded once to f32, and added to the accumulator in f32. Integer operands sum exactly
    modulo 2^32.
    """

    acc: Tile = field.inout()
    a: Tile = field.src()
    b: Tile = field.src()
    acc_axes: tuple[int, ...] = field.axes_field()
    a_axes: tuple[int, ...] = field.axes_field()
    b_axes: tuple[int, ...] = field.axes_field()

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    def meaning(self, ar: Arithmetic, acc: Any, a: Any, b: Any) -> Any:
        """The new accumulator."""
        product = ar.matmul(a, b, self.a_axes, self.b_axes, self.acc_axes, self.a.dtype, self.acc.dtype)
        return ar.binary("add", acc, product, self.acc.dtype)

    def cost(self, chip: Chip) -> float:
        """Cycles of the systolic array for this tile's multiply-adds."""
        sizes = dict(zip(self.a_axes + self.b_axes, self.a.shape + self.b.shape, strict=True))
        return chip.matrix_cycles([sizes[i] for i in self.acc_axes], [s for i, s in sizes.items() if i not in self.acc_axes])


@instr(0x32, "mm_read")
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

    def cost(self, chip: Chip) -> float:
        """Cycles to drain the accumulators through the vector lanes."""
        return chip.vector_cycles(self.dst.elems)
