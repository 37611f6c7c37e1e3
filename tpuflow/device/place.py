"""How messages name a block, an instruction with its operands, and the user's source line."""

from __future__ import annotations

from typing import Any

from tpuflow.isa.instruction import FieldKind, Instruction, Tile, Window
from tpuflow.isa.program import Kernel


def tile_text(tile: Tile) -> str:
    """vmem[0x1000] f32[8,128], with the number of slots where there are several."""
    slots = f" x{tile.slots} a {tile.rate}" if tile.slots != 1 else ""
    return f"{tile.space}[{tile.address:#x}] {tile.dtype}[{','.join(map(str, tile.shape))}]{slots}"


def window_text(window: Window) -> str:
    """The buffer's number and the tile."""
    return f"(buffer {window.buffer}, {tile_text(window.tile)})"


def _value_text(kind: FieldKind, value: Any) -> str:
    if kind.name == "tile":
        return tile_text(value)
    if kind.name == "tiles":
        return f"({', '.join(map(tile_text, value))})"
    return window_text(value) if kind.name == "window" else str(value)


def instruction_text(instruction: Instruction) -> str:
    """Mnemonic and operands, for messages (the assembler's text is `tpuflow.isa.disassembler`'s)."""
    operands = ", ".join(f"{name}={_value_text(kind, value)}" for name, kind, value in instruction.fields())
    return f"{instruction.mnemonic} {operands}"


def kernel_place(path: str, kernel: Kernel) -> str:
    """kernel 3.body.0 'name'."""
    return f"kernel {path} {kernel.title!r}" if kernel.title else f"kernel {path}"


def section_place(kernel: Kernel, number: int) -> str:
    """body[2] binary, for instruction `number` counted over all three sections."""
    mnemonic = kernel.instructions[number].mnemonic
    for name, section in kernel.sections:
        if number < len(section):
            return f"{name}[{number}] {mnemonic}"
        number -= len(section)
    raise IndexError(number)


def source_line(kernel: Kernel, number: int) -> str:
    """The user's source line of instruction `number`, or nothing."""
    return kernel.sources[number] if number < len(kernel.sources) else ""


def instruction_place(path: str, kernel: Kernel, number: int) -> str:
    """kernel 3.body.0 'name', body[2] binary."""
    return f"{kernel_place(path, kernel)}, {section_place(kernel, number)}"


def source_suffix(kernel: Kernel, number: int) -> str:
    """The source line as the end of a message, or nothing."""
    line = source_line(kernel, number)
    return f" Source: {line}." if line else ""
