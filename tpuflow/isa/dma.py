"""Moves between HBM and on-chip memory, and the semaphores that order the queues."""

from __future__ import annotations

from tpuflow.chips.chip import Chip
from tpuflow.isa import instruction as field
from tpuflow.isa.instruction import QUEUES, Instruction, Tile, Window, instr

STORE_MODES = ("set", "add", "mul", "min", "max")


def _transfer_queue(window: Window, direction: str) -> str:
    return "scalar" if window.tile.space == "smem" else direction


@instr(0x40, "load")
class Load(Instruction):
    """window.tile = the window's piece of its buffer at this grid index (registers are loaded by the scalar queue itself)."""

    window: Window = field.window_in()

    @property
    def queue(self) -> str:
        """Load, or scalar for a register."""
        return _transfer_queue(self.window, "load")

    def cost(self, chip: Chip) -> float:
        """Cycles at full HBM bandwidth."""
        return chip.hbm_cycles(self.window.tile.elems * self.window.tile.dtype.bytes)


@instr(0x41, "store")
class Store(Instruction):
    """The window's piece of its buffer at this grid index = window.tile; positions outside the buffer are dropped."""

    window: Window = field.window_out()

    @property
    def queue(self) -> str:
        """Store, or scalar for a register."""
        return _transfer_queue(self.window, "store")

    def cost(self, chip: Chip) -> float:
        """Cycles at full HBM bandwidth."""
        return chip.hbm_cycles(self.window.tile.elems * self.window.tile.dtype.bytes)


@instr(0x42, "load_indexed")
class LoadIndexed(Instruction):
    """A gather: row r of window.tile (its axis 0) comes from position `position(r=0) + index[r]` of the window's axis 0.

    The window's axis 0 has step 0: its own position does not move with r. `index` is an s32 tile of rank 1, as long as the tile's
    axis 0. Positions out of range give `fill`.
    """

    window: Window = field.window_in()
    index: Tile = field.src()

    @property
    def queue(self) -> str:
        """Load."""
        return "load"

    def cost(self, chip: Chip) -> float:
        """Cycles at full HBM bandwidth."""
        return chip.hbm_cycles(self.window.tile.elems * self.window.tile.dtype.bytes)


@instr(0x43, "store_indexed")
class StoreIndexed(Instruction):
    """A scatter: for r = 0, 1, ... in order, buffer row `position + index[r]` = mode(that row, row r of window.tile).

    The addressing of `load_indexed`; positions out of range are dropped. "set" keeps the last; "add", "mul", "min" and "max" round
    every combination to the buffer's type.
    """

    mode: str = field.choice(STORE_MODES)
    window: Window = field.window_out()
    index: Tile = field.src()

    @property
    def queue(self) -> str:
        """Store."""
        return "store"

    def cost(self, chip: Chip) -> float:
        """Cycles at full HBM bandwidth, read and written."""
        return 2 * chip.hbm_cycles(self.window.tile.elems * self.window.tile.dtype.bytes)


@instr(0x48, "signal")
class Signal(Instruction):
    """Add one to a semaphore once the queue's earlier instructions are complete."""

    on: str = field.choice(QUEUES)
    semaphore: int = field.number()

    @property
    def queue(self) -> str:
        """The named queue."""
        return self.on

    def cost(self, chip: Chip) -> float:
        """One cycle."""
        return 1.0


@instr(0x49, "wait")
class Wait(Instruction):
    """Hold the queue until a semaphore is above zero, then take one from it."""

    on: str = field.choice(QUEUES)
    semaphore: int = field.number()

    @property
    def queue(self) -> str:
        """The named queue."""
        return self.on

    def cost(self, chip: Chip) -> float:
        """One cycle."""
        return 1.0
