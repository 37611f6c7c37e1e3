"""HBM over the blocks of a Program: what is read must be valid, what must stay is never overwritten.

A buffer is valid once it holds an input, a constant, an infeed item, or has been stored whole (possibly part by part), until a buffer
that overlaps it is written. Loops run to a fixpoint of what is valid at their head; branches meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.device.place import instruction_place, source_suffix
from tpuflow.device.verify.footprint import Box, cover
from tpuflow.device.verify.kernels import Effects
from tpuflow.errors import ProgramError
from tpuflow.isa.program import Block, Buffer, Infeed, Kernel, Loop, Outfeed, Program, Switch, While


@dataclass(frozen=True, slots=True)
class Memory:
    """What HBM holds: valid buffers (a bit each), and the parts stored so far of those that are not valid yet."""

    valid: int = 0
    parts: Mapping[int, frozenset[Box]] = field(default_factory=dict)

    def meet(self, other: Memory) -> Memory:
        """What holds in both."""
        parts = {b: boxes & other.parts[b] for b, boxes in self.parts.items() if b in other.parts}
        mine, theirs = self.parts, other.parts
        parts |= {b: boxes for b, boxes in mine.items() if b not in theirs and other.valid >> b & 1}
        parts |= {b: boxes for b, boxes in theirs.items() if b not in mine and self.valid >> b & 1}
        return Memory(self.valid & other.valid, {b: boxes for b, boxes in parts.items() if boxes})


def check_dataflow(program: Program, effects: Mapping[int, Effects]) -> None:
    """Refuse a program that reads what is not there, or writes what must stay. effects: of every kernel, by its id."""
    walk = _Walk(program, effects)
    initial = _bits(n for n, b in enumerate(program.buffers) if b.elems == 0)
    initial |= _bits(c.buffer for c in program.constants) | _bits(p.buffer for p in program.inputs)
    final = walk.blocks(program.code, "", Memory(initial))
    for port in program.outputs:
        if not final.valid >> port.buffer & 1:
            raise ProgramError(
                f"signature: output {port.name!r} is buffer {port.buffer}, which is {walk.state(final, port.buffer)} at the end."
            )


def overlap_masks(buffers: Sequence[Buffer]) -> list[int]:
    """For every buffer, a bit for every other one that shares a byte with it."""
    masks = [0] * len(buffers)
    active: list[int] = []
    for n in sorted((n for n, b in enumerate(buffers) if b.bytes), key=lambda n: buffers[n].address):
        active = [m for m in active if buffers[m].address + buffers[m].bytes > buffers[n].address]
        for m in active:
            masks[m] |= 1 << n
            masks[n] |= 1 << m
        active.append(n)
    return masks


class _Walk:
    """One abstract run of the blocks."""

    def __init__(self, program: Program, effects: Mapping[int, Effects]):
        self.program, self.effects = program, effects
        self.overlaps = overlap_masks(program.buffers)
        kept = {c.buffer for c in program.constants} | {p.buffer for p in program.inputs if not p.donated}
        self.kept = _bits(kept)
        self.reads: dict[int, int] = {}

    def blocks(self, code: Sequence[Block], path: str, memory: Memory) -> Memory:
        """Memory after the blocks."""
        for n, block in enumerate(code):
            memory = _STEPS[type(block)](self, block, f"{path}{n}", memory)
        return memory

    def kernel(self, block: Kernel, path: str, memory: Memory) -> Memory:
        """Reads, then writes."""
        missing = self._reads(block, path) & ~memory.valid
        if missing:
            buffer = _lowest(missing)
            place, source = _user(block, path, buffer, "read")
            self._fail(place, "reads", memory, buffer, source)
        for buffer, box in self.effects[id(block)].writes:
            memory = self.write(lambda b=buffer: _user(block, path, b, "write"), buffer, box, memory)
        return memory

    def _reads(self, kernel: Kernel, path: str) -> int:
        """Buffers a kernel reads, a bit each; refuses, once a kernel, writes to what overlaps another buffer that it uses."""
        if id(kernel) in self.reads:
            return self.reads[id(kernel)]
        effects = self.effects[id(kernel)]
        reads = _bits(effects.reads)
        used = reads | _bits(b for b, _ in effects.writes)
        for buffer, _ in effects.writes:
            if self.overlaps[buffer] & used:
                place, source = _user(kernel, path, buffer, "write")
                other = _lowest(self.overlaps[buffer] & used)
                raise ProgramError(
                    f"{place}: writes buffer {buffer}, which shares addresses with buffer {other} of this kernel; expected none.{source}"
                )
        self.reads[id(kernel)] = reads
        return reads

    def write(self, at: Callable[[], tuple[str, str]], buffer: int, box: Box | None, memory: Memory) -> Memory:
        """Memory after a store of a part (None: of an unknown part) of a buffer. at: place and source line."""
        if box is not None and box.empty:
            return memory
        protected = (1 << buffer | self.overlaps[buffer]) & self.kept
        if protected:
            shared = self._shared(buffer, _lowest(protected))
            place, source = at()
            raise ProgramError(f"{place}: writes buffer {buffer}, {shared}; expected what is constant or not donated to stay.{source}")
        valid = memory.valid & ~self.overlaps[buffer]
        parts = {b: boxes for b, boxes in memory.parts.items() if not self.overlaps[buffer] >> b & 1}
        if not valid >> buffer & 1 and box is not None:
            boxes = parts.pop(buffer, frozenset()) | {box}
            if cover(tuple(boxes), self.program.buffers[buffer].elems):
                valid |= 1 << buffer
            else:
                parts[buffer] = boxes
        return Memory(valid, parts)

    def _shared(self, buffer: int, b: int) -> str:
        what = "a constant" if any(c.buffer == b for c in self.program.constants) else "an input that is not donated"
        return what if b == buffer else f"which shares addresses with buffer {b}, {what}"

    def need(self, place: str, what: str, buffer: int, memory: Memory) -> None:
        """Refuse to read a buffer that is not valid."""
        if not memory.valid >> buffer & 1:
            self._fail(place, what, memory, buffer, "")

    def _fail(self, place: str, what: str, memory: Memory, buffer: int, source: str) -> None:
        raise ProgramError(f"{place}: {what} buffer {buffer}, which is {self.state(memory, buffer)} here; expected it to be valid.{source}")

    def state(self, memory: Memory, buffer: int) -> str:
        """Why a buffer is not valid, in words."""
        return "only partly written" if memory.parts.get(buffer) else "not written, or overwritten by another at its addresses,"

    def loop(self, block: Loop, path: str, memory: Memory) -> Memory:
        """Zero or more trips: the fixpoint of what is valid at the head."""
        self.need(f"loop {path}", "takes its trip count from", block.trips, memory)
        while True:
            after = memory.meet(self.blocks(block.body, f"{path}.body.", memory))
            if after == memory:
                return memory
            memory = after

    def while_(self, block: While, path: str, memory: Memory) -> Memory:
        """The condition at least once; what holds after it is what leaves."""
        while True:
            tested = self.blocks(block.condition, f"{path}.condition.", memory)
            self.need(f"while {path}", "tests", block.predicate, tested)
            after = memory.meet(self.blocks(block.body, f"{path}.body.", tested))
            if after == memory:
                return tested
            memory = after

    def switch(self, block: Switch, path: str, memory: Memory) -> Memory:
        """One branch or another."""
        self.need(f"switch {path}", "takes its index from", block.index, memory)
        results = [self.blocks(b, f"{path}.branch{n}.", memory) for n, b in enumerate(block.branches)]
        met = results[0]
        for other in results[1:]:
            met = met.meet(other)
        return met

    def infeed(self, block: Infeed, path: str, memory: Memory) -> Memory:
        """A whole buffer from the host."""
        memory = self.write(lambda: (f"infeed {path}", ""), block.buffer, None, memory)
        return replace(memory, valid=memory.valid | 1 << block.buffer, parts={b: x for b, x in memory.parts.items() if b != block.buffer})

    def outfeed(self, block: Outfeed, path: str, memory: Memory) -> Memory:
        """A whole buffer to the host."""
        self.need(f"outfeed {path}", "sends", block.buffer, memory)
        return memory


def _user(kernel: Kernel, path: str, buffer: int, role: str) -> tuple[str, str]:
    """Place and source line of the first instruction of a kernel that reads or writes a buffer."""
    for n, i in enumerate(kernel.instructions):
        if any(w.buffer == buffer and r in (role, "write") for r, w in i.windows()):
            return instruction_place(path, kernel, n), source_suffix(kernel, n)
    raise LookupError(buffer)


def _bits(numbers: Iterable[int]) -> int:
    mask = 0
    for n in numbers:
        mask |= 1 << n
    return mask


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


_STEPS = {
    Kernel: _Walk.kernel, Loop: _Walk.loop, While: _Walk.while_, Switch: _Walk.switch, Infeed: _Walk.infeed, Outfeed: _Walk.outfeed,
}  # fmt: skip
