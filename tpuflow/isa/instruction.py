"""What an instruction is made of: operands (tiles, windows), field kinds, and the `@instr` declaration.

An instruction is a frozen dataclass declared once. Its fields say what they are (`dst()`, `src()`, `choice(...)`, ...), its traits what
kind of work it does, its rules what its operands must be to each other; codec, assembler, disassembler, documentation, verifier, both
engines and random tests derive from that declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform

from tpuflow.dtypes import DType
from tpuflow.errors import ProgramError

if TYPE_CHECKING:
    from tpuflow.chips.chip import Chip
    from tpuflow.isa.cost import Cost, ShapeOf
    from tpuflow.isa.rules import Rule

TRAITS = {
    "elementwise": "each element written is made of the same element of every tile read",
    "fills": "each element written depends on its position, and on nothing else that differs between elements",
    "repeats": "what is written are elements of one tile, some of them several times",
    "permutes": "what is written is one tile with its axes in another order",
    "slices": "what is written are elements of one tile at even distances along its axes",
    "accumulates": "one tile is read and written: a value made of the other tiles is combined with it, in any order of trips",
    "scans": "one tile is read and written: it carries a value from element to element, in order",
    "sorts": "rows of several tiles are reordered together",
    "transfers": "a window's piece of HBM is loaded into a tile, or a tile is stored there",
    "updates": "the part of HBM that is written is read as well",
    "signals": "a semaphore is raised",
    "waits": "a semaphore is lowered",
}
"""What a declaration can state of an instruction. Verifier, engines and compiler go by traits, and refuse an instruction without any."""

QUEUES = ("scalar", "matrix", "vector", "load", "store", "link")
QUEUE_CODES = {name: code for code, name in enumerate(QUEUES)}
"""Name -> number in the binary."""
SPACES = ("vmem", "smem", "acc")
RATES = ("step", "point")
MAX_RANK = 6


@dataclass(frozen=True, slots=True)
class TileAxis:
    """One axis of a tile: `size` elements, or fewer in the last tile of a blocked axis.

    A blocked axis (`grid >= 0`) is a piece of a whole axis of `extent` elements: at index i of grid axis `grid` the tile holds
    positions [i*size, min((i+1)*size, extent)). An unblocked axis (`grid == -1`, `extent == 0`) always holds `size` elements.
    """

    size: int
    grid: int = -1
    extent: int = 0

    def valid(self, index: int) -> int:
        """Elements held at index `index` of the blocking grid axis (`size` if not blocked)."""
        return self.size if self.grid < 0 else min(self.size, self.extent - index * self.size)

    @property
    def whole(self) -> int:
        """Length of the whole axis that the tiles of all grid indices make up."""
        return self.size if self.grid < 0 else self.extent


@dataclass(frozen=True, slots=True)
class Tile:
    """A place in on-chip memory: `slots` copies one after the other from byte `address`, used in turn.

    `rate` says what moves to the next slot: every sequential step of the kernel ("step") or every parallel point ("point").
    Slot used = count % slots. Space "vmem" is the vector memory, "acc" the matrix unit's accumulators, "smem" the scalar unit's
    registers (rank 0, one element). Two operands are the same place only if all fields are equal.
    """

    space: str
    address: int
    dtype: DType
    axes: tuple[TileAxis, ...] = ()
    slots: int = 1
    rate: str = "step"

    def __hash__(self) -> int:
        """A cheap hash, of the fields that differ most: tiles are dictionary keys wherever kernels are built."""
        return hash((self.address, *[a.size for a in self.axes]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a full (not clipped) tile."""
        return tuple([a.size for a in self.axes])

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the virtual tensor that all tiles of the grid make up."""
        return tuple(a.whole for a in self.axes)

    @property
    def elems(self) -> int:
        """Elements of a full tile."""
        n = 1
        for a in self.axes:
            n *= a.size
        return n

    def valid_shape(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Shape held at grid index `index` (all grid axes), shorter than `shape` at the edges."""
        return tuple(a.valid(index[a.grid]) if a.grid >= 0 else a.size for a in self.axes)


@dataclass(frozen=True, slots=True)
class WindowAxis:
    """How one tile axis walks over one axis of a buffer's view.

    Element j of the tile axis at grid index g sits at
        position = origin + sum(elements * g[axis] for axis, elements in grid) + (register value) + step * j.
    It is element position / dilation of the view axis if dilation divides position and 0 <= position / dilation < extent; otherwise a
    load reads `fill` and a store drops it. `pitch` is the distance in elements between neighbours of the view axis in the dense
    buffer. step 0 with extent 1 broadcasts; a negative step reverses.
    """

    extent: int
    pitch: int
    origin: int = 0
    grid: tuple[tuple[int, int], ...] = ()
    step: int = 1
    dilation: int = 1
    register: Tile | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A DMA descriptor between a dense HBM buffer (index into the Program's table) and a tile.

    `axes` pair with the tile's axes in order. Together the view axes (extent, pitch) must be a reshape of the dense buffer followed
    by a permutation: their extents multiply to its element count and their pitches are row-major in some order.
    """

    buffer: int
    tile: Tile
    axes: tuple[WindowAxis, ...]
    fill: int | float | bool = 0

    def on(self, buffer: int) -> Window:
        """The same piece of another buffer."""
        return Window(buffer, self.tile, self.axes, self.fill)


@dataclass(frozen=True, slots=True)
class FieldKind:
    """What an instruction field holds: `name` picks the codec; `role` is how a tile or window is used (read, write, both); `choices` are
    the words that it can be, with their numbers in the binary."""

    name: str
    role: str = ""
    choices: Mapping[str, int] = field(default_factory=dict)


def _kinded(kind: FieldKind, **kw: Any) -> Any:
    return field(metadata={"kind": kind}, **kw)


def dst() -> Any:
    """A tile that is written."""
    return _kinded(FieldKind("tile", "write"))


def src() -> Any:
    """A tile that is read."""
    return _kinded(FieldKind("tile", "read"))


def inout() -> Any:
    """A tile that is read and written (an accumulator or a carry)."""
    return _kinded(FieldKind("tile", "both"))


def dsts() -> Any:
    """Several tiles that are written."""
    return _kinded(FieldKind("tiles", "write"))


def srcs() -> Any:
    """Several tiles that are read."""
    return _kinded(FieldKind("tiles", "read"))


def window_in() -> Any:
    """A window whose buffer is read and whose tile is written."""
    return _kinded(FieldKind("window", "read"))


def window_out() -> Any:
    """A window whose tile is read and whose buffer is written."""
    return _kinded(FieldKind("window", "write"))


def choice(codes: Mapping[str, int], **default: str) -> Any:
    """One of some words (a sub-operation), each with its number in the binary; it may have a `default`."""
    return _kinded(FieldKind("choice", choices=codes), **default)


def axes_field() -> Any:
    """A tuple of small non-negative integers."""
    return _kinded(FieldKind("axes"))


def pairs_field() -> Any:
    """A tuple of sliding axes (`SlidingAxis`), empty by default."""
    return field(default=(), metadata={"kind": FieldKind("pairs")})


def bounds_field() -> Any:
    """A tuple of bounds on where operands have elements (`Bound`), empty by default."""
    return field(default=(), metadata={"kind": FieldKind("bounds")})


def number(**default: int) -> Any:
    """A non-negative integer; it may have a `default`."""
    return _kinded(FieldKind("number"), **default)


def flag() -> Any:
    """A boolean."""
    return _kinded(FieldKind("flag"))


def immediate() -> Any:
    """A number written in the type of the instruction's `dst`."""
    return _kinded(FieldKind("immediate"))


class Instruction:
    """Base of all instructions. Subclasses are declared with `@instr`.

    All but transfers and semaphore instructions have a `meaning(ar, trip, *values)`, which computes what they write (a value, or a tuple of
    one for each tile written) from the values of the tiles that they read, with an `Arithmetic` `ar`, in a `Trip` of the grid.
    """

    __slots__ = ()
    opcode: ClassVar[int]
    mnemonic: ClassVar[str]
    kinds: ClassVar[dict[str, FieldKind]]
    windowed: ClassVar[tuple[tuple[str, FieldKind], ...]]
    reading: ClassVar[tuple[tuple[str, TilesOf], ...]]
    writing: ClassVar[tuple[tuple[str, TilesOf], ...]]
    traits: ClassVar[frozenset[str]]
    rules: ClassVar[tuple[Rule, ...] | None]

    @classmethod
    def has(cls, trait: str) -> bool:
        """Whether the declaration states a trait of `TRAITS`.

        Raises:
          ProgramError: it states none, so there is nothing to go by.
        """
        if not cls.traits:
            raise ProgramError(f"instruction {cls.mnemonic!r} states no traits in its declaration; expected some of {', '.join(TRAITS)}.")
        return trait in cls.traits

    @property
    def queue(self) -> str:
        """The queue that executes this instruction."""
        raise ProgramError(f"instruction {self.mnemonic!r} does not declare its queue.")

    def meaning(self, ar: Any, trip: Any, *values: Any) -> Any:
        """What one execution writes."""
        raise ProgramError(f"instruction {self.mnemonic!r} does not declare what it computes.")

    def cost(self, chip: Chip, shape_of: ShapeOf) -> Cost:
        """What one execution costs."""
        raise ProgramError(f"instruction {self.mnemonic!r} does not declare what it costs.")

    def fields(self) -> Iterator[tuple[str, FieldKind, Any]]:
        """Name, kind and value of every field, in declaration order."""
        for name, kind in self.kinds.items():
            yield name, kind, getattr(self, name)

    def on(self, place: Mapping[int, int], role: str | None = None) -> Self:
        """The same on other buffers: `place` has them by the numbers of those whose place they take, in all windows or of one role."""
        windows = ((name, getattr(self, name)) for name, kind in self.windowed if role in (None, kind.role))
        moved: dict[str, Any] = {name: w.on(place[w.buffer]) for name, w in windows if w.buffer in place}
        return dataclasses.replace(self, **moved) if moved else self  # type: ignore[type-var]

    def windows(self) -> Sequence[tuple[str, Window]]:
        """Every window with its role: "read" (HBM to VMEM) or "write" (VMEM to HBM)."""
        return [(kind.role, getattr(self, name)) for name, kind in self.windowed]

    def reads(self) -> Sequence[Tile]:
        """Every tile whose old content this instruction uses, in operand order; window registers and stored tiles included."""
        return [tile for name, tiles in self.reading for tile in tiles(getattr(self, name))]

    def writes(self) -> Sequence[Tile]:
        """Every tile that this instruction writes."""
        return [tile for name, tiles in self.writing for tile in tiles(getattr(self, name))]


TilesOf = Callable[[Any], Sequence[Tile]]
"""The tiles that a field's value names."""


def _one(tile: Tile) -> Sequence[Tile]:
    return (tile,)


def _several(tiles: tuple[Tile, ...]) -> Sequence[Tile]:
    return tiles


def _filled(window: Window) -> Sequence[Tile]:
    return (window.tile,)


def _registers(window: Window) -> Sequence[Tile]:
    return [a.register for a in window.axes if a.register is not None]


def _stored(window: Window) -> Sequence[Tile]:
    return [*_registers(window), window.tile]


_READING: dict[tuple[str, str], TilesOf] = {
    ("tile", "read"): _one,
    ("tile", "both"): _one,
    ("tiles", "read"): _several,
    ("window", "read"): _registers,
    ("window", "write"): _stored,
}
_WRITING: dict[tuple[str, str], TilesOf] = {
    ("tile", "write"): _one,
    ("tile", "both"): _one,
    ("tiles", "write"): _several,
    ("window", "read"): _filled,
}
"""(kind, role) of a field -> the tiles that it reads (`_READING`), or writes (`_WRITING`)."""
PLAIN_KINDS = ("choice", "axes", "pairs", "bounds", "number", "flag", "immediate")
"""Kinds of fields that hold no tile and no window."""


_I = TypeVar("_I", bound=Instruction)

INSTRUCTIONS: dict[int, type[Instruction]] = {}
BY_MNEMONIC: dict[str, type[Instruction]] = {}


def _touching(cls: type[Instruction], how: dict[tuple[str, str], TilesOf]) -> tuple[tuple[str, TilesOf], ...]:
    """The fields of a class that `how` has a row for, with that row. Found once for each class: the compiler asks for every instruction."""
    return tuple((name, how[kind.name, kind.role]) for name, kind in cls.kinds.items() if (kind.name, kind.role) in how)


def _check_kind(where: str, kind: FieldKind) -> None:
    """Refuse a field of an unknown kind, whose tiles would count as neither read nor written."""
    if kind.name not in PLAIN_KINDS and (kind.name, kind.role) not in {*_READING, *_WRITING}:
        known = ", ".join([*PLAIN_KINDS, *sorted({f"{name} to {role}" for name, role in (*_READING, *_WRITING)})])
        raise ValueError(f"{where} is a field of kind {kind.name!r} to {kind.role!r}; expected one of {known}")


CUSTOM_OPCODES = range(0x60, 0x80)
"""The instruction set takes none of these itself: they are for instructions that are added to it, whose number no later version takes."""


@dataclass_transform(frozen_default=True)
def instr(opcode: int, mnemonic: str, *traits: str, rules: Sequence[Rule] | None = None) -> Callable[[type[_I]], type[_I]]:
    """Declare an instruction class: freeze it, read its field kinds, note its traits and operand rules, enter it in the opcode and mnemonic
    tables. An instruction that states no traits, or no rules (`rules=()` states that there are none), is refused where they are needed."""

    def declare(cls: type[_I]) -> type[_I]:
        cls = dataclass(frozen=True, slots=True)(cls)
        cls.opcode, cls.mnemonic = opcode, mnemonic
        cls.kinds = {f.name: f.metadata["kind"] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name, kind in cls.kinds.items():
            _check_kind(f"{mnemonic}.{name}", kind)
        if set(traits) - set(TRAITS):
            raise ValueError(f"{mnemonic} states {', '.join(sorted(set(traits) - set(TRAITS)))}; expected traits of {', '.join(TRAITS)}")
        cls.traits = frozenset(traits)
        cls.rules = None if rules is None else tuple(rules)
        cls.windowed = tuple((name, kind) for name, kind in cls.kinds.items() if kind.name == "window")
        cls.reading, cls.writing = _touching(cls, _READING), _touching(cls, _WRITING)
        if opcode in INSTRUCTIONS or mnemonic in BY_MNEMONIC:
            raise ValueError(f"opcode {opcode:#x} or mnemonic {mnemonic!r} is declared twice")
        INSTRUCTIONS[opcode] = cls
        BY_MNEMONIC[mnemonic] = cls
        return cls

    return declare
