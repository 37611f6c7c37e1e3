"""Move kernels: pure DMA, in through one window and out through another (copies, slices, pads, transposes, reversals, joins)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.dtypes import S32, DType
from tpuflow.isa.instruction import Tile, Window
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.map import emit_map
from tpuflow.lower.emit.nest import Nest, pitches, walk, zero_fill
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.site import Plan, Plans, Site
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.graph.tiling import Space

Fill = int | float | bool | None


@dataclass(frozen=True, slots=True)
class MovedAxis:
    """How one axis of the moved array traverses a buffer axis; `start`: the buffer of a dynamic start (s32[]), if there is one."""

    extent: int
    pitch: int
    origin: int = 0
    step: int = 1
    dilation: int = 1
    start: int | None = None

    def covers(self, size: int) -> bool:
        """Whether `size` steps visit the whole axis, in order."""
        return replace(self, pitch=1) == MovedAxis(size, 1)

    @property
    def contiguous(self) -> bool:
        """Whether elements are contiguous, from a static start."""
        return self.step == 1 and self.dilation == 1 and self.start is None


@dataclass(frozen=True, slots=True)
class Side:
    """The source or target of a move: a buffer, and how each axis of the moved array traverses it."""

    buffer: int
    walks: tuple[MovedAxis, ...]


def dense(buffer: int, shape: Sequence[int]) -> Side:
    """The whole of a buffer, in order."""
    return Side(buffer, tuple(map(MovedAxis, shape, pitches(shape))))


def changed(side: Side, axis: int, **fields: int) -> Side:
    """The side with one axis walking differently."""
    walks = list(side.walks)
    walks[axis] = replace(walks[axis], **fields)
    return replace(side, walks=tuple(walks))


def emit_move(site: Site, dtype: DType, shape: Sequence[int], source: Side, target: Side, fill: Fill = None) -> Plans:
    """One kernel that moves an array of `shape` from one side to the other; positions outside the source read `fill`."""
    if math.prod(shape) == 0:
        return ()
    sizes, (source, target) = _merge(shape, (source, target))
    space = "vmem" if sizes else "smem"

    def attempt(nest: Nest) -> KernelBuilder:
        kernel = site.kernel(nest.grid)
        starts = _load_starts(kernel, nest, (source, target))
        tile, axes = kernel.tile(dtype, nest.axes, space), range(len(sizes))
        kernel.load(nest, _window(nest, tile, source, starts, zero_fill(dtype) if fill is None else fill), axes)
        kernel.store(nest, _window(nest, tile, target, starts, zero_fill(dtype)), axes)
        return kernel

    return site.fit(attempt, Space(sizes), dtype.bytes)


def _merge(shape: Sequence[int], sides: tuple[Side, Side]) -> tuple[tuple[int, ...], tuple[Side, Side]]:
    """Drop axes of size 1, and merge an axis that both sides walk whole into its outer neighbour."""
    sizes: list[int] = []
    merged: list[tuple[MovedAxis, ...]] = []
    for size, walks in zip(shape, zip(*(s.walks for s in sides), strict=True), strict=True):
        if size == 1 and all(w.covers(1) for w in walks):
            continue
        if sizes and all(w.covers(size) and o.contiguous and o.pitch == w.extent * w.pitch for o, w in zip(merged[-1], walks, strict=True)):
            merged[-1] = tuple(MovedAxis(o.extent * size, w.pitch, o.origin * size) for o, w in zip(merged[-1], walks, strict=True))
            sizes[-1] *= size
        else:
            merged.append(walks)
            sizes.append(size)
    by_side = list(zip(*merged, strict=True)) or [(), ()]
    return tuple(sizes), (Side(sides[0].buffer, by_side[0]), Side(sides[1].buffer, by_side[1]))


def _load_starts(kernel: KernelBuilder, nest: Nest, sides: Sequence[Side]) -> dict[int, Tile]:
    """A register for every start."""
    registers: dict[int, Tile] = {}
    for buffer in dict.fromkeys(w.start for side in sides for w in side.walks if w.start is not None):
        registers[buffer] = kernel.tile(S32, (), "smem")
        kernel.load(nest, Window(buffer, registers[buffer], ()), ())
    return registers


def _window(nest: Nest, tile: Tile, side: Side, starts: Mapping[int, Tile], fill: int | float | bool) -> Window:
    axes = tuple(
        walk(
            axis, w.extent, w.pitch, origin=w.origin, step=w.step, dilation=w.dilation,
            register=None if w.start is None else starts[w.start],
        )
        for axis, w in zip(nest.axes, side.walks, strict=True)
    )  # fmt: skip
    return Window(side.buffer, tile, axes, fill)


# --- one function a node op -------------------------------------------------------------------------------------------


def emit_plain_copy(site: Site) -> Plans:
    """result = operand, element by element in row-major order (a copy, or a reshape that has to move)."""
    value = site.node.inputs[0]
    flat = (value.type.elems,)
    return emit_move(site, value.dtype, flat, dense(site.buffer(0), flat), dense(site.target, flat))


def emit_transpose(site: Site) -> Plans:
    """Result axis i walks over operand axis permutation[i]."""
    node = site.node
    source = dense(site.buffer(0), node.inputs[0].shape)
    permuted = Side(source.buffer, tuple(source.walks[p] for p in node.attrs["permutation"]))
    return emit_move(site, node.result.dtype, node.result.shape, permuted, dense(site.target, node.result.shape))


def emit_slice(site: Site) -> Plans:
    """Every axis starts at its start and goes in strides."""
    node = site.node
    source = dense(site.buffer(0), node.inputs[0].shape)
    for axis, (start, stride) in enumerate(zip(node.attrs["start"], node.attrs["stride"], strict=True)):
        source = changed(source, axis, origin=start, step=stride)
    return emit_move(site, node.result.dtype, node.result.shape, source, dense(site.target, node.result.shape))


def emit_reverse(site: Site) -> Plans:
    """Reversed axes walk from their end in steps of -1."""
    node = site.node
    source = dense(site.buffer(0), node.inputs[0].shape)
    for axis in node.attrs["axes"]:
        source = changed(source, axis, origin=max(node.inputs[0].shape[axis] - 1, 0), step=-1)
    return emit_move(site, node.result.dtype, node.result.shape, source, dense(site.target, node.result.shape))


def emit_concatenate(site: Site) -> Plans:
    """One kernel per operand, each storing its part of the result."""
    node, axis = site.node, site.node.attrs["axis"]
    kernels: list[Plan] = []
    origin = 0
    for i, value in enumerate(node.inputs):
        target = changed(dense(site.target, node.result.shape), axis, origin=origin)
        kernels += emit_move(site, value.dtype, value.shape, dense(site.buffer(i), value.shape), target)
        origin += value.shape[axis]
    return tuple(kernels)


def emit_pad(site: Site) -> Plans:
    """Fill the whole result with the padding value, then store the operand's elements at their places in it."""
    node = site.node
    value, shape = node.inputs[1], node.result.shape
    target = dense(site.target, shape)
    for axis, (low, interior) in enumerate(zip(node.attrs["low"], node.attrs["interior"], strict=True)):
        target = changed(target, axis, origin=low, step=interior + 1)
    whole = Value(TensorType(node.result.dtype, shape))
    splat = Region((Node("broadcast", (value,), (whole,), {"axes": ()}, source=node.source),), site.region.inputs, ((whole, site.target),))
    operand = node.inputs[0]
    source = dense(site.buffer(0), operand.shape)
    return emit_map(replace(site, region=splat)) + emit_move(site, operand.dtype, operand.shape, source, target)


def emit_pad_with(site: Site, fill: int | float | bool) -> Plans:
    """One kernel: positions of the result that hold no operand element read `fill`."""
    node = site.node
    source = dense(site.buffer(0), node.inputs[0].shape)
    for axis, (low, interior) in enumerate(zip(node.attrs["low"], node.attrs["interior"], strict=True)):
        source = changed(source, axis, origin=-low, dilation=interior + 1)
    return emit_move(site, node.result.dtype, node.result.shape, source, dense(site.target, node.result.shape), fill)


def _started(side: Side, piece: Sequence[int], start: Callable[[int], int]) -> Side:
    """Axes that are longer than the piece start where a register says."""
    for axis, size in enumerate(piece):
        if side.walks[axis].extent != size:
            side = changed(side, axis, start=start(axis))
    return side


def emit_dynamic_slice(site: Site) -> Plans:
    """The load window begins where registers say."""
    node = site.node
    source = _started(dense(site.buffer(0), node.inputs[0].shape), node.result.shape, lambda axis: site.buffer(axis + 1))
    return emit_move(site, node.result.dtype, node.result.shape, source, dense(site.target, node.result.shape))


def emit_dynamic_update_slice(site: Site) -> Plans:
    """A copy unless in place; then the update goes where registers say."""
    update = site.node.inputs[1]
    target = _started(dense(site.target, site.node.result.shape), update.shape, lambda axis: site.buffer(axis + 2))
    return copy_unless_in_place(site) + emit_move(site, update.dtype, update.shape, dense(site.buffer(1), update.shape), target)


def copy_unless_in_place(site: Site) -> Plans:
    """The copy that precedes a partial update of operand 0; none if the result shares the operand's buffer."""
    return () if site.buffer(0) == site.target else emit_plain_copy(site)
