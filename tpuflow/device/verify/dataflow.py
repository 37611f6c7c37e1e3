"""HBM, VMEM and CMEM over the blocks of a Program: what is read must be valid, what must stay is never overwritten.

A buffer is valid once it holds an input, a constant, an infeed item, or has been stored whole (possibly part by part), or if it is at the
host and zeros at first, for its items are written one by one; until a buffer that overlaps it is written, or (in VMEM) a kernel has tiles
there. What a list of blocks does to memory is found once (`contents.Contents`); with it one walk in program order knows what holds at the
head of a loop and after a branch, however deep they nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tpuflow.device.place import instruction_place, source_suffix
from tpuflow.device.verify.contents import WHOLE, Contents, Spans, any_trips, either
from tpuflow.device.verify.footprint import Box
from tpuflow.device.verify.kernels import Effects
from tpuflow.errors import ProgramError
from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.program import Block, Buffer, CallHost, Copy, Infeed, Kernel, Loop, Outfeed, Program, Switch, While


def check_dataflow(program: Program, effects: Mapping[int, Effects]) -> None:
    """Refuse a program that reads what is not there, or writes what must stay. effects: of every kernel, by its id."""
    walk = _AbstractRun(program, effects)
    memory = Contents(program.buffers)
    memory.forget()
    for buffer in (*(c.buffer for c in program.constants), *(p.buffer for p in program.inputs), *sorted(program.by_items)):
        memory.put(buffer, WHOLE)
    walk.blocks(program.code, "", memory)
    for port in program.outputs:
        if not memory.is_whole(port.buffer):
            raise ProgramError(
                f"signature: output {port.name!r} is buffer {port.buffer}, which is {_state(memory, port.buffer)} at the end."
            )


class _Changes:
    """What blocks do to memory, whatever it holds. That of nested blocks is found once, so the whole takes one walk."""

    def __init__(self, buffers: Sequence[Buffer], effects: Mapping[int, Effects]):
        self.buffers, self.effects = buffers, effects
        self._known: dict[tuple[int, str], Contents] = {}

    def head(self, block: Loop | While) -> Contents:
        """From before a loop to the head of any of its trips."""
        return self._once(block, "head", lambda: any_trips(self._list((*_tested(block), *block.body))))

    def condition(self, block: While) -> Contents:
        """Of the condition of a while loop."""
        return self._once(block, "condition", lambda: self._list(block.condition))

    def branches(self, block: Switch) -> Contents:
        """Of any one branch."""
        return self._once(block, "branches", lambda: either([self._list(b) for b in block.branches]))

    def _once(self, block: Block, what: str, find: Callable[[], Contents]) -> Contents:
        key = (id(block), what)
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def _list(self, code: Sequence[Block]) -> Contents:
        made = Contents(self.buffers)
        for block in code:
            _CHANGES[type(block)](self, block, made)
        return made

    def _kernel(self, block: Kernel, made: Contents) -> None:
        made.lose(self.effects[id(block)].tiles)
        for buffer, box in self.effects[id(block)].writes:
            made.store(buffer, box)

    def _loop(self, block: Loop, made: Contents) -> None:
        made.then(self.head(block))

    def _while(self, block: While, made: Contents) -> None:
        made.then(self.head(block))
        made.then(self.condition(block))

    def _switch(self, block: Switch, made: Contents) -> None:
        made.then(self.branches(block))

    def _infeed(self, block: Infeed | Position, made: Contents) -> None:
        made.put(block.buffer, WHOLE)

    def _received(self, block: Collective, made: Contents) -> None:
        """That nobody looks before it has arrived is for `verify.collectives` to say."""
        made.put(block.target, WHOLE)

    def _copied(self, block: Copy, made: Contents) -> None:
        if not (block.index >= 0 and self.buffers[block.target].space == "host"):
            made.put(block.target, WHOLE)

    def _answered(self, block: CallHost, made: Contents) -> None:
        for target in block.targets:
            made.put(target, WHOLE)

    def _nothing(self, block: Outfeed | Await, made: Contents) -> None:
        """Memory stays as it is."""


_CHANGES: Mapping[type, Callable[..., None]] = {
    Kernel: _Changes._kernel, Loop: _Changes._loop, While: _Changes._while, Switch: _Changes._switch, Infeed: _Changes._infeed,
    Position: _Changes._infeed, Collective: _Changes._received, Outfeed: _Changes._nothing, Await: _Changes._nothing,
    Copy: _Changes._copied, CallHost: _Changes._answered,
}  # fmt: skip


def _tested(block: Loop | While) -> tuple[Block, ...]:
    return block.condition if isinstance(block, While) else ()


class _AbstractRun:
    """One abstract run of the blocks, in program order."""

    def __init__(self, program: Program, effects: Mapping[int, Effects]):
        self.program, self.effects = program, effects
        self.changes = _Changes(program.buffers, effects)
        self.constants = {c.buffer for c in program.constants}
        kept = self.constants | {p.buffer for p in program.inputs if not p.donated}
        self.kept = sorted((b for b in kept if program.buffers[b].bytes), key=lambda b: program.buffers[b].span)
        self.kept_spans = Spans(*(list(x) for x in zip(*(program.buffers[b].span for b in self.kept), strict=True)) if self.kept else ())
        self.checked: set[int] = set()

    def blocks(self, code: Sequence[Block], path: str, memory: Contents) -> None:
        """Run the blocks; memory is what they find and leave."""
        for n, block in enumerate(code):
            _STEPS[type(block)](self, block, f"{path}{n}", memory)

    def kernel(self, block: Kernel, path: str, memory: Contents) -> None:
        """Its tiles take their place, then it reads, then it writes."""
        effects = self.effects[id(block)]
        self._check_apart(block, path, effects)
        memory.lose(effects.tiles)
        for buffer in sorted(effects.reads):
            if not memory.is_whole(buffer):
                place, source = _user(block, path, buffer, "read")
                self._fail(place, "reads", memory, buffer, source)
        for buffer, box in effects.writes:
            self._write(lambda b=buffer: _user(block, path, b, "write"), buffer, box)
            memory.store(buffer, box)

    def _check_apart(self, kernel: Kernel, path: str, effects: Effects) -> None:
        """Refuse, once a kernel, writes to what overlaps another buffer that it uses, and tiles in the place of one."""
        if id(kernel) in self.checked:
            return
        self.checked.add(id(kernel))
        written = {b for b, _ in effects.writes}
        for buffer in sorted(b for b in written | effects.reads if self.program.buffers[b].is_parted):
            low, high = self.program.buffers[buffer].span
            if any(low < end and start < high for start, end in effects.tiles):
                place, source = _user(kernel, path, buffer, "read")
                raise ProgramError(f"{place}: uses buffer {buffer}, in whose place in VMEM this kernel has tiles; expected none.{source}")
        found = _overlapping(self.program.buffers, written, written | effects.reads)
        if found is not None:
            buffer, other = found
            place, source = _user(kernel, path, buffer, "write")
            raise ProgramError(
                f"{place}: writes buffer {buffer}, which shares addresses with buffer {other} of this kernel; expected none.{source}"
            )

    def _write(self, at: Callable[[], tuple[str, str]], buffer: int, box: Box | None) -> None:
        """Refuse to store a part (None: an unknown part) over what must stay. at: place and source line."""
        first, last = self.kept_spans.meeting(*self.program.buffers[buffer].span)
        if first < last and self.program.buffers[buffer].bytes and not (box is not None and box.empty):
            protected = self.kept[first:last]
            shared = self._shared(buffer, buffer if buffer in protected else protected[0])
            place, source = at()
            raise ProgramError(f"{place}: writes buffer {buffer}, {shared}; expected what is constant or not donated to stay.{source}")

    def _shared(self, buffer: int, b: int) -> str:
        what = "a constant" if b in self.constants else "an input that is not donated"
        return what if b == buffer else f"which shares addresses with buffer {b}, {what}"

    def need(self, place: str, what: str, buffer: int, memory: Contents) -> None:
        """Refuse to read a buffer that is not valid."""
        if not memory.is_whole(buffer):
            self._fail(place, what, memory, buffer, "")

    def _fail(self, place: str, what: str, memory: Contents, buffer: int, source: str) -> None:
        raise ProgramError(f"{place}: {what} buffer {buffer}, which is {_state(memory, buffer)} here; expected it to be valid.{source}")

    def loop(self, block: Loop, path: str, memory: Contents) -> None:
        """Zero or more trips."""
        self.need(f"loop {path}", "takes its trip count from", block.trips, memory)
        memory.then(self.changes.head(block))
        self.blocks(block.body, f"{path}.body.", memory.copy())

    def while_(self, block: While, path: str, memory: Contents) -> None:
        """The condition at least once; what holds after it is what leaves."""
        memory.then(self.changes.head(block))
        self.blocks(block.condition, f"{path}.condition.", memory)
        self.need(f"while {path}", "tests", block.predicate, memory)
        self.blocks(block.body, f"{path}.body.", memory.copy())

    def switch(self, block: Switch, path: str, memory: Contents) -> None:
        """One branch or another."""
        self.need(f"switch {path}", "takes its index from", block.index, memory)
        for n, branch in enumerate(block.branches):
            self.blocks(branch, f"{path}.branch{n}.", memory.copy())
        memory.then(self.changes.branches(block))

    def infeed(self, block: Infeed, path: str, memory: Contents) -> None:
        """A whole buffer from the host."""
        self._write(lambda: (f"infeed {path}", ""), block.buffer, None)
        memory.put(block.buffer, WHOLE)

    def outfeed(self, block: Outfeed, path: str, memory: Contents) -> None:
        """A whole buffer to the host."""
        self.need(f"outfeed {path}", "sends", block.buffer, memory)

    def position(self, block: Position, path: str, memory: Contents) -> None:
        """A scalar."""
        self._write(lambda: (f"position {path}", ""), block.buffer, None)
        memory.put(block.buffer, WHOLE)

    def collective(self, block: Collective, path: str, memory: Contents) -> None:
        """A whole buffer out, a whole buffer in."""
        place, source = f"{block.kind} {path}", f" ({block.where})" if block.where else ""
        if not memory.is_whole(block.source):
            self._fail(place, "sends", memory, block.source, source)
        self._write(lambda: (place, source), block.target, None)
        memory.put(block.target, WHOLE)

    def copy(self, block: Copy, path: str, memory: Contents) -> None:
        """A whole buffer to the other memory, or an item, whose array stays as valid as it was."""
        self.need(f"copy {path}", "takes", block.source, memory)
        if block.index >= 0:
            self.need(f"copy {path}", "takes the item's number from", block.index, memory)
        self._write(lambda: (f"copy {path}", ""), block.target, None)
        if not (block.index >= 0 and self.program.is_host(block.target)):
            memory.put(block.target, WHOLE)
            return
        self.need(f"copy {path}", "writes an item of", block.target, memory)

    def call_host(self, block: CallHost, path: str, memory: Contents) -> None:
        """Whole buffers out, then whole buffers in."""
        for source in block.sources:
            self.need(f"callhost {path}", "sends", source, memory)
        for target in block.targets:
            self._write(lambda: (f"callhost {path}", ""), target, None)
            memory.put(target, WHOLE)

    def nothing(self, block: Await, path: str, memory: Contents) -> None:
        """Memory stays as it is."""


_STEPS: Mapping[type, Callable[..., None]] = {
    Kernel: _AbstractRun.kernel,
    Loop: _AbstractRun.loop,
    While: _AbstractRun.while_,
    Switch: _AbstractRun.switch,
    Infeed: _AbstractRun.infeed,
    Outfeed: _AbstractRun.outfeed,
    Position: _AbstractRun.position,
    Collective: _AbstractRun.collective,
    Await: _AbstractRun.nothing,
    Copy: _AbstractRun.copy,
    CallHost: _AbstractRun.call_host,
}


def _state(memory: Contents, buffer: int) -> str:
    """Why a buffer is not valid, in words."""
    if memory.of(buffer).parts:
        return "only partly written"
    return f"not written, or overwritten by another{' or by tiles' if memory.buffers[buffer].is_parted else ''} at its addresses,"


def _overlapping(buffers: Sequence[Buffer], written: set[int], used: Iterable[int]) -> tuple[int, int] | None:
    """(a written buffer, another used one that shares a byte with it), if there are such."""
    order = sorted((b for b in used if buffers[b].bytes), key=lambda b: (buffers[b].span[0], b))
    longest = longest_written = -1  # of those so far, the buffer that reaches furthest
    for b in order:
        for other in (longest, longest_written) if b in written else (longest_written,):
            if other >= 0 and buffers[other].span[1] > buffers[b].span[0]:
                return (b, other) if b in written else (other, b)
        longest = max(longest, b, key=lambda x: buffers[x].span[1] if x >= 0 else -1)
        if b in written:
            longest_written = max(longest_written, b, key=lambda x: buffers[x].span[1] if x >= 0 else -1)
    return None


def _user(kernel: Kernel, path: str, buffer: int, role: str) -> tuple[str, str]:
    """Place and source line of the first instruction of a kernel that reads or writes a buffer."""
    for n, i in enumerate(kernel.instructions):
        if any(w.buffer == buffer and r in (role, "write") for r, w in i.windows()):
            return instruction_place(path, kernel, n), source_suffix(kernel, n)
    raise LookupError(buffer)
