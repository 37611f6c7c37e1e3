"""A uniformity analysis: the mesh axes along which each buffer's content, and each block's control, may differ from chip to chip.

It looks at the Program alone, whatever the data. Sources of variation are inputs and infeed items, along the axes that they are sharded
over, and positions, along their axis; constants are equal on all chips, and so is what a collective gives to all members alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from tpuflow.isa.collectives import KINDS, Await, Collective, Position
from tpuflow.isa.instruction import Tile
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Kernel, Loop, Outfeed, Port, Program, Switch, While, walk

Axes = frozenset[int]
NONE: Axes = frozenset()
Flows = Mapping[int, frozenset[int]]
"""Buffers that a kernel writes, each with those that its new content depends on."""


@dataclass(frozen=True, slots=True)
class Varying:
    """`buffers`: for each, the axes along which its content may differ. `decided`: for each loop and switch, by id, the axes along which
    its trip count or branch may differ."""

    buffers: tuple[Axes, ...]
    decided: dict[int, Axes]


def cut_axes(port: Port) -> Axes:
    """The mesh axes over which a port's arrays are sharded."""
    return frozenset(a for axes in port.cut for a in axes)


def varying(program: Program) -> Varying:
    """The analysis of a Program whose buffer numbers and axes are in range. Without a mesh nothing varies."""
    found = _Spread(program)
    while found.grew and program.mesh:
        found.grew = False
        found.blocks(program.code, NONE)
    return Varying(tuple(found.buffers), found.decided)


class _Spread:
    """The fixpoint iteration: a buffer varies along every axis of anything that is ever written to it."""

    def __init__(self, program: Program):
        self.program, self.every = program, frozenset(range(len(program.mesh)))
        self.buffers: list[Axes] = [NONE] * len(program.buffers)
        self.decided: dict[int, Axes] = {id(b): NONE for _, b in walk(program.code) if isinstance(b, Loop | While | Switch)}
        self.grew = True
        self.flows: dict[int, Flows] = {}
        for port in program.inputs:
            self._add(port.buffer, cut_axes(port))

    def blocks(self, code: tuple[Block, ...], around: Axes) -> None:
        """Propagate through a list of blocks; around: the axes along which chips may differ in whether they run it."""
        for block in code:
            self._block(block, around)

    def _block(self, block: Block, around: Axes) -> None:
        match block:
            case Kernel():
                for b, sources in self._flows(block).items():
                    self._add(b, around.union(*(self.buffers[source] for source in sources)))
            case Infeed():
                self._add(block.buffer, cut_axes(self.program.infeeds[block.port]) | around)
            case Position():
                self._add(block.buffer, frozenset((block.axis,)) | around)
            case Collective():
                sent, axes = self.buffers[block.source] | around, frozenset(block.axes)
                self._add(block.target, sent - axes if KINDS[block.kind].alike else sent | axes)
            case Copy():
                chosen = self.buffers[block.index] if block.index >= 0 else frozenset()
                self._add(block.target, self.buffers[block.source] | chosen | around)
            case Loop() | While() | Switch():
                self._control(block, around)
            case CallHost():
                apart = self.every if self.program.functions[block.function].per_chip else NONE
                for target in block.targets:
                    self._add(target, apart | around)
            case Outfeed() | Await():
                pass

    def _control(self, block: Loop | While | Switch, around: Axes) -> None:
        number = block.trips if isinstance(block, Loop) else block.predicate if isinstance(block, While) else block.index
        inside = around | self.buffers[number]
        self.decided[id(block)] |= inside
        lists = block.branches if isinstance(block, Switch) else (block.body,)
        if isinstance(block, While):
            lists = (block.condition, block.body)
        for code in lists:
            self.blocks(code, inside)

    def _flows(self, kernel: Kernel) -> Flows:
        if id(kernel) not in self.flows:
            self.flows[id(kernel)] = flows(kernel)
        return self.flows[id(kernel)]

    def _add(self, buffer: int, axes: Set[int]) -> None:
        if not axes <= self.buffers[buffer]:
            self.buffers[buffer] |= axes
            self.grew = True


def flows(kernel: Kernel) -> Flows:
    """The buffers that each written buffer's content depends on, followed from tile to tile: a kernel may do several unrelated things."""
    ordered = _of_one_queue(kernel)
    left: dict[Tile, frozenset[int]] = {}
    stored: dict[int, frozenset[int]] = {}
    before: object = None
    while before != (left, stored):  # tiles carry content from trip to trip
        before, tiles = (dict(left), dict(stored)), dict(left)
        for instruction in kernel.instructions:
            updates = instruction.has("updates")
            made = NONE.union(*(tiles.get(t, NONE) for t in instruction.reads()))
            made |= {w.buffer for role, w in instruction.windows() if role == "read" or updates}
            for tile in instruction.writes():
                tiles[tile] = made if tile in ordered else tiles.get(tile, NONE) | made
            for role, window in instruction.windows():
                if role == "write":
                    stored[window.buffer] = stored.get(window.buffer, NONE) | made
        left = {tile: left.get(tile, NONE) | sources for tile, sources in tiles.items()}
    return stored


def _of_one_queue(kernel: Kernel) -> set[Tile]:
    """Tiles that a single queue reads and writes, and so in program order: a write replaces their content, whatever the schedule."""
    queues: dict[Tile, set[str]] = {}
    for instruction in kernel.instructions:
        for tile in (*instruction.reads(), *instruction.writes()):
            queues.setdefault(tile, set()).add(instruction.queue)
    return {tile for tile, of in queues.items() if len(of) == 1}
