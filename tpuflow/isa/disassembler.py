"""A Program as canonical text, which the assembler reads back to the same Program.

The first line names the format's version and the program; then come the sections `chip`, `mesh`, `buffers`, `constants`, `inputs`,
`outputs`, `infeeds`, `outfeeds` and `code`, as far as they are not empty. Two spaces of indentation are one level.

    "data" 4                            an axis of the mesh, and how many chips it has; `joined` to the one before it, if both are
                                        parts of one row of chips
    b3 f32[64, 784] at 0x1000           a buffer: type, shape, byte address in HBM
    b4 f32[64, 10] at vmem[0x1000]      a buffer that stays in VMEM, or in cmem[0x1000]
    b3 = f32 0.5, 1.0                   a constant by its values, or `b3 = hex` and lines of hexadecimal bytes
    "x" f32[64, 784] b3 donated weak    a port: name, type, shape, its buffer (b-1: none), marks, and key="..." of random keys;
                                        `cut=[(0, 1), ()]`: along its first axis the host's array is cut over mesh axes 0 and 1
    kernel                              a kernel; `grid parallel 4, sequential 3`; `semaphores 2, 0` are the initial counts
    %t0 = vmem[0x2000] f32[128@g0/300, 64] x2 step
                                        a tile: space, byte address, type, axes, slots, and what moves to the next slot; an axis
                                        is its size, and `@g0/300` if it is blocked by grid axis 0 out of a whole of 300
    %w0 = b3 %t0 [300:64 at 128*g0 + j, 64:1 at j] fill 0
                                        a window of buffer 3 and tile %t0: for each axis, extent:pitch of the view and the
                                        position of element j (origin, grid terms, a register, step*j), `(...)/2` if dilated
    vector.binary add %t2, %t0, %t1     an instruction: queue, mnemonic, sub-operation, tiles and windows; other fields by name
    pairs=[1 stride 2 label 5 dilation 1]
                                        axis 1 holds position 2*(its own label) + 1*(label 5)
    scope "jvp(Net)/Dense_0"            debug information, too: where in the model a kernel comes from
    loop trips=b3                       a block with its buffers; its nested lists follow, each under its name
    collective all_reduce add axes=[0] source=b3 target=b4 semaphore=0
                                        a collective over mesh axis 0, awaited by `await semaphore=0`; `pairs=[(0, 1)]` of a permute

Numbers that carry a type keep it: `1` is an integer, `1.0` a float, `true` a bool; floats print so that they read back to the same
bits (`nan:` and 16 digits for a NaN other than the usual one). Text after `;` is debug information: the name of the program, kernel
or buffer, or the source line of the instruction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Any

import ml_dtypes
import numpy as np

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import DType
from tpuflow.errors import ProgramFileError
from tpuflow.isa.codec import Table
from tpuflow.isa.collectives import Collective, MeshAxis
from tpuflow.isa.file import MAJOR, MINOR, debug_fault
from tpuflow.isa.instruction import QUEUE_CODES, Instruction, Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Block, Buffer, CallHost, Constant, Kernel, Port, Program, children

PORT_SECTIONS = ("inputs", "outputs", "infeeds", "outfeeds")
POSITIONAL = ("tile", "tiles", "window")  # kinds of fields that an instruction shows without their name
UNBUFFERED = ("port", "axis", "semaphore", "function")  # numbers of a block that are no buffers
SHORT_CONSTANT_ELEMS = 16
HEX_BYTES_A_LINE = 64
USUAL_NAN = bytes.fromhex("7ff8000000000000")


def _mesh_axis(axis: MeshAxis) -> str:
    return f"{quote(axis.name)} {axis.size}{' joined' * axis.joined}"


def disassemble(program: Program) -> str:
    """The canonical text of a Program, names and source lines included.

    Raises:
      ProgramFileError: there are names or source lines, but not one for each buffer or instruction.
    """
    if fault := debug_fault(program):
        raise ProgramFileError(f"cannot write the program: {fault}")
    lines = [_commented(f"tpx {MAJOR}.{MINOR}", program.name or None)]
    lines += _section("chip", _chip(program.chip))
    lines += _section("mesh", map(_mesh_axis, program.mesh))
    lines += _section("buffers", _named_buffers(program))
    lines += _section("constants", (line for c in program.constants for line in _constant(c, program.buffers)))
    for name in PORT_SECTIONS:
        lines += _section(name, map(_port, getattr(program, name)))
    lines += _section("code", (line for block in program.code for line in _block(block)))
    return "\n".join(lines) + "\n"


def _chip(chip: Chip) -> Iterator[str]:
    """Its facts in order; one that stands at its default is left out."""
    for f in fields(chip):
        value = getattr(chip, f.name)
        if f.default is MISSING or repr(value) != repr(f.default):
            yield f"{f.name} {_fact(f.type, value)}"


# ---- words


def quote(text: str) -> str:
    """A string in double quotes."""
    return '"' + escape(text).replace('"', "\\u{22}") + '"'


def escape(text: str) -> str:
    """Text that keeps to its line: backslashes and what does not print become `\\u{hex}`."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(c if c.isprintable() and c != "\\" else f"\\u{{{ord(c):x}}}" for c in text)


def float_text(value: float) -> str:
    """A float, exactly."""
    if value == value:
        return repr(float(value))
    bits = struct.pack(">d", value)
    return "nan" if bits == USUAL_NAN else f"nan:{bits.hex()}"


def scalar_text(value: int | float | bool) -> str:
    """A number with its type: true, 1, 1.0."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return float_text(value) if isinstance(value, float) else str(int(value))


def array_type(dtype: DType, shape: Iterable[object]) -> str:
    """`f32[64, 784]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _commented(line: str, comment: str | None) -> str:
    """The line with a comment at its right; an outer space of the comment is escaped, since editors drop it."""
    if comment is None:
        return line
    text = escape(comment)
    if text.startswith(" "):
        text = "\\u{20}" + text[1:]
    if text.endswith(" "):
        text = text[:-1] + "\\u{20}"
    return f"{line}    ; {text}".rstrip()


def _section(name: str, lines: Iterable[str]) -> list[str]:
    content = [f"  {line}" for line in lines]
    return [name, *content] if content else []


def _fact(hint: object, value: Any) -> str:
    return quote(value) if hint in (str, "str") else float_text(value) if hint in (float, "float") else str(value)


# ---- buffers, constants, ports


def _named_buffers(program: Program) -> Iterator[str]:
    names: Iterable[str | None] = program.buffer_names or (None,) * len(program.buffers)
    for number, (buffer, name) in enumerate(zip(program.buffers, names, strict=True)):
        place = f"{buffer.space}[{buffer.address:#x}]" if buffer.space != "hbm" else f"{buffer.address:#x}"
        yield _commented(f"b{number} {array_type(buffer.dtype, buffer.shape)} at {place}", name)


def _constant(constant: Constant, buffers: tuple[Buffer, ...]) -> Iterator[str]:
    values = _short_values(constant, buffers)
    if values:
        yield f"b{constant.buffer} = {values}"
        return
    yield f"b{constant.buffer} = hex"
    for at in range(0, len(constant.data), HEX_BYTES_A_LINE):
        yield f"  {constant.data[at : at + HEX_BYTES_A_LINE].hex()}"


_PLAIN = {"float": np.float64, "int": np.int64, "uint": np.int64}
"""What numbers of a kind are written as."""


def _short_values(constant: Constant, buffers: tuple[Buffer, ...]) -> str:
    """The values of a small constant in its buffer's type, if they read back to the same bytes ("" if not)."""
    if not 0 <= constant.buffer < len(buffers):
        return ""
    dtype = buffers[constant.buffer].dtype
    if not 0 < len(constant.data) <= SHORT_CONSTANT_ELEMS * dtype.bytes or len(constant.data) % dtype.bytes:
        return ""
    with np.errstate(all="ignore"):
        values = np.frombuffer(constant.data, dtype.numpy).astype(_PLAIN.get(dtype.computed.kind, dtype.numpy)).tolist()
    return f"{dtype} {', '.join(map(scalar_text, values))}" if values_data(dtype, values) == constant.data else ""


def values_data(dtype: DType, values: list[Any]) -> bytes:
    """The little-endian bytes of values in a type.

    Raises:
      OverflowError: an integer is outside the type.
    """
    with np.errstate(all="ignore"):
        if dtype.computed.is_float:
            return np.array(values, np.float64).astype(dtype.numpy).tobytes()
        if dtype.wide is not None and not all(ml_dtypes.iinfo(dtype.numpy).min <= v <= ml_dtypes.iinfo(dtype.numpy).max for v in values):
            raise OverflowError
        return np.array(values, dtype.computed.numpy).astype(dtype.numpy).tobytes()


def _port(port: Port) -> str:
    marks = [mark for mark in ("donated", "weak") if getattr(port, mark)]
    key = [f"key={quote(port.key)}"] if port.key else []
    cut = [f"cut={_tuples(port.cut)}"] if port.cut else []
    return " ".join((quote(port.name), array_type(port.dtype, port.shape), f"b{port.buffer}", *marks, *key, *cut))


def _tuples(rows: Iterable[Iterable[int]]) -> str:
    return "[" + ", ".join(f"({', '.join(map(str, row))})" for row in rows) + "]"


# ---- code


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Kernel):
        yield from _kernel(block)
        return
    if isinstance(block, Collective):
        yield _commented(_collective(block), block.where or None)
        return
    if isinstance(block, CallHost):
        yield f"callhost function={block.function} sources={_buffers(block.sources)} targets={_buffers(block.targets)}"
        return
    numbers = ((f.name, getattr(block, f.name)) for f in fields(block))
    marks = [f"{name}={'' if name in UNBUFFERED else 'b'}{value}" for name, value in numbers if not isinstance(value, tuple)]
    yield " ".join((type(block).__name__.lower(), *marks))
    for name, blocks in children(block):
        yield f"  {name}"
        for nested in blocks:
            yield from (f"    {line}" for line in _block(nested))


def _buffers(numbers: Iterable[int]) -> str:
    return f"[{', '.join(f'b{n}' for n in numbers)}]"


def _collective(c: Collective) -> str:
    axes = ", ".join(map(str, c.axes))
    words = f"collective {c.kind} {c.reducer} axes=[{axes}] source=b{c.source} target=b{c.target} semaphore={c.semaphore}"
    return " ".join((words, *([f"pairs={_tuples(c.pairs)}"] if c.pairs else []), *([f"scope {quote(c.scope)}"] if c.scope else [])))


def _kernel(kernel: Kernel) -> Iterator[str]:
    names = _Names()
    sources = iter(kernel.sources or (None,) * len(kernel.instructions))
    sections = {
        name: [_commented(_instruction(i, names), source) for i, source in zip(section, sources, strict=False)]
        for name, section in kernel.sections
    }
    yield _commented("kernel", kernel.name or None)
    if kernel.scope:
        yield f"  scope {quote(kernel.scope)}"
    if kernel.grid:
        yield f"  grid {', '.join(f'{axis.kind} {axis.size}' for axis in kernel.grid)}"
    if kernel.semaphores:
        yield f"  semaphores {', '.join(map(str, kernel.semaphores))}"
    yield from (f"  {line}" for line in names.definitions())
    for name, lines in sections.items():
        yield from (f"  {line}" for line in _section(name, lines))


class _Names:
    """The names of a kernel's tiles and windows, numbered by first use."""

    def __init__(self) -> None:
        self._tiles = Table(_tile)
        self._windows = Table(self._window)

    def tile(self, tile: Tile) -> str:
        return f"%t{self._tiles.number(tile)}"

    def tiles(self, tiles: tuple[Tile, ...]) -> str:
        return f"({', '.join(map(self.tile, tiles))})"

    def window(self, window: Window) -> str:
        return f"%w{self._windows.number(window)}"

    def definitions(self) -> Iterator[str]:
        """A line for every tile, then for every window."""
        yield from (f"%t{number} = {row}" for row, number in self._tiles.rows.items())
        yield from (f"%w{number} = {row}" for row, number in self._windows.rows.items())

    def _window(self, window: Window) -> str:
        tile = self.tile(window.tile)  # numbered before the registers of the axes
        axes = ", ".join(self._window_axis(axis) for axis in window.axes)
        return f"b{window.buffer} {tile} [{axes}] fill {scalar_text(window.fill)}"

    def _window_axis(self, axis: WindowAxis) -> str:
        terms = [f"{elements}*g{grid}" for grid, elements in axis.grid]
        terms += [self.tile(axis.register)] if axis.register is not None else []
        terms += [] if axis.step == 0 else ["j" if axis.step == 1 else f"{axis.step}*j"]
        terms = [str(axis.origin), *terms] if axis.origin or not terms else terms
        position = " + ".join(terms)
        position = position if axis.dilation == 1 else f"({position})/{axis.dilation}"
        return f"{axis.extent}:{axis.pitch} at {position}"


def _tile(tile: Tile) -> str:
    axes = map(_tile_axis, tile.axes)
    return f"{tile.space}[{tile.address:#x}] {array_type(tile.dtype, axes)} x{tile.slots} {tile.rate}"


def _tile_axis(axis: TileAxis) -> str:
    return str(axis.size) if axis.grid == -1 and axis.extent == 0 else f"{axis.size}@g{axis.grid}/{axis.extent}"


OPERANDS: dict[str, Callable[[_Names, Any], str]] = {
    "choice": lambda names, value: value,
    "tile": _Names.tile,
    "tiles": _Names.tiles,
    "window": _Names.window,
    "axes": lambda names, value: f"[{', '.join(map(str, value))}]",
    "pairs": lambda names, value: f"[{', '.join(map(str, value))}]",
    "bounds": lambda names, value: f"[{', '.join(map(str, value))}]",
    "number": lambda names, value: str(value),
    "flag": lambda names, value: scalar_text(value),
    "immediate": lambda names, value: scalar_text(value),
}


def _instruction(instruction: Instruction, names: _Names) -> str:
    values = {name: OPERANDS[kind.name](names, value) for name, kind, value in instruction.fields()}
    return instruction_text(type(instruction), instruction.queue, values)


def instruction_text(cls: type[Instruction], queue: str, values: dict[str, str]) -> str:
    """An instruction from the texts of its queue and fields.

    Words come first, then tiles and windows as they are and other fields after their names; a field that names the queue is the
    prefix itself.
    """
    words = [values[name] for name, kind in cls.kinds.items() if kind.name == "choice" and kind.choices != QUEUE_CODES]
    operands = [
        values[name] if kind.name in POSITIONAL else f"{name}={values[name]}" for name, kind in cls.kinds.items() if kind.name != "choice"
    ]
    return " ".join(part for part in (f"{queue}.{cls.mnemonic}", *words, ", ".join(operands)) if part)
