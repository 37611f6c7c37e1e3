"""Vector and scalar instructions: elementwise work, conversions, broadcasts, reductions, prefix scans and sorts on tiles.

An instruction whose destination is in "smem" (rank 0) runs on the scalar queue, otherwise on the vector queue; its meaning is the
same. Elementwise operands have the destination's valid shape; each result is rounded once to the destination's type.
`meaning` receives values in the arithmetic's own form (`tpuflow.isa.arithmetic`) and returns the new value of each destination.
"""

from __future__ import annotations

import math
from typing import Any

from tpuflow.chips.chip import LANE_BYTES, Chip
from tpuflow.dtypes import PRED, U32
from tpuflow.isa import instruction as field
from tpuflow.isa import philox
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.contraction import Halo, SlidingAxis
from tpuflow.isa.cost import Cost, ShapeOf
from tpuflow.isa.elementwise import BINARY, COMPARE, CUMULATIVE, REDUCE, UNARY, codes
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, instr
from tpuflow.isa.refusal import Refusal
from tpuflow.isa.rules import (
    NUMBER,
    ONE,
    axes_text,
    axis_of,
    check_immediate,
    defined_on,
    is_computed,
    is_of,
    is_of_kind,
    lies_in,
    on_lanes,
    overlap,
    require_axes,
    require_computed,
    rule,
    same_axes,
    same_dtype,
)
from tpuflow.isa.trip import Trip


class _Compute(Instruction):
    """Common to all compute instructions: the queue follows from where the destination lies."""

    __slots__ = ()

    @property
    def queue(self) -> str:
        """The scalar queue for registers, else the vector queue."""
        name, tiles = self.writing[0]
        return "scalar" if tiles(getattr(self, name))[0].space == "smem" else "vector"

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """How often the largest operand, of valid `shape`, goes through the vector lanes."""
        return 1

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """The largest operand through the vector lanes, `passes` times; an operation on registers takes a cycle a pass."""
        distinct = dict.fromkeys((shape_of(t), t.dtype.bytes) for t in (*self.writes(), *self.reads()))  # most are alike
        shape = max((shape for shape, _ in distinct), key=math.prod)
        cycles = max(chip.vector_cycles(*one) for one in distinct) if shape else 1
        passes = self.passes(chip, shape)
        return Cost(cycles=passes * cycles, element_ops=passes * math.prod(shape))


_ADDRESSED = Cost(cycles=1, element_ops=1)


@rule("`value` is a number that the type of `dst` can hold")
def _held(i: Constant) -> None:
    check_immediate(i.value, i.dst.dtype)


@instr(0x10, "constant", "fills", rules=(on_lanes, _held))
class Constant(_Compute):
    """dst = value, everywhere."""

    dst: Tile = field.dst()
    value: int | float | bool = field.immediate()

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """One register: readers address it over again."""
        return _ADDRESSED

    def meaning(self, ar: Arithmetic, trip: Trip) -> Any:
        """A splat of the immediate."""
        return ar.full(trip.shape, self.value, self.dst.dtype)


@instr(0x11, "iota", "fills", rules=(on_lanes, is_of_kind("dst", *NUMBER), axis_of("dst")))
class Iota(_Compute):
    """dst[..., j, ...] = the position of element j on the whole axis `axis` (tile index x tile size + j)."""

    dst: Tile = field.dst()
    axis: int = field.number()

    def meaning(self, ar: Arithmetic, trip: Trip) -> Any:
        """Positions start, start + 1, ... along the axis."""
        return ar.iota(trip.shape, self.axis, trip.start(self.dst.axes[self.axis]), self.dst.dtype)


@instr(0x12, "unary", "elementwise", rules=(on_lanes, same_axes("dst", "a"), same_dtype("dst", "a"), defined_on("a")))
class Unary(_Compute):
    """dst = op(a)."""

    op: str = field.choice(codes(UNARY))
    dst: Tile = field.dst()
    a: Tile = field.src()

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """More than one for divisions, roots and transcendental functions."""
        return chip.special_passes if UNARY[self.op].special else 1

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any) -> Any:
        """One rounding of the exact result."""
        return ar.unary(self.op, a, self.a.dtype)


@instr(0x13, "is_finite", "elementwise", rules=(on_lanes, same_axes("dst", "a"), is_of("dst", PRED), is_of_kind("a", *NUMBER)))
class IsFinite(_Compute):
    """dst = a is neither infinite nor NaN (pred)."""

    dst: Tile = field.dst()
    a: Tile = field.src()

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any) -> Any:
        """True where finite."""
        return ar.is_finite(a, self.a.dtype)


@instr(0x14, "binary", "elementwise", rules=(on_lanes, same_axes("dst", "a", "b"), same_dtype("dst", "a", "b"), defined_on("a")))
class Binary(_Compute):
    """dst = op(a, b)."""

    op: str = field.choice(codes(BINARY))
    dst: Tile = field.dst()
    a: Tile = field.src()
    b: Tile = field.src()

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """More than one for divisions, roots and transcendental functions."""
        return chip.special_passes if BINARY[self.op].special else 1

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any, b: Any) -> Any:
        """One rounding of the exact result."""
        return ar.binary(self.op, a, b, self.a.dtype)


@instr(
    0x15, "compare", "elementwise", rules=(on_lanes, same_axes("dst", "a", "b"), same_dtype("a", "b"), is_of("dst", PRED), is_computed("a"))
)
class Compare(_Compute):
    """dst = a op b (pred); comparisons with NaN are false, except ne."""

    op: str = field.choice(codes(COMPARE))
    dst: Tile = field.dst()
    a: Tile = field.src()
    b: Tile = field.src()

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any, b: Any) -> Any:
        """Truth values."""
        return ar.compare(self.op, a, b, self.a.dtype)


@instr(
    0x16,
    "select",
    "elementwise",
    rules=(on_lanes, same_axes("dst", "pred", "on_true", "on_false"), is_of("pred", PRED), same_dtype("dst", "on_true", "on_false")),
)
class Select(_Compute):
    """dst = on_true where pred else on_false; moves bits, rounds nothing."""

    dst: Tile = field.dst()
    pred: Tile = field.src()
    on_true: Tile = field.src()
    on_false: Tile = field.src()

    def meaning(self, ar: Arithmetic, trip: Trip, pred: Any, on_true: Any, on_false: Any) -> Any:
        """Bits of one or the other."""
        return ar.select(pred, on_true, on_false, self.dst.dtype)


@instr(0x17, "convert", "elementwise", rules=(on_lanes, same_axes("dst", "a")))
class Convert(_Compute):
    """dst = a in dst's type: round to nearest even; float to integer truncates and saturates, NaN gives 0.

    What is too large for a float type is infinity there, or NaN in types that have none.
    """

    dst: Tile = field.dst()
    a: Tile = field.src()

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any) -> Any:
        """The converted values."""
        return ar.convert(a, self.a.dtype, self.dst.dtype)


@rule("the types of `dst` and `a` are of one width, of whole bytes")
def _of_one_width(i: Bitcast) -> None:
    if i.dst.dtype.bits != i.a.dtype.bits or i.a.dtype.bits < 8:
        raise Refusal(f"bits of {i.a.dtype} read as {i.dst.dtype}; expected a type of the same width, of whole bytes")


@instr(0x18, "bitcast", "elementwise", rules=(on_lanes, same_axes("dst", "a"), _of_one_width))
class Bitcast(_Compute):
    """dst = the bits of a read as dst's type, of the same width."""

    dst: Tile = field.dst()
    a: Tile = field.src()

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any) -> Any:
        """The same bits."""
        return ar.bitcast(a, self.a.dtype, self.dst.dtype)


@rule("`state` has four elements in vmem, which `dst` need not; `strides` are one an axis of `dst`")
def _drawn(i: Random) -> None:
    require_axes("state", i.state, (TileAxis(4),))
    if i.state.space != "vmem":
        raise Refusal(f"state lies in {i.state.space}; expected vmem")
    if len(i.strides) != len(i.dst.axes):
        raise Refusal(f"strides are {i.strides}; expected {len(i.dst.axes)}, one an axis of dst")


@instr(0x1B, "random", "fills", rules=(lies_in(dst="vmem|smem"), is_of("dst", U32), is_of("state", U32), _drawn))
class Random(_Compute):
    """dst = random words by their numbers: `first`, plus for each axis its entry of `strides` times the position on the whole axis.

    Philox-4x32-10 makes four words at a time of a key of 64 bits and a counter of 128. The four words of `state` are the key and the lower
    half of the counter's start, whose upper half is the key again, as in XLA's `RngBitGenerator`.
    """

    dst: Tile = field.dst()
    state: Tile = field.src()
    strides: tuple[int, ...] = field.axes_field()
    first: int = field.number(default=0)

    @property
    def queue(self) -> str:
        """The vector queue: its instructions ask the generator for words."""
        return "vector"

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """A core's generator makes `random_words` of the chip's row a cycle, while the vector unit, which asks for a register of them at a
        time, does other work; without a generator, it computes every word."""
        shape, operations = shape_of(self.dst), philox.operations(chip)
        cycles = operations * chip.vector_cycles(shape, LANE_BYTES)
        return Cost(cycles, element_ops=operations * math.prod(shape), generator_cycles=philox.generator_cycles(chip, shape))

    def meaning(self, ar: Arithmetic, trip: Trip, state: Any) -> Any:
        """The words with these numbers, which wrap."""
        number = ar.full(trip.shape, self.first % 2**32, U32)
        for axis, stride in enumerate(self.strides):
            along = ar.iota(trip.shape, axis, trip.start(self.dst.axes[axis]), U32)
            number = ar.binary("add", number, ar.binary("mul", along, ar.full(trip.shape, stride % 2**32, U32), U32), U32)
        return philox.words(ar, number, [ar.broadcast(state[n], trip.shape, ()) for n in range(4)])


@rule("`axes` are ascending axes of `dst`, one an axis of `a`, which is the same there or of size 1")
def _stretched(i: Broadcast) -> None:
    if len(i.axes) != len(i.a.axes) or any(x >= len(i.dst.axes) for x in i.axes) or list(i.axes) != sorted(set(i.axes)):
        raise Refusal(
            f"axes are {i.axes}; expected ascending axes of dst (rank {len(i.dst.axes)}), one an axis of a (rank {len(i.a.axes)})"
        )
    for axis, x in zip(i.a.axes, i.axes, strict=True):
        if axis not in (ONE, i.dst.axes[x]):
            raise Refusal(f"axis {axes_text((axis,))} of a lies along {axes_text((i.dst.axes[x],))} of dst; expected the same, or size 1")


@instr(0x19, "broadcast", "repeats", rules=(lies_in(dst="vmem", a="vmem|smem"), same_dtype("dst", "a"), _stretched))
class Broadcast(_Compute):
    """dst = a stretched: axis i of a lies along axis `axes[i]` of dst; an axis of size 1 is repeated. `a` may be a register."""

    dst: Tile = field.dst()
    a: Tile = field.src()
    axes: tuple[int, ...] = field.axes_field()

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """One register where a number or whole rows are repeated, one for each group of rows where each number is repeated along its row:
        readers address them over again.
        """
        shape, minor = shape_of(self.dst), len(self.dst.axes) - 1
        row = minor in self.axes and shape_of(self.a)[self.axes.index(minor)] == shape[minor]
        if row or math.prod(shape_of(self.a)) == 1:
            return _ADDRESSED
        filled = chip.column_shape(shape)
        return Cost(cycles=chip.vector_cycles(filled, self.dst.dtype.bytes), element_ops=math.prod(filled))

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any) -> Any:
        """Repeated values."""
        return ar.broadcast(a, trip.shape, self.axes)


@rule("`permutation` is one of the axes of `a`, and `dst` has those axes in that order")
def _permuted(i: Transpose) -> None:
    if sorted(i.permutation) != list(range(len(i.a.axes))):
        raise Refusal(f"permutation is {i.permutation}; expected one of the axes 0 ... {len(i.a.axes) - 1}")
    require_axes("dst", i.dst, tuple(i.a.axes[p] for p in i.permutation))


@instr(0x1A, "transpose", "permutes", rules=(on_lanes, same_dtype("dst", "a"), _permuted))
class Transpose(_Compute):
    """dst axis i = a axis `permutation[i]`."""

    dst: Tile = field.dst()
    a: Tile = field.src()
    permutation: tuple[int, ...] = field.axes_field()

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any) -> Any:
        """The permuted tile."""
        return ar.transpose(a, self.permutation)


@rule(
    "`starts` and `strides` have a number for every axis, strides at least 1; an axis with start 0 and stride 1 is as in `dst`, or, as all "
    "others, whole in every tile of `a` and long enough for what is taken of it"
)
def _sliced(i: Slice) -> None:
    rank = len(i.dst.axes)
    if not len(i.a.axes) == len(i.starts) == len(i.strides) == rank or 0 in i.strides:
        raise Refusal(
            f"starts are {i.starts} and strides {i.strides} of a with rank {len(i.a.axes)}; expected {rank} of each, as many as dst has "
            f"axes, and strides of at least 1"
        )
    for x in i.sliced:
        axis, reach = i.a.axes[x], i.starts[x] + (i.dst.axes[x].size - 1) * i.strides[x] + 1
        if axis.grid >= 0 or axis.size < reach:
            raise Refusal(f"axis {x} of a is {axes_text((axis,))}; expected one that is not cut into tiles, of at least {reach} elements")


@instr(0x1F, "slice", "slices", rules=(lies_in(dst="vmem", a="vmem"), same_dtype("dst", "a"), _sliced))
class Slice(_Compute):
    """dst[i] = a[starts + strides * i], along every axis. So a tile that is loaded once serves overlapping windows: neighbouring tiles of
    `a` overlap by what its windows reach beyond `dst`'s (a halo).
    """

    dst: Tile = field.dst()
    a: Tile = field.src()
    starts: tuple[int, ...] = field.axes_field()
    strides: tuple[int, ...] = field.axes_field()

    @property
    def sliced(self) -> tuple[int, ...]:
        """The axes of which not all is taken."""
        every = zip(self.a.axes, self.dst.axes, self.starts, self.strides, strict=True)
        return tuple(x for x, (axis, taken, start, stride) in enumerate(every) if (axis, start, stride) != (taken, 0, 1))

    @property
    def halos(self) -> dict[int, Halo]:
        """The halo of every sliced axis: which elements of `a` all slices of this kind address together."""
        found = {}
        for x in self.sliced:
            outer, stride = self.dst.axes[x], self.strides[x]
            found[x] = Halo(SlidingAxis(x, 0, stride, 1), outer, TileAxis(self.a.axes[x].size - (outer.size - 1) * stride))
        return found

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """What is taken, once through the vector lanes, unless it is whole rows of lanes and sublanes, which readers address."""
        if all(x < len(self.dst.axes) - 2 for x in self.sliced):
            return _ADDRESSED
        shape = shape_of(self.dst)
        return Cost(cycles=chip.vector_cycles(shape, self.dst.dtype.bytes), element_ops=math.prod(shape))

    def meaning(self, ar: Arithmetic, trip: Trip, a: Any) -> Any:
        """The elements taken."""
        every = zip(self.starts, self.strides, trip.shape, strict=True)
        return a[tuple(slice(start, start + (n - 1) * stride + 1, stride) for start, stride, n in every)]


@rule("`axes` are ascending axes of `a`, in whose place `acc` has axes of size 1; `block` is at least 1")
def _reduced(i: ReduceInto) -> None:
    if list(i.axes) != sorted(set(i.axes)) or any(x >= len(i.a.axes) for x in i.axes):
        raise Refusal(f"axes are {i.axes}; expected ascending axes of a, which has rank {len(i.a.axes)}")
    if i.block < 1:
        raise Refusal(f"block is {i.block}; expected at least 1 element")
    require_axes("acc", i.acc, tuple(ONE if n in i.axes else x for n, x in enumerate(i.a.axes)))


@instr(0x1C, "reduce_into", "accumulates", rules=(on_lanes, same_dtype("acc", "a"), defined_on("a"), _reduced))
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

    def meaning(self, ar: Arithmetic, trip: Trip, acc: Any, a: Any) -> Any:
        """The new accumulator."""
        return ar.reduce(self.op, acc, a, self.axes, self.block, self.a.dtype)


@rule("`carry` is of size 1 along `axis`, else as `a`, and lies elsewhere than `dst`")
def _carried(i: Cumulative) -> None:
    require_axes("carry", i.carry, tuple(ONE if n == i.axis else x for n, x in enumerate(i.a.axes)))
    if overlap(i.dst, i.carry):
        raise Refusal("dst and carry overlap; expected two places")


@instr(
    0x1D,
    "cumulative",
    "scans",
    rules=(on_lanes, same_axes("dst", "a"), same_dtype("dst", "carry", "a"), defined_on("a"), axis_of("a"), _carried),
)
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

    def meaning(self, ar: Arithmetic, trip: Trip, carry: Any, a: Any) -> Any:
        """(dst, new carry)."""
        return ar.cumulative(self.op, carry, a, self.axis, self.a.dtype)


@rule(
    "as many results as operands, each of its operand's type; all of the same axes, the results along `axis` at most as long; `axis` is "
    "not blocked; at least one key, none of kind storage"
)
def _sorted_together(i: Sort) -> None:
    if not i.srcs or len(i.srcs) != len(i.dsts) or not 1 <= i.keys <= len(i.srcs):
        raise Refusal(
            f"{len(i.dsts)} results, {len(i.srcs)} operands, {i.keys} keys; expected as many results as operands, and keys of them"
        )
    for n, key in enumerate(i.srcs[: i.keys]):
        require_computed(f"key {n}", key.dtype)
    first = i.srcs[0].axes
    if i.axis >= len(first) or first[i.axis].grid >= 0:
        raise Refusal(f"axis is {i.axis} of {axes_text(first)}; expected an axis that lies whole in the tile (not blocked)")
    shortened = tuple(along if n == i.axis else axis for n, (axis, along) in enumerate(zip(first, i.dsts[0].axes, strict=False)))
    for n, (dst, src) in enumerate(zip(i.dsts, i.srcs, strict=True)):
        require_axes(f"srcs[{n}]", src, first)
        require_axes(f"dsts[{n}]", dst, shortened)
        if dst.dtype != src.dtype:
            raise Refusal(f"a result is {dst.dtype}, its operand {src.dtype}; expected the same type")
    if not 1 <= i.count <= first[i.axis].size:
        raise Refusal(f"the results have {i.count} elements along axis {i.axis}; expected 1 to {first[i.axis].size}")
    if len({(t.space, t.address) for t in i.dsts}) < len(i.dsts):
        raise Refusal("two results overlap; expected different places")


@instr(0x1E, "sort", "sorts", rules=(on_lanes, _sorted_together))
class Sort(_Compute):
    """dsts = srcs sorted together along `axis` by the first `keys` of them, stable, ascending; -0 equals 0, NaN comes last.

    Of results that are shorter along `axis` than the operands the first so many are written.
    """

    dsts: tuple[Tile, ...] = field.dsts()
    srcs: tuple[Tile, ...] = field.srcs()
    axis: int = field.number()
    keys: int = field.number()

    @property
    def count(self) -> int:
        """Elements along `axis` that are written."""
        return self.dsts[0].axes[self.axis].size

    def passes(self, chip: Chip, shape: tuple[int, ...]) -> int:
        """The stages of a bitonic network, every operand compared and exchanged in each."""
        stages = (shape[self.axis] - 1).bit_length() if shape else 0
        return max(1, len(self.srcs) * stages * (stages + 1) // 2)

    def meaning(self, ar: Arithmetic, trip: Trip, *srcs: Any) -> Any:
        """The sorted tiles, one for each source."""
        return ar.sort(srcs, tuple(t.dtype for t in self.srcs), self.axis, self.keys, self.count)
