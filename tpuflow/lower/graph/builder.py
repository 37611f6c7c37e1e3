"""Builder: makes a graph by its operations, a method each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tpuflow.dtypes import F32, PRED, S32, U32, DType, exactly
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.errors import GraphError
from tpuflow.isa.calls import HostFunction
from tpuflow.isa.contraction import Contraction
from tpuflow.lower.graph.blocking import axes_reduced_first, is_ordered
from tpuflow.lower.graph.elementwise import fold_splats
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.node_builder import NodeBuilder
from tpuflow.lower.graph.ops import infer
from tpuflow.lower.graph.products import DEFAULT
from tpuflow.lower.graph.scalars import Scalar, identity, scalar_of

Operand = Value | bool | int | float


def _unary(op: str) -> Callable[[Builder, Value], Value]:
    def method(self: Builder, x: Value) -> Value:
        return self.emit(op, (x,)).result

    method.__doc__ = f"Elementwise `{op}`."
    return method


def _binary(op: str, **attrs: str) -> Callable[[Builder, Operand, Operand], Value]:
    def method(self: Builder, x: Operand, y: Operand) -> Value:
        return self.emit(op, self.alike(x, y), dict(attrs)).result

    method.__doc__ = f"Elementwise `{' '.join((op, *attrs.values()))}`; one operand may be a Python scalar."
    return method


class Builder(NodeBuilder):
    """A method for every operation. Python scalars become `full` nodes of the other operand's type; an operation without effect (a reshape
    to the same shape, say) emits no node.
    """

    def alike(self, x: Operand, y: Operand) -> tuple[Value, Value]:
        """Both operands as values; a Python scalar takes the other's type."""
        if isinstance(x, Value):
            return x, y if isinstance(y, Value) else self.full_like(x, y)
        if not isinstance(y, Value):
            raise GraphError("at least one operand must be a value")
        return self.full_like(y, x), y

    # --- elementwise ------------------------------------------------------------------------------------------------

    neg, abs, not_ = _unary("neg"), _unary("abs"), _unary("not")
    floor, ceil = _unary("floor"), _unary("ceil")
    round_even, round_away = _unary("round_even"), _unary("round_away")
    sqrt, rsqrt, cbrt = _unary("sqrt"), _unary("rsqrt"), _unary("cbrt")
    exp, expm1, log, log1p = _unary("exp"), _unary("expm1"), _unary("log"), _unary("log1p")
    tanh, sin, cos, erf = _unary("tanh"), _unary("sin"), _unary("cos"), _unary("erf")
    popcnt, clz, is_finite = _unary("popcnt"), _unary("clz"), _unary("is_finite")
    add, sub, mul, div, rem = _binary("add"), _binary("sub"), _binary("mul"), _binary("div"), _binary("rem")
    pow, atan2, max, min = _binary("pow"), _binary("atan2"), _binary("max"), _binary("min")
    and_, or_, xor, mulhi = _binary("and"), _binary("or"), _binary("xor"), _binary("mulhi")
    shl, shr_logical, shr_arithmetic = _binary("shl"), _binary("shr_logical"), _binary("shr_arithmetic")
    eq, ne, lt, le, gt, ge = (_binary("compare", direction=d) for d in ("eq", "ne", "lt", "le", "gt", "ge"))

    def select(self, pred: Value, on_true: Operand, on_false: Operand) -> Value:
        """`on_true` where pred, else `on_false`."""
        on_true, on_false = self.alike(on_true, on_false)
        if (known := self.known(pred)) is not None:
            return on_true if known else on_false
        return self.emit("select", (pred, on_true, on_false)).result

    def reciprocal(self, x: Value) -> Value:
        """1 / x."""
        return self.div(1, x)

    def convert(self, x: Value, dtype: DType) -> Value:
        """x in another element type; to pred it is x != 0, to its own type x itself."""
        if dtype == x.dtype:
            return x
        if dtype == PRED:
            return self.ne(x, 0)
        known = self.known(x) if dtype.is_float or not x.dtype.is_float else None
        if known is not None and (made := fold_splats("convert", {}, [known], [x.dtype], dtype)) is not None:
            return self.full(TensorType(dtype, x.shape), made)
        return self.emit("convert", (x,), asked=[TensorType(dtype, x.shape)]).result

    def bitcast(self, x: Value, dtype: DType) -> Value:
        """The bits of x as another element type of the same width."""
        return x if dtype == x.dtype else self.emit("bitcast", (x,), asked=[TensorType(dtype, x.shape)]).result

    # --- making and moving ------------------------------------------------------------------------------------------

    def full(self, type: TensorType, value: Scalar) -> Value:
        """A tensor with `value` everywhere, rounded to the element type; the same one each time."""
        number = scalar_of(value, type.dtype)
        key = type, exactly(number)
        if key not in self._fulls:
            self._fulls[key] = self.emit("full", (), {"value": number}, [type]).result
        return self._fulls[key]

    def full_like(self, x: Value, value: Scalar) -> Value:
        """`value` everywhere, in x's type."""
        return self.full(x.type, value)

    def scalar(self, value: Scalar, dtype: DType = F32) -> Value:
        """A 0-d value."""
        return self.full(TensorType(dtype), value)

    def constant(self, data: np.ndarray) -> Value:
        """An array known now; a splat becomes `full`."""
        type_ = TensorType(dtype_of(data.dtype), tuple(data.shape))
        flat = np.ascontiguousarray(data).reshape(-1)
        if flat.size == 1 or (flat.size and (flat.view(np.uint8).reshape(flat.size, -1) == flat[:1].view(np.uint8)).all()):
            return self.full(type_, flat[0].item())
        return self.full(type_, 0) if not flat.size else self.emit("constant", (), {"data": data}).result

    def iota(self, type: TensorType, axis: int) -> Value:
        """The position along `axis`."""
        return self.emit("iota", (), {"axis": axis}, [type]).result

    def random(self, state: Value, shape: Sequence[int]) -> Value:
        """The first words of the random stream that begins at a state, u32[4], in row-major order."""
        return self.emit("random", (state,), asked=[TensorType(U32, tuple(shape))]).result

    def broadcast(self, x: Value, shape: Sequence[int], axes: Sequence[int]) -> Value:
        """Operand axis i lies along result axis axes[i]; an operand axis of size 1 is stretched."""
        if x.shape == tuple(shape):
            return x
        result = TensorType(x.dtype, tuple(shape))
        if (made := self.known(x)) is not None:
            return self.full(result, made)
        source, along = self._unstretched(x, tuple(axes))
        return self.emit("broadcast", (source,), {"axes": along}, [result]).result

    def splat(self, x: Value, shape: Sequence[int]) -> Value:
        """A 0-d value everywhere."""
        return self.broadcast(x, shape, ())

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """The same elements in row-major order under another shape."""
        if x.shape == tuple(shape):
            return x
        result = TensorType(x.dtype, tuple(shape))
        if (made := self.known(x)) is not None:
            return self.full(result, made)
        before = self._made_by.get(x)
        if before is not None and before.op == "reshape":
            return self.reshape(before.inputs[0], shape)
        return self.emit("reshape", (x,), asked=[result]).result

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """Result axis i is operand axis permutation[i]."""
        if tuple(permutation) == tuple(range(len(x.shape))):
            return x
        return self.emit("transpose", (x,), {"permutation": tuple(permutation)}).result

    def slice(self, x: Value, start: Sequence[int], limit: Sequence[int], stride: Sequence[int] | None = None) -> Value:
        """x[start:limit:stride] on every axis."""
        start, limit, stride = (tuple(map(int, places)) for places in (start, limit, stride or (1,) * len(x.shape)))  # JAX has NumPy's
        if not any(start) and limit == x.shape and set(stride) <= {1}:
            return x
        return self.emit("slice", (x,), {"start": start, "limit": limit, "stride": stride}).result

    def slice_axis(self, x: Value, axis: int, start: int, limit: int, stride: int = 1) -> Value:
        """x[start:limit:stride] on one axis."""
        at = [slice(0, n, 1) for n in x.shape]
        at[axis] = slice(start, limit, stride)
        return self.slice(x, [s.start for s in at], [s.stop for s in at], [s.step for s in at])

    def pad(self, x: Value, value: Value | Scalar, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None) -> Value:
        """x padded with `value` around and between its elements, as lax.pad: negative amounts crop."""
        low, high, interior = (tuple(map(int, amounts)) for amounts in (low, high, interior or (0,) * len(x.shape)))
        attrs = {"low": low, "high": high, "interior": interior}
        if not any((*low, *high, *interior)):
            return x
        value = value if isinstance(value, Value) else self.scalar(value, x.dtype)
        if not x.type.elems:
            (result,) = infer("pad", (x.type, value.type), attrs)
            return self.splat(value, result.shape)
        return self.emit("pad", (x, value), attrs).result

    def concatenate(self, parts: Sequence[Value], axis: int) -> Value:
        """The parts concatenated along `axis`; empty parts are left out."""
        full = [p for p in parts if p.shape[axis]] or list(parts[:1])
        return full[0] if len(full) == 1 else self.emit("concatenate", full, {"axis": axis}).result

    def reverse(self, x: Value, axes: Sequence[int]) -> Value:
        """x back to front along the axes."""
        return self.emit("reverse", (x,), {"axes": tuple(axes)}).result if axes else x

    # --- the rest ---------------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Value, axes: Sequence[int]) -> Value:
        """x combined over the axes, which are removed."""
        if not axes:
            return x
        if not x.type.elems:
            (result,) = infer("reduce", (x.type,), {"op": op, "axes": tuple(axes)})
            return self.full(result, identity(op, x.dtype))
        if is_ordered(op, x.dtype) and (first := axes_reduced_first(x.shape, axes)):
            return self.reduce(op, self.reduce(op, x, first), [axis for axis in axes if axis not in first])
        return self.emit("reduce", (x,), {"op": op, "axes": tuple(axes)}).result

    def cumulative(self, op: str, x: Value, axis: int, *, reverse: bool = False) -> Value:
        """Running combination along `axis`."""
        return self.emit("cumulative", (x,), {"op": op, "axis": axis, "reverse": reverse}).result

    def dot(
        self, lhs: Value, rhs: Value, lhs_contract: Sequence[int], rhs_contract: Sequence[int],
        lhs_batch: Sequence[int] = (), rhs_batch: Sequence[int] = (), precision: str = DEFAULT,
    ) -> Value:  # fmt: skip
        """Products summed over the contracted axes: [batch, lhs free, rhs free] in f32, or s32 for integers."""
        attrs = {
            "lhs_contract": tuple(lhs_contract), "rhs_contract": tuple(rhs_contract),
            "lhs_batch": tuple(lhs_batch), "rhs_batch": tuple(rhs_batch), "precision": precision,
        }  # fmt: skip
        if not (lhs.type.elems and rhs.type.elems):
            (result,) = infer("dot", (lhs.type, rhs.type), attrs)
            return self.full(result, 0)
        return self.emit("dot", (lhs, rhs), attrs).result

    def conv(self, lhs: Value, rhs: Value, contraction: Contraction, shape: Sequence[int], precision: str = DEFAULT) -> Value:
        """A product of the given result shape whose axes are labelled by `contraction`, where axes of lhs may slide (a convolution); its
        result is f32, or s32 for integers.
        """
        declared, attrs = TensorType(F32 if lhs.dtype.is_float else S32, tuple(shape)), {"contraction": contraction, "precision": precision}
        (result,) = infer("conv", (lhs.type, rhs.type), attrs, asked=(declared,))
        if not (lhs.type.elems and rhs.type.elems):
            return self.full(result, 0)
        return self.emit("conv", (lhs, rhs), attrs, (result,)).result

    def take_rows(self, x: Value, index: Value, fill: Scalar = 0) -> Value:
        """[N, C...] at s32[R] -> [R, C...]; an index out of range gives `fill`."""
        if not x.type.elems:
            return self.full(TensorType(x.dtype, (*index.shape, *x.shape[1:])), fill)
        return self.emit("take_rows", (x, index), {"fill": scalar_of(fill, x.dtype)}).result

    def scatter_rows(self, x: Value, index: Value, updates: Value, mode: str) -> Value:
        """x [N, C...] with row index[r] = mode(that row, updates[r]) in order of r; out of range is dropped."""
        return self.emit("scatter_rows", (x, index, updates), {"mode": mode}).result if updates.type.elems else x

    def dynamic_slice(self, x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
        """The piece of `sizes` that begins at `starts` (s32[], already in range)."""
        if x.shape == tuple(sizes):
            return x
        known = [self.known(s) for s in starts]
        if None not in known:
            return self.slice(x, known, [int(k) + n for k, n in zip(known, sizes, strict=True)])  # type: ignore[arg-type]
        return self.emit("dynamic_slice", (x, *starts), {"sizes": tuple(sizes)}).result

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        """x with `update` written at `starts` (s32[], already in range)."""
        if x.shape == update.shape or not update.type.elems:
            return update if x.shape == update.shape else x
        return self.emit("dynamic_update_slice", (x, update, *starts)).result

    def sort(self, operands: Sequence[Value], axis: int, keys: int = 1, count: int | None = None) -> tuple[Value, ...]:
        """All operands sorted along `axis` by the first `keys` of them, stable, ascending, NaN last; the first `count` are kept."""
        there = operands[0].shape[axis]
        count = there if count is None else count
        if not operands[0].type.elems or not count:
            return tuple(self.slice_axis(x, axis, 0, count) for x in operands)
        return self.emit("sort", operands, {"axis": axis, "count": count, "keys": keys}).results

    def barrier(self, operands: Sequence[Value]) -> tuple[Value, ...]:
        """The operands behind an optimization barrier: available only when all of them are, and opaque to passes."""
        return self.emit("barrier", operands).results if operands else ()

    def device_put(self, x: Value, space: str) -> Value:
        """x in the memory of the host, or of the device ("hbm")."""
        return self.emit("device_put", (x,), {"space": space}).result

    def while_(self, condition: Graph, body: Graph, carries: Sequence[Value]) -> tuple[Value, ...]:
        """Carries after running `body` as long as `condition` holds."""
        return self.emit("while", carries, regions=(condition, body)).results

    def loop(self, trips: Value | int, body: Graph, carries: Sequence[Value]) -> tuple[Value, ...]:
        """Carries after `trips` runs of `body`."""
        trips = trips if isinstance(trips, Value) else self.scalar(trips, S32)
        return self.emit("loop", (trips, *carries), regions=(body,)).results

    def switch(self, index: Value, branches: Sequence[Graph], operands: Sequence[Value]) -> tuple[Value, ...]:
        """Results of branch number `index` (s32[], clamped)."""
        return self.emit("switch", (index, *operands), regions=branches).results

    def fused(self, kind: Kind, region: Graph, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """Results of a region that will be one kernel."""
        return self.emit("fused", inputs, {"kind": kind}, regions=(region,)).results

    def infeed(self, port: int, types: Sequence[TensorType]) -> tuple[Value, ...]:
        """The next item from the host."""
        return self.emit("infeed", (), {"port": port}, types).results

    def outfeed(self, port: int, value: Value) -> None:
        """Send a value to the host."""
        self.emit("outfeed", (value,), {"port": port})

    def call_host(self, function: HostFunction, operands: Sequence[Value]) -> tuple[Value, ...]:
        """The results of a function on the host, for which the device waits."""
        return self.emit("call_host", operands, {"function": function}).results

    def _unstretched(self, x: Value, axes: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
        """Look through a broadcast, or a reshape that adds axes of size 1: (its operand, the operand's axes in terms of `axes`), else (x,
        axes).
        """
        made = self._made_by.get(x)
        if made is None or made.op not in ("broadcast", "reshape"):
            return x, axes
        (source,) = made.inputs
        inner = made.attrs["axes"] if made.op == "broadcast" else _places(source.shape, x.shape)
        return (x, axes) if inner is None else (source, tuple(axes[i] for i in inner))


def _places(shape: tuple[int, ...], within: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of `within` that correspond to those of `shape`, if `within` only has further axes of size 1; None otherwise."""
    places = []
    sizes = iter(enumerate(within))
    for n in shape:
        places.append(next((i for i, m in sizes if m == n), None))
    left = [m for i, m in enumerate(within) if i not in places]
    return tuple(places) if None not in places and set(left) <= {1} else None
