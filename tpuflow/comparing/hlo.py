"""A parser of XLA:TPU's optimised, scheduled HLO text: its instructions, with memory spaces and windows.

The layout of an array gives its memory space by number: `S(1)` is VMEM, no `S` is HBM (`Space`). Only what `tpuflow.compare` needs is
parsed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from tpuflow.errors import ConfigError, short


class Space(IntEnum):
    """A memory space, by its number in XLA:TPU's layouts: the colours that JAX gives operands of Pallas kernels
    (`jax._src.tpu_custom_call`); CMEM and SCALAR as libtpu 0.0.52 prints them, of arrays on tpu-v4 that other chips have in VMEM, and of
    single numbers; those at the end are of SparseCores, whose names for them are not public."""

    HBM = 0
    VMEM = 1
    SEMAPHORE = 2
    CMEM = 3
    SMEM = 4
    HOST = 5
    SCALAR = 6
    SPARSE_CORE_SEMAPHORE = 8
    SPARSE_CORE_10 = 10
    SPARSE_CORE_11 = 11
    SPARSE_CORE_12 = 12
    SPARSE_CORE_15 = 15


BITS: Mapping[str, int] = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
_F8 = re.compile(r"f8\w+")
FREE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"))
"""Opcodes that move no bytes."""
STARTS = frozenset(("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"))
"""Opcodes that start an asynchronous copy."""
NUMBERED = frozenset(("parameter", "constant", "get-tuple-element"))
CUTS = frozenset(("dynamic-slice", "slice", "gather"))
"""Opcodes that read only as many bytes of their first operand as they return."""

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_CALLED = re.compile(r"(calls|body|condition|to_apply)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONFIG = "backend_config={"
_SCOPE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]<=|mesh\[([^\]]*)\] ?\{([^}]*)\})")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\(\d+\)(\d+))?")
_DIRECTION = re.compile(r"direction=(\w+)")
_INDEX = re.compile(r"index=(\d+)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_DEVICES = re.compile(r"HloModule .*num_partitions=(\d+)")
_ROW = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")
_TILE = re.compile(r":T\(([\d,]+)\)")
_WINDOWS = ("input_window", "kernel_window", "output_window")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape: its bytes (without what layouts pad) and memory space; its lengths, from the axis that varies slowest in memory
    to the one that varies fastest, and the tile that its layout cuts the last of them into."""

    bytes: int
    space: Space
    lengths: tuple[int, ...] = field(default=(), compare=False)
    tile: tuple[int, ...] = field(default=(), compare=False)

    @property
    def padding(self) -> int:
        """The bytes that its layout adds: whole tiles, also at the ends."""
        tiled = self.lengths[-len(self.tile) :] if self.tile else ()
        if not self.bytes or not tiled:
            return 0
        cut = self.tile[-len(tiled) :]
        whole = math.prod(-(-n // t) * t for n, t in zip(tiled, cut, strict=True))
        return self.bytes * whole // math.prod(tiled) - self.bytes


@dataclass(frozen=True, slots=True)
class Windows:
    """The blocks in which a product or convolution is computed: the lengths of one of each operand and of the result, in tiles where the
    layout has some, and how many iterations of each loop there are: over features of the result, its batch, its space, the window, and
    features that are summed."""

    input: tuple[int, ...]
    kernel: tuple[int, ...]
    output: tuple[int, ...]
    iterations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction.

    called: role ("calls" | "body" | "condition" | "branch") and computation; cycles: what the compiler expects of a product or convolution,
    else None; vmem: bytes of VMEM that it works in, beside its operands; trips: of a loop, 0 if they are not known; number: of a parameter,
    the place of what is taken out of a tuple, or the value of a whole constant; direction: of a comparison; group: of a collective, the
    devices that take part together, 0 for all; chain: the number that fusions share which go on with one collective; windows: of a product
    or convolution that is computed in blocks.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[tuple[str, str], ...] = ()
    scope: str = ""
    source: str = ""
    cycles: int | None = None
    vmem: int = 0
    trips: int = 0
    number: int | None = None
    direction: str = ""
    root: bool = False
    group: int = 0
    chain: str = ""
    windows: Windows | None = None


@dataclass(frozen=True)
class Module:
    """Computations by name, each with its instructions in order; and how many devices run them."""

    computations: Mapping[str, tuple[Op, ...]]
    entry: str
    devices: int = 1
    _named: dict[str, dict[str, Op]] = field(default_factory=dict)

    @cached_property
    def users(self) -> Mapping[tuple[str, str], tuple[Op, ...]]:
        """(computation, instruction) -> who reads it."""
        found: dict[tuple[str, str], list[Op]] = {}
        for name, ops in self.computations.items():
            for op in ops:
                for operand in dict.fromkeys(op.operands):
                    found.setdefault((name, operand), []).append(op)
        return {place: tuple(ops) for place, ops in found.items()}

    def op(self, computation: str, name: str) -> Op:
        """An instruction."""
        if computation not in self._named:
            self._named[computation] = {op.name: op for op in self.computations[computation]}
        return self._named[computation][name]

    @property
    def uncounted(self) -> int:
        """The number of loops whose trip count is not known."""
        return sum(op.opcode == "while" and not op.trips for ops in self.computations.values() for op in ops)

    def scheduled(self, computation: str | None = None, times: int = 1) -> Iterator[tuple[str, Op, int]]:
        """(computation, instruction, executions) of every instruction that the device runs, in order, with those of loops, calls and
        conditionals; every branch of a conditional counts, and a loop of unknown trip count once."""
        here = self.entry if computation is None else computation
        for op in self.computations[here]:
            if op.opcode in ("while", "conditional", "call"):
                for _, name in op.called:
                    yield from self.scheduled(name, times * (op.trips or 1))
            elif op.opcode not in FREE:
                yield here, op, times


def parse(text: str) -> Module:
    """A scheduled module as XLA:TPU writes it, which is also what `jax.stages.Compiled.as_text` gives.

    Raises:
      ConfigError: it has no entry computation, or something in it cannot be read.
    """
    frames, computations, entry = _Frames(), {}, ""
    inside: list[Op] | None = None
    table = ""
    for line in text.splitlines():
        if inside is None and (head := _HEAD.match(line)) is not None:
            inside = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif inside is not None and line.startswith("}"):
            inside = None
        elif inside is not None:
            if (found := _op(line, frames)) is not None:
                inside.append(found)
        elif line in _TABLES:
            table = line
        elif table and (row := _ROW.match(line)) is not None:
            frames.add(table, *row.groups())
    if not entry:
        raise ConfigError("expected the text of an optimised HLO module, and found no ENTRY computation in it.")
    devices = _DEVICES.match(text)
    return Module({name: tuple(ops) for name, ops in computations.items()}, entry, int(devices[1]) if devices else 1)


class _Frames:
    """The tables at the head of a module: where in the user's files an instruction comes from."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, str]] = {table: {} for table in _TABLES}

    def add(self, table: str, number: str, name: str | None, fields: str | None) -> None:
        """A row of a table."""
        self._rows[table][int(number)] = name if name is not None else fields or ""

    def source(self, frame: int) -> str:
        """file:line of a stack frame; "" if it is not known."""
        place = _fields(self._rows["StackFrames"].get(frame, "")).get("file_location_id")
        if place is None or place not in self._rows["FileLocations"]:
            return ""
        location = _fields(self._rows["FileLocations"][place])
        return f"{self._rows['FileNames'].get(location.get('file_name_id', 0), '?')}:{location.get('line', 0)}"


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (item.partition("=") for item in text.split()) if value.isdigit()}


def _op(line: str, frames: _Frames) -> Op | None:
    head = _LINE.match(line)
    if head is None:
        return None
    shape, rest = _shape(line[head.end() :])
    opcode, _, rest = rest.partition("(")
    operands, attributes = _balanced(f"({rest}")
    called = [*_CALLED.findall(attributes)]
    if (branches := _BRANCHES.search(attributes)) is not None:
        called += [("branch", name) for name in _NAME.findall(branches[1])]
    scope, frame, chain, direction = (pattern.search(attributes) for pattern in (_SCOPE, _FRAME, _CHAIN, _DIRECTION))
    config = _config(attributes)
    window = config.get("window_config", {})
    worked = config.get("used_scoped_memory_configs", [])
    return Op(
        name=head[2],
        opcode=opcode.strip(),
        results=tuple(map(_array, _ARRAY.findall(shape))),
        operands=tuple(_NAME.findall(operands)),
        called=tuple(called),
        scope="" if scope is None else scope[1].replace("\\'", "'"),
        source="" if frame is None else frames.source(int(frame[1])),
        cycles=int(window["estimated_cycles"]) if window.get("cost_model_type") == "COST_MODEL_TYPE_CLASSIC" else None,
        vmem=sum(int(one["size"]) for one in worked if int(one["memory_space"]) == Space.VMEM),
        trips=int(config.get("known_trip_count", {}).get("n", 0)),
        number=_number(opcode.strip(), operands, attributes),
        direction="" if direction is None else direction[1],
        root=bool(head[1]),
        group=_group(attributes),
        chain="" if chain is None else chain[1],
        windows=_windows(window),
    )


def _windows(config: Mapping[str, Any]) -> Windows | None:
    found = [tuple(map(int, config.get(f"{name}_bounds", ()))) for name in (*_WINDOWS, "iteration")]
    return Windows(*found) if all(found) else None


def _number(opcode: str, operands: str, attributes: str) -> int | None:
    """Of a parameter its number, of a constant its value if that is whole, of a tuple's element its place."""
    text = operands
    if opcode == "get-tuple-element":
        found = _INDEX.search(attributes)
        text = "" if found is None else found[1]
    return int(text) if opcode in NUMBERED and text.lstrip("-").isdigit() else None


def _group(attributes: str) -> int:
    """The devices of a group, which are listed, counted, or those along axes of a mesh, or parts of such; 0 where nothing is said: all."""
    found = _GROUPS.search(attributes)
    if found is None:
        return 0
    listed, counted, mesh, axes = found.groups()
    if axes is not None:
        sizes = {name: size for name, size, _ in _AXIS.findall(mesh)}
        return math.prod(int(part or sizes[name]) for name, _, part in _AXIS.findall(axes))
    return int(counted) if listed is None else len(listed.split(","))


def _shape(text: str) -> tuple[str, str]:
    """(a type, what comes after it); of a tuple it is in parentheses."""
    if text.startswith("("):
        shape, rest = _balanced(text)
        return shape, rest.lstrip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def _balanced(text: str) -> tuple[str, str]:
    """(what is in the parentheses that the text begins with, the rest)."""
    depth, quoted = 0, False
    for at, letter in enumerate(text):
        if letter == '"' and text[at - 1] != "\\":
            quoted = not quoted
        if not quoted:
            depth += (letter == "(") - (letter == ")")
            if not depth:
                return text[1:at], text[at + 1 :]
    return text[1:], ""


def _array(found: tuple[str, str, str]) -> Array:
    kind, lengths, layout = found
    bits = 8 if _F8.fullmatch(kind) else BITS.get(kind)
    if bits is None:
        raise ConfigError(f"the HLO has arrays of {kind}, whose size is not known here (tpuflow.comparing.hlo.BITS).")
    shape = tuple(map(int, lengths.split(","))) if lengths else ()
    order = [int(n) for n in layout.partition(":")[0].split(",") if n]
    tile = _TILE.search(layout)
    in_memory = tuple(shape[axis] for axis in reversed(order)) if len(order) == len(shape) else shape
    return Array(-(-math.prod(shape) * bits // 8), _space(layout), in_memory, () if tile is None else tuple(map(int, tile[1].split(","))))


def _space(layout: str) -> Space:
    found = _SPACE.search(layout)
    if found is None:
        return Space.HBM
    if int(found[1]) not in set(Space):
        known = ", ".join(f"{space.value} {space.name}" for space in Space)
        raise ConfigError(
            f"the HLO has arrays in memory space {found[1]}, which is not known here; known are {known} (tpuflow.comparing.hlo.Space)."
        )
    return Space(int(found[1]))


def _config(attributes: str) -> dict[str, Any]:
    at = attributes.find(_CONFIG)
    if at < 0:
        return {}
    try:
        return json.JSONDecoder().raw_decode(attributes, at + len(_CONFIG) - 1)[0]
    except json.JSONDecodeError as error:
        raise ConfigError(f"the HLO has a backend_config that is no JSON ({error}): {short(attributes[at:])}") from error
