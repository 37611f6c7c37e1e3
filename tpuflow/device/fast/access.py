"""Loads and stores of whole virtual tensors: a window, lifted over grid axes, becomes slices, pads, reversals and gathers.

Every window axis pairs one tile axis with one axis of the buffer's view, so a lifted access is done axis by axis: the positions that
all lifted trips touch along one axis are known in closed form when the Program is translated (a `Positions`), plus a run-time offset
where a looped grid axis or a scalar register moves the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.positions import CannotLift, Dim, Positions
from tpuflow.device.fast.reshapes import reshaped, transposed
from tpuflow.device.fast.slices import dynamic_slice, dynamic_slice_in_dim, dynamic_update_slice
from tpuflow.isa.contraction import Halo
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.trip import Trip
from tpuflow.isa.windows import view_layout


@dataclass(frozen=True)
class Trips:
    """The point of the grid at which the translation is: the indices of the grid axes that run as loops.

    `sizes` are those of all grid axes. `index[g]` is an int or a traced s32 scalar, `bounds[g]` the smallest and largest value that it
    takes here. Grid axes that are not in `index` are lifted.
    """

    sizes: tuple[int, ...]
    index: Mapping[int, Any]
    bounds: Mapping[int, tuple[int, int]]

    def length(self, axis: TileAxis) -> int:
        """Static length of a tile axis here: whole if its grid axis is lifted, else what the current index holds."""
        if axis.grid < 0:
            return axis.size
        if axis.grid not in self.index:
            return axis.extent
        low, high = self.bounds[axis.grid]
        if axis.valid(low) != axis.valid(high):
            raise CannotLift("a loop crosses the clipped tail of an axis")
        return axis.valid(low)

    def shape(self, axes: tuple[TileAxis, ...]) -> tuple[int, ...]:
        """Static shape of a tile here."""
        return tuple(self.length(a) for a in axes)

    def start(self, axis: TileAxis) -> Any:
        """The position on the whole axis at which a tile's axis begins here; a lifted axis is whole."""
        return self.index[axis.grid] * axis.size if axis.grid in self.index else 0

    def trip(self, tile: Tile) -> Trip:
        """The `Trip` for the meaning of an instruction that writes this tile."""
        return Trip(self.shape(tile.axes), self.start)


def axis_positions(axis: WindowAxis, tile: TileAxis, trips: Trips, register: Any) -> Positions:
    """The positions that a window axis touches over all lifted trips."""
    length, coefficient = trips.length(tile), dict(axis.grid)
    lifted = tile.grid >= 0 and tile.grid not in trips.index
    own = Dim.of(length, axis.step, tile.size, coefficient.pop(tile.grid, 0)) if lifted else Dim.of(length, axis.step)
    batch = [g for g, elements in sorted(coefficient.items()) if elements and g not in trips.index and trips.sizes[g] != 1]
    dims = (*(Dim.of(trips.sizes[g], coefficient[g]) for g in batch), own)
    offset, bounds = _offset(coefficient, trips)
    if register is not None:
        offset, bounds = offset + register, (-math.inf, math.inf)
    return Positions(axis.origin, dims, tuple(batch), offset, bounds)


def halo_positions(axis: WindowAxis, halo: Halo, trips: Trips) -> Positions:
    """The positions that a halo axis touches: all those of the lifted labels at once, moved by the looped ones."""
    length = halo.sliding.reach(trips.length(halo.outer), trips.length(halo.inner))
    return Positions(axis.origin, (Dim.of(length, 1),), (), *_offset(dict(halo.moves), trips))


def _offset(moves: Mapping[int, int], trips: Trips) -> tuple[Any, tuple[float, float]]:
    """(how far the looped grid axes move a window, by elements a trip; the bounds of that)."""
    offset, low, high = 0, 0.0, 0.0
    for g, elements in sorted(moves.items()):
        if elements and g in trips.index:
            offset = offset + elements * trips.index[g]
            ends = sorted(elements * b for b in trips.bounds[g])
            low, high = low + ends[0], high + ends[1]
    return offset, (low, high)


def to_view(array: Any, window: Window) -> Any:
    """The buffer as the window's view: reshaped, then permuted."""
    layout = view_layout(window)
    array = reshaped(array, layout.dims)
    return array if layout.is_plain else transposed(array, layout.permutation)


def from_view(view: Any, window: Window, shape: tuple[int, ...]) -> Any:
    """The inverse of `to_view`."""
    layout = view_layout(window)
    return reshaped(view if layout.is_plain else transposed(view, tuple(np.argsort(layout.permutation))), shape)


def read_axis(x: Any, axis: int, extent: int, dilation: int, where: Positions, fill: Any) -> Any:
    """x with view axis `axis` replaced by the positions' [batch..., length] dimensions; `fill` (0-d) outside the view."""
    progression = where.progression
    if progression is not None and where.known:
        return _read_progression(x, axis, extent, dilation, progression[0] + where.offset, progression[1], where.length, fill)
    if progression is not None and dilation == 1 and progression[1] == 1 and where.length <= extent:
        return _read_dynamic(x, axis, extent, progression[0], where, fill)
    return _read_gather(x, axis, extent, dilation, where, fill)


def _read_progression(x: Any, axis: int, extent: int, dilation: int, start: int, step: int, length: int, fill: Any) -> Any:
    """Positions start, start + step, ...: a pad, a strided slice and a reversal, each only where it changes something."""
    if step < 0:
        flipped = _read_progression(x, axis, extent, dilation, start + step * (length - 1), -step, length, fill)
        return lax.rev(flipped, (axis,))
    if step == 0:
        one = _read_progression(x, axis, extent, dilation, start, 1, 1, fill)
        return jnp.broadcast_to(one, (*x.shape[:axis], length, *x.shape[axis + 1 :]))
    dilated = (extent - 1) * dilation + 1 if extent else 0
    span = (length - 1) * step + 1
    if start < 0 or start + span > dilated or dilation > 1:
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (max(-start, 0), max(start + span - dilated, 0), dilation - 1)  # XLA:CPU has no negative ones of its own
        x, start = lax.pad(x, fill, config), max(start, 0)
    if start == 0 and span == x.shape[axis] and step == 1:
        return x
    return lax.slice_in_dim(x, start, start + span, step, axis)


def _read_gather(x: Any, axis: int, extent: int, dilation: int, where: Positions, fill: Any) -> Any:
    if extent == 0 or 0 in where.shape:
        return jnp.broadcast_to(fill, (*x.shape[:axis], *where.shape, *x.shape[axis + 1 :]))
    positions = where.array()
    index = positions // dilation if dilation > 1 else positions
    taken = jnp.take(x, jnp.clip(index, 0, extent - 1), axis=axis, mode="clip")
    low, high = where.ends()
    if where.known and dilation == 1 and low + where.offset >= 0 and high + where.offset < extent:
        return taken
    ok = (index >= 0) & (index < extent) & (positions % dilation == 0)
    ok = ok.reshape(positions.shape + (1,) * (x.ndim - axis - 1))
    return jnp.where(ok, taken, fill)


def _read_dynamic(x: Any, axis: int, extent: int, start: int, where: Positions, fill: Any) -> Any:
    """A run of consecutive positions at a run-time start; what lies outside reads as `fill`."""
    length = where.length
    begin = start + where.offset
    if where.bounds[0] + start >= 0 and where.bounds[1] + start + length <= extent:
        return dynamic_slice_in_dim(x, begin, length, axis)
    clamped = jnp.clip(begin, 0, extent - length)
    piece = dynamic_slice_in_dim(x, clamped, length, axis)
    if length == 1:  # all of it is inside or outside
        return jnp.where(clamped == begin, piece, fill)
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (length, length, 0)
    shift = jnp.clip(begin - clamped, -length, length)
    return dynamic_slice_in_dim(lax.pad(piece, fill, config), length + shift, length, axis)


def write(array: Any, value: Any, window: Window, wheres: list[Positions]) -> Any:
    """A buffer with `value` written as by `write_axes`; in the buffer's own shape, without a reshape, if the window's view only merges
    axes, and the merged axes are written whole. XLA updates a loop's array in place if the update is the last operation on it; after a
    reshape it copies the whole array in every trip."""
    finer = in_own_shape(array.shape, window, wheres)
    if finer is None:
        return from_view(write_axes(to_view(array, window), value, window, wheres), window, array.shape)
    own, positions = finer
    return write_axes(array, reshaped(value, [where.length for where in positions]), own, positions)


def whole(value: Any, window: Window, wheres: list[Positions], shape: tuple[int, ...]) -> Any | None:
    """A buffer that `write` has written all of, in order; None if some of it stays as it was, or is moved."""
    covered = (a.dilation == 1 and _is_whole(where, a.extent) for a, where in zip(window.axes, wheres, strict=True))
    return reshaped(value, shape) if view_layout(window).is_plain and all(covered) else None


def _is_whole(where: Positions, extent: int) -> bool:
    return where.known and where.progression == (0, 1) and where.offset == 0 and where.length == extent


def in_own_shape(shape: tuple[int, ...], window: Window, wheres: list[Positions]) -> tuple[Window, list[Positions]] | None:
    """(the window with an axis for each of the buffer's axes, the positions along them); None if it cannot be written so."""
    if not view_layout(window).is_plain:
        return None
    axes: list[WindowAxis] = []
    positions: list[Positions] = []
    left = list(shape)
    for axis, where in zip(window.axes, wheres, strict=True):
        merged = _leading(left, axis.extent)
        if merged is None:
            return None
        del left[: len(merged)]
        whole = axis.dilation == 1 and _is_whole(where, axis.extent)
        longest = merged.index(max(merged)) if merged else 0
        if not whole and any(n != 1 for i, n in enumerate(merged) if i != longest):
            return None
        for i, n in enumerate(merged):
            positions.append(where if not whole and i == longest else Positions.even(0, 1, n))
            axes.append(replace(axis, extent=n) if i == longest else WindowAxis(n, 1))
    ones = len(left)  # what is left of the shape has no more than one element
    return replace(window, axes=(*axes, *[WindowAxis(1, 1)] * ones)), [*positions, *[Positions.even(0, 1, 1)] * ones]


def _leading(sizes: list[int], extent: int) -> list[int] | None:
    """The first sizes, at least one, that multiply to an extent; None if there are none such."""
    product = 1
    for count, n in enumerate(sizes, 1):
        product *= n
        if product == extent:
            return sizes[:count]
    return None


def write_axes(view: Any, value: Any, window: Window, wheres: list[Positions]) -> Any:
    """`view` with `value` written at the positions of every axis; positions outside the view are dropped.

    value has the shape of the positions' lengths, axis by axis (no batch dimensions).
    """
    whole, plans = value, []
    for i, (axis, where) in enumerate(zip(window.axes, wheres, strict=True)):
        value, plan = _write_plan(value, i, axis, where)
        plans.append(plan)
    if any(p is None for p in plans):
        return _write_scatter(view, whole, window, wheres)  # it drops what lies outside itself
    if value.shape == view.shape and all(isinstance(p, int) for p in plans):
        return value
    return _write_slice(view, value, plans)


def _write_plan(value: Any, i: int, axis: WindowAxis, where: Positions) -> tuple[Any, Any]:
    """(the part of the value inside the view, its start). The start is an int, a traced scalar, (traced scalar, extent) if the part may
    exceed the view at run time, or None if positions are not consecutive."""
    progression = where.progression
    if axis.dilation != 1 or progression is None or value.shape[i] == 0:
        return value, None
    start, step = progression
    if step == -1 and where.known:
        value, start, step = lax.rev(value, (i,)), start - (value.shape[i] - 1), 1
    if step != 1:
        return value, None
    length = value.shape[i]
    if where.known:
        start += where.offset
        first, last = max(0, -start), min(length, axis.extent - start)
        if first >= last:
            return value, None
        return (value if (first, last) == (0, length) else lax.slice_in_dim(value, first, last, axis=i)), start + first
    begin = start + where.offset
    if where.bounds[0] + start >= 0 and where.bounds[1] + start + length <= axis.extent:
        return value, begin
    return value, ((begin, axis.extent) if length <= axis.extent else None)


def _write_slice(view: Any, value: Any, plans: list[Any]) -> Any:
    """One dynamic_update_slice; values that may exceed the view are shifted inside, and keep the old content where they exceeded it."""
    starts, inside = [], None
    shape = value.shape
    for i, plan in enumerate(plans):
        if not isinstance(plan, tuple):
            starts.append(plan)
            continue
        begin, extent = plan
        clamped = jnp.clip(begin, 0, extent - shape[i])
        starts.append(clamped)
        if shape[i] == 1:
            inside = _both(inside, clamped == begin)
            continue
        shift = jnp.clip(clamped - begin, -shape[i], shape[i])
        config = [(0, 0, 0)] * value.ndim
        config[i] = (shape[i], shape[i], 0)
        value = dynamic_slice_in_dim(lax.pad(value, jnp.zeros((), value.dtype), config), shape[i] + shift, shape[i], i)
        place = lax.broadcasted_iota(jnp.int32, shape, i) + shift
        ok = (place >= 0) & (place < shape[i])
        inside = _both(inside, ok)
    starts = [jnp.asarray(s, jnp.int32) for s in starts]
    if inside is not None:
        value = jnp.where(inside, value, dynamic_slice(view, starts, shape))
    return dynamic_update_slice(view, value, starts)


def _both(inside: Any, ok: Any) -> Any:
    return ok if inside is None else inside & ok


def _write_scatter(view: Any, value: Any, window: Window, wheres: list[Positions]) -> Any:
    """The general case: one index array an axis, out-of-range positions sent past the end and dropped."""
    if value.size == 0 or view.size == 0:
        return view
    index = []
    for i, (axis, where) in enumerate(zip(window.axes, wheres, strict=True)):
        position = where.array()
        place = position // axis.dilation
        ok = (place >= 0) & (place < axis.extent) & (position % axis.dilation == 0)
        index.append(jnp.where(ok, place, axis.extent).reshape((-1,) + (1,) * (value.ndim - 1 - i)))
    full = where_length(window, wheres)
    assert value.shape == full, (value.shape, full)
    return view.at[tuple(index)].set(value, mode="drop")


def where_length(window: Window, wheres: list[Positions]) -> tuple[int, ...]:
    """Lengths of the positions of every axis."""
    return tuple(w.length for w in wheres)
