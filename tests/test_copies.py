"""Copies between HBM and VMEM while kernels run: arrays in VMEM for a part of their lives, no bit changed, and every misuse found."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.program_builder import Builder as ProgramBuilder
from tests.program_builder import substitute
from tests.programs import VMEM_PLACE, copies_program, map_kernel, unary
from tests.test_residency import PLACES, without_a_place
from tpuflow.chips import get_chip
from tpuflow.compiler import PIPELINE, compile_function
from tpuflow.device.fast.copies import read_at_home
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.runtime import Executable
from tpuflow.device.timing import time_program
from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.copies import CopyQueue, CopyRow
from tpuflow.device.verify import verify
from tpuflow.dtypes import F32
from tpuflow.errors import HazardError, ProgramError
from tpuflow.isa.assembler import assemble
from tpuflow.isa.collectives import Await
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import from_bytes, to_bytes
from tpuflow.isa.instruction import Instruction
from tpuflow.isa.kernel_forms import forms_of
from tpuflow.isa.liveness import Timeline, touched
from tpuflow.isa.program import Block, Copy, Kernel, Program, walk
from tpuflow.lower.assemble import Interface
from tpuflow.lower.assemble import assemble as assemble_blocks
from tpuflow.lower.copies import Placed, with_copies
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.stays import Access, Stay
from tpuflow.reports.profile import profile
from tpuflow.reports.trace import COPIES, trace

CHIPS = ("generic", "tpu-v5e", "tpu-v4")  # of 16 MiB of VMEM, of 128, and of 128 of CMEM
X, Y = (np.random.default_rng(n).normal(size=(16, 256)).astype(np.float32) for n in range(2))
MAKE, EVICT, PREFETCH, BETWEEN, AWAIT_PREFETCH, AWAIT_EVICT, READER, LAST = range(8)
"""Blocks of `copies_program`."""

# --- programs of the compiler's own


def _read_again(x: Any) -> Any:
    """`x` is read by four kernels; `ordered` is a result, and read again."""
    ordered = jnp.sort(x, axis=1)
    return (
        ordered,
        jnp.cumsum(ordered, axis=1).max(0),
        jnp.sort(x, axis=0).sum(0),
        jnp.cumsum(x, axis=0).max(0),
        jnp.cumsum(x, axis=1).max(0),
    )


def _sink(x: Any) -> Any:
    """The same in a loop that carries `x`."""

    def trip(_: Any, carry: Any) -> Any:
        ordered, *others = _read_again(carry)
        return ordered * 0.5 + jnp.stack([v.sum() for v in others]).sum() * 1e-9

    return (jax.lax.fori_loop(0, TRIPS, trip, x),)


def _updated(x: Any) -> Any:
    """The same in a loop that updates `x` as a training does its parameters: after all else that reads it, where it lies."""

    def trip(_: Any, carry: Any) -> Any:
        _, *others = _read_again(carry)
        return carry - jnp.stack([v.sum() for v in others]).sum() * 1e-9

    return (jax.lax.fori_loop(0, TRIPS, trip, x),)


TRIPS = 3
ROWS: dict[str, Callable[[Any], Any]] = {"flat": _read_again, "in-a-loop": _sink, "updated": _updated}
SHAPE = (512, 1024)


@functools.cache
def _compiled(name: str, chip: str) -> Program:
    return compile_function(ROWS[name], (jax.ShapeDtypeStruct(SHAPE, np.float32),), name=name, chip=chip)


@functools.cache
def _without(name: str, chip: str) -> Program:
    shapes = (jax.ShapeDtypeStruct(SHAPE, np.float32),)
    program = compile_function(ROWS[name], shapes, name=name, chip=without_a_place(chip))
    return replace(program, chip=get_chip(chip))


def _copies(program: Program) -> list[Copy]:
    return [block for _, block in walk(program.code) if isinstance(block, Copy)]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ROWS)
def test_no_bit_depends_on_copies(name: str, chip: str) -> None:
    kept, without = _compiled(name, chip), _without(name, chip)
    assert _copies(kept) and not _copies(without)
    verify(kept)
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native")):
        one, other = (Executable(p, engine=engine, fidelity=fidelity).launch([x])[0] for p in (kept, without))
        assert [np.asarray(v).tobytes() for v in one] == [np.asarray(v).tobytes() for v in other], (engine, fidelity)


@pytest.mark.parametrize("name", ROWS)
def test_a_copy_costs_the_fast_engine_nothing(name: str) -> None:
    kept, without = ([lowered.as_text() for lowered in FastEngine(p(name, "tpu-v5e")).translate()] for p in (_compiled, _without))
    assert kept == without, "the same text for XLA"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ROWS)
def test_copies_save_traffic_and_take_no_longer(name: str, chip: str) -> None:
    kept, without = time_program(_compiled(name, chip)), time_program(_without(name, chip))
    assert kept.work.hbm_bytes < without.work.hbm_bytes
    assert kept.roofline_seconds <= kept.seconds <= without.seconds
    copied = sum(_compiled(name, chip).buffers[c.source].bytes for c in _copies(_compiled(name, chip)))
    assert kept.copied_bytes == copied * (1 if name == "flat" else TRIPS) > 0


def test_what_is_read_again_is_copied_in_both_directions() -> None:
    program = _compiled("flat", "tpu-v5e")
    directions = {program.buffers[c.target].space for c in _copies(program)}
    assert directions == {"hbm", "vmem"}


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_a_copy_keeps_what_is_written_over_where_it_came_from(engine: str) -> None:
    b, shape = ProgramBuilder(), (16, 256)
    x, y = b.input("x", F32, shape), b.input("y", F32, shape)
    there, home = b.buffer(F32, shape, address=VMEM_PLACE), b.buffer(F32, shape)
    out, other = b.new_output("out", F32, shape), b.new_output("other", F32, shape)

    def negated(source: int, target: int) -> Kernel:
        return map_kernel(b, [source], target, unary("neg"), (8, 128))

    code = (negated(x, home), Copy(home, there, 0), Await(0), negated(y, home), negated(there, out), negated(home, other))
    b.buffers[there] = replace(b.buffers[there], space="vmem")
    results = Executable(b.program(*code), engine=engine).launch([X, Y])[0]
    assert np.array_equal(results[0], X) and np.array_equal(results[1], Y)


@pytest.mark.parametrize("chip", CHIPS)
def test_an_update_reads_the_copy_and_writes_what_was_copied(chip: str) -> None:
    program = _compiled("updated", chip)
    home = {c.target: c.source for c in _copies(program) if program.buffers[c.target].space != "hbm"}
    kernels = [block for _, block in walk(program.code) if isinstance(block, Kernel)]
    moved = [{(role, w.buffer) for i in kernel.instructions for role, w in i.windows()} for kernel in kernels]
    updates = [there for each in moved for there, n in home.items() if {("read", there), ("write", n)} <= each]
    assert updates
    assert not any(("read", home[there]) in each for each in moved for there in updates), "all others read the copy, too"


def test_an_array_takes_the_place_of_one_that_is_stored_there_and_then() -> None:
    program = _without("flat", "generic")
    timeline = Timeline(program)
    (given,), ordered = (p.buffer for p in program.inputs), program.outputs[0].buffer
    makes = next(tick for tick, block in enumerate(timeline.blocks) if ordered in dict(touched(block)))
    reads = next(tick for tick, block in enumerate(timeline.blocks) if tick > makes and given in dict(touched(block)))
    here = ("", makes + 1)
    stored = Stay(ordered, makes, makes, (Access(makes, written=1),), 1, begins=here, awaited=here)
    loaded = Stay(given, makes + 1, reads, (Access(reads, read=1),), 1, begins=here, awaited=("", reads), loads=True)
    place = program.chip.resident_bytes - program.buffers[given].bytes
    for placed in ((stored, loaded), (loaded, stored)):
        made = with_copies(program, timeline, [Placed(stay, place) for stay in placed])
        verify(made)


def _replaced() -> tuple[Program, tuple[int, int], int]:
    """A kernel that may write its result over its operand, before arrays stay; the two buffers, and its tick."""
    b = Builder("f", [TensorType(F32, SHAPE)])
    chip, graph = get_chip("generic"), b.finish([b.sort((b.neg(b.sort(b.inputs, 1)[0]),), 0)[0]])
    for step in PIPELINE:
        graph = step.on(chip, ())(graph)
    plan = plan_memory(graph, chip)
    program = assemble_blocks(graph, plan, chip, Interface())
    ((old, new),) = plan.replaced
    return program, (old, new), Timeline(program).spans[new][0]


@pytest.mark.parametrize("kept", ["neither", "operand", "result", "both", "operand-stored", "operand-loaded", "result-stored"])
def test_a_result_is_made_where_its_operand_lies_if_both_are_in_hbm(kept: str) -> None:
    program, (old, new), tick = _replaced()
    timeline, size = Timeline(program), program.buffers[old].bytes
    first, last = timeline.spans[old][0], timeline.spans[new][1]
    assert program.buffers[old] == program.buffers[new] and timeline.spans[old][1] == tick, "one address"
    written, read = Access(first, written=size), Access(tick, read=size)
    stays = {
        "operand": Stay(old, first, tick, (written, read), 2 * size),
        "result": Stay(new, tick, last, (Access(tick, written=size), Access(last, read=size)), 2 * size),
        "operand-stored": Stay(old, first, first, (written,), size, ("", tick), ("", tick)),
        "operand-loaded": Stay(old, first, tick, (read,), size, ("", tick), ("", tick), loads=True),
        "result-stored": Stay(new, tick, tick, (Access(tick, written=size),), size, ("", tick + 1), ("", tick + 1)),
    }
    chosen = [stay for name, stay in stays.items() if name == kept or (kept == "both" and stay.begins is None)]
    top = program.chip.resident_bytes
    made = with_copies(program, timeline, [Placed(stay, top - (i + 1) * size) for i, stay in enumerate(chosen)], [(old, new)])
    one = kept in ("neither", "operand-stored")
    assert len(made.buffers) == len(program.buffers) - one + sum(stay.begins is not None for stay in chosen)
    verify(made)
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for engine in ("reference", "fast"):
        (found,) = Executable(made, engine=engine, fidelity="bitexact").launch([x])[0]
        assert np.array_equal(np.asarray(found), np.sort(-np.sort(x, 1), 0)), engine


@pytest.mark.parametrize("chip", ["generic", "ascend910", "tpu-v3"])
def test_branches_may_write_one_result_over_operands_of_their_own(chip: str) -> None:
    def chosen(p: Any, x: Any) -> Any:
        branches = lambda x: -jnp.sort(jnp.sort(x, 0) * 2.0, 1), lambda x: jnp.abs(jnp.sort(x, 1))
        return jnp.sort(jax.lax.cond(p > 0, *branches, x), 0)

    shapes = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(X.shape, jnp.float32)
    program = compile_function(chosen, shapes, chip=chip)
    verify(program)
    for p in np.arange(2, dtype=np.int32):
        for engine in ("reference", "fast"):
            (found,) = Executable(program, engine=engine, fidelity="bitexact").launch([p, X])[0]
            assert np.array_equal(np.asarray(found), np.asarray(chosen(p, X))), (p, engine)


def test_copies_survive_bytes_and_text() -> None:
    program = _compiled("in-a-loop", "generic")
    assert from_bytes(to_bytes(program)).code == program.code == assemble(disassemble(program)).code


def test_a_trace_has_copies_in_a_row_of_their_own() -> None:
    program = _compiled("flat", "tpu-v5e")
    found = profile(program, time_program(program))
    drawn = [e for e in trace(found, 1)["traceEvents"] if e.get("tid") == COPIES and e["ph"] == "X"]
    assert len(drawn) == len(_copies(program)) and {e["args"]["to"] for e in drawn} == {"HBM", "VMEM"}
    assert "copies between HBM and VMEM" in found.time.summary()


# --- time


def test_a_copy_takes_what_kernels_leave_of_the_bus_and_the_chip_waits_for_the_rest() -> None:
    machine = Machine.of(get_chip("generic"))
    queue = CopyQueue(machine)
    for semaphore, alone in ((0, 4_000_000), (1, 6_000_000)):
        queue.start(semaphore, CopyRow("", 1, 0, ("hbm", "vmem"), 1, alone), now=0)
    queue.leave(5_000_000)
    assert queue.wait(1, now=20_000_000)[1] == 5_000_000, "one after the other"
    assert queue.wait(0, now=25_000_000)[1] == 0
    queue.start(2, CopyRow("", 1, 0, ("hbm", "vmem"), 1, 1_000_000), now=0)
    queue.leave(10**9)
    start_up = round(machine.chip.dma_seconds * 1e12)
    assert queue.wait(2, now=100)[1] == start_up + 1_000_000 - 100, "no sooner than alone"


# --- faults, planted in out = -y + -x + x with x and y in VMEM for a part of their lives


def _with(order: list[int], **blocks: Block) -> Program:
    """The hand-built program with its blocks in this order; those given by name in place of its own."""
    program = copies_program()
    code = [blocks.get(f"block{n}", program.code[n]) for n in order]
    return replace(program, code=tuple(code))


def prefetch_awaited_too_late() -> Program:
    """The reader of y does not wait for it."""
    return _with([MAKE, EVICT, PREFETCH, BETWEEN, AWAIT_EVICT, READER, AWAIT_PREFETCH, LAST])


def never_awaited() -> Program:
    """Nobody waits for -x."""
    return _with([MAKE, EVICT, PREFETCH, BETWEEN, AWAIT_PREFETCH, READER, LAST])


def copy_read_too_early() -> Program:
    """The last kernel reads -x in HBM while it arrives there."""
    return _with([MAKE, EVICT, PREFETCH, BETWEEN, AWAIT_PREFETCH, READER, LAST, AWAIT_EVICT])


def copied_before_it_is_made() -> Program:
    """-x goes to HBM before it is made."""
    return _with([EVICT, MAKE, PREFETCH, BETWEEN, AWAIT_PREFETCH, AWAIT_EVICT, READER, LAST])


def evicted_too_early() -> Program:
    """A kernel has its tiles where -x lies, which is still on its way to HBM."""
    return _with(list(range(8)), block3=_with_tiles_at(VMEM_PLACE))


def arrives_where_tiles_are() -> Program:
    """A kernel has its tiles where y arrives."""
    return _with(list(range(8)), block3=_with_tiles_at(2 * VMEM_PLACE))


def _with_tiles_at(address: int) -> Kernel:
    """The kernel in between, on other buffers, with its tiles there."""
    kernel = copies_program().code[READER]
    assert isinstance(kernel, Kernel)

    def moved(i: Instruction) -> Instruction:
        tiles = {name: replace(v, address=v.address + address) for name, kind, v in i.fields() if kind.name == "tile"}
        windows = {
            name: replace(v, buffer={"read": 1, "write": 5}[kind.role], tile=replace(v.tile, address=v.tile.address + address))
            for name, kind, v in i.fields()
            if kind.name == "window"
        }
        return replace(i, **tiles, **windows)

    return substitute(kernel, moved)


def made_again_too_early() -> Program:
    """-x is made again while it is copied."""
    return _with([MAKE, EVICT, MAKE, PREFETCH, BETWEEN, AWAIT_PREFETCH, AWAIT_EVICT, READER, LAST])


def one_semaphore_twice() -> Program:
    """Both copies signal the same semaphore."""
    return _with(list(range(8)), block2=replace(copies_program().code[PREFETCH], semaphore=0))


FAULTS: dict[Callable[[], Program], tuple[str, str]] = {
    prefetch_awaited_too_late: (
        r"^block 5: reads what has not arrived yet from copy 2 .*expected an await of semaphore 1 before it",
        r"^kernel 5 'reader', body\[\d+\] load.*reads what has not arrived yet in buffer 3",
    ),
    never_awaited: (
        r"^block 6: reads what has not arrived yet from copy 1 ",
        r"^kernel 6 'last', body\[\d+\] load.*reads what has not arrived yet in buffer 4",
    ),
    copy_read_too_early: (
        r"^block 6: reads what has not arrived yet from copy 1 ",
        r"^kernel 6 'last', body\[\d+\] load.*reads what has not arrived yet in buffer 4",
    ),
    copied_before_it_is_made: (
        r"^copy 0: takes buffer 2, which is not written, or overwritten by another( or by tiles)? at its addresses, here",
        r"^copy 0: buffer 2 is read before all of it was written",
    ),
    evicted_too_early: (
        r"^(block 3: has tiles where copy 1 moves something \(buffer 2\)|kernel 6 )",
        r"^kernel 3 'reader': has tiles where buffer 2 lies, which copy 1 is still moving",
    ),
    arrives_where_tiles_are: (
        r"^(block 3: has tiles where copy 2 moves something \(buffer 3\)|kernel 6 )",
        r"^kernel 3 'reader': has tiles where buffer 3 lies, which copy 2 is still moving",
    ),
    made_again_too_early: (
        r"^block 2: overwrites what is being sent by copy 1 ",
        r"^kernel 2 'make', body\[\d+\] store.*writes buffer 2, which copy 1 is sending",
    ),
    one_semaphore_twice: (
        r"^copy 2: semaphore 0 is taken by copy 1, which is still on its way",
        r"^copy 2: semaphore 0 is taken by what is still on its way",
    ),
}


def _launch(program: Program, schedule: str) -> np.ndarray:
    return np.asarray(ReferenceEngine(program, verify=False, schedule=schedule).launch([X, Y])[0][0])


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_the_program_without_a_fault_is_right(schedule: str) -> None:
    program = copies_program()
    verify(program)
    assert np.array_equal(_launch(program, schedule), (-Y + -X) + X)
    fast = Executable(program, fidelity="bitexact").launch([X, Y])[0][0]
    assert np.array_equal(np.asarray(fast), (-Y + -X) + X)


PLANTED = [
    (plant, place) for plant in FAULTS for place in PLACES if place == "vmem" or plant not in (evicted_too_early, arrives_where_tiles_are)
]
"""Tiles are in VMEM alone."""


@pytest.mark.parametrize(("plant", "place"), PLANTED)
def test_the_verifier_refuses_a_fault_of_a_copy(plant: Callable[[], Program], place: str) -> None:
    with pytest.raises(ProgramError, match=FAULTS[plant][0]):
        verify(PLACES[place](plant()))


@pytest.mark.parametrize("schedule", ["late", "early"])
@pytest.mark.parametrize(("plant", "place"), PLANTED)
def test_the_reference_engine_finds_a_fault_of_a_copy(plant: Callable[[], Program], place: str, schedule: str) -> None:
    with pytest.raises(HazardError) as raised:
        _launch(PLACES[place](plant()), schedule)
    assert re.search(FAULTS[plant][1], str(raised.value)), str(raised.value)


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (Copy(0, 4, 0), "copy 1: copies buffer 0 to 4, hbm to hbm; expected one in hbm and the other on the chip or at the host"),
        (Copy(2, 99, 0), "copy 1: buffer 99 does not exist; the program has 8"),
        (Copy(2, 4, -1), "copy 1: semaphore -1; expected one of 65536"),
    ],
)
def test_a_copy_that_is_none_is_refused(copy: Copy, message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        verify(_with(list(range(8)), block1=copy))


def test_nothing_to_wait_for_is_refused_and_found() -> None:
    program = _with([MAKE, AWAIT_EVICT, EVICT, PREFETCH, BETWEEN, AWAIT_PREFETCH, READER, LAST])
    assert isinstance(program.code[1], Await)
    with pytest.raises(ProgramError, match="await 1: nothing is on its way for semaphore 0"):
        verify(program)
    with pytest.raises(HazardError, match="await 1: nothing is on its way for semaphore 0"):
        _launch(program, "late")


@pytest.mark.parametrize("name", ROWS)
def test_forms_of_kernels_that_read_elsewhere_are_those_that_they_would_be_given(name: str) -> None:
    program = _compiled(name, "tpu-v5e")
    changed = read_at_home(program)
    assert any(kernel is not other for kernel, other in zip(program.kernels(), changed.kernels(), strict=True))
    numbers: dict[int, int] = {}
    for form, fresh in zip(changed.kernel_forms, forms_of(changed.kernels()), strict=True):
        assert form.buffers == fresh.buffers and numbers.setdefault(form.number, fresh.number) == fresh.number
    assert len(set(numbers.values())) == len(numbers)
