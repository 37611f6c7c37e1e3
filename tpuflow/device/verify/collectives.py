"""Several chips: the mesh, arrays cut over it, and collectives, which every chip must take in the same order from buffers left alone.

A collective, or a copy between HBM and the chip or the host, is awaited in the list of blocks that starts it. In between nobody writes its
source, nor reads or writes its target, and no tiles take the place of either. A collective lies in no loop, condition or branch that
chips may run differently, nor does anything that the host takes part in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from tpuflow.device.varying import varying
from tpuflow.device.verify.kernels import Effects
from tpuflow.dtypes import S32
from tpuflow.errors import ProgramError
from tpuflow.isa.collectives import KINDS, Await, Collective, Position, chips_of, sizes_of, where_text, whole_shape
from tpuflow.isa.numpy_arithmetic import is_defined
from tpuflow.isa.program import (
    Block,
    Buffer,
    CallHost,
    Copy,
    Infeed,
    Kernel,
    Loop,
    Moving,
    Outfeed,
    Port,
    Program,
    Switch,
    While,
    children,
    moving_text,
    walk,
)
from tpuflow.isa.refusal import Refusal

MOST_CHIPS = 2**20
MOST_MOVING = 1024
"""Collectives and copies on their way at once; each is held against all that runs meanwhile."""
MOST_SEMAPHORES = 2**16


def check_mesh(program: Program) -> None:
    """Refuse axes that are none or are joined to none, or too many chips."""
    names = [axis.name for axis in program.mesh]
    if len(set(names)) != len(names) or not all(names):
        raise Refusal(f"the axes are named {', '.join(map(repr, names))}; expected different names")
    if program.mesh and program.mesh[0].joined:
        raise Refusal(f"the first axis, {names[0]!r}, is joined to the one before it; there is none")
    if any(axis.size < 1 for axis in program.mesh) or chips_of(program.mesh) > MOST_CHIPS:
        sizes = " x ".join(str(axis.size) for axis in program.mesh)
        raise Refusal(f"the mesh has {sizes} chips; expected sizes of 1 at least and at most {MOST_CHIPS} in all")


def check_cut(program: Program, what: str, port: Port) -> None:
    """Refuse an array of the host that is cut over axes that there are not, or twice over one."""
    if not port.cut:
        return
    axes = [a for row in port.cut for a in row]
    if len(port.cut) != len(port.shape) or any(not 0 <= a < len(program.mesh) for a in axes) or len(set(axes)) != len(axes):
        raise Refusal(
            f"{what} {port.name!r} of shape {list(port.shape)} is cut {port.cut}; expected for each of its axes some of the "
            f"{len(program.mesh)} mesh axes, none twice"
        )
    whole = whole_shape(port.shape, port.cut, program.mesh)
    if any(n >= 2**31 for n in whole):
        raise Refusal(f"{what} {port.name!r} has shape {list(whole)} over all chips; expected sizes below 2^31")


def check_position(program: Program, block: Position) -> None:
    """An axis that there is, and a scalar for it."""
    if not 0 <= block.axis < len(program.mesh):
        raise Refusal(f"axis {block.axis} does not exist; the mesh has {len(program.mesh)}")
    buffer = buffer_of(program, block.buffer)
    if (buffer.dtype, buffer.elems) != (S32, 1):
        raise Refusal(f"buffer {block.buffer} is {buffer.dtype}{list(buffer.shape)}; expected one s32")


def check_collective(program: Program, c: Collective) -> None:
    """Refuse one whose axes, buffers or pairs do not fit its kind."""
    kind = KINDS[c.kind]
    if kind.reduces != (c.reducer != "none"):
        raise Refusal(f"{c.kind} has reducer {c.reducer!r}; expected {'one that combines' if kind.reduces else 'none'}")
    if not c.axes or len(set(c.axes)) != len(c.axes) or any(not 0 <= a < len(program.mesh) for a in c.axes):
        raise Refusal(f"axes {list(c.axes)}; expected different ones of the {len(program.mesh)} of the mesh, one at least")
    if not 0 <= c.semaphore < MOST_SEMAPHORES:
        raise Refusal(f"semaphore {c.semaphore}; expected one of {MOST_SEMAPHORES}")
    source, target, chips = buffer_of(program, c.source), buffer_of(program, c.target), math.prod(sizes_of(program.mesh, c.axes))
    received = kind.received_elems(source.elems, chips)
    if source.dtype != target.dtype or received != target.elems:
        expected = f"{source.dtype} of {received} elements" if received is not None else f"a source that divides by {chips}"
        raise Refusal(
            f"{c.kind} over {chips} chips sends {source.dtype}{list(source.shape)} and receives {target.dtype}{list(target.shape)}; "
            f"expected {expected}"
        )
    if kind.reduces and not is_defined(c.reducer, source.dtype):
        raise Refusal(f"{c.reducer} is not defined on {source.dtype}")
    if _overlap(source, target):
        raise Refusal(f"source and target, buffers {c.source} and {c.target}, share addresses; expected them apart")
    _check_pairs(c, chips)


def _check_pairs(c: Collective, chips: int) -> None:
    if c.kind != "permute":
        if c.pairs:
            raise Refusal(f"{c.kind} has pairs; expected none")
        return
    for what, ends in (("sends", [s for s, _ in c.pairs]), ("receives", [r for _, r in c.pairs])):
        if any(not 0 <= end < chips for end in ends):
            raise Refusal(f"pairs {list(c.pairs)} name chips that are not in the group of {chips}")
        if len(set(ends)) != len(ends):
            raise Refusal(f"in the pairs {list(c.pairs)} a chip {what} twice; expected once at most")


def check_copy(program: Program, c: Copy) -> None:
    """Refuse a copy that is not between HBM and another memory, or of other elements."""
    source, target = buffer_of(program, c.source), buffer_of(program, c.target)
    if not 0 <= c.semaphore < MOST_SEMAPHORES:
        raise Refusal(f"semaphore {c.semaphore}; expected one of {MOST_SEMAPHORES}")
    if c.index >= 0:
        _check_item(program, c, source, target)
    elif (source.dtype, source.elems) != (target.dtype, target.elems):
        ends = f"{source.dtype}{list(source.shape)} to {target.dtype}{list(target.shape)}"
        raise Refusal(f"copies buffer {c.source} to {c.target}, {ends}; expected one type and as many elements")
    if (source.space == "hbm") == (target.space == "hbm"):
        found = f"{source.space} to {target.space}"
        raise Refusal(f"copies buffer {c.source} to {c.target}, {found}; expected one in hbm and the other on the chip or at the host")


def _check_item(program: Program, c: Copy, source: Buffer, target: Buffer) -> None:
    """Refuse one of an item that is none of an array at the host, or is chosen by no scalar."""
    index, items = buffer_of(program, c.index), source if source.space == "host" else target
    if (index.dtype, index.elems, index.space) != (S32, 1, "hbm"):
        raise Refusal(f"buffer {c.index} is {index.dtype}{list(index.shape)} in {index.space}; expected one s32 in hbm, the item's number")
    one = target if items is source else source
    if items.space != "host" or source.dtype != target.dtype or not items.shape or items.elems != items.shape[0] * one.elems:
        ends = f"{source.dtype}{list(source.shape)} in {source.space} to {target.dtype}{list(target.shape)} in {target.space}"
        raise Refusal(
            f"copies an item from buffer {c.source} to {c.target}, {ends}; expected one along the first axis of what is at the host"
        )


def check_await(program: Program, block: Await) -> None:
    """All there is to it is its order."""


def buffer_of(program: Program, number: int) -> Buffer:
    """A buffer that code or a signature names."""
    if not 0 <= number < len(program.buffers):
        raise Refusal(f"buffer {number} does not exist; the program has {len(program.buffers)}")
    return program.buffers[number]


def _overlap(a: Buffer, b: Buffer) -> bool:
    return bool(a.bytes and b.bytes) and a.span[0] < b.span[1] and b.span[0] < a.span[1]


# --- order


def check_order_of_moves(program: Program, effects: Mapping[int, Effects]) -> None:
    """Refuse a program in which a collective or copy meets something that touches its buffers, or a collective that not all chips may come
    to. effects: of every kernel, by its id.

    Raises:
      ProgramError: with the place of both and the source line.
    """
    if not any(isinstance(block, Position | Moving | Await) for _, block in walk(program.code)) and not program.mesh:
        return
    order = _Order(program, effects)
    order.blocks(program.code, "", {})
    _check_uniform(program)


@dataclass(frozen=True, slots=True)
class _Uses:
    """The buffers that a block reads and writes, and the stretches of VMEM that tiles take, nested blocks included."""

    reads: frozenset[int]
    writes: frozenset[int]
    tiles: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class _Order:
    """Goes over every list of blocks with what is on its way there. `used`: what nested blocks do, by the block's id."""

    program: Program
    effects: Mapping[int, Effects]
    used: dict[int, _Uses] = field(default_factory=dict)

    def blocks(self, code: Sequence[Block], path: str, around: Mapping[int, tuple[str, Moving]]) -> None:
        """Every collective of a list is awaited in it, and its buffers are left alone until then. around: what is on its way outside."""
        moving: dict[int, tuple[str, Moving]] = {}
        for n, block in enumerate(code):
            place = f"{path}{n}"
            if isinstance(block, Await):
                if block.semaphore not in moving:
                    raise ProgramError(f"await {place}: nothing is on its way for semaphore {block.semaphore} in this list of blocks.")
                del moving[block.semaphore]
                continue
            if moving:
                self._check_apart(block, place, moving)
            if isinstance(block, Moving):
                self._start(block, place, moving, around)
            for name, nested in children(block):
                self.blocks(nested, f"{place}.{name}.", {**around, **moving} if moving else around)
        for place, c in moving.values():
            raise ProgramError(
                f"{moving_text(c)} {place}: nobody waits for semaphore {c.semaphore} before the end of the list of blocks that starts it; "
                f"expected an await there.{where_text(c)}"
            )

    def _start(self, c: Moving, place: str, moving: dict[int, tuple[str, Moving]], around: Mapping[int, tuple[str, Moving]]) -> None:
        taken = moving.get(c.semaphore) or around.get(c.semaphore)
        if taken is not None:
            raise ProgramError(
                f"{moving_text(c)} {place}: semaphore {c.semaphore} is taken by {moving_text(taken[1])} {taken[0]}, which is still on its "
                f"way; expected a free one.{where_text(c)}"
            )
        if len(moving) >= MOST_MOVING:
            raise ProgramError(
                f"{moving_text(c)} {place}: {len(moving)} collectives and copies are on their way; expected at most {MOST_MOVING}."
            )
        moving[c.semaphore] = place, c

    def _check_apart(self, block: Block, place: str, moving: dict[int, tuple[str, Moving]]) -> None:
        uses = self._uses(block)
        buffers = self.program.buffers
        for start, c in moving.values():
            for what, touched, own in (
                ("overwrites what is being sent by", uses.writes, c.source),
                ("writes where something arrives from", uses.writes, c.target),
                ("reads what has not arrived yet from", uses.reads, c.target),
            ):
                for b in touched:
                    if b == own or _overlap(buffers[b], buffers[own]):
                        raise ProgramError(
                            f"block {place}: {what} {moving_text(c)} {start} (buffer {own}, through buffer {b}); expected an await of "
                            f"semaphore {c.semaphore} before it.{where_text(c)}"
                        )
            for own in (c.source, c.target):
                low, high = buffers[own].span
                if any(low < end and begin < high for begin, end in uses.tiles):
                    raise ProgramError(
                        f"block {place}: has tiles where {moving_text(c)} {start} moves something (buffer {own}); expected an await of "
                        f"semaphore {c.semaphore} before it.{where_text(c)}"
                    )

    def _uses(self, block: Block) -> _Uses:
        if id(block) not in self.used:
            reads, writes = _own_uses(block)
            own = _Uses(reads, writes, frozenset(self.effects[id(block)].tiles) if isinstance(block, Kernel) else frozenset())
            both = [own, *(self._uses(b) for _, code in children(block) for b in code)]
            self.used[id(block)] = _Uses(*(frozenset().union(*(getattr(u, f.name) for u in both)) for f in fields(_Uses)))
        return self.used[id(block)]


def _own_uses(block: Block) -> tuple[frozenset[int], frozenset[int]]:
    none: frozenset[int] = frozenset()
    match block:
        case Kernel():
            found = [(role, w.buffer) for i in block.instructions for role, w in i.windows()]
            updated = {w.buffer for i in block.instructions if i.has("updates") for _, w in i.windows()}
            return frozenset(b for role, b in found if role == "read") | updated, frozenset(b for role, b in found if role == "write")
        case Collective():
            return frozenset((block.source,)), frozenset((block.target,))
        case Copy():
            return frozenset(b for b in (block.source, block.index) if b >= 0), frozenset((block.target,))
        case CallHost():
            return frozenset(block.sources), frozenset(block.targets)
        case Infeed() | Position():
            return none, frozenset((block.buffer,))
        case Outfeed():
            return frozenset((block.buffer,)), none
        case Loop():
            return frozenset((block.trips,)), none
        case While():
            return frozenset((block.predicate,)), none
        case Switch():
            return frozenset((block.index,)), none
        case Await():
            return none, none


def _check_uniform(program: Program) -> None:
    decided = varying(program).decided

    def is_met(block: Block) -> bool:
        if isinstance(block, CallHost):
            return not program.functions[block.function].per_chip
        return isinstance(block, Collective | Infeed | Outfeed)

    def go(code: Sequence[Block], path: str, apart: str) -> None:
        for n, block in enumerate(code):
            here = f"{type(block).__name__.lower()} {path}{n}"
            if apart and is_met(block):
                raise ProgramError(
                    f"{here}: lies in {apart}, which chips may run differently, for it depends on where they are or on pieces of what is "
                    f"cut over them; expected all chips to come to it alike.{where_text(block)}"
                )
            axes = decided.get(id(block))
            for name, nested in children(block):
                go(nested, f"{path}{n}.{name}.", apart or (here if axes else ""))

    go(program.code, "", "")
