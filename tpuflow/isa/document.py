"""docs/ISA.md, written from the declarations: `python -m tpuflow.isa.document` brings it up to date."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from tpuflow.dtypes import DTYPES
from tpuflow.isa import codec, collectives, disassembler, file
from tpuflow.isa.bounds import Bound
from tpuflow.isa.codec import DECLARED, FAMILIES
from tpuflow.isa.collectives import KINDS as COLLECTIVES
from tpuflow.isa.collectives import Await, Collective, MeshAxis, Position
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.disassembler import instruction_text
from tpuflow.isa.instruction import CUSTOM_OPCODES, QUEUES, FieldKind, Instruction, Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Buffer, CallHost, Constant, Copy, GridAxis, Infeed, Kernel, Loop, Outfeed, Port, Program, Switch, While

PATH = Path(__file__).parents[2] / "docs" / "ISA.md"
RECORDS = (
    Program,
    MeshAxis,
    Buffer,
    Constant,
    Port,
    Kernel,
    GridAxis,
    Loop,
    While,
    Switch,
    Infeed,
    Outfeed,
    Position,
    Collective,
    Await,
    Copy,
    CallHost,
    Tile,
    TileAxis,
    Window,
    WindowAxis,
    SlidingAxis,
    Bound,
)

MACHINE = f"""\
A chip has cores. A core has {len(QUEUES)} in-order queues ({", ".join(QUEUES)})
that run side by side and meet only at semaphores. Arrays lie dense and row-major in HBM or, from kernel to kernel, in the vector
memory or a memory that the cores share ("cmem"); an on-chip tile is a piece of one at an explicit address of the vector memory
("vmem"), of the matrix unit's accumulators ("acc"), or a single value in a register of the scalar unit ("smem"). The load and store
queues move pieces between arrays and tiles, through windows; the others compute on tiles. Control flow between kernels (loops,
branches, infeed, outfeed) is part of the program; there is none inside a kernel but its grid.

A blocked axis is shorter in its last tile, and every instruction works on the valid part only: there are no padding data to mask.
What an instruction computes is its `meaning`, written against the arithmetic protocol (`tpuflow/isa/arithmetic.py`); what it costs is
its `cost`, in cycles of a chip's row.
"""

ROLES = {"read": "is read", "write": "is written", "both": "is read and written"}
KINDS = {
    "tile": "tile",
    "tiles": "tiles, at least one",
    "window": "window",
    "choice": "word",
    "axes": "non-negative integers, at most 6",
    "pairs": "sliding axes of `a`, at most 6",
    "bounds": "bounds on where `a` and `b` have elements, at most 6",
    "number": "non-negative integer",
    "flag": "bool",
    "immediate": "number in the destination's type",
}
WINDOW_ROLES = {"read": "from its buffer to its tile", "write": "from its tile to its buffer"}


def document() -> str:
    """The text of docs/ISA.md."""
    parts = (
        "# The instruction set",
        "Written by `python -m tpuflow.isa.document` from the declarations in `tpuflow/isa/`; do not edit.",
        "## The machine",
        MACHINE.rstrip(),
        _types(),
        "## The parts of a Program",
        *(f"**{record.__name__}** ({_fields(record)})\n\n{_markdown(record)}" for record in RECORDS),
        "## Several chips",
        _markdown(collectives),
        "\n".join(
            (
                "| code | collective | what a member receives |",
                "|---|---|---|",
                *(f"| {k.code} | `{n}` | {k.says} |" for n, k in COLLECTIVES.items()),
            )
        ),
        "## Instructions",
        _summary(),
        *(part for family in FAMILIES for part in _family(family)),
        "## The text form",
        _markdown(disassembler),
        "## The file form",
        _markdown(file),
        _markdown(codec),
        f"The current format is {file.MAJOR}.{file.MINOR}.",
    )
    return "\n\n".join(parts) + "\n"


def _types() -> str:
    rows = "\n".join(f"| {d.name} | {d.numpy} | {d.bytes} | {d.kind} | {d.code} |" for d in DTYPES)
    return f"| type | NumPy | bytes | kind | code |\n|---|---|---|---|---|\n{rows}"


def _fields(record: Any) -> str:
    hints = inspect.get_annotations(record)
    return ", ".join(f"`{f.name}: {hints[f.name]}`" for f in dataclasses.fields(record) if f.init)


def _summary() -> str:
    rows = (f"| {cls.opcode:#04x} | `{cls.mnemonic}` | {_first_line(cls)} |" for cls in DECLARED)
    custom = f"Opcodes {CUSTOM_OPCODES.start:#x} to {CUSTOM_OPCODES.stop - 1:#x} are left to instructions that others add."
    return "\n".join(("| opcode | mnemonic | |", "|---|---|---|", *rows, "", custom))


def _family(module: ModuleType) -> list[str]:
    own = (cls for cls in DECLARED if cls.__module__ == module.__name__)
    name = module.__name__.rpartition(".")[2]
    return [f"### {name}", _markdown(module), *map(_instruction, own)]


def _instruction(cls: type[Instruction]) -> str:
    values = {name: f"%{name}" if kind.name in ("tile", "window") else _placeholder(name, kind) for name, kind in cls.kinds.items()}
    cost: Any = cls.cost
    lines = [
        f"#### {cls.opcode:#04x} `{cls.mnemonic}`",
        f"    {instruction_text(cls, 'queue', values)}",
        _markdown(cls),
        "\n".join(
            (
                *(f"- `{name}`: {_kind(kind)}" for name, kind in cls.kinds.items()),
                *([f"- must hold: {'; '.join(rule.sentence for rule in cls.rules)}."] if cls.rules else []),
                f"- queue: {_sentence(cls.queue)}",
                f"- cost: {_sentence(cost)}",
            )
        ),
    ]
    return "\n\n".join(lines)


def _placeholder(name: str, kind: FieldKind) -> str:
    return {"tiles": f"(%{name}, ...)", "axes": "[...]", "pairs": "[...]", "choice": name}.get(kind.name, "...")


def _kind(kind: FieldKind) -> str:
    role = WINDOW_ROLES if kind.name == "window" else ROLES
    words = f": {' '.join(f'`{word}`' for word in kind.choices)}" if kind.choices else ""
    return KINDS[kind.name] + (f", {role[kind.role]}" if kind.role else "") + words


def _sentence(described: object) -> str:
    return " ".join((inspect.getdoc(described) or "").split())


def _first_line(cls: type[Instruction]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("|", "\\|")


def _markdown(described: object) -> str:
    """A docstring, with the asterisks escaped that would make its text italic; indented blocks after an empty line are code."""
    lines: list[str] = []
    code = False
    for line in (inspect.getdoc(described) or "").splitlines():
        code = line.startswith("    ") and (code or not lines or not lines[-1])
        lines.append(line if code else _outside_code_spans(line))
    return "\n".join(lines)


def _outside_code_spans(line: str) -> str:
    return "`".join(part if i % 2 else part.replace("*", "\\*") for i, part in enumerate(line.split("`")))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tpuflow.isa.document", description="Write the page of the instruction set.")
    parser.add_argument("-o", "--output", type=Path, default=PATH, metavar="FILE", help="write it here, not to docs/ISA.md")
    parser.parse_args().output.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
