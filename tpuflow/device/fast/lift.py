"""The lift rules: each instruction as an operation on whole virtual tensors. `HANDLERS` has one rule for each instruction class."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.chips import CHIPS
from tpuflow.device.fast import access, boxes
from tpuflow.device.fast.access import Trips
from tpuflow.device.fast.extremes import NOTHING, handed_on, is_number
from tpuflow.device.fast.joined_stores import piece_at
from tpuflow.device.fast.lax_reduce import summed
from tpuflow.device.fast.lax_rounding import materialized
from tpuflow.device.fast.positions import CannotLift, Positions
from tpuflow.device.fast.product_operands import product_operands
from tpuflow.device.fast.reshapes import transposed
from tpuflow.device.fast.slices import dynamic_index_in_dim, dynamic_update_index_in_dim
from tpuflow.device.fast.softmaxes import Role
from tpuflow.device.fast.virtual import Lifting, State, Virtual, leading_ones, same_view
from tpuflow.dtypes import F32, DType
from tpuflow.isa import dma, matrix, philox, vector
from tpuflow.isa.contraction import Halo
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, Window
from tpuflow.isa.splitting import multiply_split

GENERIC = CHIPS["generic"]
MATERIALIZE_WORK, SPECIAL_WORK = 4, 8
MATERIALIZE_ELEMS = 2**16
"""The least elementwise work, and the least number of elements, from which on a stored result is materialized, natively: XLA:CPU fuses
it into each of its readers otherwise, and recomputes it there, in the reader's order, with all that it is made of: the sums of a network's
residual blocks become chains that every reader computes from the first block on. An instruction is 1 of work; a division, a root or a
transcendental function is `SPECIAL_WORK`. Measured on [3200, 256], read by two sums and a map: 24 multiplications and additions take 0.9 ms
recomputed and 0.5 ms materialized, 8 of them the same either way; x * sigmoid(x) of [8, 160, 160, 32], fused into a transposition, takes 92
ms instead of 5."""
SOFTMAX_ELEMS = 2**14
"""The least number of elements from which on a softmax is YNNPACK's, which takes no small ones: their maxima would be slow."""
LONG_WORK = 64
"""The least elementwise work from which on a stored result is materialized however few elements it has, in either fidelity. Fused into a
loop over random numbers, the 20 rounds of threefry that derive their key are a chain that LLVM's vectorizer never comes to the end
of: it asks of every operand of every operand whether it is the same for all elements (`isSingleScalar`, LLVM 22)."""


def _elementwise(t: Lifting, i: Any, trips: Trips, state: State) -> None:
    """Elementwise instructions: their meaning applies to whole tensors as it stands."""
    if not t.ar.bitexact and (same := handed_on(i, t.makers)) is not None:
        state.tiles[i.dst] = t.read(same, state)
        return
    values = [t.read(tile, state) for tile in i.reads()]
    first, *others = values
    if first.ones and all((x.shape, x.batch) == (first.shape, first.batch) for x in others):
        front, operands, batch = first.ones, [x.bare for x in values], first.batch
    else:
        front, (operands, batch) = 0, t.aligned(values)
    (dst,) = i.writes()
    made = id(i), SPECIAL_WORK if i.cost(GENERIC, lambda tile: (1,)).element_ops > 1 else 1
    work = frozenset({made}).union(*(value.work for value in values))
    state.tiles[dst] = Virtual(i.meaning(t.ar, trips.trip(dst), *operands), batch, work=work, front=front)


def _splat(t: Lifting, i: vector.Constant | matrix.MatmulZero, trips: Trips, state: State) -> None:
    """Instructions that write one number everywhere."""
    (dst,) = i.writes()
    trip = trips.trip(dst)
    front = leading_ones(trip.shape)
    bare = i.meaning(t.ar, replace(trip, shape=trip.shape[front:]))
    state.tiles[dst] = Virtual(bare, zero=isinstance(i, matrix.MatmulZero) or _is_zero(i), front=front)


def _is_zero(i: Instruction) -> bool:
    """Whether an instruction writes +0."""
    return isinstance(i, vector.Constant) and i.value == 0 and math.copysign(1, i.value) > 0


def _iota(t: Lifting, i: vector.Iota, trips: Trips, state: State) -> None:
    state.tiles[i.dst] = Virtual(i.meaning(t.ar, trips.trip(i.dst)))


def _random(t: Lifting, i: vector.Random, trips: Trips, state: State) -> None:
    words = t.read(i.state, state)
    if words.batch:
        raise CannotLift("a random state that depends on lifted axes")
    work = frozenset({(id(i), philox.OPERATIONS)})
    state.tiles[i.dst] = Virtual(i.meaning(t.ar, trips.trip(i.dst), words.array), work=work)


def _broadcast(t: Lifting, i: vector.Broadcast, trips: Trips, state: State) -> None:
    a = t.read(i.a, state)
    n = len(a.batch)
    shape = a.array.shape[:n] + trips.shape(i.dst.axes)
    axes = tuple(range(n)) + tuple(n + x for x in i.axes)
    state.tiles[i.dst] = Virtual(t.ar.broadcast(a.array, shape, axes), a.batch)


def _transpose(t: Lifting, i: vector.Transpose, trips: Trips, state: State) -> None:
    a = t.read(i.a, state)
    n = len(a.batch)
    state.tiles[i.dst] = Virtual(t.ar.transpose(a.array, tuple(range(n)) + tuple(n + p for p in i.permutation)), a.batch)


def _slice(t: Lifting, i: vector.Slice, trips: Trips, state: State) -> None:
    """A slice of each piece is one of the stretch that they make up (`halos_of`)."""
    a = t.read(i.a, state)
    starts, strides = ((0,) * len(a.batch) + i.starts, (1,) * len(a.batch) + i.strides)
    taken = a.array.shape[: len(a.batch)] + trips.shape(i.dst.axes)
    stops = [start + (n - 1) * stride + 1 for start, n, stride in zip(starts, taken, strides, strict=True)]
    state.tiles[i.dst] = Virtual(lax.slice(a.array, starts, stops, strides), a.batch)


def _local_axes(t: Lifting, tile: Tile, axes: tuple[int, ...]) -> None:
    """Refuse to lift if one of the tile's `axes` is blocked by a lifted grid axis: the instruction needs it whole in every tile."""
    _whole_axes(t, [tile.axes[x] for x in axes])


def _whole_axes(t: Lifting, axes: Sequence[TileAxis]) -> None:
    for g in (axis.grid for axis in axes):
        if t.lifted(g) and t.sizes[g] != 1:
            raise CannotLift("an instruction works along an axis that the grid cuts into tiles")


def _fold_axes(t: Lifting, a: Virtual, axes: Sequence[TileAxis], reduced: tuple[int, ...]) -> None:
    """Folding all steps at once is right only if every sequential axis is summed over exactly once through this operand."""
    blocked = {axis.grid for x, axis in enumerate(axes) if x in reduced}
    kept = {axis.grid for x, axis in enumerate(axes) if x not in reduced}
    for g in t.kernel.sequential:
        if t.sizes[g] != 1 and (g in kept or (g in a.batch) == (g in blocked)):
            raise CannotLift("an accumulator that does not reduce over every step")
    if any(t.sizes[g] != 1 for g in blocked & set(t.kernel.parallel)):
        raise CannotLift("a reduction across points")


def _reduce_into(t: Lifting, i: vector.ReduceInto, trips: Trips, state: State) -> None:
    acc, a = t.read(i.acc, state), t.read(i.a, state)
    if t.folded and i.acc in t.carried:
        _fold_axes(t, a, i.a.axes, i.axes)
    else:
        _local_axes(t, i.a, i.axes)
    steps = tuple(g for g in a.batch if t.folded and i.acc in t.carried and g in t.kernel.sequential)
    is_sum = i.op == "add" and i.a.dtype == F32 and not t.ar.bitexact  # in any order
    in_memory = not a.work
    a = _inner_batch(a, steps)
    batch = tuple(sorted({*acc.batch, *a.batch}))
    taken = tuple(range(len(batch), len(batch) + len(steps)))  # steps that are taken at once: native only, where order is free
    axes = (*taken, *(len(batch) + len(steps) + x for x in i.axes))
    source, role = t.expand(a, batch), t.softmaxes.get(id(i)) if a.array.size >= SOFTMAX_ELEMS else None
    if is_sum and (widened := t.ar.to_be_summed(source)) is not None:
        source, in_memory = widened, True
    if role is Role.MAXIMUM:
        found = lax.expand_dims(lax.reduce(source, np.float32(-np.inf), lax.max, axes), axes)
    elif is_sum and acc.zero:
        in_memory = in_memory or role is Role.SUM
        found = summed(source, axes, from_zero=True, in_memory=in_memory)
    else:
        start = None if _starts_at_nothing(t, i) and source.size else lax.expand_dims(t.expand(acc, batch), taken)
        block = math.prod(source.shape[x] for x in axes) if steps else i.block
        from_zero = is_sum and _starts_at_zero(t, i)
        found = t.ar.reduce(i.op, start, source, axes, block, i.a.dtype, in_memory=in_memory, from_zero=from_zero)
    state.tiles[i.acc] = Virtual(lax.squeeze(found, taken), batch)


def _starts_at_nothing(t: Lifting, i: vector.ReduceInto) -> bool:
    """Whether an extreme starts from what it cannot be told from, natively."""
    if t.ar.bitexact or i.op not in NOTHING or (i.acc in t.carried and not t.folded):
        return False
    return is_number([maker for maker in t.makers(i, i.acc) if maker is not i], NOTHING[i.op])


def _starts_at_zero(t: Lifting, i: vector.ReduceInto) -> bool:
    """Whether the accumulator is never -0: what is in it when something is added to it is +0, or a sum that starts from that."""
    found, sums = False, [i]
    for x in sums:
        for maker in t.makers(x, i.acc):
            if isinstance(maker, vector.ReduceInto) and maker.op == "add":
                sums += [maker] if all(maker is not y for y in sums) else []
            elif _is_zero(maker):
                found = True
            else:
                return False
    return found


def _inner_batch(value: Virtual, inner: tuple[int, ...]) -> Virtual:
    """Some batch dimensions as the first axes of the value itself."""
    outer = tuple(g for g in value.batch if g not in inner)
    order = [value.batch.index(g) for g in (*outer, *inner)]
    return Virtual(transposed(value.array, (*order, *range(len(order), value.array.ndim))), outer)


def _matmul(t: Lifting, i: matrix.MatmulAccumulate, trips: Trips, state: State) -> None:
    acc, a, b = t.read(i.acc, state), t.read(i.a, state), t.read(i.b, state)
    halos, whole = t.halos.get(i.a, {}), i.contraction
    if i.pairs and not halos and any(t.lifted(g) and t.sizes[g] != 1 for g in range(len(t.sizes))):
        raise CannotLift("a halo tile that is not a piece of one stretch")
    contracted = set(whole.contracted)
    sides = ((a, _patch_axes(i.a, halos), whole.patch if halos else whole.lhs), (b, i.b.axes, whole.rhs))
    steps: set[int] = set()
    if t.folded and i.acc in t.carried:
        for value, axes, labels in sides:
            _fold_axes(t, value, axes, tuple(k for k, x in enumerate(labels) if x in contracted))
        steps = {g for g in (*a.batch, *b.batch) if g in t.kernel.sequential}
        if any((g in a.batch) != (g in b.batch) for g in steps):
            raise CannotLift("a step axis that only one operand of a product depends on")
    else:
        for _, axes, labels in sides:
            _whole_axes(t, [axis for axis, x in zip(axes, labels, strict=True) if x in contracted])
    batch = tuple(sorted({g for g in (*a.batch, *b.batch) if g not in steps}))
    own = (value.array.shape[len(value.batch) :] for value in (a, b, acc))
    sizes, lifted = whole.by_label(*own), whole.with_batches(a.batch, b.batch, batch)
    operands, right = product_operands(t, i, trips, a, b, sizes), b.array
    if t.gather is not None:
        operands, right, lifted = operands.of_chips(t.gather), t.gather(right), lifted.with_batches((0,), (0,), ())

    def multiply(x: Any, y: Any, dtype: DType) -> Any:
        return t.ar.convolve(
            x, y, lifted, sizes, dtype, i.acc.dtype, operands.a_mask, operands.b_mask, operands.low_padding, operands.phases
        )

    total, pieces = acc, i.k_tiles(operands.a, right, lifted.lhs, lifted.rhs) if t.ar.bitexact else [(operands.a, right)]
    for x, y in pieces:
        product = Virtual(multiply_split(t.ar, x, y, i.a.dtype, i.precision, multiply), batch)
        if total.zero and not t.ar.bitexact:
            total = product
            continue
        (x, y), batch = t.aligned([total, product])
        total = Virtual(t.ar.binary("add", x, y, i.acc.dtype), batch)
    state.tiles[i.acc] = total


def _patch_axes(tile: Tile, halos: Mapping[int, Halo]) -> list[TileAxis]:
    """The tile axes of a product's left operand once each halo is its two labels' axes."""
    doubled = ((halos[n].outer, halos[n].inner) if n in halos else (axis,) for n, axis in enumerate(tile.axes))
    return [axis for axes in doubled for axis in axes]


def _cumulative(t: Lifting, i: vector.Cumulative, trips: Trips, state: State) -> None:
    _local_axes(t, i.a, (i.axis,))
    (carry, a), batch = t.aligned([t.read(i.carry, state), t.read(i.a, state)])
    values, last = t.ar.cumulative(i.op, carry, a, len(batch) + i.axis, i.a.dtype)
    state.tiles[i.dst], state.tiles[i.carry] = Virtual(values, batch), Virtual(last, batch)


def _sort(t: Lifting, i: vector.Sort, trips: Trips, state: State) -> None:
    _local_axes(t, i.srcs[0], (i.axis,))
    operands, batch = t.aligned([t.read(x, state) for x in i.srcs])
    results = t.ar.sort(tuple(operands), tuple(x.dtype for x in i.srcs), len(batch) + i.axis, i.keys, i.count)
    state.tiles.update({x: Virtual(r, batch) for x, r in zip(i.dsts, results, strict=True)})


def _positions(t: Lifting, window: Window, trips: Trips, state: State) -> list[Positions]:
    halos = t.halos.get(window.tile, {})
    return [
        access.halo_positions(axis, halos[n], trips)
        if n in halos
        else access.axis_positions(axis, tile, trips, None if axis.register is None else t.read(axis.register, state).array)
        for n, (axis, tile) in enumerate(zip(window.axes, window.tile.axes, strict=True))
    ]


def _fill(t: Lifting, window: Window, dtype: DType) -> Any:
    return t.ar.held(window.fill, dtype)


def _load(t: Lifting, i: dma.Load, trips: Trips, state: State) -> None:
    wheres = _positions(t, i.window, trips, state)
    box = None if t.looped else boxes.strides(wheres)
    if box is not None:
        state.tiles[i.window.tile] = _load_box(t, i.window, box, trips, state)
        return
    state.tiles[i.window.tile] = _load_moving(t, i.window, state.hbm[i.window.buffer], wheres)


def _load_moving(t: Lifting, window: Window, array: Any, wheres: list[Positions]) -> Virtual:
    """A load from the buffer in its own shape where that can be: of a reshaped one XLA does not see how little is read, and cuts a trip's
    row of an LSTM in two for two threads."""
    finer = None if all(w.known for w in wheres) or any(w.batch for w in wheres) else access.in_own_shape(array.shape, window, wheres)
    if finer is None:
        return _load_axes(t, window, access.to_view(array, window), wheres)
    return Virtual(_load_axes(t, finer[0], array, finer[1]).array.reshape([w.length for w in wheres]))


def _load_box(t: Lifting, window: Window, box: Sequence[boxes.Stride], trips: Trips, state: State) -> Virtual:
    """A load from a view that is padded once for all loads of the kernel that leave it."""
    source, view_key = state.hbm[window.buffer], same_view(window)
    key = view_key, tuple(sorted(trips.index.items()))  # the prologue and the epilogue stand elsewhere than the body
    if key not in state.margins:
        found = (boxes.strides(_positions(t, w, trips, state)) for w in t.loads[view_key] if all(a.register is None for a in w.axes))
        state.margins[key] = boxes.margins([b for b in found if b is not None], boxes.spread_extents(window))
    around = state.margins[key]
    if key not in state.padded or state.padded[key][0] is not source:
        view = boxes.padded(access.to_view(source, window), window, around, functools.partial(_fill, t, window, window.tile.dtype))
        state.padded[key] = source, view
    bare = boxes.unpadded(access.to_view(source, window), window, box) if any(map(any, around)) else None
    held = None if bare is None else replace(bare, array=t.ar.load(bare.array, window.tile.dtype))
    return Virtual(t.ar.load(boxes.cut(state.padded[key][1], box, around), window.tile.dtype), unpadded=held)


def _load_axes(t: Lifting, window: Window, view: Any, wheres: list[Positions]) -> Virtual:
    dtype = window.tile.dtype
    fill = _fill(t, window, dtype)
    batches = [g for w in wheres for g in w.batch]
    blocked = {a.grid for a in window.tile.axes if t.lifted(a.grid)}
    if len(set(batches)) != len(batches) or blocked & set(batches):
        raise CannotLift("a window moves diagonally")
    at = 0
    order: list[int] = []
    for axis, where in zip(window.axes, wheres, strict=True):
        view = access.read_axis(view, at, axis.extent, axis.dilation, where, fill)
        order += [*where.batch, -1]
        at += len(where.batch) + 1
    batch = tuple(sorted(batches))
    if batch:
        first = [order.index(g) for g in batch]
        view = transposed(view, first + [k for k, g in enumerate(order) if g < 0])
    return Virtual(t.ar.load(view, dtype), batch)


def _store(t: Lifting, i: dma.Store, trips: Trips, state: State) -> None:
    window = i.window
    value = t.read(window.tile, state)
    wheres = _positions(t, window, trips, state)
    array = t.ar.hold(value.array, window.tile.dtype) if value.rested is None else value.rested
    array, wheres = _fold_batch_into_axes(t, Virtual(array, value.batch), window, wheres)
    if _is_deferred(t, window, array, wheres, state):
        return
    buffer = t.buffers[window.buffer]
    if array.size == buffer.elems and window.buffer in t.read_later:
        if _work_of(value) >= LONG_WORK:
            array = materialized(array)
        elif window.tile in t.only_stored and _pays_materializing(value, array.size):
            array = t.ar.materialized_if_native(array)
    whole = access.whole(array, window, wheres, buffer.shape)
    state.hbm[window.buffer] = access.write(state.hbm[window.buffer], array, window, wheres) if whole is None else whole


def _work_of(value: Virtual) -> int:
    return sum(work for _, work in value.work)


def _pays_materializing(value: Virtual, elems: int) -> bool:
    """Whether materializing a value of so many elements takes less time than recomputing it in its readers."""
    return _work_of(value) >= MATERIALIZE_WORK and elems >= MATERIALIZE_ELEMS


def _is_deferred(t: Lifting, window: Window, array: Any, wheres: list[Positions], state: State) -> bool:
    """Defer a store until the kernel ends if others write the same buffer through the same view; whether it was deferred."""
    if t.looped or window.buffer not in t.joined_stores or any(a.dilation != 1 for a in window.axes):
        return False
    piece = piece_at(array, wheres)
    if piece is None:
        raise CannotLift("one of several stores to a buffer whose places are not evenly spaced")
    state.pieces.setdefault(window.buffer, []).append((window, piece))
    return True


def _fold_batch_into_axes(t: Lifting, value: Virtual, window: Window, wheres: list[Positions]) -> tuple[Any, list[Positions]]:
    """Batch dimensions of value and positions become part of the window axis that they move along."""
    moving = [g for w in wheres for g in w.batch]
    blocked = {a.grid for a in window.tile.axes if t.lifted(a.grid)}
    if len(set(moving)) != len(moving) or blocked & set(moving) or set(value.batch) - set(moving):
        raise CannotLift("a store that does not spread its lifted axes over the window")
    if not moving:
        return value.array, wheres
    batch = tuple(sorted(moving))
    array = t.expand(value, batch)
    order = [k for axis, w in enumerate(wheres) for k in (*(batch.index(g) for g in w.batch), len(batch) + axis)]
    array = transposed(array, order)
    flat = [replace(w, batch=()) for w in wheres]
    return array.reshape([w.length for w in flat]), flat


def _load_indexed(t: Lifting, i: dma.LoadIndexed, trips: Trips, state: State) -> None:
    window = i.window
    wheres = _positions(t, window, trips, state)
    index = _row_index(t, i.index, wheres[0], state)
    view = access.to_view(state.hbm[window.buffer], window)
    fill = _fill(t, window, window.tile.dtype)
    extent = window.axes[0].extent
    if any(w.batch for w in wheres):
        raise CannotLift("an indexed load over a moving window")
    for k, (axis, where) in enumerate(zip(window.axes[1:], wheres[1:], strict=True), 1):
        view = access.read_axis(view, k, axis.extent, axis.dilation, where, fill)
    ok = (index >= 0) & (index < extent)
    rows = jnp.take(view, jnp.where(ok, index, 0), axis=0, mode="clip") if extent else jnp.broadcast_to(fill, index.shape + view.shape[1:])
    rows = jnp.where(ok.reshape(ok.shape + (1,) * (view.ndim - 1)), rows, fill)
    state.tiles[window.tile] = Virtual(t.ar.load(rows, window.tile.dtype))


def _row_index(t: Lifting, tile: Tile, where: Positions, state: State) -> Any:
    index = t.read(tile, state)
    if index.batch or where.batch:
        raise CannotLift("row numbers that depend on lifted axes")
    return index.array + where.array()


def _store_indexed(t: Lifting, i: dma.StoreIndexed, trips: Trips, state: State) -> None:
    window = i.window
    buffer, dtype = t.buffers[window.buffer], window.tile.dtype
    value = t.read(window.tile, state)
    wheres = _positions(t, window, trips, state)
    index = _row_index(t, i.index, wheres[0], state)
    if value.batch or any(w.batch for w in wheres):
        raise CannotLift("an indexed store over a moving window")
    view = access.to_view(state.hbm[window.buffer], window)
    rows, piece = t.ar.hold(value.array, dtype), view
    for k, (axis, where) in enumerate(zip(window.axes[1:], wheres[1:], strict=True), 1):
        piece = access.read_axis(piece, k, axis.extent, axis.dilation, where, _fill(t, window, dtype))
    piece = _scatter_rows(t, i.mode, piece, index, rows, dtype)
    every_row = Positions.even(0, 1, window.axes[0].extent)
    view = access.write_axes(view, piece, window, [every_row, *wheres[1:]])
    state.hbm[window.buffer] = access.from_view(view, window, buffer.shape)


def _scatter_rows(t: Lifting, mode: str, view: Any, index: Any, rows: Any, dtype: DType) -> Any:
    """Rows combined in index order, every combination rounded to the type; what lies outside is dropped, and no other row is touched."""
    extent = view.shape[0]
    if extent == 0 or rows.size == 0:
        return view
    safe = jnp.where((index >= 0) & (index < extent), index, extent)
    if mode == "set":
        return view.at[safe].set(rows, mode="drop")
    if not dtype.is_float or (dtype == F32 and not t.ar.bitexact):
        at = view.at[safe]
        return {"add": at.add, "mul": at.multiply, "min": at.min, "max": at.max}[mode](rows, mode="drop")

    def combine(r: Any, view: Any) -> Any:
        place = jnp.clip(safe[r], 0, extent - 1)
        old = dynamic_index_in_dim(view, place, 0, keepdims=False)
        new = t.ar.hold(t.ar.binary(mode, t.ar.load(old, dtype), t.ar.load(rows[r], dtype), dtype), dtype)
        return dynamic_update_index_in_dim(view, jnp.where(safe[r] < extent, new, old), place, 0)

    return lax.fori_loop(0, rows.shape[0], combine, view)


def _nothing(t: Lifting, i: Instruction, trips: Trips, state: State) -> None:
    """Semaphores: the verifier has shown that they imply program order, in which the translation runs."""


HANDLERS: Mapping[type[Instruction], Callable[..., None]] = {
    vector.Constant: _splat,
    matrix.MatmulZero: _splat,
    vector.Iota: _iota,
    vector.Random: _random,
    vector.Broadcast: _broadcast,
    vector.Transpose: _transpose,
    vector.Slice: _slice,
    vector.ReduceInto: _reduce_into,
    vector.Cumulative: _cumulative,
    vector.Sort: _sort,
    matrix.MatmulAccumulate: _matmul,
    dma.Load: _load,
    dma.Store: _store,
    dma.LoadIndexed: _load_indexed,
    dma.StoreIndexed: _store_indexed,
    dma.Signal: _nothing,
    dma.Wait: _nothing,
}


def handler_of(instruction: Instruction) -> Callable[..., None]:
    """The lift rule of an instruction: its own, or the one of all that are stated to be elementwise.

    Raises:
      CannotLift: it has none. ProgramError: it states no traits.
    """
    own = HANDLERS.get(type(instruction))
    if own is not None:
        return own
    if not instruction.has("elementwise") or len(instruction.writes()) != 1:
        raise CannotLift(f"instruction {instruction.mnemonic!r} has no lift rule, and is not an elementwise one with one result")
    return _elementwise
