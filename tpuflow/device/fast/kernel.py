"""One kernel as whole-tensor XLA operations: the lift, with some grid axes turned into loops where it must be.

The same code serves three tiers; they differ only in which grid axes run as loops:
  1 (lift)   none: every tile becomes a virtual tensor over the whole grid, an accumulator a reduction;
  2 (batch)  the sequential axes;
  3 (loop)   all axes, one tile after the other.
A tier that has no whole-tensor form for some instruction raises `CannotLift` and the next one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast import access
from tpuflow.device.fast.access import CannotLift, Trips
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.dtypes import DType
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.instruction import Instruction, Tile, Window
from tpuflow.isa.program import Buffer, Kernel

UNROLL_STEPS = 16
BATCH_LABEL = 1000


@dataclass(frozen=True)
class Virtual:
    """A tile's content over all lifted trips: leading dimensions for the lifted grid axes in `batch`, then the tile's own axes."""

    array: Any
    batch: tuple[int, ...] = ()


@dataclass
class _State:
    """What a kernel changes while it is translated: buffers (storage form) and tiles (the arithmetic's form)."""

    hbm: dict[int, Any]
    tiles: dict[Tile, Virtual] = field(default_factory=dict)


def translate_kernel(kernel: Kernel, buffers: Sequence[Buffer], hbm: dict[int, Any], ar: LaxArithmetic) -> tuple[dict[int, Any], int]:
    """(new content of every buffer the kernel writes, tier used). `hbm` maps buffer index to its array, all that is live."""
    if any(g.size == 0 for g in kernel.grid if g.kind == "parallel"):
        return {}, 1
    attempts = ((1, ()), (2, kernel.sequential), (3, kernel.parallel + kernel.sequential))
    for tier, looped in attempts:
        if tier == 2 and not looped:
            continue
        try:
            written = _Translation(kernel, buffers, ar, frozenset(looped), exact_order=ar.bitexact).run(dict(hbm))
        except CannotLift:
            if tier == 3:
                raise
            continue
        return written, tier
    raise AssertionError("tier 3 takes every verified kernel")


class _Translation:
    """The translation of one kernel with a fixed choice of looped axes."""

    def __init__(self, kernel: Kernel, buffers: Sequence[Buffer], ar: LaxArithmetic, looped: frozenset[int], *, exact_order: bool):
        self.kernel, self.buffers, self.ar = kernel, buffers, ar
        self.sizes = tuple(g.size for g in kernel.grid)
        self.carried = _carried_tiles(kernel)
        self.leaked = _leaked_tiles(kernel)
        self.steps = int(np.prod([self.sizes[g] for g in kernel.sequential], dtype=np.int64))
        self.folded = self.steps != 1 and not looped
        if self.folded:
            self._check_foldable()
            if exact_order and self.carried:
                looped = frozenset(kernel.sequential)
                self.folded = False
        self.looped = looped
        self.tails = {g: self._has_tail(g) for g in looped}

    def _check_foldable(self) -> None:
        """Tier 1 over several steps: carried tiles are pure accumulators and nothing but them leaves the body."""
        if self.leaked - self.carried:
            raise CannotLift("the last step's tile is used after the body")
        for tile in self.carried:
            users = [i for i in self.kernel.body if tile in (*i.reads(), *i.writes())]
            if len(users) != 1 or not isinstance(users[0], (vector.ReduceInto, matrix.MatmulAccumulate)):
                raise CannotLift("a tile carried from step to step is not a plain accumulator")

    def _has_tail(self, g: int) -> bool:
        tiles = {t for i in self.kernel.instructions for t in (*i.reads(), *i.writes())}
        return any(a.grid == g and a.extent % a.size for t in tiles for a in t.axes)

    # --- the grid

    def run(self, hbm: dict[int, Any]) -> dict[int, Any]:
        """Translate the whole grid; returns the written buffers."""
        written = sorted({w.buffer for i in self.kernel.instructions for role, w in i.windows() if role == "write"})
        for b in written:
            hbm.setdefault(b, jnp.zeros(self.buffers[b].shape, self.buffers[b].dtype.numpy))
        state = _State(hbm)
        axes = tuple(g for g in self.kernel.parallel if g in self.looped)
        self._loop(axes, Trips(self.sizes, {}, {}), state, written, (), self._point)
        return {b: state.hbm[b] for b in written}

    def _point(self, trips: Trips, state: _State) -> None:
        state.tiles = {}
        self._section(self.kernel.prologue, trips, state)
        axes = tuple(g for g in self.kernel.sequential if g in self.looped)
        written = sorted({w.buffer for i in self.kernel.body for role, w in i.windows() if role == "write"})
        if self.steps or not axes:
            self._loop(axes, trips, state, written, tuple(self.carried | self.leaked), self._step)
        self._section(self.kernel.epilogue, _last_step(trips, self.kernel, self.looped), state)

    def _step(self, trips: Trips, state: _State) -> None:
        self._section(self.kernel.body, trips, state)

    def _section(self, instructions: tuple[Instruction, ...], trips: Trips, state: _State) -> None:
        for instruction in instructions:
            handler = _HANDLERS.get(type(instruction), _compute)
            handler(self, instruction, trips, state)

    def _loop(
        self,
        axes: tuple[int, ...],
        trips: Trips,
        state: _State,
        written: list[int],
        tiles: tuple[Tile, ...],
        body: Callable[[Trips, _State], None],
    ) -> None:
        """Run `body` over the given looped grid axes, outermost first: full tiles in one loop, a clipped tail by itself."""
        if not axes:
            body(trips, state)
            return
        g, rest = axes[0], axes[1:]
        size = self.sizes[g]
        last_apart = self.tails[g] or bool(tiles and self.leaked - self.carried)
        full = size - 1 if last_apart and size else size

        def inner(index: Any, low: int, high: int, current: _State) -> None:
            here = replace(trips, index={**trips.index, g: index}, bounds={**trips.bounds, g: (low, high)})
            self._loop(rest, here, current, written, tiles, body)

        if full <= (UNROLL_STEPS if len(axes) == 1 else 1):
            for i in range(full):
                inner(i, i, i, state)
        else:
            self._counted(full, state, written, tiles, inner)
        if full < size:
            inner(full, full, full, state)

    def _counted(self, count: int, state: _State, written: list[int], tiles: tuple[Tile, ...], inner: Callable[..., None]) -> None:
        """`count` trips as one XLA loop carrying the written buffers and the tiles that live from trip to trip."""
        kept = [t for t in tiles if t in state.tiles]
        batches = [state.tiles[t].batch for t in kept]

        def trip(i: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            arrays, values = carry
            local = _State({**state.hbm, **dict(zip(written, arrays, strict=True))}, dict(state.tiles))
            local.tiles.update({t: Virtual(v, b) for t, v, b in zip(kept, values, batches, strict=True)})
            inner(i, 0, count - 1, local)
            if any(local.tiles[t].batch != b for t, b in zip(kept, batches, strict=True)):
                raise CannotLift("an accumulator depends on more lifted axes after a step than before")
            return [local.hbm[b] for b in written], [local.tiles[t].array for t in kept]

        start = ([state.hbm[b] for b in written], [state.tiles[t].array for t in kept])
        arrays, values = lax.fori_loop(0, count, trip, start)
        state.hbm.update(zip(written, arrays, strict=True))
        state.tiles.update({t: Virtual(v, b) for t, v, b in zip(kept, values, batches, strict=True)})

    # --- values

    def read(self, tile: Tile, state: _State) -> Virtual:
        """The current content of a tile (the verifier has shown that there is one)."""
        return state.tiles[tile]

    def aligned(self, values: Sequence[Virtual]) -> tuple[list[Any], tuple[int, ...]]:
        """The arrays brought to one common set of batch dimensions."""
        batch = tuple(sorted({g for v in values for g in v.batch}))
        return [self._expand(v, batch) for v in values], batch

    def _expand(self, value: Virtual, batch: tuple[int, ...]) -> Any:
        if value.batch == batch:
            return value.array
        rank = value.array.ndim - len(value.batch)
        shape = tuple(self.sizes[g] for g in batch) + value.array.shape[len(value.batch) :]
        where = [batch.index(g) for g in value.batch] + [len(batch) + i for i in range(rank)]
        return lax.broadcast_in_dim(value.array, shape, where)

    def lifted(self, axis_grid: int) -> bool:
        """Whether a grid axis is lifted (not looped)."""
        return axis_grid >= 0 and axis_grid not in self.looped


def _carried_tiles(kernel: Kernel) -> set[Tile]:
    """Tiles that the body reads before it writes them."""
    written: set[Tile] = set()
    carried: set[Tile] = set()
    for instruction in kernel.body:
        carried |= {t for t in instruction.reads() if t not in written}
        written |= set(instruction.writes())
    return {t for t in carried if t in written}


def _leaked_tiles(kernel: Kernel) -> set[Tile]:
    """Tiles that the body writes and the epilogue reads before writing."""
    body = {t for i in kernel.body for t in i.writes()}
    written: set[Tile] = set()
    leaked: set[Tile] = set()
    for instruction in kernel.epilogue:
        leaked |= {t for t in instruction.reads() if t not in written} & body
        written |= set(instruction.writes())
    return leaked


def _last_step(trips: Trips, kernel: Kernel, looped: frozenset[int]) -> Trips:
    """The epilogue sees the last index of every looped sequential axis."""
    last = {g: kernel.grid[g].size - 1 for g in kernel.sequential if g in looped}
    return replace(trips, index={**trips.index, **last}, bounds={**trips.bounds, **{g: (i, i) for g, i in last.items()}})


# --- instructions


def _compute(t: _Translation, i: Any, trips: Trips, state: _State) -> None:
    """Elementwise and other instructions whose meaning applies to whole tensors as it stands."""
    operands, batch = t.aligned([t.read(tile, state) for tile in i.reads()])
    state.tiles[i.dst] = Virtual(i.meaning(t.ar, *operands), batch)


def _constant(t: _Translation, i: vector.Constant | matrix.MatmulZero, trips: Trips, state: _State) -> None:
    (tile,) = i.writes()
    state.tiles[tile] = Virtual(i.meaning(t.ar, trips.shape(tile.axes)))


def _iota(t: _Translation, i: vector.Iota, trips: Trips, state: _State) -> None:
    axis = i.dst.axes[i.axis]
    start = trips.index[axis.grid] * axis.size if axis.grid in trips.index else 0
    state.tiles[i.dst] = Virtual(i.meaning(t.ar, trips.shape(i.dst.axes), start))


def _broadcast(t: _Translation, i: vector.Broadcast, trips: Trips, state: _State) -> None:
    a = t.read(i.a, state)
    n = len(a.batch)
    shape = a.array.shape[:n] + trips.shape(i.dst.axes)
    axes = tuple(range(n)) + tuple(n + x for x in i.axes)
    state.tiles[i.dst] = Virtual(t.ar.broadcast(a.array, shape, axes), a.batch)


def _transpose(t: _Translation, i: vector.Transpose, trips: Trips, state: _State) -> None:
    a = t.read(i.a, state)
    n = len(a.batch)
    state.tiles[i.dst] = Virtual(t.ar.transpose(a.array, tuple(range(n)) + tuple(n + p for p in i.permutation)), a.batch)


def _local_axes(t: _Translation, tile: Tile, axes: tuple[int, ...]) -> None:
    """The named axes must lie whole within each tile: a lifted axis cut into several tiles is not."""
    for x in axes:
        g = tile.axes[x].grid
        if t.lifted(g) and t.sizes[g] != 1:
            raise CannotLift("an instruction works along an axis that the grid cuts into tiles")


def _reduce(t: _Translation, i: vector.Reduce, trips: Trips, state: _State) -> None:
    a = t.read(i.a, state)
    _local_axes(t, i.a, i.axes)
    n = len(a.batch)
    state.tiles[i.dst] = Virtual(t.ar.reduce(i.op, a.array, tuple(n + x for x in i.axes), i.a.dtype), a.batch)


def _fold_axes(t: _Translation, a: Virtual, tile: Tile, reduced: tuple[int, ...]) -> None:
    """Folding all steps at once is right only if every sequential axis is summed over exactly once through this operand."""
    blocked = {axis.grid for x, axis in enumerate(tile.axes) if x in reduced}
    kept = {axis.grid for x, axis in enumerate(tile.axes) if x not in reduced}
    for g in t.kernel.sequential:
        if t.sizes[g] != 1 and (g in kept or (g in a.batch) == (g in blocked)):
            raise CannotLift("an accumulator that does not reduce over every step")
    if any(t.sizes[g] != 1 for g in blocked & set(t.kernel.parallel)):
        raise CannotLift("a reduction across points")


def _reduce_into(t: _Translation, i: vector.ReduceInto, trips: Trips, state: _State) -> None:
    acc, a = t.read(i.acc, state), t.read(i.a, state)
    if not t.folded:
        _local_axes(t, i.a, i.axes)
        n = len(a.batch)
        part = Virtual(t.ar.reduce(i.op, a.array, tuple(n + x for x in i.axes), i.a.dtype), a.batch)
    else:
        _fold_axes(t, a, i.a, i.axes)
        part = _fold_reduce(t, i, a)
    (x, y), batch = t.aligned([acc, part])
    state.tiles[i.acc] = Virtual(t.ar.binary(i.op, x, y, i.acc.dtype), batch)


def _fold_reduce(t: _Translation, i: vector.ReduceInto, a: Virtual) -> Virtual:
    """One reduction over the tile's axes and every batched step axis (order free: native only)."""
    n = len(a.batch)
    steps = tuple(k for k, g in enumerate(a.batch) if g in t.kernel.sequential)
    reduced = t.ar.reduce(i.op, a.array, (*steps, *(n + x for x in i.axes)), i.a.dtype)
    batch = tuple(g for g in a.batch if g not in t.kernel.sequential)
    return Virtual(lax.squeeze(reduced, steps), batch)


def _matmul(t: _Translation, i: matrix.MatmulAccumulate, trips: Trips, state: _State) -> None:
    acc, a, b = t.read(i.acc, state), t.read(i.a, state), t.read(i.b, state)
    contracted = {x for x in i.a_axes if x not in i.acc_axes}
    steps: set[int] = set()
    if t.folded:
        for value, tile, axes in ((a, i.a, i.a_axes), (b, i.b, i.b_axes)):
            _fold_axes(t, value, tile, tuple(k for k, x in enumerate(axes) if x in contracted))
        steps = {g for g in (*a.batch, *b.batch) if g in t.kernel.sequential}
        if any((g in a.batch) != (g in b.batch) for g in steps):
            raise CannotLift("a step axis that only one operand of a product depends on")
    else:
        for tile, axes in ((i.a, i.a_axes), (i.b, i.b_axes)):
            _local_axes(t, tile, tuple(k for k, x in enumerate(axes) if x in contracted))
    batch = tuple(sorted({g for g in (*a.batch, *b.batch) if g not in steps}))
    product = t.ar.matmul(
        a.array,
        b.array,
        _labels(a, i.a_axes),
        _labels(b, i.b_axes),
        (*(BATCH_LABEL + g for g in batch), *i.acc_axes),
        i.a.dtype,
        i.acc.dtype,
    )
    (x, y), batch = t.aligned([acc, Virtual(product, batch)])
    state.tiles[i.acc] = Virtual(t.ar.binary("add", x, y, i.acc.dtype), batch)


def _labels(value: Virtual, axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*(BATCH_LABEL + g for g in value.batch), *axes)


def _cumulative(t: _Translation, i: vector.Cumulative, trips: Trips, state: _State) -> None:
    _local_axes(t, i.a, (i.axis,))
    (carry, a), batch = t.aligned([t.read(i.carry, state), t.read(i.a, state)])
    values, last = t.ar.cumulative(i.op, carry, a, len(batch) + i.axis, i.a.dtype)
    state.tiles[i.dst], state.tiles[i.carry] = Virtual(values, batch), Virtual(last, batch)


def _sort(t: _Translation, i: vector.Sort, trips: Trips, state: _State) -> None:
    _local_axes(t, i.srcs[0], (i.axis,))
    operands, batch = t.aligned([t.read(x, state) for x in i.srcs])
    results = t.ar.sort(tuple(operands), tuple(x.dtype for x in i.srcs), len(batch) + i.axis, i.keys)
    state.tiles.update({x: Virtual(r, batch) for x, r in zip(i.dsts, results, strict=True)})


def _positions(t: _Translation, window: Window, trips: Trips, state: _State) -> list[access.Positions]:
    return [
        access.axis_positions(axis, tile, trips, None if axis.register is None else t.read(axis.register, state).array)
        for axis, tile in zip(window.axes, window.tile.axes, strict=True)
    ]


def _fill(t: _Translation, window: Window, dtype: DType) -> Any:
    return jnp.asarray(np.asarray(window.fill).astype(dtype.numpy))


def _load(t: _Translation, i: dma.Load, trips: Trips, state: _State) -> None:
    view = access.to_view(state.hbm[i.window.buffer], i.window)
    state.tiles[i.window.tile] = _load_axes(t, i.window, view, _positions(t, i.window, trips, state))


def _load_axes(t: _Translation, window: Window, view: Any, wheres: list[access.Positions]) -> Virtual:
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
        view = lax.transpose(view, first + [k for k, g in enumerate(order) if g < 0])
    return Virtual(t.ar.load(view, dtype), batch)


def _store(t: _Translation, i: dma.Store, trips: Trips, state: _State) -> None:
    window = i.window
    value = t.read(window.tile, state)
    wheres = _positions(t, window, trips, state)
    array = t.ar.store(value.array, window.tile.dtype)
    array, wheres = _fold_batch_into_axes(t, Virtual(array, value.batch), window, wheres)
    buffer = t.buffers[window.buffer]
    view = access.to_view(state.hbm[window.buffer], window)
    view = access.write_axes(view, array, window, wheres)
    state.hbm[window.buffer] = access.from_view(view, window, buffer.shape)


def _fold_batch_into_axes(
    t: _Translation, value: Virtual, window: Window, wheres: list[access.Positions]
) -> tuple[Any, list[access.Positions]]:
    """Batch dimensions of value and positions become part of the window axis that they move along."""
    moving = [g for w in wheres for g in w.batch]
    blocked = {a.grid for a in window.tile.axes if t.lifted(a.grid)}
    if len(set(moving)) != len(moving) or blocked & set(moving) or set(value.batch) - set(moving):
        raise CannotLift("a store that does not spread its lifted axes over the window")
    if not moving:
        return value.array, wheres
    batch = tuple(sorted(moving))
    array = t._expand(value, batch)
    rank = len(wheres)
    order = [k for axis, w in enumerate(wheres) for k in (*(batch.index(g) for g in w.batch), len(batch) + axis)]
    array = lax.transpose(array, order)
    shape = tuple(int(np.prod(w.static.shape)) for w in wheres)
    flat = [replace(w, static=w.static.reshape(-1), batch=()) for w in wheres]
    assert len(shape) == rank
    return array.reshape(shape), flat


def _load_indexed(t: _Translation, i: dma.LoadIndexed, trips: Trips, state: _State) -> None:
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


def _row_index(t: _Translation, tile: Tile, where: access.Positions, state: _State) -> Any:
    index = t.read(tile, state)
    if index.batch or where.batch:
        raise CannotLift("row numbers that depend on lifted axes")
    return index.array + jnp.asarray(where.static, jnp.int32) + where.offset


def _store_indexed(t: _Translation, i: dma.StoreIndexed, trips: Trips, state: _State) -> None:
    window = i.window
    buffer, dtype = t.buffers[window.buffer], window.tile.dtype
    value = t.read(window.tile, state)
    wheres = _positions(t, window, trips, state)
    index = _row_index(t, i.index, wheres[0], state)
    if value.batch or any(w.batch for w in wheres):
        raise CannotLift("an indexed store over a moving window")
    view = access.to_view(state.hbm[window.buffer], window)
    rows, piece = t.ar.store(value.array, dtype), view
    for k, (axis, where) in enumerate(zip(window.axes[1:], wheres[1:], strict=True), 1):
        piece = access.read_axis(piece, k, axis.extent, axis.dilation, where, _fill(t, window, dtype))
    piece = _scatter_rows(t, i.mode, piece, index, rows, dtype)
    every_row = access.Positions(np.arange(window.axes[0].extent), (), 0, (0.0, 0.0))
    view = access.write_axes(view, piece, window, [every_row, *wheres[1:]])
    state.hbm[window.buffer] = access.from_view(view, window, buffer.shape)


def _scatter_rows(t: _Translation, mode: str, view: Any, index: Any, rows: Any, dtype: DType) -> Any:
    """Rows combined in index order; what lies outside is dropped."""
    extent = view.shape[0]
    if extent == 0 or rows.size == 0:
        return view
    safe = jnp.where((index >= 0) & (index < extent), index, extent)
    if mode == "set" or (dtype.numpy == np.float32 and mode in ("min", "max")) or not t.ar.bitexact or dtype.is_integer:
        at = view.at[safe]
        return {"set": at.set, "add": at.add, "mul": at.multiply, "min": at.min, "max": at.max}[mode](rows, mode="drop")

    def combine(r: Any, view: Any) -> Any:
        place = jnp.clip(safe[r], 0, extent - 1)
        old = lax.dynamic_index_in_dim(view, place, 0, keepdims=False)
        new = t.ar.store(t.ar.binary(mode, t.ar.load(old, dtype), t.ar.load(rows[r], dtype), dtype), dtype)
        return lax.dynamic_update_index_in_dim(view, jnp.where(safe[r] < extent, new, old), place, 0)

    return lax.fori_loop(0, rows.shape[0], combine, view)


def _nothing(t: _Translation, i: Instruction, trips: Trips, state: _State) -> None:
    """Semaphores: the verifier has shown that they imply program order, in which the translation runs."""


_HANDLERS: dict[type[Instruction], Callable[..., None]] = {
    vector.Constant: _constant,
    matrix.MatmulZero: _constant,
    vector.Iota: _iota,
    vector.Broadcast: _broadcast,
    vector.Transpose: _transpose,
    vector.Reduce: _reduce,
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
