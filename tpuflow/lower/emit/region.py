"""Emission of elementwise nodes: the nodes of a region at one level become loads, one instruction each, and stores.

A level is a set of values with the same logical axes: the iteration space, the reduced space, an operand of a product. `reduce` and product
nodes lead from one level to another and are emitted by the templates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.dtypes import DType
from tpuflow.errors import GraphError
from tpuflow.isa import vector as v
from tpuflow.isa.elementwise import BINARY, UNARY
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, Window, WindowAxis
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.nest import Axis, Labels, Merged, Nest, Unit, walk, window, zero_fill
from tpuflow.lower.emit.overlapping import Overlapping, overlapping
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.graph.view import View, runs
from tpuflow.lower.passes.analysis import depending

Template = Callable[..., Instruction]

ELEMENTWISE: Mapping[str, Template] = {
    **dict.fromkeys(UNARY, lambda node, dst, a: v.Unary(node.op, dst, a)),
    **dict.fromkeys(BINARY, lambda node, dst, a, b: v.Binary(node.op, dst, a, b)),
    "is_finite": lambda node, dst, a: v.IsFinite(dst, a),
    "compare": lambda node, dst, a, b: v.Compare(node.attrs["direction"], dst, a, b),
    "select": lambda node, dst, pred, on_true, on_false: v.Select(dst, pred, on_true, on_false),
    "convert": lambda node, dst, a: v.Convert(dst, a),
    "bitcast": lambda node, dst, a: v.Bitcast(dst, a),
}
SOURCES = ("full", "iota")
LEVEL_STEPS = ("reduce", *PRODUCTS)
UNTILED = (*LEVEL_STEPS, "join")


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes in program order, and the HBM buffers of the values that enter and leave."""

    nodes: tuple[Node, ...]
    inputs: Mapping[Value, int]
    outputs: tuple[tuple[Value, int], ...]

    @classmethod
    def of(cls, node: Node, buffers: Sequence[int]) -> Region:
        """The fused region, or the node as a region of itself; `buffers` are those of its operands and results."""
        read, written = buffers[: len(node.inputs)], buffers[len(node.inputs) :]
        if node.op != "fused":
            return cls((node,), dict(zip(node.inputs, read, strict=True)), tuple(zip(node.results, written, strict=True)))
        (graph,) = node.regions
        return cls(graph.nodes, dict(zip(graph.inputs, read, strict=True)), tuple(zip(graph.outputs, written, strict=True)))

    @property
    def results(self) -> tuple[Value, ...]:
        """The outputs."""
        return tuple(value for value, _ in self.outputs)

    @property
    def space(self) -> tuple[int, ...]:
        """The iteration space: the shape of the results, or of the pieces from which they are joined."""
        first = self.results[0]
        return next((n.inputs[0].shape for n in self.find("join") if n.result is first), first.shape)

    @property
    def results_by_stage(self) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The outputs in two groups: those computed before any reduction, and those computed from reductions."""
        after = depending(self.nodes, [n.result for n in self.find("reduce")])
        return tuple(v for v in self.results if v not in after), tuple(v for v in self.results if v in after)

    def stored(self, values: Iterable[Value]) -> tuple[tuple[Value, int], ...]:
        """(value, buffer) of those of some values that are outputs."""
        wanted = set(values)
        return tuple(entry for entry in self.outputs if entry[0] in wanted)

    def find(self, op: str) -> tuple[Node, ...]:
        """The nodes of one op."""
        return tuple(n for n in self.nodes if n.op == op)

    def needed(self, roots: Iterable[Value]) -> set[Value]:
        """The values from which `roots` are computed at their own level: up to region inputs, reductions and products."""
        want = set(roots)
        for node in reversed(self.nodes):
            if node.op not in LEVEL_STEPS and not want.isdisjoint(node.results):
                want.update(node.inputs)
        return want

    def accesses(self, roots: Sequence[Value], labels: Labels) -> Iterator[tuple[Value, Labels]]:
        """(value, labels of its axes) for all inputs, results and values that depend on their place, which the level of `roots`, with axes
        `labels`, accesses."""
        want = self.needed(roots)
        for node in self.nodes:
            if node.op in LEVEL_STEPS or want.isdisjoint(node.results):
                continue
            if node.op == "broadcast":
                yield node.inputs[0], broadcast_labels(node, labels)
            elif node.op == "window":
                yield from ((node.inputs[0], used) for used in _runs(node.attrs["view"], node.result.shape, labels))
            elif node.op == "random":
                yield node.result, labels
            elif node.op == "iota":
                yield node.result, (labels[node.attrs["axis"]],)
            else:
                yield from ((value, labels) for value in node.inputs if value in self.inputs)
        pieces = {n.result: n for n in self.find("join")}
        for value in roots:
            if value in pieces:
                (piece, *_), views = pieces[value].inputs, pieces[value].attrs["views"]
                yield from ((value, used) for view in views for used in _runs(view, piece.shape, labels))
            else:
                yield value, labels

    def walked_by_place(self, labels: Labels) -> Iterator[int]:
        """The labels along which values of a level with axes `labels` depend on their place: those of iotas and of views of operands."""
        for node in self.nodes:
            axes = (node.attrs["axis"],) if node.op == "iota" else (v.axis for v in node.attrs["view"]) if node.op == "window" else ()
            yield from (label for a in axes if (label := labels[a]) is not None)

    def widest_bytes(self, values: Iterable[Value] = ()) -> int:
        """Bytes of the widest element among `values`, or all values of the region."""
        found = list(values) or [*self.inputs, *(r for n in self.nodes for r in n.results)]
        return max((value.dtype.bytes for value in found), default=4)


def _runs(view: View, shape: Sequence[int], labels: Labels) -> list[Labels]:
    """The labels of each group of axes that a view traverses contiguously; the None at the end keeps others from merging with it."""
    return [(*(labels[a] for a in run), None) for run in runs(view, shape)]


def _overlap(one: Node, other: Node) -> bool:
    """Whether two views of one value differ in their origins alone, so that what they read may overlap."""
    if one.inputs != other.inputs or one.result.type != other.result.type or repr(one.attrs["fill"]) != repr(other.attrs["fill"]):
        return False
    return [replace(v, origin=0) for v in one.attrs["view"]] == [replace(v, origin=0) for v in other.attrs["view"]]


Roots = tuple[tuple[Value, ...], Labels]


def operands(region: Region, levels: Iterable[Roots]) -> list[Labels]:
    """The axis labels of all accesses of a region's levels; see `Region.accesses`."""
    return [used for roots, labels in levels for _, used in region.accesses(roots, labels)]


def broadcast_labels(node: Node, labels: Labels) -> Labels:
    """The labels of a broadcast's operand; None where it is stretched."""
    shape, whole = node.inputs[0].shape, node.result.shape
    return tuple(labels[a] if n == whole[a] else None for n, a in zip(shape, node.attrs["axes"], strict=True))


@dataclass(frozen=True, slots=True)
class Level:
    """A space of tiles: the labels of its values' logical axes, and the axis of each tile axis."""

    labels: Labels
    axes: tuple[Axis, ...]
    space: str = "vmem"

    @property
    def missing(self) -> tuple[int, ...]:
        """Positions of the tile axes that no array has (`Unit`)."""
        return tuple(i for i, a in enumerate(self.axes) if isinstance(a, Unit))


@dataclass(slots=True)
class LevelEmitter:
    """Emits the values of one level into a kernel; `tiles` holds what exists so far (templates put in accumulators).

    `halos`: by view, what it reads together with others, if it overlaps with them. `wanted`: the values that are being emitted.
    """

    kernel: KernelBuilder
    region: Region
    merged: Merged
    nest: Nest
    level: Level
    tiles: dict[Value, Tile]
    loaded: dict[tuple[object, ...], Tile]
    halos: dict[tuple[object, ...], Overlapping | None] = field(default_factory=dict)
    wanted: set[Value] = field(default_factory=set)

    @property
    def axes(self) -> tuple[TileAxis, ...]:
        """The tile axes of the level."""
        return tuple(self.nest.axis(a) for a in self.level.axes)

    def new(self, dtype: DType) -> Tile:
        """A new tile of the level."""
        return self.kernel.tile(dtype, self.axes, self.level.space)

    def emit(self, roots: Sequence[Value]) -> tuple[Tile, ...]:
        """Emit all that `roots` need; their tiles."""
        self.wanted = want = self.region.needed(roots)
        for node in self.region.nodes:
            if node.op in UNTILED or want.isdisjoint(node.results) or node.result in self.tiles:
                continue
            self.kernel.source = node.source
            self.tiles[node.result] = self._node(node)
        joined = {n.result for n in self.region.find("join")}
        return tuple(self.value(r) for r in roots if r not in joined)

    def value(self, value: Value) -> Tile:
        """The tile of a value; a region input is loaded on first use."""
        if value not in self.tiles:
            self.tiles[value] = self._load(value, self.level.labels)
        return self.tiles[value]

    def _node(self, node: Node) -> Tile:
        if node.op == "broadcast":
            return self._load(node.inputs[0], broadcast_labels(node, self.level.labels))
        if node.op == "window":
            return self._load_window(node)
        if node.op == "full":
            return self._write(node, lambda dst: v.Constant(dst, node.attrs["value"]))
        if node.op == "iota":
            return self._iota(node)
        if node.op == "random":
            return self._random(node)
        if node.op not in ELEMENTWISE:
            raise GraphError(f"{node.source}: a kernel cannot compute {node.op!r} element by element")
        tiles = tuple(self.value(value) for value in node.inputs)
        return self._write(node, lambda dst: ELEMENTWISE[node.op](node, dst, *tiles))

    def _write(self, node: Node, instruction: Callable[[Tile], Instruction]) -> Tile:
        dst = self.new(node.result.dtype)
        self.kernel.emit(instruction(dst))
        return dst

    def _iota(self, node: Node) -> Tile:
        (axis,) = self.merged.fold((self.level.labels[node.attrs["axis"]],)) or (None,)
        if axis is None:  # an axis of size 1: position 0 everywhere
            return self._write(node, lambda dst: v.Constant(dst, 0))
        return self._write(node, lambda dst: v.Iota(dst, self.level.axes.index(axis)))

    def _random(self, node: Node) -> Tile:
        """Random words, numbered as the elements of the array would lie in memory."""
        (state,) = node.inputs
        key = (self.region.inputs[state], "state")
        if key not in self.loaded:
            self.loaded[key] = tile = self.kernel.tile(state.dtype, (TileAxis(4),))
            self.kernel.load_state(Window(key[0], tile, (WindowAxis(4, 1),)))
        dst = self.new(node.result.dtype)
        walks = window(self.nest, key[0], self.merged.fold(self.level.labels), dst, self.level.axes).axes
        strides = tuple(w.pitch * w.step for w in walks)
        self.kernel.emit(v.Random(dst, self.loaded[key], strides, sum(w.origin * w.pitch for w in walks)))
        return dst

    def _load(self, value: Value, labels: Labels) -> Tile:
        """Load an input with its own axes, then broadcast it to the level."""
        if value not in self.region.inputs:
            raise GraphError(f"{self.kernel.source}: {value.name or value.type} is neither an input of the fused region nor defined in it")
        order = self.merged.fold(labels)
        key = (self.region.inputs[value], order)
        if key not in self.loaded:
            self.loaded[key] = self._stretch(self._fetch(key[0], order, value.dtype), order)
        return self.loaded[key]

    def _held(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of the level's axes that a loaded tile has: the operand's own, and those of size 1."""
        if not order and any(axis.whole > 1 for axis in self.axes):
            return ()
        return tuple(i for i, a in enumerate(self.level.axes) if a in order or self.axes[i].whole == 1)

    def _fetch(self, buffer: int, order: tuple[int, ...], dtype: DType) -> Tile:
        held = self._held(order)
        tile = self.kernel.tile(dtype, tuple(self.axes[i] for i in held), self.level.space if held else "smem")
        axes = [self.level.axes[i] for i in held]
        self.kernel.load(self.nest, window(self.nest, buffer, order, tile, axes), axes)
        return tile

    def _load_window(self, node: Node) -> Tile:
        """Load an input through a view, then broadcast it to the level."""
        key = self._window_key(node)
        if key not in self.loaded:
            order = self.merged.fold([self.level.labels[v.axis] for v in node.attrs["view"]])
            held = self._held(order)
            self.loaded[key] = self._stretch(self._load_viewed(node, held), order)
        return self.loaded[key]

    def _window_key(self, node: Node) -> tuple[object, ...]:
        return self.region.inputs[node.inputs[0]], node.attrs["view"], repr(node.attrs["fill"])

    def _load_viewed(self, node: Node, held: Sequence[int]) -> Tile:
        """Load the tile of a view, or take it from a halo tile, which is loaded with the first of the views that overlap."""
        dtype, axes = node.result.dtype, [self.level.axes[i] for i in held]
        tile = self.kernel.tile(dtype, tuple(self.axes[i] for i in held), self.level.space if held else "smem")
        window = self._viewing(node, tile, axes)
        if (key := self._window_key(node)) not in self.halos:
            alike = {self._window_key(n): n for n in self.region.find("window") if n.result in self.wanted and _overlap(n, node)}
            windows = [self._viewing(n, tile, axes) for n in alike.values()]
            found = overlapping(windows, self.kernel.chip)
            if found is not None:
                halo = self.kernel.tile(dtype, found.window.tile.axes)
                found = replace(found, window=replace(found.window, tile=halo))
                self.kernel.load_halo(self.nest, found.window, windows, axes)
            self.halos.update(dict.fromkeys(alike, found))
        shared = self.halos[key]
        if shared is None:
            self.kernel.load(self.nest, window, axes)
        else:
            self.kernel.emit(shared.slice(window))
        return tile

    def _viewing(self, node: Node, tile: Tile, axes: Sequence[Axis]) -> Window:
        """The window of a tile with (merged) axes `axes` onto an input seen through a node's view."""
        return self._view_window(self.region.inputs[node.inputs[0]], node.attrs["view"], tile, axes, node.attrs["fill"])

    def _view_window(self, buffer: int, view: View, tile: Tile, axes: Sequence[Axis], fill: int | float | bool) -> Window:
        """The window of a tile with (merged) axes `axes` onto a buffer seen through a view; axes that it does not walk have size 1."""
        walked = {self.level.labels[v.axis]: v for v in view}
        walks: list[WindowAxis] = []
        for a in axes:
            parts = [walked[label] for label, axis in self.merged.axis_of.items() if axis == a and label in walked]
            if not parts:
                walks.append(WindowAxis(1, 1))
                continue
            extent = math.prod(v.extent for v in parts)  # several are plain: they walk as one
            first, pitch = parts[0], parts[-1].pitch
            walks.append(walk(self.nest.axis(a), extent, pitch, origin=first.origin, step=first.step, dilation=first.dilation))
        return Window(buffer, tile, tuple(walks), fill)

    def _stretch(self, tile: Tile, order: tuple[int, ...]) -> Tile:
        held = self._held(order)
        if len(held) == len(self.axes):
            return tile
        whole = self.new(tile.dtype)
        self.kernel.emit(v.Broadcast(whole, tile, held))
        return whole

    def store(self, outputs: Iterable[tuple[Value, int]]) -> None:
        """Store values of the level to their buffers."""
        pieces = {n.result: n for n in self.region.find("join")}
        for value, buffer in outputs:
            if value in pieces:
                self._store_pieces(pieces[value], buffer)
                continue
            order = tuple(a for a in self.level.axes if not isinstance(a, Unit))
            self.kernel.store(self.nest, window(self.nest, buffer, order, self.value(value), self.level.axes), self.level.axes)

    def _store_pieces(self, join: Node, buffer: int) -> None:
        """Store the pieces of a joined value, each through its view of the whole."""
        for piece, view in zip(join.inputs, join.attrs["views"], strict=True):
            tile = self.value(piece)
            self.kernel.store(self.nest, self._view_window(buffer, view, tile, self.level.axes, zero_fill(tile.dtype)), self.level.axes)
