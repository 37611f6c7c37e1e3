"""`verify`: all rules of a Program, in the order tables, blocks, kernels, dataflow over HBM, collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from tpuflow.chips.checking import row_problem
from tpuflow.device.place import instruction_place, kernel_place, source_suffix
from tpuflow.device.verify.budget import VerifyBudget
from tpuflow.device.verify.collectives import (
    buffer_of,
    check_await,
    check_collective,
    check_copy,
    check_cut,
    check_mesh,
    check_order_of_moves,
    check_position,
)
from tpuflow.device.verify.dataflow import check_dataflow
from tpuflow.device.verify.kernels import Effects, check_kernel
from tpuflow.dtypes import PRED, S32, DType
from tpuflow.errors import ProgramError
from tpuflow.isa.calls import ArrayType
from tpuflow.isa.codec import MAX_DEPTH
from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.kernel_forms import KernelForm, forms_of
from tpuflow.isa.liveness import touched
from tpuflow.isa.program import (
    SPACE_BYTES,
    Block,
    Buffer,
    CallHost,
    Copy,
    Infeed,
    Kernel,
    Loop,
    Outfeed,
    Port,
    Program,
    Switch,
    While,
    children,
    walk,
)
from tpuflow.isa.refusal import Refusal

Check = Callable[..., None]


def verify(program: Program) -> None:
    """Check everything that the engines rely on.

    Raises:
      ProgramError: a rule does not hold; says the place in the program, what was found, what was expected, and the source line.
    """
    for what, check in _TABLES:
        _at(what, check, program)
    kernels = _Kernels(program)
    _check_blocks(program, program.code, "", 0, kernels)
    check_dataflow(program, kernels.effects)
    check_order_of_moves(program, kernels.effects)


def _at(what: str, check: Check, *arguments: Any) -> None:
    try:
        check(*arguments)
    except Refusal as refusal:
        raise ProgramError(f"{what}: {refusal.what}.") from None


# --- tables


def _check_chip(program: Program) -> None:
    problem = row_problem(program.chip)
    if problem:
        raise Refusal(problem)


def _check_shape(program: Program, what: str, dtype: DType, shape: Sequence[int]) -> None:
    """Sizes of an array; one of no elements could not be made either if the other axes alone are too long."""
    if any(not 0 <= s < 2**31 for s in shape) or len(shape) > 32:
        raise Refusal(f"{what} has shape {list(shape)}; expected sizes >= 0 and < 2^31 (at most 32 axes)")
    size = math.prod(max(1, s) for s in shape) * dtype.bytes
    if size > program.chip.hbm_bytes:
        raise Refusal(f"{what} has shape {list(shape)}, {size} bytes; {program.chip.name} has {program.chip.hbm_bytes}")


def _check_buffers(program: Program) -> None:
    for n, b in enumerate(program.buffers):
        _check_shape(program, f"buffer {n}", b.dtype, b.shape)
        if b.space not in ("hbm", "host", program.chip.array_space):
            expected = ", ".join(filter(None, ("hbm", program.chip.array_space))) + " or host"
            raise Refusal(f"buffer {n} stays in {b.space}; expected {expected}, for {program.chip.name} keeps no arrays there")
        end, there = b.address + b.bytes, _memory_bytes(program, b)
        if b.address < 0 or end > there:
            raise Refusal(f"buffer {n} lies at bytes {b.address} to {end} of {b.space}; {program.chip.name} has {there}")
        if b.is_parted and (b.address % program.chip.cores or b.elems % program.chip.cores):
            where = f"{b.elems} elements at byte {b.address} of vmem"
            raise Refusal(f"buffer {n} has {where}; expected both to divide by the {program.chip.cores} cores of {program.chip.name}")


def _memory_bytes(program: Program, buffer: Buffer) -> int:
    """Of the memory that a buffer lies in. What the host lends is not known: as far as addresses reach."""
    if buffer.space == "host":
        return SPACE_BYTES
    return program.chip.resident_bytes if buffer.is_resident else program.chip.hbm_bytes


def _check_constants(program: Program) -> None:
    for c in program.constants:
        buffer = _hbm_buffer(program, c.buffer)
        if len(c.data) != buffer.bytes:
            raise Refusal(f"buffer {c.buffer} gets {len(c.data)} bytes; expected {buffer.bytes}")
        if buffer.dtype == PRED and c.data.strip(b"\0\1"):
            raise Refusal(f"buffer {c.buffer} of pred holds bytes other than 0 and 1")
        if buffer.dtype.bits < 8 and max(c.data, default=0) >> buffer.dtype.bits:
            raise Refusal(f"buffer {c.buffer} of {buffer.dtype} holds bytes of more than {buffer.dtype.bits} bits")


def _check_signature(program: Program) -> None:
    for what in ("input", "output", "infeed", "outfeed"):
        for port in getattr(program, f"{what}s"):
            _check_port(program, what, port, stored=what.endswith("put"))
            check_cut(program, what, port)
            if port.donated and what != "input":
                raise Refusal(f"{what} {port.name!r} is donated; expected only inputs to be")


def _check_port(program: Program, what: str, port: Port, *, stored: bool) -> None:
    _check_shape(program, f"{what} {port.name!r}", port.dtype, port.shape)
    if not stored:
        if port.buffer != -1:
            raise Refusal(f"{what} {port.name!r} has buffer {port.buffer}; expected -1 (its items go where the blocks say)")
        return
    buffer = _port_buffer(program, port.buffer)
    if (buffer.dtype, buffer.shape) != (port.dtype, port.shape):
        raise Refusal(f"{what} {port.name!r} is {_text(port)}, its buffer {port.buffer} {_text(buffer)}; expected the same")


def _check_initial(program: Program) -> None:
    """What is in HBM or at the host at the start does not overlap."""
    buffers = [c.buffer for c in program.constants] + [p.buffer for p in program.inputs]
    spans = sorted((*program.buffers[b].span, b) for b in buffers)
    end, owner = -1, -1
    for low, high, b in spans:
        if high > low and low < end:
            raise Refusal(f"buffers {owner} and {b} overlap at byte {low}; expected inputs and constants apart")
        if high > end:
            end, owner = high, b
    if len(set(buffers)) != len(buffers):
        twice = next(b for b, count in Counter(buffers).items() if count > 1)
        raise Refusal(f"buffer {twice} is two inputs or constants at once; expected one")


_TABLES = (
    ("chip", _check_chip),
    ("mesh", check_mesh),
    ("buffer table", _check_buffers),
    ("constants", _check_constants),
    ("signature", _check_signature),
    ("inputs and constants", _check_initial),
)


def _hbm_buffer(program: Program, number: int) -> Buffer:
    buffer = buffer_of(program, number)
    if buffer.space != "hbm":
        reach = "copies reach what is" if buffer.space == "host" else "kernels and copies reach what stays"
        raise Refusal(f"buffer {number} stays in {buffer.space}; expected it in hbm: only {reach} there")
    return buffer


def _port_buffer(program: Program, number: int) -> Buffer:
    """Inputs and outputs may be at the host."""
    buffer = buffer_of(program, number)
    return buffer if buffer.space == "host" else _hbm_buffer(program, number)


def _text(array: Buffer | Port) -> str:
    return f"{array.dtype}{list(array.shape)}"


# --- blocks


def _check_blocks(program: Program, code: Sequence[Block], path: str, depth: int, kernels: _Kernels) -> None:
    if depth > MAX_DEPTH:
        raise ProgramError(f"block {path}: nested {depth} deep; expected at most {MAX_DEPTH}.")
    for n, block in enumerate(code):
        here = f"{path}{n}"
        if isinstance(block, Kernel):
            kernels.check(block, here)
            continue
        _at(f"{type(block).__name__.lower()} {here}", _check_block, program, block)
        for name, blocks in children(block):
            _check_blocks(program, blocks, f"{here}.{name}.", depth + 1, kernels)


def _check_block(program: Program, block: Block) -> None:
    _BLOCKS[type(block)](program, block)
    if not isinstance(block, Copy):
        for buffer, _ in touched(block):
            _hbm_buffer(program, buffer)


class _Kernels:
    """Effects of every kernel by its id; kernels of one form on buffers that are alike are checked once."""

    def __init__(self, program: Program):
        self.program = program
        self._forms = _forms(program)
        self.effort = VerifyBudget(sum(len(k.instructions) for k in program.kernels()))
        self.effects: dict[int, Effects] = {}
        self._seen: dict[Hashable, tuple[Effects, tuple[int, ...]]] = {}

    def check(self, kernel: Kernel, path: str) -> None:
        """Refuse the kernel, or note its effects."""
        form = self._forms[id(kernel)]
        key = form.with_marks(self._checked)
        if key in self._seen:
            effects, before = self._seen[key]
            self.effects[id(kernel)] = effects.renumbered(dict(zip(before, form.buffers, strict=True)))
            return
        try:
            effects = check_kernel(kernel, self.program.buffers, self.program.chip, self.effort)
        except Refusal as refusal:
            n = refusal.instruction
            place = kernel_place(path, kernel) if n is None else instruction_place(path, kernel, n)
            raise ProgramError(f"{place}: {refusal.what}.{'' if n is None else source_suffix(kernel, n)}") from None
        self.effects[id(kernel)] = effects
        self._seen[key] = effects, form.buffers

    def _checked(self, number: int) -> Hashable:
        """What the checks of a kernel look at of a buffer; of one that does not exist nothing."""
        buffers = self.program.buffers
        buffer = buffers[number] if 0 <= number < len(buffers) else None
        return None if buffer is None else (buffer.dtype.code, buffer.elems, buffer.space)


def _forms(program: Program) -> Mapping[int, KernelForm]:
    try:
        return program.forms_by_id()
    except ProgramError:
        for path, block in walk(program.code):
            if isinstance(block, Kernel):
                try:
                    forms_of((block,))
                except ProgramError as error:
                    raise ProgramError(f"{kernel_place(path, block)}: {error}") from None
        raise


def _scalar(what: str, field: str, dtype: DType) -> Check:
    def check(program: Program, block: Any) -> None:
        number = getattr(block, field)
        buffer = buffer_of(program, number)
        if (buffer.dtype, buffer.shape) != (dtype, ()):
            raise Refusal(f"{what} is buffer {number}, {_text(buffer)}; expected {dtype}[]")

    return check


def _switch(program: Program, block: Switch) -> None:
    _scalar("the index", "index", S32)(program, block)
    if not block.branches:
        raise Refusal("no branches; expected one at least")


def _feed(field: str) -> Check:
    def check(program: Program, block: Any) -> None:
        ports = getattr(program, field)
        if not 0 <= block.port < len(ports):
            raise Refusal(f"port {block.port} does not exist; the program has {len(ports)} {field}")
        buffer, port = buffer_of(program, block.buffer), ports[block.port]
        if (buffer.dtype, buffer.shape) != (port.dtype, port.shape):
            raise Refusal(f"buffer {block.buffer} is {_text(buffer)}, port {port.name!r} {_text(port)}; expected the same")

    return check


def _call_host(program: Program, block: CallHost) -> None:
    """A function that there is, and arrays of its types."""
    if not 0 <= block.function < len(program.functions):
        raise Refusal(f"function {block.function} of the host does not exist; the program has {len(program.functions)}")
    function = program.functions[block.function]
    _check_arrays(program, "sources", block.sources, function.operands)
    _check_arrays(program, "targets", block.targets, function.results)


def _check_arrays(program: Program, what: str, numbers: Sequence[int], types: Sequence[ArrayType]) -> None:
    if len(numbers) != len(types) or (len(set(numbers)) != len(numbers) and what == "targets"):
        raise Refusal(f"has {what} {list(numbers)}; expected {len(types)}{', none twice' if what == 'targets' else ''}")
    for number, (dtype, shape) in zip(numbers, types, strict=True):
        buffer = buffer_of(program, number)
        if (buffer.dtype, buffer.elems) != (dtype, math.prod(shape)):
            raise Refusal(f"buffer {number} of its {what} is {_text(buffer)}; expected the elements of {dtype}{list(shape)}")


_BLOCKS: dict[type, Check] = {
    Loop: _scalar("the trip count", "trips", S32),
    While: _scalar("the predicate", "predicate", PRED),
    Switch: _switch,
    Infeed: _feed("infeeds"),
    Outfeed: _feed("outfeeds"),
    Position: check_position,
    Collective: check_collective,
    Await: check_await,
    Copy: check_copy,
    CallHost: _call_host,
}
