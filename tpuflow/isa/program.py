"""A Program: what the device is given. Buffers in HBM, on the chip and at the host, constants, a signature, and code: a list of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import DType
from tpuflow.isa.calls import Call, HostFunction, count, sources
from tpuflow.isa.collectives import Await, Collective, Cut, MeshAxis, Position
from tpuflow.isa.instruction import Instruction
from tpuflow.isa.kernel_forms import Forms, KernelForm

GRID_KINDS = ("parallel", "sequential")
BUFFER_SPACES = ("hbm", "vmem", "cmem", "host")
SPACE_BYTES = 2**61
"""How far addresses reach in any memory: more than the HBM of any chip."""
VMEM_START, CMEM_START, HOST_START = SPACE_BYTES, 2 * SPACE_BYTES, 3 * SPACE_BYTES
"""Where VMEM, CMEM and the host's memory begin in the numbering of `Buffer.span`."""
_STARTS: Mapping[str, int] = dict(zip(BUFFER_SPACES, (0, VMEM_START, CMEM_START, HOST_START), strict=True))


@dataclass(frozen=True, slots=True)
class Buffer:
    """A dense row-major array at byte `address` of HBM, of the chip's VMEM or CMEM, where it stays from kernel to kernel, or of the memory
    that the host lends to the chip (`space`).

    Buffers may share addresses if their contents are never needed at once. A kernel's tiles take the place of what lies in VMEM where
    they do. Constants, and what blocks other than kernels and copies read or write, are in HBM; inputs and outputs there or at the host.
    Several cores have equal parts of what stays in VMEM (`core_parts`), each at the same place of its own: addresses there count the bytes
    of all cores together. CMEM is one memory, where every core reaches everything, and no tiles are. Of what is at the host only copies
    from and to HBM reach anything.
    """

    dtype: DType
    shape: tuple[int, ...]
    address: int
    space: str = "hbm"
    elems: int = field(init=False, repr=False, compare=False)
    """Number of elements: kept, since the planner of what stays on the chip asks for it again and again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "elems", math.prod(self.shape))

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elems * self.dtype.bytes

    @property
    def is_resident(self) -> bool:
        """Whether it stays on the chip."""
        return self.space in ("vmem", "cmem")

    @property
    def is_parted(self) -> bool:
        """Whether every core has its own part of it, in its own VMEM, beside its tiles."""
        return self.space == "vmem"

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the first one after it, in one numbering of all memories: HBM by its addresses, VMEM from `VMEM_START` on."""
        start = self.address + _STARTS[self.space]
        return start, start + self.bytes


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One counted loop of a kernel: `size` trips; "parallel" trips are independent, "sequential" ones run in order, inside."""

    size: int
    kind: str = "parallel"


SECTIONS = ("prologue", "body", "epilogue")


def kernel_title(scope: str, name: str) -> str:
    """`transpose(jvp(LeNet5))/fc1: dot f32[32,84]`, or what there is of it."""
    return f"{scope}: {name}" if scope else name


@dataclass(frozen=True, slots=True)
class Kernel:
    """A grid of trips over three sections of tile instructions; a barrier before and after.

    The parallel axes come first; one index of them is a point. At each point `prologue` runs once, `body` once for every index of the
    sequential axes (row-major), `epilogue` once. Each of the six queues executes its own instructions of that stream in order and
    runs ahead of the others as far as the semaphores let it. `semaphores` holds the initial counts; every semaphore is signalled by
    one queue and waited for by one queue. Prologue and epilogue together, and the body by itself, signal each as often as
    they wait for it.

    `name` (what it does), `sources` (one user source line an instruction, in the order prologue, body, epilogue) and `scope` (JAX's name
    stack: where in the model) are debug information.
    """

    grid: tuple[GridAxis, ...]
    semaphores: tuple[int, ...]
    prologue: tuple[Instruction, ...]
    body: tuple[Instruction, ...]
    epilogue: tuple[Instruction, ...]
    name: str = field(default="", compare=False)
    sources: tuple[str, ...] = field(default=(), compare=False)
    scope: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """Scope and name, for messages and listings."""
        return kernel_title(self.scope, self.name)

    @property
    def source(self) -> str:
        """The first source line that is known; empty if there is none."""
        return next(filter(None, self.sources), "")

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All three sections in order."""
        return self.prologue + self.body + self.epilogue

    @property
    def sections(self) -> tuple[tuple[str, tuple[Instruction, ...]], ...]:
        """The sections by their names, in order."""
        return tuple((name, getattr(self, name)) for name in SECTIONS)

    def on(self, place: Mapping[int, int], role: str | None = None) -> Kernel:
        """The same on other buffers: `place` has them by the numbers of those whose place they take, in all windows or of one role."""
        moved = {name: tuple([i.on(place, role) if i.windowed else i for i in section]) for name, section in self.sections}
        return replace(self, **moved)

    @property
    def parallel(self) -> tuple[int, ...]:
        """Indices of the parallel grid axes."""
        return tuple(i for i, g in enumerate(self.grid) if g.kind == "parallel")

    @property
    def sequential(self) -> tuple[int, ...]:
        """Indices of the sequential grid axes."""
        return tuple(i for i, g in enumerate(self.grid) if g.kind == "sequential")


@dataclass(frozen=True, slots=True)
class Loop:
    """Run `body` as often as the s32 scalar in buffer `trips` says (read once, at entry)."""

    trips: int
    body: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class While:
    """Run `condition`, then `body`, as long as the pred scalar in buffer `predicate` is true after `condition`."""

    condition: tuple[Block, ...]
    predicate: int
    body: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Switch:
    """Run branch number `index` (an s32 scalar buffer, clamped to the branches there are)."""

    index: int
    branches: tuple[tuple[Block, ...], ...]


@dataclass(frozen=True, slots=True)
class Infeed:
    """Take the next item of infeed port `port` from the host into `buffer`."""

    port: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Outfeed:
    """Send `buffer` to the host as the next item of outfeed port `port`."""

    port: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Start to copy buffer `source` to `target`, one in HBM and the other on the chip or at the host, until the wait for `semaphore`.

    Kernels run meanwhile. Until the wait the source must stay as it is, and nobody may touch the target; no tiles may take the place of
    either. Semaphores are those of collectives.

    Between HBM and the host it may be one item of the array that lies at the host, along its first axis: of the number that the s32 scalar
    in buffer `index` is when the copy starts (-1: none, it is the whole). An array of which items are written is zeros when the program
    starts.
    """

    source: int
    target: int
    semaphore: int
    index: int = -1


@dataclass(frozen=True, slots=True)
class CallHost:
    """Send `sources` to the host, call its function number `function` with them, and wait until what that returns is in `targets`."""

    function: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


Block = Kernel | Loop | While | Switch | Infeed | Outfeed | Position | Collective | Await | Copy | CallHost
Moving = Collective | Copy
"""What is on its way until an `Await` of its semaphore."""


def moving_text(block: Moving) -> str:
    """What such a block is called in messages."""
    return block.kind if isinstance(block, Collective) else "copy"


@dataclass(frozen=True, slots=True)
class Port:
    """A named array that crosses between host and device; `buffer` is its place in HBM (-1 for infeed and outfeed items).

    `shape` is that of one chip's array. The host's is cut over the mesh as `cut` says; over axes that it does not name all chips have
    the same.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    buffer: int = -1
    donated: bool = False
    weak: bool = False
    key: str = ""  # name of the PRNG implementation if the u32 data are a JAX random key
    cut: Cut = ()


@dataclass(frozen=True, slots=True)
class Constant:
    """Initial content of a buffer, loaded with the Program: little-endian bytes."""

    buffer: int
    data: bytes


@dataclass(frozen=True)
class Program:
    """Everything the device needs. An input marked donated may be overwritten; an output may be the same buffer as a donated input.

    `mesh` are the axes of the chips that run it, all of them the same; without any it is for one chip.

    `calls` is what the host does with the items of the first outfeed ports, `functions` what `CallHost` blocks call, by number. Both
    are the host's alone, and not in a file.
    """

    chip: Chip
    buffers: tuple[Buffer, ...]
    constants: tuple[Constant, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    infeeds: tuple[Port, ...]
    outfeeds: tuple[Port, ...]
    code: tuple[Block, ...]
    mesh: tuple[MeshAxis, ...] = ()
    name: str = field(default="", compare=False)
    buffer_names: tuple[str, ...] = field(default=(), compare=False)
    calls: tuple[Call, ...] = field(default=(), compare=False)
    functions: tuple[HostFunction, ...] = field(default=(), compare=False)

    @property
    def host_lines(self) -> tuple[str, ...]:
        """The user's lines that call the host."""
        return (*sources(self.calls), *(f.source for f in self.functions))

    @property
    def call_ports(self) -> int:
        """How many of the outfeed ports, the first ones, are those of `calls`."""
        return count(self.calls)

    @property
    def by_items(self) -> frozenset[int]:
        """Numbers of the buffers at the host that are written item by item."""
        return frozenset(b.target for _, b in walk(self.code) if isinstance(b, Copy) and b.index >= 0 and self.is_host(b.target))

    def is_host(self, buffer: int) -> bool:
        """Whether a buffer that there is lies at the host."""
        return 0 <= buffer < len(self.buffers) and self.buffers[buffer].space == "host"

    @property
    def resident(self) -> frozenset[int]:
        """Numbers of the buffers that stay on the chip."""
        return frozenset(n for n, b in enumerate(self.buffers) if b.is_resident)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of HBM up to the end of the buffer that lies highest in it."""
        return self.end_bytes("hbm")

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory, the same for what lies there."""
        return self.end_bytes("host")

    def end_bytes(self, space: str) -> int:
        """Bytes of a memory up to the end of the buffer that lies highest in it."""
        return max((b.address + b.bytes for b in self.buffers if b.space == space), default=0)

    def kernels(self) -> Iterator[Kernel]:
        """Every kernel, depth first, in program order."""
        yield from (b for _, b in walk(self.code) if isinstance(b, Kernel))

    @cached_property
    def kernel_forms(self) -> tuple[KernelForm, ...]:
        """The form of every kernel, in the order of `kernels`.

        Raises:
          ProgramError: an instruction states no traits, or has a field of an unknown kind.
        """
        return tuple(map(self._forms.of, self.kernels()))

    @cached_property
    def _forms(self) -> Forms:
        return Forms()

    def forms_by_id(self) -> Mapping[int, KernelForm]:
        """The forms by the `id` of their kernels, for use while the Program lives."""
        return {id(kernel): form for kernel, form in zip(self.kernels(), self.kernel_forms, strict=True)}

    def with_code(self, code: tuple[Block, ...], known: Mapping[int, KernelForm]) -> Program:
        """The same with other blocks, of whose kernels some have forms that are known here, by their `id`."""
        made, forms = replace(self, code=code), self._forms.copy()
        vars(made).update(_forms=forms, kernel_forms=tuple([known.get(id(k)) or forms.of(k) for k in made.kernels()]))
        return made

    def distinct_kernels(self) -> Sequence[Kernel]:
        """One kernel of each form."""
        return list({form.number: kernel for form, kernel in zip(self.kernel_forms, self.kernels(), strict=True)}.values())

    def strip(self) -> Program:
        """The same Program without names and source lines."""
        return replace(self, chip=replace(self.chip, source=""), code=tuple(map(_strip, self.code)), name="", buffer_names=())


def children(block: Block) -> tuple[tuple[str, tuple[Block, ...]], ...]:
    """The nested block lists of a block, each with its name."""
    match block:
        case Loop():
            return (("body", block.body),)
        case While():
            return (("condition", block.condition), ("body", block.body))
        case Switch():
            return tuple((f"branch{i}", b) for i, b in enumerate(block.branches))
    return ()


def walk(code: tuple[Block, ...], path: str = "") -> Iterator[tuple[str, Block]]:
    """Every block, depth first, with its place in the program ("3.body.0")."""
    for i, block in enumerate(code):
        here = f"{path}{i}"
        yield here, block
        for name, blocks in children(block):
            yield from walk(blocks, f"{here}.{name}.")


def _strip(block: Block) -> Block:
    match block:
        case Kernel():
            return replace(block, name="", scope="", sources=())
        case Collective():
            return replace(block, scope="", where="")
        case Loop():
            return replace(block, body=tuple(_strip(b) for b in block.body))
        case While():
            return replace(block, condition=tuple(map(_strip, block.condition)), body=tuple(map(_strip, block.body)))
        case Switch():
            return replace(block, branches=tuple(tuple(map(_strip, b)) for b in block.branches))
    return block
