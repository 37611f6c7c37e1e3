"""Operand rules of every instruction: spaces, element types, axes. One row of a table a class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tpuflow.device.verify.refusal import Refusal
from tpuflow.dtypes import F32, PRED, S32, DType
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.contraction import Halo
from tpuflow.isa.instruction import FieldKind, Instruction, Tile, TileAxis
from tpuflow.isa.numpy_arithmetic import is_defined, undefined
from tpuflow.isa.program import Kernel
from tpuflow.isa.splitting import EXACT

Rule = Callable[[Any], None]

FLOAT = frozenset({"float"})
INTEGER = frozenset({"int", "uint"})
NUMBER = FLOAT | INTEGER
ONE = TileAxis(1)


def check_fields(kernel: Kernel, instruction: Instruction) -> None:
    """Every field holds what its kind says (words from their lists, small numbers, semaphores that exist)."""
    if not instruction.traits:
        raise Refusal(f"instruction {instruction.mnemonic!r} states no traits in its declaration; expected some, to check it by")
    for name, kind, value in instruction.fields():
        if kind.name not in _FIELD_RULES:
            raise Refusal(f"field {name} of {instruction.mnemonic!r} is of kind {kind.name!r}; expected one of {', '.join(_FIELD_RULES)}")
        _FIELD_RULES[kind.name](name, kind, value)
    if isinstance(instruction, dma.Signal | dma.Wait):
        _semaphore(kernel, instruction)


def _semaphore(kernel: Kernel, i: dma.Signal | dma.Wait) -> None:
    if i.semaphore >= len(kernel.semaphores):
        raise Refusal(f"semaphore {i.semaphore} does not exist; the kernel has {len(kernel.semaphores)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(name: str, kind: FieldKind, value: Any) -> None:
    if not _is_count(value):
        raise Refusal(f"{name} is {value!r}; expected a non-negative integer")


def _axes(name: str, kind: FieldKind, value: Any) -> None:
    if not all(_is_count(v) for v in value):
        raise Refusal(f"{name} are {value!r}; expected non-negative integers")


def _choice(name: str, kind: FieldKind, value: Any) -> None:
    if value not in kind.choices:
        raise Refusal(f"{name} is {value!r}; expected one of {', '.join(kind.choices)}")


def _flag(name: str, kind: FieldKind, value: Any) -> None:
    if not isinstance(value, bool):
        raise Refusal(f"{name} is {value!r}; expected True or False")


def _by_operands(name: str, kind: FieldKind, value: Any) -> None:
    """Tiles and windows are checked as such; pairs, bounds and immediates with the operands that they go with."""


_FIELD_RULES: dict[str, Callable[[str, FieldKind, Any], None]] = {
    "number": _number,
    "axes": _axes,
    "choice": _choice,
    "flag": _flag,
    **dict.fromkeys(("tile", "tiles", "window", "pairs", "bounds", "immediate"), _by_operands),
}


def check_operands(instruction: Instruction) -> None:
    """Every rule of the instruction's row, and: what one instruction writes does not overlap."""
    if type(instruction) not in RULES:
        raise Refusal(f"instruction {instruction.mnemonic!r} has no operand rules; expected a row for it in RULES")
    for rule in RULES[type(instruction)]:
        rule(instruction)


def check_immediate(value: object, dtype: DType) -> None:
    """A Python number that `dtype` can hold (floats are rounded, so any will do)."""
    if dtype.kind == "pred":
        ok = value in (False, True)
    elif dtype.is_float:
        ok = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        bits = 8 * dtype.bytes
        low, high = (0, 2**bits) if dtype.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        ok = isinstance(value, int) and not isinstance(value, bool) and low <= value < high
    if not ok:
        raise Refusal(f"the immediate {value!r} is not a value of {dtype}")


# --- rules


def _tiles(instruction: Instruction) -> Iterable[tuple[str, Tile]]:
    for name, kind, value in instruction.fields():
        if kind.name == "tile":
            yield name, value
        elif kind.name == "tiles":
            yield from ((f"{name}[{i}]", t) for i, t in enumerate(value))


def _on_lanes(instruction: Instruction) -> None:
    """All operands in vector memory, or all in registers."""
    spaces = {t.space for _, t in _tiles(instruction)}
    if spaces != {"vmem"} and spaces != {"smem"}:
        raise Refusal(f"operands lie in {', '.join(sorted(spaces))}; expected all in vmem, or all in smem (registers)")


def _in(**spaces: str) -> Rule:
    """Named operands in the given spaces (alternatives separated by a bar)."""

    def rule(instruction: Any) -> None:
        for name, allowed in spaces.items():
            if getattr(instruction, name).space not in allowed.split("|"):
                raise Refusal(f"{name} lies in {getattr(instruction, name).space}; expected {allowed.replace('|', ' or ')}")

    return rule


def _same_axes(*names: str) -> Rule:
    """Named operands have the axes of the first (same size, same blocking)."""

    def rule(instruction: Any) -> None:
        first = getattr(instruction, names[0]).axes
        for name in names[1:]:
            if getattr(instruction, name).axes != first:
                raise Refusal(
                    f"{name} has axes {axes_text(getattr(instruction, name).axes)}; expected {axes_text(first)}, those of {names[0]}"
                )

    return rule


def _same_dtype(*names: str) -> Rule:
    """Named operands have the type of the first."""

    def rule(instruction: Any) -> None:
        first = getattr(instruction, names[0]).dtype
        for name in names[1:]:
            if getattr(instruction, name).dtype != first:
                raise Refusal(f"{name} is {getattr(instruction, name).dtype}; expected {first}, the type of {names[0]}")

    return rule


def _dtype(name: str, *allowed: DType) -> Rule:
    """A named operand has one of the given types."""

    def rule(instruction: Any) -> None:
        if getattr(instruction, name).dtype not in allowed:
            raise Refusal(f"{name} is {getattr(instruction, name).dtype}; expected {' or '.join(map(str, allowed))}")

    return rule


def _kind(name: str, allowed: frozenset[str]) -> Rule:
    """A named operand's type is of one of the given kinds."""

    def rule(instruction: Any) -> None:
        dtype = getattr(instruction, name).dtype
        if dtype.kind not in allowed:
            raise Refusal(f"{name} is {dtype}; expected a type of kind {' or '.join(sorted(allowed))}")

    return rule


def _defined(name: str, field: str = "op") -> Rule:
    """The arithmetic has the sub-operation named in `field` for the type of a named operand."""

    def rule(instruction: Any) -> None:
        require_defined(getattr(instruction, field), getattr(instruction, name).dtype)

    return rule


def require_defined(op: str, dtype: DType) -> None:
    """The arithmetic has the operation on a type."""
    if not is_defined(op, dtype):
        raise Refusal(str(undefined(op, dtype)))


def _axis_of(name: str) -> Rule:
    """`axis` is an axis of a named operand."""

    def rule(instruction: Any) -> None:
        rank = len(getattr(instruction, name).axes)
        if instruction.axis >= rank:
            raise Refusal(f"axis is {instruction.axis}; {name} has rank {rank}")

    return rule


def _constant(i: vector.Constant) -> None:
    check_immediate(i.value, i.dst.dtype)


def _bitcast(i: vector.Bitcast) -> None:
    if i.dst.dtype.bytes != i.a.dtype.bytes:
        raise Refusal(f"bits of {i.a.dtype} read as {i.dst.dtype}; expected a type of the same width")


def _broadcast(i: vector.Broadcast) -> None:
    if len(i.axes) != len(i.a.axes) or any(x >= len(i.dst.axes) for x in i.axes) or list(i.axes) != sorted(set(i.axes)):
        raise Refusal(
            f"axes are {i.axes}; expected ascending axes of dst (rank {len(i.dst.axes)}), one an axis of a (rank {len(i.a.axes)})"
        )
    for axis, x in zip(i.a.axes, i.axes, strict=True):
        if axis not in (ONE, i.dst.axes[x]):
            raise Refusal(f"axis {axes_text((axis,))} of a lies along {axes_text((i.dst.axes[x],))} of dst; expected the same, or size 1")


def _transpose(i: vector.Transpose) -> None:
    if sorted(i.permutation) != list(range(len(i.a.axes))):
        raise Refusal(f"permutation is {i.permutation}; expected one of the axes 0 ... {len(i.a.axes) - 1}")
    expected = tuple(i.a.axes[p] for p in i.permutation)
    if i.dst.axes != expected:
        raise Refusal(f"dst has axes {axes_text(i.dst.axes)}; expected {axes_text(expected)}")


def _reduced(i: vector.ReduceInto) -> None:
    """The accumulator has the axes of `a`, those of `axes` replaced by unblocked axes of size 1."""
    a, axes = i.a, i.axes
    if list(axes) != sorted(set(axes)) or any(x >= len(a.axes) for x in axes):
        raise Refusal(f"axes are {axes}; expected ascending axes of a, which has rank {len(a.axes)}")
    if i.block < 1:
        raise Refusal(f"block is {i.block}; expected at least 1 element")
    _require_axes("acc", i.acc, tuple(ONE if n in axes else x for n, x in enumerate(a.axes)))


def _carry(i: vector.Cumulative) -> None:
    _require_axes("carry", i.carry, tuple(ONE if n == i.axis else x for n, x in enumerate(i.a.axes)))
    if overlaps(i.dst, i.carry):
        raise Refusal("dst and carry overlap; expected two places")


def _require_axes(name: str, tile: Tile, expected: tuple[TileAxis, ...]) -> None:
    if tile.axes != expected:
        raise Refusal(f"{name} has axes {axes_text(tile.axes)}; expected {axes_text(expected)}")


def _sort(i: vector.Sort) -> None:
    if not i.srcs or len(i.srcs) != len(i.dsts) or not 1 <= i.keys <= len(i.srcs):
        raise Refusal(
            f"{len(i.dsts)} results, {len(i.srcs)} operands, {i.keys} keys; expected as many results as operands, and keys of them"
        )
    first = i.srcs[0].axes
    for name, tile in _tiles(i):
        _require_axes(name, tile, first)
    if i.axis >= len(first) or first[i.axis].grid >= 0:
        raise Refusal(f"axis is {i.axis} of {axes_text(first)}; expected an axis that lies whole in the tile (not blocked)")
    for dst, src in zip(i.dsts, i.srcs, strict=True):
        if dst.dtype != src.dtype:
            raise Refusal(f"a result is {dst.dtype}, its operand {src.dtype}; expected the same type")
    if len({(t.space, t.address) for t in i.dsts}) < len(i.dsts):
        raise Refusal("two results overlap; expected different places")


def overlaps(x: Tile, y: Tile) -> bool:
    """Whether two tiles start at one place (partial overlaps are found by the ordering walk, cell by cell)."""
    return x.space == y.space and x.address == y.address


def _matmul_labels(i: matrix.MatmulAccumulate) -> None:
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
        _halo(i.a.axes[axis], halo)


def _halo(axis: TileAxis, halo: Halo) -> None:
    """A sliding axis holds just what full tiles of its two labels reach."""
    s, outer, inner = halo.sliding, halo.outer, halo.inner
    if axis != halo.tile or 0 in (outer.size, inner.size):
        raise Refusal(
            f"axis {s.axis} of a is {axes_text((axis,))}; expected {axes_text((halo.tile,))}, the reach of "
            f"{axes_text((outer,))} in strides of {s.stride} and {axes_text((inner,))} in strides of {s.dilation}"
        )


def _matmul_bounds(i: matrix.MatmulAccumulate) -> None:
    """Every bound is one of a or of b, and what it computes is a 32-bit number."""
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


def _matmul_types(i: matrix.MatmulAccumulate) -> None:
    expected = F32 if i.a.dtype.is_float else S32
    if i.a.dtype != i.b.dtype or i.acc.dtype != expected or i.a.dtype.kind == "pred":
        raise Refusal(
            f"{i.acc.dtype} += {i.a.dtype} . {i.b.dtype}; expected operands of one numeric type, acc of f32 (of s32 for integers)"
        )
    if i.precision != EXACT and i.a.dtype != F32:
        raise Refusal(f"{i.a.dtype} operands at precision {i.precision}; expected {EXACT}, or operands of f32, which alone are split")


def _row_index(i: dma.LoadIndexed | dma.StoreIndexed) -> None:
    window = i.window
    if i.index.dtype != S32 or i.index.space != "vmem" or not window.tile.axes or i.index.axes != window.tile.axes[:1]:
        raise Refusal(
            f"index is {i.index.dtype} {axes_text(i.index.axes)} in {i.index.space}; expected an s32 tile in vmem with the tile's axis 0, "
            f"of {axes_text(window.tile.axes)}"
        )
    if window.axes[0].step != 0 or window.axes[0].dilation != 1:
        raise Refusal(f"the window's axis 0 has step {window.axes[0].step}, dilation {window.axes[0].dilation}; expected 0 and 1")


def _mode(i: dma.StoreIndexed) -> None:
    if i.mode != "set":
        require_defined(i.mode, i.window.tile.dtype)


def axes_text(axes: tuple[TileAxis, ...]) -> str:
    """[8 of 20 by grid 0, 128]."""
    return f"[{', '.join(f'{a.size} of {a.extent} by grid {a.grid}' if a.grid >= 0 else str(a.size) for a in axes)}]"


RULES: dict[type[Instruction], tuple[Rule, ...]] = {
    vector.Constant: (_on_lanes, _constant),
    vector.Iota: (_on_lanes, _kind("dst", NUMBER), _axis_of("dst")),
    vector.Unary: (_on_lanes, _same_axes("dst", "a"), _same_dtype("dst", "a"), _defined("a")),
    vector.IsFinite: (_on_lanes, _same_axes("dst", "a"), _dtype("dst", PRED), _kind("a", NUMBER)),
    vector.Binary: (_on_lanes, _same_axes("dst", "a", "b"), _same_dtype("dst", "a", "b"), _defined("a")),
    vector.Compare: (_on_lanes, _same_axes("dst", "a", "b"), _same_dtype("a", "b"), _dtype("dst", PRED)),
    vector.Select: (
        _on_lanes, _same_axes("dst", "pred", "on_true", "on_false"), _dtype("pred", PRED), _same_dtype("dst", "on_true", "on_false"),
    ),
    vector.Convert: (_on_lanes, _same_axes("dst", "a")),
    vector.Bitcast: (_on_lanes, _same_axes("dst", "a"), _bitcast),
    vector.Broadcast: (_in(dst="vmem", a="vmem|smem"), _same_dtype("dst", "a"), _broadcast),
    vector.Transpose: (_on_lanes, _same_dtype("dst", "a"), _transpose),
    vector.ReduceInto: (_on_lanes, _same_dtype("acc", "a"), _defined("a"), _reduced),
    vector.Cumulative: (
        _on_lanes, _same_axes("dst", "a"), _same_dtype("dst", "carry", "a"), _defined("a"), _axis_of("a"), _carry,
    ),
    vector.Sort: (_on_lanes, _sort),
    matrix.MatmulZero: (_in(acc="acc"), _dtype("acc", F32, S32)),
    matrix.MatmulAccumulate: (_in(acc="acc", a="vmem", b="vmem"), _matmul_types, _matmul_labels, _matmul_bounds),
    matrix.MatmulRead: (_in(dst="vmem", acc="acc"), _same_dtype("dst", "acc"), _same_axes("dst", "acc")),
    dma.Load: (),
    dma.Store: (),
    dma.LoadIndexed: (_row_index,),
    dma.StoreIndexed: (_row_index, _mode),
    dma.Signal: (),
    dma.Wait: (),
}  # fmt: skip
