"""Rules for operations that move elements without changing them: reshapes, transposes, broadcasts, slices, pads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites, rewrites_all

SMALL_CONSTANT_ELEMS = 4096


def _ascending(axes: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(axes))


@rewrites("reshape", "transpose", "broadcast", "slice", "reverse", "concatenate", "dynamic_slice", "take_rows")
def _move_of_splat(rw: Rewriter, node: Node) -> Value | None:
    """A move of equal splats is that splat; but not take_rows, whose rows out of range may have another value."""
    moved = node.inputs if node.op == "concatenate" else node.inputs[:1]
    made = [rw.maker(x, "full") for x in moved]
    if node.op == "take_rows" or None in made or len({repr(m.attrs["value"]) for m in made if m}) > 1:
        return None
    return rw.full(node.result.dtype, node.result.shape, rw.splat(moved[0]))  # type: ignore[arg-type]


@rewrites("reshape")
def _reshape(rw: Rewriter, node: Node) -> Value | None:
    """A reshape to the same shape is its operand; a reshape of a reshape, of a broadcast scalar or of a constant is a single node."""
    (x,), result = node.inputs, node.result.type
    if x.shape == result.shape:
        return x
    if inner := rw.maker(x, "reshape"):
        return rw.emit("reshape", inner.inputs, result)
    if (inner := rw.maker(x, "broadcast")) and inner.inputs[0].type.elems == 1:
        return rw.emit("broadcast", (rw.reshape(inner.inputs[0], ()),), result, axes=())
    if inner := rw.maker(x, "constant"):
        return rw.emit("constant", (), result, data=inner.attrs["data"].reshape(result.shape))
    return None


@rewrites("transpose")
def _transpose(rw: Rewriter, node: Node) -> Value | None:
    """An identity transpose is its operand; one that only moves axes of size 1 is a reshape; one of a transpose, a broadcast or a small
    constant is a single node.
    """
    (x,), permutation, result = node.inputs, node.attrs["permutation"], node.result.type
    if permutation == tuple(range(len(permutation))):
        return x
    if _ascending([axis for axis in permutation if x.shape[axis] != 1]):
        return rw.reshape(x, result.shape)
    if inner := rw.maker(x, "transpose"):
        return rw.emit("transpose", inner.inputs, result, permutation=tuple(inner.attrs["permutation"][i] for i in permutation))
    if inner := rw.maker(x, "broadcast"):
        return rw.emit("broadcast", inner.inputs, result, axes=tuple(permutation.index(axis) for axis in inner.attrs["axes"]))
    if (inner := rw.maker(x, "constant")) and x.type.elems <= SMALL_CONSTANT_ELEMS:
        return rw.emit("constant", (), result, data=inner.attrs["data"].transpose(permutation))
    return None


@rewrites("broadcast")
def _broadcast(rw: Rewriter, node: Node) -> Value | None:
    """A broadcast that repeats nothing is a reshape; one of a broadcast is a single one; axes of size 1 of the operand are dropped."""
    (x,), axes, result = node.inputs, node.attrs["axes"], node.result.type
    if x.type.elems == result.elems and _ascending([axis for axis, n in zip(axes, x.shape, strict=True) if n != 1]):
        return rw.reshape(x, result.shape)
    if inner := rw.maker(x, "broadcast"):
        return rw.emit("broadcast", inner.inputs, result, axes=tuple(axes[i] for i in inner.attrs["axes"]))
    if 1 in x.shape:
        kept = [i for i, n in enumerate(x.shape) if n != 1]
        squeezed = rw.reshape(x, [x.shape[i] for i in kept])
        return rw.emit("broadcast", (squeezed,), result, axes=tuple(axes[i] for i in kept))
    return None


@rewrites("broadcast")
def _broadcast_of_convert(rw: Rewriter, node: Node) -> Value | None:
    """broadcast(convert(x)) = convert(broadcast(x)) for a stored array x, so that the reader converts it rather than another kernel.

    Work on a single number goes the other way (see `fold.py`).
    """
    inner = rw.maker(node.inputs[0], "convert")
    stored = _before_converts(rw, inner)
    if inner is None or not node.inputs[0].shape or _fuses(stored) or (stored is not None and stored.op == "full"):
        return None
    narrow = inner.inputs[0]
    wide = rw.emit("broadcast", (narrow,), TensorType(narrow.dtype, node.result.shape), axes=node.attrs["axes"])
    return rw.emit("convert", (wide,), node.result.type)


def _before_converts(rw: Rewriter, node: Node | None) -> Node | None:
    """The node that defines the operand of a chain of converts."""
    while node is not None and node.op == "convert":
        node = rw.maker(node.inputs[0])
    return node


@rewrites("slice")
def _slice_of_convert(rw: Rewriter, node: Node) -> Value | None:
    """slice(convert(x)) = convert(slice(x)) where convert widens, so that the wide copy of all of x need not be stored."""
    inner = rw.maker(node.inputs[0], "convert")
    if inner is None or inner.inputs[0].dtype.bytes >= node.result.dtype.bytes:
        return None
    part = rw.emit("slice", inner.inputs, TensorType(inner.inputs[0].dtype, node.result.shape), **node.attrs)
    return rw.emit("convert", (part,), node.result.type)


@rewrites("reshape")
def _reshape_of_converted_slice(rw: Rewriter, node: Node) -> Value | None:
    """reshape(convert(slice(x))) = convert(reshape(slice(x))): reshape and slice then fold into one window."""
    inner = rw.maker(node.inputs[0], "convert")
    if inner is None or rw.maker(inner.inputs[0], "slice") is None:
        return None
    return rw.emit("convert", (rw.reshape(inner.inputs[0], node.result.shape),), node.result.type)


@rewrites("slice")
def _slice(rw: Rewriter, node: Node) -> Value | None:
    """A slice of a whole array is the array; a slice of a small constant is a constant."""
    (x,), result = node.inputs, node.result.type
    if x.shape == result.shape:
        return x
    if (inner := rw.maker(x, "constant")) and x.type.elems <= SMALL_CONSTANT_ELEMS:
        rows = zip(node.attrs["start"], node.attrs["limit"], node.attrs["stride"], strict=True)
        return rw.emit("constant", (), result, data=inner.attrs["data"][tuple(slice(*row) for row in rows)])
    return None


@rewrites("slice")
def _slice_of_concatenate(rw: Rewriter, node: Node) -> Value | None:
    """A slice within one operand of a concatenate is a slice of that operand."""
    joined = rw.maker(node.inputs[0], "concatenate")
    if joined is None:
        return None
    axis, origin = joined.attrs["axis"], 0
    start, limit = node.attrs["start"], node.attrs["limit"]
    for part in joined.inputs:
        length = part.shape[axis]
        if origin <= start[axis] and limit[axis] <= origin + length:
            moved = {name: (*at[:axis], at[axis] - origin, *at[axis + 1 :]) for name, at in (("start", start), ("limit", limit))}
            return rw.emit("slice", (part,), node.result.type, **moved, stride=node.attrs["stride"])
        origin += length
    return None


@rewrites("pad")
def _pad(rw: Rewriter, node: Node) -> Value | None:
    """A pad by nothing is its operand; a splat padded with its own value is a splat."""
    x, value = node.inputs
    if not any((*node.attrs["low"], *node.attrs["high"], *node.attrs["interior"])):
        return x
    inside, around = rw.splat(x), rw.splat(value)
    if inside is not None and repr(inside) == repr(around):
        return rw.full(x.dtype, node.result.shape, inside)
    return None


@rewrites("concatenate")
def _concatenate(rw: Rewriter, node: Node) -> Value | None:
    """A concatenate of one operand is that operand."""
    return node.inputs[0] if len(node.inputs) == 1 else None


@rewrites("reverse")
def _reverse(rw: Rewriter, node: Node) -> Value | None:
    """A reverse of axes of size 1 is its operand."""
    (x,) = node.inputs
    return x if all(x.shape[axis] == 1 for axis in node.attrs["axes"]) else None


@rewrites("dynamic_slice")
def _dynamic_slice(rw: Rewriter, node: Node) -> Value | None:
    """A dynamic slice of a whole array is the array (starts are in range); one with constant starts is a slice."""
    x, *starts = node.inputs
    if x.shape == node.result.shape:
        return x
    known = tuple(int(k) for s in starts if (k := rw.splat(s)) is not None)
    if len(known) < len(starts):
        return None
    limit = tuple(s + n for s, n in zip(known, node.result.shape, strict=True))
    return rw.emit("slice", (x,), node.result.type, start=known, limit=limit, stride=(1,) * len(starts))


@rewrites("dynamic_update_slice")
def _dynamic_update_slice(rw: Rewriter, node: Node) -> Value | None:
    """An update of the whole array is the update."""
    x, update, *_ = node.inputs
    return update if x.shape == update.shape else None


@rewrites("transpose", "broadcast", "reshape")
def _move_of_iota(rw: Rewriter, node: Node) -> Value | None:
    """A transpose, broadcast or reshape of an iota is an iota along another axis."""
    (x,), result = node.inputs, node.result.type
    inner = rw.maker(x, "iota")
    if inner is None:
        return None
    axis = inner.attrs["axis"]
    moved = {
        "transpose": lambda: node.attrs["permutation"].index(axis),
        "broadcast": lambda: node.attrs["axes"][axis],
        "reshape": lambda: _places(x.shape, result.shape).get(axis),
    }[node.op]()
    return None if moved is None else rw.emit("iota", (), result, axis=moved)


@rewrites("reshape")
def _reshape_of_random(rw: Rewriter, node: Node) -> Value | None:
    """Random words are numbered in row-major order, in any shape."""
    made = rw.maker(node.inputs[0], "random")
    return None if made is None else rw.emit("random", made.inputs, node.result.type)


@rewrites("iota")
def _iota(rw: Rewriter, node: Node) -> Value | None:
    """An iota along an axis of size 1 is zero."""
    result = node.result
    return rw.full(result.dtype, result.shape, 0.0 if result.dtype.is_float else 0) if result.shape[node.attrs["axis"]] == 1 else None


@rewrites_all(ELEMENTWISE)
def _elementwise_of_reshapes(rw: Rewriter, node: Node) -> Value | None:
    """op(reshape(x), reshape(y)) = reshape(op(x, y)): reshapes of computed values sink until a broadcast or a view absorbs them.

    The reshape of a slice does not sink: with the slice it folds into a window of the reader, which it would separate from its operand.
    """
    made = [rw.maker(x) for x in node.inputs]
    viewed = [m.inputs[0] for m in made if m and m.op == "reshape"]
    sources = {x.shape for x in viewed}
    if len(sources) != 1 or not any(_sinks(rw.maker(x), x.shape, node.result.shape) for x in viewed):
        return None
    (shape,) = sources
    operands = [_viewed(rw, x, m, shape) for x, m in zip(node.inputs, made, strict=True)]
    if None in operands:
        return None
    inner = rw.emit(node.op, operands, TensorType(node.result.dtype, shape), **node.attrs)  # type: ignore[arg-type]
    return rw.reshape(inner, node.result.shape)


def _sinks(node: Node | None, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether the reshape of a node's result should sink: its kernel could fuse with what follows, or only axes of size 1 change."""
    return _fuses(node) or (bool(_places(old, new)) and (node is None or node.op != "slice"))


def _fuses(node: Node | None) -> bool:
    """Whether a kernel that computes the node could fuse with elementwise users."""
    return node is not None and (node.op in ELEMENTWISE or node.op in (*PRODUCTS, "reduce"))


def _viewed(rw: Rewriter, x: Value, made: Node | None, shape: tuple[int, ...]) -> Value | None:
    """x in another shape if that is free: the operand of a reshape, a splat, random words, an iota or broadcast that only loses axes of
    size 1."""
    if made is None:
        return None
    if made.op == "reshape" and made.inputs[0].shape == shape:
        return made.inputs[0]
    type = TensorType(x.dtype, shape)
    if made.op == "full":
        return rw.full(x.dtype, shape, made.attrs["value"])
    if made.op == "random":
        return rw.emit("random", made.inputs, type)
    if made.op == "broadcast" and not made.inputs[0].shape:
        return rw.emit("broadcast", made.inputs, type, axes=())
    places = _places(x.shape, shape)
    if made.op == "iota" and made.attrs["axis"] in places:
        return rw.emit("iota", (), type, axis=places[made.attrs["axis"]])
    if made.op == "broadcast" and all(axis in places for axis in made.attrs["axes"]):
        return rw.emit("broadcast", made.inputs, type, axes=tuple(places[axis] for axis in made.attrs["axes"]))
    return None


def _places(old: tuple[int, ...], new: tuple[int, ...]) -> dict[int, int]:
    """old axis -> new axis, for axes longer than 1, under a reshape that only adds or removes axes of size 1; empty for other reshapes."""
    before, after = ([axis for axis, n in enumerate(shape) if n != 1] for shape in (old, new))
    same = [old[axis] for axis in before] == [new[axis] for axis in after]
    return dict(zip(before, after, strict=True)) if same else {}
