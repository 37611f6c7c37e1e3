"""Matrix instructions: initialise an accumulator, multiply-accumulate one K-tile, read and convert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import BF16, F16, F32, S32, DType
from tpuflow.isa import instruction as field
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction, Halo, SlidingAxis
from tpuflow.isa.cost import Cost, ShapeOf
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, instr
from tpuflow.isa.refusal import Refusal
from tpuflow.isa.rules import axes_text, is_of, lies_in, rule, same_axes
from tpuflow.isa.splitting import EXACT, PRECISIONS, SPLITS, multiply_split
from tpuflow.isa.trip import Trip

MOST_BLOCKS = 64  # K-tiles of one instruction, which the engines unroll


@instr(0x30, "mm_zero", "fills", rules=(lies_in(acc="acc"), is_of("acc", F32, S32)))
class MatmulZero(Instruction):
    """acc = 0 (an f32 or s32 tile in "acc")."""

    acc: Tile = field.dst()

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    def meaning(self, ar: Arithmetic, trip: Trip) -> Any:
        """Zeros."""
        return ar.full(trip.shape, 0, self.acc.dtype)

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """Free: the array clears while it fills."""
        return Cost()


@rule("`a` and `b` are of one numeric type, `acc` is f32 (s32 for integers); f32 operands alone may be split (`precision`)")
def _entering_types(i: MatmulAccumulate) -> None:
    expected = F32 if i.a.dtype.is_float else S32
    if i.a.dtype != i.b.dtype or i.acc.dtype != expected or i.a.dtype.kind in ("pred", "storage"):
        raise Refusal(
            f"{i.acc.dtype} += {i.a.dtype} . {i.b.dtype}; expected operands of one numeric type, acc of f32 (of s32 for integers)"
        )
    if i.precision != EXACT and i.a.dtype != F32:
        raise Refusal(f"{i.a.dtype} operands at precision {i.precision}; expected {EXACT}, or operands of f32, which alone are split")


@rule("a label names equal axes in all operands that have it; a sliding axis holds just what full tiles of its two labels reach")
def _labelled(i: MatmulAccumulate) -> None:
    whole, tiles = i.contraction, (i.a.axes, i.b.axes, i.acc.axes)
    for s in whole.sliding:
        if not (1 <= s.stride < 2**31 and 1 <= s.dilation < 2**31 and s.label >= 0):
            raise Refusal(f"a pair has stride {s.stride}, dilation {s.dilation}, label {s.label}; expected them positive, the label >= 0")
    if problem := whole.problem(*map(len, tiles)):
        raise Refusal(problem)
    if found := whole.differing(*tiles):
        label, one, other = found
        raise Refusal(f"label {label} is axis {axes_text((one,))} and axis {axes_text((other,))}; expected one axis")
    for axis, halo in whole.halos(*tiles).items():
        _require_reach(i.a.axes[axis], halo)


def _require_reach(axis: TileAxis, halo: Halo) -> None:
    s, outer, inner = halo.sliding, halo.outer, halo.inner
    if axis != halo.tile or 0 in (outer.size, inner.size):
        raise Refusal(
            f"axis {s.axis} of a is {axes_text((axis,))}; expected {axes_text((halo.tile,))}, the reach of "
            f"{axes_text((outer,))} in strides of {s.stride} and {axes_text((inner,))} in strides of {s.dilation}"
        )


@rule("a bound is one of `a` or of `b`, and what it computes is a 32-bit number")
def _bounded(i: MatmulAccumulate) -> None:
    whole = i.contraction
    sizes = {label: axis.whole for label, axis in whole.by_label(i.a.axes, i.b.axes, i.acc.axes).items()}
    for bound in i.bounds:
        labels = [label for label, _ in bound.terms]
        if len(set(labels)) != len(labels) or any(factor == 0 for _, factor in bound.terms):
            raise Refusal(f"a bound has the terms {bound.terms}; expected different labels, and factors other than 0")
        if whole.along_lhs(bound) is None and whole.along_rhs(bound) is None:
            raise Refusal(
                f"a bound has the terms {bound.terms}; expected labels of a, {i.a_axes}, or of b, {i.b_axes}, or both labels of a pair "
                f"with its stride and dilation, {[(i.a_axes[p.axis], p.stride, p.label, p.dilation) for p in i.pairs]}"
            )
        low, high = bound.range(sizes)
        if not (1 <= bound.dilation < 2**31 and 0 <= bound.extent * bound.dilation < 2**31 and -(2**31) <= low and high < 2**31):
            raise Refusal(
                f"a bound of extent {bound.extent} and dilation {bound.dilation} is of places {low} to {high}; expected 32-bit numbers, "
                f"the extent >= 0, the dilation positive"
            )


@rule(f"where `block` is not 0, it is of the last contracted label, which neither slides nor has a bound, in at most {MOST_BLOCKS} blocks")
def _in_blocks(i: MatmulAccumulate) -> None:
    if not i.block:
        return
    contracted, placed = i.contraction.contracted, i.contraction.placed
    if not contracted or contracted[-1] in placed:
        raise Refusal(
            f"block is {i.block} with contracted labels {contracted} and labels {tuple(sorted(placed))} in pairs and bounds; "
            f"expected a last contracted label that is in neither, or block 0"
        )
    if (depth := i.a.axes[i.a_axes.index(contracted[-1])].size) > MOST_BLOCKS * i.block:
        raise Refusal(f"block is {i.block} of {depth} contracted positions; expected at most {MOST_BLOCKS} blocks")


@instr(
    0x31, "mm_accumulate", "accumulates",
    rules=(lies_in(acc="acc", a="vmem", b="vmem"), _entering_types, _labelled, _bounded, _in_blocks),
)  # fmt: skip
class MatmulAccumulate(Instruction):
    """acc = acc + round(a . b): one K-tile.

    Axes are named by small integers, as in einsum: a label in a, b and acc is a batch axis, in a and acc (b and acc) a row (column)
    axis, in a and b alone a contracted one. The products of the K-tile are summed in float64 in ascending order of the contracted
    positions (row-major in a's axis order), rounded once to f32, and added to the accumulator in f32. Integer operands sum exactly
    modulo 2^32.

    An axis of a that is in `pairs` slides: it carries two labels, its own and the pair's. At their positions i and r the operand is
    a[i * stride + r * dilation] along that axis, which is what makes the product a convolution. The tile's axis is the halo of the
    whole tile, (I - 1) * stride + (R - 1) * dilation + 1 elements; in the order of summation it stands for the axes i, r.

    `bounds` say where an operand has elements. Elsewhere, around or between them, it is padding, whose zeros take part in no product. A
    bound is about a if its labels are the two of a pair, with the pair's stride and dilation as factors, or other labels of a; else it is
    about b.

    `precision` is how f32 operands enter the array: as they are (exact; so do all other types); rounded to bf16 or f16, in one pass; or
    split into two (bf16_x3) or three (bf16_x6) bf16 numbers, of whose products the three or six largest are computed, one pass each. Each
    pass is summed and rounded as a K-tile; the passes are added in f32, smallest first, and their sum to the accumulator. Where the sum
    of all but the largest is not finite, the largest alone counts.

    With a `block`, the tile is a sequence of K-tiles of `block` positions each along the last contracted label, the last perhaps shorter,
    and of all positions along the others: of a convolution all of its kernel, and some channels after the others.
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
    block: int = field.number(default=0)

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    @property
    def contraction(self) -> Contraction:
        """The product's labels: a is lhs, b is rhs."""
        return Contraction(self.a_axes, self.b_axes, self.acc_axes, self.pairs, self.bounds)

    @property
    def halos(self) -> dict[int, Halo]:
        """The halo of every axis of `a` that slides."""
        return self.contraction.halos(self.a.axes, self.b.axes, self.acc.axes)

    def k_tiles(self, a: Any, b: Any, a_axes: Sequence[int], b_axes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """The operands of each K-tile in turn; a, b: arrays whose axes have the labels `a_axes`, `b_axes`."""
        if not self.block:
            yield a, b
            return
        label = self.contraction.contracted[-1]
        left, right = a_axes.index(label), b_axes.index(label)
        for start in range(0, a.shape[left], self.block):
            piece = slice(start, start + self.block)
            yield a[(*(slice(None),) * left, piece)], b[(*(slice(None),) * right, piece)]

    def meaning(self, ar: Arithmetic, trip: Trip, acc: Any, a: Any, b: Any) -> Any:
        """The new accumulator."""
        for left, right in self.k_tiles(a, b, self.a_axes, self.b_axes):
            acc = self._accumulated(ar, trip, acc, left, right)
        return acc

    def _accumulated(self, ar: Arithmetic, trip: Trip, acc: Any, a: Any, b: Any) -> Any:
        """The accumulator after one K-tile."""
        whole = self.contraction
        axes = whole.by_label(self.a.axes, self.b.axes, self.acc.axes)

        def start(label: int) -> Any:
            return trip.start(axes[label])

        sizes = whole.by_label(a.shape, b.shape, acc.shape)
        a_mask = whole.lhs_mask(a.shape, start, ar.positions)
        b_mask = whole.rhs_mask(b.shape, start, ar.positions)
        if a_mask is not None and whole.sliding:
            a_mask = whole.patches(ar.broadcast(a_mask, a.shape, range(len(a.shape))), sizes, ar.patches)
        a, product = whole.patches(a, sizes, ar.patches), whole.of_patches()

        def multiply(x: Any, y: Any, dtype: DType) -> Any:
            return ar.matmul(x, y, product, dtype, self.acc.dtype, a_mask, b_mask)

        summed = multiply_split(ar, a, b, self.a.dtype, self.precision, multiply)
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
        """(the type in which operands enter the array, the number of passes)."""
        row = SPLITS.get(self.precision)
        return (row.dtype, len(row.passes)) if row else (self.a.dtype, 1)


@rule("`dst` is of the type of `acc`, or, where that is f32, bf16 or f16")
def _leaving_types(i: MatmulRead) -> None:
    if i.dst.dtype != i.acc.dtype and (i.acc.dtype != F32 or i.dst.dtype not in (BF16, F16)):
        raise Refusal(f"dst is {i.dst.dtype}; expected {i.acc.dtype}, the type of acc, or bf16 or f16 where that is f32")


@instr(0x32, "mm_read", "elementwise", rules=(lies_in(dst="vmem", acc="acc"), _leaving_types, same_axes("dst", "acc")))
class MatmulRead(Instruction):
    """dst = acc, moved to vector memory: the same bits, or rounded to dst's type as `convert` rounds."""

    dst: Tile = field.dst()
    acc: Tile = field.src()

    @property
    def queue(self) -> str:
        """Matrix."""
        return "matrix"

    def meaning(self, ar: Arithmetic, trip: Trip, acc: Any) -> Any:
        """The same values, in dst's type."""
        return acc if self.dst.dtype == self.acc.dtype else ar.convert(acc, self.acc.dtype, self.dst.dtype)

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """The last sum leaves the array, then the accumulators drain through the vector lanes, which round on the way."""
        return Cost(chip.matrix_fill_cycles + chip.vector_cycles(shape_of(self.acc), self.acc.dtype.bytes))
