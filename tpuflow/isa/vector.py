"""Vector and scalar instructions: elementwise work, conversions, broadcasts, reductions, prefix scans and sorts on tiles.

An instruction whose destination is in "smem" (rank 0) runs on the scalar queue, otherwise on the vector queue; its meaning is the
same. Elementwise operands have the destination's valid shape; each result is rounded once to the destination's type.
`meaning` receives values in the arithmetic's own form (`tpuflow.isa.arithmetic`) and returns the new value of each destination.
"""

from __future__ import annotations

import math
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.isa import instruction as field
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.cost import Cost, ShapeOf
from tpuflow.isa.elementwise import BINARY, COMPARE, CUMULATIVE, REDUCE, UNARY, codes
from tpuflow.isa.instruction import Instruction, Tile, instr


class _Compute(Instruction):
    """Common to all compute instructions: the queue follows from where the destination lies."""

    __slots__ = ()

    @property
    def queue(self) -> str:
        """The scalar queue for registers, else the vector queue."""
        return "scalar" if self.writes()[0].space == "smem" else "vector"

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """How often the largest operand, of valid `shape`, goes through the vector lanes."""
        return 1

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """The largest operand through the vector lanes, `passes` times; an operation on registers takes a cycle a pass."""
        tiles = (*self.writes(), *self.reads())
        shape = max(map(shape_of, tiles), key=math.prod)
        cycles = max(chip.vector_cycles(shape_of(t), t.dtype.bytes) for t in tiles) if shape else 1
        passes = self.passes(chip, shape)
        return Cost(cycles=passes * cycles, element_ops=passes * math.prod(shape))


_ADDRESSED = Cost(cycles=1, element_ops=1)


@instr(0x10, "constant", "fills")
class Constant(_Compute):
    """dst = value, everywhere."""

    dst: Tile = field.dst()
    value: int | float | bool = field.immediate()

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """One register: readers address it over again."""
        return _ADDRESSED

    def meaning(self, ar: Arithmetic, shape: tuple[int, ...]) -> Any:
        """A splat of the immediate."""
        return ar.full(shape, self.value, self.dst.dtype)


@instr(0x11, "iota", "fills")
class Iota(_Compute):
    """dst[..., j, ...] = the position of element j on the whole axis `axis` (tile index x tile size + j)."""

    dst: Tile = field.dst()
    axis: int = field.number()

    def meaning(self, ar: Arithmetic, shape: tuple[int, ...], start: Any) -> Any:
        """Positions start, start + 1, ... along the axis."""
        return ar.iota(shape, self.axis, start, self.dst.dtype)


@instr(0x12, "unary", "elementwise")
class Unary(_Compute):
    """dst = op(a)."""

    op: str = field.choice(codes(UNARY))
    dst: Tile = field.dst()
    a: Tile = field.src()

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """More than one for divisions, roots and transcendental functions."""
        return chip.special_passes if UNARY[self.op].special else 1

    def meaning(self, ar: Arithmetic, a: Any) -> Any:
        """One rounding of the exact result."""
        return ar.unary(self.op, a, self.a.dtype)


@instr(0x13, "is_finite", "elementwise")
class IsFinite(_Compute):
    """dst = a is neither infinite nor NaN (pred)."""

    dst: Tile = field.dst()
    a: Tile = field.src()

    def meaning(self, ar: Arithmetic, a: Any) -> Any:
        """True where finite."""
        return ar.is_finite(a, self.a.dtype)


@instr(0x14, "binary", "elementwise")
class Binary(_Compute):
    """dst = op(a, b)."""

    op: str = field.choice(codes(BINARY))
    dst: Tile = field.dst()
    a: Tile = field.src()
    b: Tile = field.src()

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """More than one for divisions, roots and transcendental functions."""
        return chip.special_passes if BINARY[self.op].special else 1

    def meaning(self, ar: Arithmetic, a: Any, b: Any) -> Any:
        """One rounding of the exact result."""
        return ar.binary(self.op, a, b, self.a.dtype)


@instr(0x15, "compare", "elementwise")
class Compare(_Compute):
    """dst = a op b (pred); comparisons with NaN are false, except ne."""

    op: str = field.choice(codes(COMPARE))
    dst: Tile = field.dst()
    a: Tile = field.src()
    b: Tile = field.src()

    def meaning(self, ar: Arithmetic, a: Any, b: Any) -> Any:
        """Truth values."""
        return ar.compare(self.op, a, b, self.a.dtype)


@instr(0x16, "select", "elementwise")
class Select(_Compute):
    """dst = on_true where pred else on_false; moves bits, rounds nothing."""

    dst: Tile = field.dst()
    pred: Tile = field.src()
    on_true: Tile = field.src()
    on_false: Tile = field.src()

    def meaning(self, ar: Arithmetic, pred: Any, on_true: Any, on_false: Any) -> Any:
        """Bits of one or the other."""
        return ar.select(pred, on_true, on_false, self.dst.dtype)


@instr(0x17, "convert", "elementwise")
class Convert(_Compute):
    """dst = a in dst's type: round to nearest even; float to integer truncates and saturates, NaN gives 0."""

    dst: Tile = field.dst()
    a: Tile = field.src()

    def meaning(self, ar: Arithmetic, a: Any) -> Any:
        """The converted values."""
        return ar.convert(a, self.a.dtype, self.dst.dtype)


@instr(0x18, "bitcast", "elementwise")
class Bitcast(_Compute):
    """dst = the bits of a read as dst's type, of the same width."""

    dst: Tile = field.dst()
    a: Tile = field.src()

    def meaning(self, ar: Arithmetic, a: Any) -> Any:
        """The same bits."""
        return ar.bitcast(a, self.a.dtype, self.dst.dtype)


@instr(0x19, "broadcast", "repeats")
class Broadcast(_Compute):
    """dst = a stretched: axis i of a lies along axis `axes[i]` of dst; an axis of size 1 is repeated. `a` may be a register."""

    dst: Tile = field.dst()
    a: Tile = field.src()
    axes: tuple[int, ...] = field.axes_field()

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """One register where a number or whole rows are repeated: readers address them over again. Else the whole tile is written."""
        minor = len(self.dst.axes) - 1
        row = minor in self.axes and shape_of(self.a)[self.axes.index(minor)] == shape_of(self.dst)[minor]
        return _ADDRESSED if row or math.prod(shape_of(self.a)) == 1 else _Compute.cost(self, chip, shape_of)

    def meaning(self, ar: Arithmetic, a: Any, shape: tuple[int, ...]) -> Any:
        """Repeated values of the given (valid) shape."""
        return ar.broadcast(a, shape, self.axes)


@instr(0x1A, "transpose", "permutes")
class Transpose(_Compute):
    """dst axis i = a axis `permutation[i]`."""

    dst: Tile = field.dst()
    a: Tile = field.src()
    permutation: tuple[int, ...] = field.axes_field()

    def meaning(self, ar: Arithmetic, a: Any) -> Any:
        """The permuted tile."""
        return ar.transpose(a, self.permutation)


@instr(0x1C, "reduce_into", "accumulates")
class ReduceInto(_Compute):
    """acc = op(op(acc, block 0), block 1) ...: what lies along `axes` of a, row-major, in blocks of `block` elements, one after the other.

    Each block is one number: a halving tree, which pads with the identity to a power of two and combines the lower half with the
    upper half until one is left. Every step is rounded to a's type. So a tile of several blocks gives the bits of several tiles.
    """

    op: str = field.choice(REDUCE)
    acc: Tile = field.inout()
    a: Tile = field.src()
    axes: tuple[int, ...] = field.axes_field()
    block: int = field.number()

    def meaning(self, ar: Arithmetic, acc: Any, a: Any) -> Any:
        """The new accumulator."""
        return ar.reduce(self.op, acc, a, self.axes, self.block, self.a.dtype)


@instr(0x1D, "cumulative", "scans")
class Cumulative(_Compute):
    """dst[j] = op(...op(op(carry, a[0]), a[1])..., a[j]) along `axis`, left to right; carry = the last dst. Carry has size 1 there."""

    op: str = field.choice(CUMULATIVE)
    dst: Tile = field.dst()
    carry: Tile = field.inout()
    a: Tile = field.src()
    axis: int = field.number()

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """One for every doubling of the distance that a scan carries over."""
        return max(1, (shape[self.axis] - 1).bit_length()) if shape else 1

    def meaning(self, ar: Arithmetic, carry: Any, a: Any) -> Any:
        """(dst, new carry)."""
        return ar.cumulative(self.op, carry, a, self.axis, self.a.dtype)


@instr(0x1E, "sort", "sorts")
class Sort(_Compute):
    """dsts = srcs sorted together along `axis` by the first `keys` of them, stable, ascending; -0 equals 0, NaN comes last."""

    dsts: tuple[Tile, ...] = field.dsts()
    srcs: tuple[Tile, ...] = field.srcs()
    axis: int = field.number()
    keys: int = field.number()

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """The stages of a bitonic network, every operand compared and exchanged in each."""
        stages = (shape[self.axis] - 1).bit_length() if shape else 0
        return max(1, len(self.srcs) * stages * (stages + 1) // 2)

    def meaning(self, ar: Arithmetic, *srcs: Any) -> Any:
        """The sorted tiles, one for each source."""
        return ar.sort(srcs, tuple(t.dtype for t in self.srcs), self.axis, self.keys)
