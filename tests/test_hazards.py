"""The hostile simulator: every planted fault is found while the Program runs, and the verifier refuses the Program before it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests import programs
from tests.program_builder import Builder, KernelBuilder, drop, edit_kernel, substitute
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.verify import verify
from tpuflow.dtypes import F32
from tpuflow.errors import HazardError, ProgramError
from tpuflow.isa import dma, vector
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.program import Kernel, Program


def map_with(change: Callable[[Kernel], Kernel]) -> Program:
    """The map Program (out = x + y; body: wait, load x, signal, wait, wait, load y, ...) with its kernel changed."""
    return edit_kernel(programs.map_program(), change)


def semaphore_user(kind: type, on: str, semaphore: int) -> Callable[[Instruction], bool]:
    """Whether an instruction is a signal or wait of one queue on one semaphore."""
    return lambda i: isinstance(i, kind) and (i.on, i.semaphore) == (on, semaphore)  # type: ignore[attr-defined]


def with_count(kernel: Kernel, semaphore: int, count: int) -> Kernel:
    """The kernel with another initial count."""
    counts = list(kernel.semaphores)
    counts[semaphore] = count
    return replace(kernel, semaphores=tuple(counts))


def without_semaphore(kernel: Kernel, semaphore: int) -> Kernel:
    """The kernel without the signals and waits of one semaphore (so that it is still balanced)."""
    return drop(kernel, lambda i: isinstance(i, dma.Signal | dma.Wait) and i.semaphore == semaphore)


def missing_wait() -> Program:
    """The vector queue does not wait for y (for x it could do without: y comes after x on the load queue)."""
    return map_with(lambda k: drop(k, semaphore_user(dma.Wait, "vector", 3)))


def missing_wait_and_signal() -> Program:
    """Nobody speaks of y being ready: balanced, and wrong."""
    return map_with(lambda k: without_semaphore(k, 3))


def wrong_address() -> Program:
    """The addition reads x at an address where nothing was loaded."""

    def moved(i: Instruction) -> Instruction:
        return replace(i, a=replace(i.a, address=i.a.address + 0x10000)) if isinstance(i, vector.Binary) else i

    return map_with(lambda k: substitute(k, moved))


def slightly_wrong_address() -> Program:
    """The addition reads x four bytes off: half of one tile, half of another."""

    def moved(i: Instruction) -> Instruction:
        return replace(i, a=replace(i.a, address=i.a.address + 4)) if isinstance(i, vector.Binary) else i

    return map_with(lambda k: substitute(k, moved))


def read_before_write() -> Program:
    """The load of x is missing, its semaphores are not."""
    return map_with(lambda k: drop(k, lambda i: isinstance(i, dma.Load) and i.window.buffer == 0))


def unordered_writes() -> Program:
    """The vector queue zeroes the tile that the load queue is filling."""

    def kernel(k: Kernel) -> Kernel:
        (x,) = (i.window.tile for i in k.body if isinstance(i, dma.Load) and i.window.buffer == 0)
        first = next(n for n, i in enumerate(k.body) if isinstance(i, dma.Wait) and i.on == "vector")
        body, lines = list(k.body), list(k.sources)
        body.insert(first, vector.Constant(x, 0.0))
        lines.insert(first, "zero.py:7")
        return replace(k, body=tuple(body), sources=tuple(lines))

    return map_with(kernel)


def overwritten_slot() -> Program:
    """One more free slot promised than there is."""
    return map_with(lambda k: with_count(k, 0, 3))


def overwritten_slot_without_semaphore() -> Program:
    """The load queue never asks whether a slot is free."""
    return map_with(lambda k: without_semaphore(k, 0))


def overwritten_result() -> Program:
    """The vector queue does not wait for the store of the result two trips before."""
    return map_with(lambda k: without_semaphore(k, 4))


def tile_beyond_vmem() -> Program:
    """The last slot of x ends past the end of vector memory."""
    at = programs.map_program().chip.vmem_bytes - 0x1800

    def moved_tile(t: Tile) -> Tile:
        return replace(t, address=at)

    def moved(i: Instruction) -> Instruction:
        if isinstance(i, dma.Load) and i.window.buffer == 0:
            return replace(i, window=replace(i.window, tile=moved_tile(i.window.tile)))
        return replace(i, a=moved_tile(i.a)) if isinstance(i, vector.Binary) else i

    return map_with(lambda k: substitute(k, moved))


def silent_semaphore() -> Program:
    """Nobody signals that x is ready."""
    return map_with(lambda k: drop(k, semaphore_user(dma.Signal, "load", 1)))


def no_free_slot() -> Program:
    """No slot is free at the start: balanced, and stuck."""
    return map_with(lambda k: with_count(k, 0, 0))


def circular_wait() -> Program:
    """The load queue waits for slots that the vector queue frees only after it got what they are for."""
    return map_with(lambda k: with_count(with_count(k, 0, 0), 2, 0))


def carried_from_point_to_point() -> Program:
    """A running sum over parallel points, which have no order."""
    b = Builder()
    x, out = b.input("x", F32, (24, 128)), b.new_output("out", F32, (24, 128))
    k = KernelBuilder(b, [(3, "parallel")], "running")
    axes = [k.axis(24, 8, 0), 128]
    total, dst = k.tile(F32, axes), k.tile(F32, axes, slots=2)
    source = k.load(k.window(x, k.tile(F32, axes, slots=2)))
    k.emit(vector.Binary("add", total, total, source))
    k.result(dst, vector.Unary("neg", dst, total), window=k.window(out, dst))
    k.release()
    return b.program(k.kernel())


def unordered_update() -> Program:
    """x is overwritten by a store that nothing orders after its load."""
    b = Builder()
    x, out = b.input("x", F32, (24, 128), donated=True), b.new_output("out", F32, (24, 128))
    b.output("x", x)
    k = KernelBuilder(b, [(3, "parallel")], "swap")
    axes = [k.axis(24, 8, 0), 128]
    zero, dst = k.tile(F32, axes, slots=2), k.tile(F32, axes, slots=2)
    k.result(zero, vector.Constant(zero, 0.0), window=k.window(x, zero))
    source = k.load(k.window(x, k.tile(F32, axes, slots=2)))
    k.result(dst, vector.Unary("neg", dst, source), window=k.window(out, dst))
    k.release()
    return b.program(k.kernel())


def stale_clip() -> Program:
    """A tile that follows a sequential axis, loaded at the first step, used at all of them: at the last it would be shorter."""
    b = Builder()
    x, out = b.input("x", F32, (8, 300)), b.new_output("out", F32, (8, 300))
    k = KernelBuilder(b, [(3, "sequential")], "stale")
    columns = k.axis(300, 128, 0)
    ready = k.semaphore()
    once = k.tile(F32, [8, columns])
    k.emit(dma.Load(k.window(x, once)), dma.Signal("load", ready), dma.Wait("vector", ready), section="prologue")
    dst = k.tile(F32, [8, columns], slots=2)
    k.result(dst, vector.Unary("neg", dst, once), window=k.window(out, dst))
    return b.program(k.kernel())


# Each planted fault: the reference engine's words (under both schedules), the instruction it blames, its place and source line; and
# the verifier's words.
FAULTS = {
    missing_wait: (
        r"is read (before anything wrote it|here while nothing orders that after its write)|is overwritten here while nothing orders",
        r"body\[\d+\] (binary|load)", r"map\.py:\d+", "semaphore 3 has 1 more signals than waits in body",
    ),
    missing_wait_and_signal: (
        r"is read (before anything wrote it|here while nothing orders that after its write)", r"body\[7\] binary", r"map\.py:10",
        "is read here while nothing orders that after its write",
    ),
    wrong_address: ("is read before anything wrote it", r"body\[9\] binary", r"map\.py:10", "is read before anything wrote it"),
    slightly_wrong_address: (
        r"is read, but was last written as float|is read, but was last written as f32|is read before anything wrote it",
        r"body\[9\] binary", r"map\.py:10", "is read, but was last written as",
    ),
    read_before_write: ("is read before anything wrote it", r"body\[8\] binary", r"map\.py:10", "is read before anything wrote it"),
    unordered_writes: (
        "is written twice with no order between the writes", r"body\[(1|3)\] (load|constant)", r"(map\.py:2|zero\.py:7)",
        "is written twice with no order between the writes",
    ),
    overwritten_slot: (
        r"is overwritten here while nothing orders that after its last read|is read here while nothing orders that after its write",
        r"body\[(1|9)\] (load|binary)", r"map\.py:(2|10)", "is overwritten here while nothing orders that after its last read",
    ),
    overwritten_slot_without_semaphore: (
        r"is overwritten here while nothing orders that after its last read|is read here while nothing orders that after its write",
        r"body\[(0|8)\] (load|binary)", r"map\.py:(2|10)", "is overwritten here while nothing orders that after its last read",
    ),
    overwritten_result: (
        r"is (overwritten here while nothing orders that after its last read|read here while nothing orders that after its write)",
        r"body\[(8|11)\] (binary|store)", r"map\.py:(10|13)", "is overwritten here while nothing orders that after its last read",
    ),
    tile_beyond_vmem: (
        r"lies at bytes \d+ to 16779264 of vmem, which has 16777216 bytes", r"body\[1\] load", r"map\.py:2", "lies at bytes",
    ),
    silent_semaphore: ("semaphore 1 never fires", r"body\[2\] wait", r"map\.py:4", "semaphore 1 has 1 more waits than signals in body"),
    no_free_slot: ("semaphore 0 never fires", r"body\[0\] wait", r"map\.py:1", "waits for semaphore 0, .* it never fires"),
    circular_wait: ("semaphore 0 never fires", r"body\[0\] wait", r"map\.py:1", "waits for semaphore 0, .* it never fires"),
    carried_from_point_to_point: (
        "is read before anything wrote it", r"body\[4\] binary", r"running\.py:5", "is read before anything wrote it",
    ),
    unordered_update: (
        r"buffer 0 is (read|overwritten) here while nothing orders that after its (write|last read)", r"body\[(4|7)\] (load|store)",
        r"swap\.py:(5|8)", "buffer 0 is read here while nothing orders that after its write",
    ),
    stale_clip: ("was written at another step", r"body\[1\] unary", r"stale\.py:5", "was written at another step"),
}  # fmt: skip


def launch(program: Program, schedule: str) -> None:
    """Run unverified with inputs of ones."""
    inputs = [np.ones(p.shape, p.dtype.numpy) for p in program.inputs]
    ReferenceEngine(program, verify=False, schedule=schedule).launch(inputs)


@pytest.mark.parametrize("schedule", ["late", "early"])
@pytest.mark.parametrize("plant", FAULTS, ids=lambda f: f.__name__)
def test_the_reference_engine_names_instruction_place_and_source_of_a_planted_fault(plant: Callable[[], Program], schedule: str) -> None:
    words, place, source, _ = FAULTS[plant]
    program = plant()
    with pytest.raises(HazardError) as raised:
        launch(program, schedule)
    message = str(raised.value)
    (kernel,) = program.kernels()
    assert re.search(words, message), message
    assert re.match(rf"kernel 0 '{kernel.name}', {place}, at grid index \(\d+, ?(\d+)?\)", message), message
    assert re.search(rf"Instruction: {re.search(place, message).group().split()[-1]} \w+=", message), message  # type: ignore[union-attr]
    assert re.search(rf"Source: {source}\.", message), message


@pytest.mark.parametrize("plant", FAULTS, ids=lambda f: f.__name__)
def test_the_verifier_refuses_a_planted_fault_before_it_runs(plant: Callable[[], Program]) -> None:
    program = plant()
    with pytest.raises(ProgramError) as raised:
        verify(program)
    message = str(raised.value)
    assert re.search(FAULTS[plant][3], message), message
    assert re.match(r"kernel 0 '\w+', body\[\d+\] \w+: ", message), message
    assert re.search(r"Source: \w+\.py:\d+\.", message), message


def test_a_stripped_program_is_refused_with_the_same_place_and_no_source() -> None:
    with pytest.raises(ProgramError, match=r"^kernel 0, body\[9\] binary: .*read before anything wrote it") as raised:
        verify(wrong_address().strip())
    assert "Source" not in str(raised.value)


def test_kernels_in_loops_are_named_by_their_path() -> None:
    program = edit_kernel(programs.loop_program(), lambda k: with_count(k, 0, 0), 1)
    for attempt in (verify, lambda p: ReferenceEngine(p, verify=False).launch([np.int32(1), *[np.ones((20, 130), np.float32)] * 2])):
        with pytest.raises((ProgramError, HazardError), match=r"^kernel 1\.body\.0 'decay', body\[0\] wait"):
            attempt(program)


def test_memory_is_poison_at_the_start_of_every_kernel() -> None:
    """A second kernel that uses what the first left on the chip is caught."""
    program = programs.map_program()
    (kernel,) = program.kernels()
    leftover = drop(kernel, lambda i: isinstance(i, dma.Load) and i.window.buffer == 0)
    twice = replace(program, code=(kernel, leftover))
    with pytest.raises(HazardError, match=r"^kernel 1 'map', body\[8\] binary.*is read before anything wrote it"):
        launch(twice, "late")


def test_hbm_that_nothing_wrote_is_poison() -> None:
    program = programs.two_layer_program()
    missing = replace(program, code=program.code[1:])
    with pytest.raises(HazardError, match=r"^kernel 0 'relu', body\[\d+\] load.*reads what nothing has written in buffer 4"):
        launch(missing, "late")
    with pytest.raises(ProgramError, match=r"^kernel 0 'relu', body\[7\] load: reads buffer 4, which is not written.*Source: relu\.py:8\."):
        verify(missing)


def test_reading_a_buffer_after_another_took_its_addresses_is_caught() -> None:
    b = Builder()
    x, first, out = b.input("x", F32, (8, 128)), b.buffer(F32, (8, 128)), b.new_output("out", F32, (8, 128))
    second = b.buffer(F32, (8, 128), address=b.buffers[first].address + 64)
    b.next_address += 8192
    kernels = [
        programs.map_kernel(b, [x], first, programs.unary("neg"), (8, 128), name="first"),
        programs.map_kernel(b, [x], second, programs.unary("abs"), (8, 128), name="second"),
        programs.map_kernel(b, [first], out, programs.unary("neg"), (8, 128), name="third"),
    ]
    program = replace(b.program(*kernels), buffers=tuple(replace(o, address=65536) if n == out else o for n, o in enumerate(b.buffers)))
    with pytest.raises(HazardError, match=r"kernel 2 'third', body\[1\] load.*reads what was last written as part of buffer 3 in buffer 1"):
        launch(program, "late")
    with pytest.raises(ProgramError, match=r"^kernel 2 'third', body\[1\] load: reads buffer 1, which is not written, or overwritten"):
        verify(program)


def test_a_kernel_that_writes_over_another_buffer_it_reads_is_caught() -> None:
    program = programs.two_layer_program()
    buffers = list(program.buffers)
    buffers[5] = replace(buffers[5], address=buffers[4].address + 64)
    shared = replace(program, buffers=tuple(buffers))
    with pytest.raises(HazardError, match=r"buffer \d is (overwritten|read) here while nothing orders that after its (last read|write)"):
        launch(shared, "late")
    with pytest.raises(ProgramError, match="writes buffer 5, which shares addresses with buffer 4 of this kernel"):
        verify(shared)


def test_writing_a_constant_or_an_input_that_is_not_donated_is_caught() -> None:
    program = programs.in_place_program()
    kept = replace(program, inputs=tuple(replace(p, donated=False) for p in program.inputs))
    with pytest.raises(HazardError, match=r"body\[12\] store.*writes buffer 0, where a constant or an input that is not donated lies"):
        launch(kept, "late")
    with pytest.raises(ProgramError, match=r"body\[12\] store: writes buffer 0, an input that is not donated"):
        verify(kept)
