"""Moves between HBM and on-chip memory, and the semaphores that order the queues."""

from __future__ import annotations

from typing import ClassVar

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import S32
from tpuflow.isa import instruction as field
from tpuflow.isa.cost import Cost, ShapeOf, window_bytes
from tpuflow.isa.instruction import QUEUE_CODES, Instruction, Tile, Window, instr
from tpuflow.isa.refusal import Refusal
from tpuflow.isa.rules import axes_text, require_defined, rule

STORE_MODES = {"set": 0, "add": 1, "mul": 2, "min": 3, "max": 4}


class _Transfer(Instruction):
    """Common to all moves: the queue follows from the direction, except that registers are moved by the scalar queue itself."""

    __slots__ = ()
    direction: ClassVar[str]
    crossings: ClassVar[int] = 1
    indexed: ClassVar[bool] = False
    window: Window

    @property
    def queue(self) -> str:
        """Load or store, or scalar for a register."""
        return "scalar" if self.window.tile.space == "smem" else self.direction

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """The bytes that the window touches, `crossings` times; the queue itself is taken as long as HBM moves them."""
        shape = shape_of(self.window.tile)
        moved, on_bus = window_bytes(self.window, shape, chip.hbm_burst_bytes)
        times = self.crossings * (shape[0] if self.indexed else 1)
        return Cost(hbm_bytes=times * moved, bus_bytes=times * on_bus)


class _Sync(Instruction):
    """Common to signal and wait: the queue is named, the price is one cycle."""

    __slots__ = ()
    on: str

    @property
    def queue(self) -> str:
        """The named queue."""
        return self.on

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """One cycle."""
        return Cost(cycles=1)


@instr(0x40, "load", "transfers", rules=())
class Load(_Transfer):
    """window.tile = the window's piece of its buffer at this grid index (registers are loaded by the scalar queue itself)."""

    direction = "load"
    window: Window = field.window_in()


@instr(0x41, "store", "transfers", rules=())
class Store(_Transfer):
    """The window's piece of its buffer at this grid index = window.tile; positions outside the buffer are dropped."""

    direction = "store"
    window: Window = field.window_out()


@rule("`index` is an s32 tile in vmem that has axis 0 of the window's tile; the window's own axis 0 has step 0 and dilation 1")
def _indexes_rows(i: LoadIndexed | StoreIndexed) -> None:
    window = i.window
    if i.index.dtype != S32 or i.index.space != "vmem" or not window.tile.axes or i.index.axes != window.tile.axes[:1]:
        raise Refusal(
            f"index is {i.index.dtype} {axes_text(i.index.axes)} in {i.index.space}; expected an s32 tile in vmem with the tile's axis 0, "
            f"of {axes_text(window.tile.axes)}"
        )
    if window.axes[0].step != 0 or window.axes[0].dilation != 1:
        raise Refusal(f"the window's axis 0 has step {window.axes[0].step}, dilation {window.axes[0].dilation}; expected 0 and 1")


@instr(0x42, "load_indexed", "transfers", rules=(_indexes_rows,))
class LoadIndexed(_Transfer):
    """A gather: row r of window.tile (its axis 0) comes from position `position(r=0) + index[r]` of the window's axis 0.

    The window's axis 0 has step 0: its own position does not move with r. `index` is an s32 tile of rank 1, as long as the tile's
    axis 0. Positions out of range give `fill`.
    """

    direction = "load"
    indexed = True
    window: Window = field.window_in()
    index: Tile = field.src()


@rule("`mode` is `set`, or defined on the type of the window's tile")
def _combines(i: StoreIndexed) -> None:
    if i.mode != "set":
        require_defined(i.mode, i.window.tile.dtype)


@instr(0x43, "store_indexed", "transfers", "updates", rules=(_indexes_rows, _combines))
class StoreIndexed(_Transfer):
    """A scatter: for r = 0, 1, ... in order, buffer row `position + index[r]` = mode(that row, row r of window.tile).

    The addressing of `load_indexed`; positions out of range are dropped. "set" keeps the last; "add", "mul", "min" and "max" round
    every combination to the buffer's type.
    """

    direction = "store"
    crossings = 2
    indexed = True
    mode: str = field.choice(STORE_MODES)
    window: Window = field.window_out()
    index: Tile = field.src()


@instr(0x48, "signal", "signals", rules=())
class Signal(_Sync):
    """Add one to a semaphore once the queue's earlier instructions are complete."""

    on: str = field.choice(QUEUE_CODES)
    semaphore: int = field.number()


@instr(0x49, "wait", "waits", rules=())
class Wait(_Sync):
    """Hold the queue until a semaphore is above zero, then take one from it."""

    on: str = field.choice(QUEUE_CODES)
    semaphore: int = field.number()
