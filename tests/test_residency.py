"""Arrays that stay on the chip: chosen where that saves time, no bit changed by it, and every misuse found by verifier and machine."""

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

from tests import programs
from tests.cases import CASES, GRADIENTS
from tests.event_oracle import oracle_time
from tests.program_builder import substitute
from tests.programs import VMEM_PLACE, vmem_program
from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.limits import occupied_bytes
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.runtime import Executable
from tpuflow.device.timing import time_program
from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.grid import grid_time, plan_grid
from tpuflow.device.timing.prices import price
from tpuflow.device.verify import verify
from tpuflow.errors import HazardError, OutOfMemoryError, ProgramError
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import from_bytes, to_bytes
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.liveness import Timeline
from tpuflow.isa.program import Kernel, Loop, Program
from tpuflow.isa.reuse import reuse
from tpuflow.lower.residency import keep_on_chip
from tpuflow.lower.stays import Bus, Stay, Stays
from tpuflow.pjrt.executable import _fresh_bytes
from tpuflow.reports.memory import memory_map

CHIPS = ("generic", "tpu-v5e", "tpu-v4")  # of 16 MiB of VMEM, of 128, and of 128 of CMEM
X = np.arange(16 * 256, dtype=np.float32).reshape(16, 256)

# --- programs of the compiler's own


def _training_step(parameters: dict[str, Any], x: Any, y: Any) -> Any:
    """One step of gradient descent of two dense layers."""

    def loss(p: dict[str, Any]) -> Any:
        hidden = jnp.tanh(x @ p["first"] + p["bias"])
        return jnp.mean((hidden @ p["second"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)


def _arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    sizes = {"first": (40, 150), "bias": (150,), "second": (150, 10)}
    parameters = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    return parameters, rng.normal(size=(33, 40)).astype(np.float32), rng.normal(size=(33, 10)).astype(np.float32)


def without_a_place(chip: str | Chip) -> Chip:
    """The same chip, but it keeps no array."""
    return replace(get_chip(chip) if isinstance(chip, str) else chip, vmem_bytes_per_second=0.0, cmem_bytes=0)


def in_cmem(program: Program) -> Program:
    """A Program with arrays in VMEM on tpu-v4, with them in its CMEM."""
    buffers = tuple(replace(b, space="cmem") if b.space == "vmem" else b for b in program.buffers)
    return replace(program, chip=get_chip("tpu-v4"), buffers=buffers)


def _rows() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    names = ("grad-layer-norm", "scatter-apply-float32", "grad-scan-reverse", "cond-in-scan")
    rows = {case.name: (case.fn, case.arguments()) for case in (*CASES, *GRADIENTS) if case.name in names}
    assert len(rows) == len(names)
    return rows | {"training-step": (_training_step, _arguments())}


ROWS = _rows()


@functools.cache
def _kept(name: str, chip: str) -> Program:
    fn, arguments = ROWS[name]
    return compile_function(fn, arguments, name=name, chip=chip)


@functools.cache
def _without(name: str, chip: str) -> Program:
    """The same Program with all its arrays in HBM, as for a chip that keeps none."""
    fn, arguments = ROWS[name]
    program = compile_function(fn, arguments, name=name, chip=without_a_place(chip))
    return replace(program, chip=get_chip(chip))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ROWS)
def test_no_bit_depends_on_where_an_array_lies(name: str, chip: str) -> None:
    arrays = [np.asarray(x) for x in jax.tree.leaves(ROWS[name][1])]
    kept, without = _kept(name, chip), _without(name, chip)
    assert kept.resident and not without.resident
    for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native")):
        one, other = (Executable(p, engine=engine, fidelity=fidelity).launch(arrays)[0] for p in (kept, without))
        assert [np.asarray(x).tobytes() for x in one] == [np.asarray(x).tobytes() for x in other], (engine, fidelity)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ROWS)
def test_arrays_that_stay_take_no_time_longer_move_fewer_bytes_of_hbm_and_need_less_of_it(name: str, chip: str) -> None:
    kept, without = time_program(_kept(name, chip)), time_program(_without(name, chip))
    assert kept.roofline_seconds <= kept.seconds <= without.seconds
    assert kept.work.hbm_bytes < without.work.hbm_bytes and kept.work.macs == without.work.macs
    assert kept.work.bus_bytes + kept.work.resident_read_bytes + kept.work.resident_written_bytes == without.work.bus_bytes
    assert _kept(name, chip).hbm_bytes <= _without(name, chip).hbm_bytes


@pytest.mark.parametrize("chip", CHIPS)
def test_moves_within_the_chip_are_scheduled_as_events_and_periods_add_up(chip: str) -> None:
    machine = Machine.of(get_chip(chip))
    for name in ROWS:
        program = _kept(name, chip)
        for kernel in program.kernels():
            plan, _ = plan_grid(price(kernel, machine, program.resident), machine)
            assert grid_time(plan) == grid_time(plan, unroll=True) == oracle_time(plan), kernel.name


def _chain(chip: Chip, rows: int) -> Program:
    """Sorted rows, sorted again by columns: two kernels with one array of `rows` x 1,024 between them."""
    return compile_function(lambda x: jnp.sort(jnp.sort(x, axis=1), axis=0), (jax.ShapeDtypeStruct((rows, 1024), np.float32),), chip=chip)


@pytest.mark.parametrize("chip", CHIPS)
def test_an_array_stays_if_there_is_room_beside_what_every_kernel_takes_meanwhile(chip: str) -> None:
    row = get_chip(chip)
    small = _chain(row, 512)
    assert small.resident
    tiles, again = max(k.vmem_bytes for k in memory_map(small).kernels), max(reuse(k, row).bytes for k in small.kernels())
    crowded = replace(row, vmem_bytes=tiles + 2**20) if row.array_space == "vmem" else replace(row, cmem_bytes=again + 2**20)
    assert not keep_on_chip(replace(_in_hbm(small), chip=crowded)).resident, "2 MiB do not fit in the 1 that is left"
    assert keep_on_chip(replace(_in_hbm(small), chip=row)).resident == small.resident


def _stays_of_weights(steps: int) -> list[Stay]:
    """Where the weights of an unrolled recurrent network could stay, which all of its steps read."""

    def unrolled(x: Any, w: Any) -> Any:
        for _ in range(steps):
            x = jnp.tanh(x @ w)
        return x

    arguments = jax.ShapeDtypeStruct((8, 512), jnp.float32), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    program = replace(compile_function(unrolled, arguments, chip=without_a_place("tpu-v5e")), chip=get_chip("tpu-v5e"))
    timeline = Timeline(program)
    return list(Stays.of(program, timeline, Bus.of(program, timeline), frozenset()).all([program.inputs[1].buffer]))


def test_what_many_kernels_read_may_stay_for_some_of_them_but_not_between_any_two():
    few, some, many = map(_stays_of_weights, (16, 64, 128))
    assert len(few) == 16 * 15 // 2  # a copy for one reader saves nothing
    assert len(some) < len(many) < 2.5 * len(some)
    assert max(len(stay.accesses) for stay in many) == 128


def _in_hbm(program: Program) -> Program:
    """The Program with its arrays one after the other in HBM."""
    buffers, at = [], 0
    for b in program.buffers:
        buffers.append(replace(b, address=at, space="hbm"))
        at += -(-b.bytes // 256) * 256
    return replace(program, buffers=tuple(buffers))


def test_an_array_that_a_loop_carries_stays_through_it() -> None:
    def carried(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 7, lambda _, c: jnp.tanh(c @ w), x * 2).sum()

    program = compile_function(carried, (jax.ShapeDtypeStruct((256, 256), np.float32),) * 2)
    timeline = Timeline(program)
    (loop,) = (n for n, b in enumerate(timeline.blocks) if isinstance(b, Loop))
    through = [n for n in program.resident if timeline.spans[n][0] < loop < timeline.spans[n][1]]
    assert [program.buffers[n].shape for n in through] == [(256, 256)]


def test_nothing_stays_where_cores_share_a_cache_that_fills_itself() -> None:
    fn, arguments = ROWS["training-step"]
    assert not compile_function(fn, arguments, chip="ascend910").resident


def test_what_a_kernel_reads_again_from_cmem_leaves_no_room_there_for_an_array() -> None:
    row, shapes = get_chip("tpu-v4"), [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((8192, 2048), (2048, 8192))]
    program = compile_function(lambda x, w: jnp.sort(jnp.exp(x) @ w, axis=1), shapes, chip=row)
    taken = max(reuse(k, row).bytes for k in program.kernels())
    assert 2**20 < taken <= row.cache_bytes
    assert not keep_on_chip(replace(_in_hbm(program), chip=replace(row, cmem_bytes=taken))).resident


SEVERAL_CORES = {"tpu-v3": 2, "tpu-v5p": 2, "tpu-v4": 3}
"""How many arrays of `_by_rows` stay: all but the third, of which every core reads all rows, or in a memory of all cores all."""


def _by_rows(x: Any) -> Any:
    """Three kernels over the same rows, then one that reads the columns of what the third has made."""
    ordered = jnp.sort(jnp.cumsum(jnp.sort(x, axis=1), axis=1), axis=1)
    return jnp.sort(ordered, axis=0)


@functools.cache
def _of_cores(chip: str, *, keeps: bool = True) -> Program:
    row = get_chip(chip) if keeps else without_a_place(chip)
    return replace(compile_function(_by_rows, (jax.ShapeDtypeStruct((256, 384), np.float32),), chip=row), chip=get_chip(chip))


@pytest.mark.parametrize(("chip", "count"), SEVERAL_CORES.items())
def test_cores_keep_arrays_of_which_each_reads_and_writes_its_own_part_and_of_those_in_common_any(chip: str, count: int) -> None:
    kept, without = _of_cores(chip), _of_cores(chip, keeps=False)
    assert len(kept.resident) == count and not without.resident
    verify(kept)
    x = np.random.default_rng(3).normal(size=(256, 384)).astype(np.float32)
    for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native")):
        one, other = (Executable(p, engine=engine, fidelity=fidelity).launch([x])[0] for p in (kept, without))
        assert one[0].tobytes() == other[0].tobytes(), (engine, fidelity)


@pytest.mark.parametrize("chip", SEVERAL_CORES)
def test_cores_take_no_longer_with_arrays_that_stay(chip: str) -> None:
    kept, without = time_program(_of_cores(chip)), time_program(_of_cores(chip, keeps=False))
    assert kept.roofline_seconds <= kept.seconds <= without.seconds
    assert kept.work.hbm_bytes + kept.work.resident_bytes == without.work.hbm_bytes and kept.work.resident_bytes > 0


def _from_the_mean(x: Any, w: Any) -> Any:
    """A product with the sum of its rows, which cores add up step by step, and a kernel over the same rows."""
    y = x @ w
    return jnp.tanh(y - y.mean(0))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "steps"), [(2048, 4), (3840, 10)])  # of 3840, 8 tiles of 512 would not be equal
def test_cores_keep_the_rows_of_their_steps_where_they_share_a_point(rows: int, steps: int) -> None:
    chip, shapes = get_chip("tpu-v5p"), ((rows, 256), (256, 128))
    arguments = [jax.ShapeDtypeStruct(size, np.float32) for size in shapes]
    kept, without = (compile_function(_from_the_mean, arguments, chip=row) for row in (chip, without_a_place(chip)))
    product, others = kept.kernels()
    assert [axis.size for axis in product.grid] == [steps] and not product.parallel
    assert others.parallel and len(kept.resident) == 1 and not without.resident
    verify(kept)
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=size).astype(np.float32) for size in shapes]
    for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native")):
        one, other = (Executable(p, engine=engine, fidelity=fidelity).launch(arrays)[0] for p in (kept, without))
        assert one[0].tobytes() == other[0].tobytes(), (engine, fidelity)
    crowd = replace(kept, chip=replace(chip, cores=16))
    with pytest.raises(ProgramError, match=rf"outermost sequential axis has {steps} trips; expected a multiple of the 16 cores"):
        verify(crowd)
    with pytest.raises(HazardError, match=r"on core 0 writes what core 1 has of buffer \d+ in its VMEM"):
        ReferenceEngine(crowd, verify=False, schedule="late").launch(arrays)


def test_an_array_of_several_cores_takes_its_part_of_each_ones_vmem() -> None:
    chip = get_chip("tpu-v3")
    verify(replace(vmem_program(first=2 * chip.vmem_bytes - 2**14), chip=chip))
    with pytest.raises(ProgramError, match=f"lies at bytes .* of vmem; tpu-v3 has {2 * chip.vmem_bytes}"):
        verify(replace(vmem_program(first=2 * chip.vmem_bytes), chip=chip))
    with pytest.raises(ProgramError, match="4096 elements at byte 1048577 of vmem; expected both to divide by the 2 cores of tpu-v3"):
        verify(replace(vmem_program(first=VMEM_PLACE + 1), chip=chip))


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_reading_what_another_core_has_in_its_vmem_is_refused_and_found(schedule: str) -> None:
    apart = replace(vmem_program(), chip=get_chip("tpu-v3"))
    verify(apart)
    assert np.array_equal(np.asarray(_launch(apart, schedule)[0]), -X)
    columns = replace(vmem_program(last=(16, 128)), chip=get_chip("tpu-v3"))
    with pytest.raises(
        ProgramError, match=r"^kernel 2 'third', body.*one core may touch what another has of buffer 2, which stays in vmem"
    ):
        verify(columns)
    with pytest.raises(HazardError, match=r"^kernel 2 'third', body.*on core 0 reads what core 1 has of buffer 2 in its VMEM"):
        _launch(columns, schedule)


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_every_core_reads_all_that_is_in_cmem_and_no_tiles_take_its_place(schedule: str) -> None:
    for program in (vmem_program(last=(16, 128)), evicted(), in_its_own_tiles()):
        verify(in_cmem(program))
        assert np.array_equal(np.asarray(_launch(in_cmem(program), schedule)[0]), -X)


def test_what_the_host_or_a_block_looks_at_is_in_hbm() -> None:
    for name in ROWS:
        program = _kept(name, "generic")
        ports = {p.buffer for p in (*program.inputs, *program.outputs)} | {c.buffer for c in program.constants}
        blocks = {b.trips for b in Timeline(program).blocks if isinstance(b, Loop)}
        assert program.resident.isdisjoint(ports | blocks)


def test_a_step_fits_if_what_does_not_stay_in_vmem_does() -> None:
    fn, arguments = ROWS["training-step"]
    kept, without = _kept("training-step", "generic"), _without("training-step", "generic")
    assert kept.hbm_bytes < without.hbm_bytes
    needed, more = (-(-p.hbm_bytes // 256) * 256 for p in (kept, without))
    row = replace(get_chip("generic"), hbm_bytes=needed)
    assert compile_function(fn, arguments, chip=row).hbm_bytes == kept.hbm_bytes
    with pytest.raises(OutOfMemoryError, match=rf"needs {more:,} bytes of HBM"):
        compile_function(fn, arguments, chip=without_a_place(row))
    with pytest.raises(OutOfMemoryError, match=rf"needs {needed:,} bytes of HBM .*: 1 B \(1 bytes\) more"):
        compile_function(fn, arguments, chip=replace(row, hbm_bytes=needed - 1))


def test_reports_count_the_two_memories_apart() -> None:
    program = _kept("training-step", "generic")
    found = memory_map(program)
    assert sum(a.space == "vmem" for a in found.allocations) == len(program.resident)
    assert found.planned_bytes == program.hbm_bytes and found.peak_bytes <= found.planned_bytes
    beside = [k.vmem_bytes + k.resident_bytes for k in found.kernels]
    assert 0 < max(found.resident_bytes) and max(beside) <= program.chip.vmem_bytes
    assert f"VMEM: {len(program.resident)} arrays stay there" in str(found)
    assert f"CMEM: {len(_kept('training-step', 'tpu-v4').resident)} arrays stay there" in str(memory_map(_kept("training-step", "tpu-v4")))


def test_what_a_program_occupies_of_hbm_leaves_out_what_stays_in_vmem() -> None:
    program = _kept("training-step", "tpu-v5e")
    there, in_hbm = occupied_bytes(program, ("vmem",)), occupied_bytes(program, ("hbm",))
    assert there and occupied_bytes(program) == in_hbm + there and in_hbm <= program.hbm_bytes
    assert _fresh_bytes(program) == in_hbm - sum(program.buffers[p.buffer].bytes for p in program.inputs)


@pytest.mark.parametrize("chip", ["generic", "tpu-v4"])
def test_where_an_array_lies_survives_bytes_and_text(chip: str) -> None:
    program = _kept("training-step", chip)
    assert from_bytes(to_bytes(program)).buffers == program.buffers == assemble(disassemble(program)).buffers


# --- faults, planted in out = -(-(-x)) with both intermediate arrays in VMEM


def overlapping() -> Program:
    """The second array takes the place of the first while it is read."""
    return vmem_program(second=VMEM_PLACE + 1024)


def read_too_early() -> Program:
    """The kernel that makes the first array is missing."""
    program = vmem_program()
    return replace(program, code=program.code[1:])


def evicted() -> Program:
    """A kernel between the one that makes the second array and the one that reads it has its tiles in its place."""
    program = vmem_program()
    first, second, third = program.code
    assert isinstance(first, Kernel)
    return replace(program, code=(first, second, substitute(first, _two_places_higher), third))


def _two_places_higher(i: Instruction) -> Instruction:
    def moved(tile: Tile) -> Tile:
        return replace(tile, address=tile.address + 2 * VMEM_PLACE)

    tiles = {name: moved(value) for name, kind, value in i.fields() if kind.name == "tile"}
    windows = {name: replace(value, tile=moved(value.tile)) for name, kind, value in i.fields() if kind.name == "window"}
    return replace(i, **tiles, **windows)


def in_its_own_tiles() -> Program:
    """The first array lies where the kernel that writes it has its tiles."""
    return vmem_program(first=0)


FAULTS: dict[Callable[[], Program], tuple[str, str]] = {
    overlapping: (
        r"^kernel 1 'second', body\[\d+\] store: writes buffer 2, which shares addresses with buffer 1",
        r"^kernel 1 'second', body\[\d+\] (load.*reads what was last written as part of buffer 2 in buffer 1"
        r"|store.*buffer 2 is overwritten here while nothing orders that after its last read)",
    ),
    read_too_early: (
        r"^kernel 0 'second', body\[\d+\] load: reads buffer 1, which is not written, or overwritten by another( or by tiles)? at",
        r"^kernel 0 'second', body\[\d+\] load.*reads what nothing has written(, or tiles have taken its place since,)? in buffer 1",
    ),
    evicted: (
        r"^kernel 3 'third', body\[\d+\] load: reads buffer 2, which is not written, or overwritten by another or by tiles",
        r"^kernel 3 'third', body\[\d+\] load.*reads what nothing has written, or tiles have taken its place since, in buffer 2",
    ),
    in_its_own_tiles: (
        r"^kernel 0 'first', body\[\d+\] store: uses buffer 1, in whose place in VMEM this kernel has tiles",
        r"^kernel 0 'first', body\[\d+\] store.*writes buffer 1, in whose place in VMEM this kernel has tiles",
    ),
}


def _launch(program: Program, schedule: str) -> list[np.ndarray]:
    return ReferenceEngine(program, verify=False, schedule=schedule).launch([X])[0]


def test_the_program_without_a_fault_is_right() -> None:
    program = vmem_program()
    verify(program)
    assert np.array_equal(np.asarray(_launch(program, "late")[0]), -X)


PLACES: dict[str, Callable[[Program], Program]] = {"vmem": lambda program: program, "cmem": in_cmem}
PLANTED = [(plant, "vmem") for plant in FAULTS] + [(plant, "cmem") for plant in (overlapping, read_too_early)]
"""Tiles are in VMEM alone."""


@pytest.mark.parametrize(("plant", "place"), PLANTED)
def test_the_verifier_refuses_a_fault_on_the_chip(plant: Callable[[], Program], place: str) -> None:
    with pytest.raises(ProgramError, match=FAULTS[plant][0]):
        verify(PLACES[place](plant()))


@pytest.mark.parametrize("schedule", ["late", "early"])
@pytest.mark.parametrize(("plant", "place"), PLANTED)
def test_the_reference_engine_finds_a_fault_on_the_chip(plant: Callable[[], Program], place: str, schedule: str) -> None:
    with pytest.raises(HazardError) as raised:
        _launch(PLACES[place](plant()), schedule)
    assert re.search(FAULTS[plant][1], str(raised.value)), str(raised.value)


def _resident(program: Program, *numbers: int) -> Program:
    buffers = [replace(b, space="vmem") if n in numbers else b for n, b in enumerate(program.buffers)]
    return replace(program, buffers=tuple(buffers))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (_resident(programs.map_program(), 0), "signature: buffer 0 stays in vmem; expected it in hbm: only kernels and copies reach"),
        (_resident(programs.loop_program(), 4), "constants: buffer 4 stays in vmem; expected it in hbm"),
        (_resident(programs.while_program(), 3), "while 1: buffer 3 stays in vmem; expected it in hbm"),
        (vmem_program(first=2**24), "buffer table: buffer 1 lies at bytes 16777216 to 16793600 of vmem; generic has 16777216"),
        (
            replace(vmem_program(), chip=get_chip("tpu-v4")),
            "buffer table: buffer 1 stays in vmem; expected hbm, cmem or host, for tpu-v4 keeps no arrays there",
        ),
        (
            replace(vmem_program(), chip=get_chip("ascend910")),
            "buffer table: buffer 1 stays in vmem; expected hbm or host, for ascend910 keeps no arrays there",
        ),
        (in_cmem(vmem_program(first=2**27)), "buffer 1 lies at bytes 134217728 to 134234112 of cmem; tpu-v4 has 134217728"),
    ],
)
def test_what_must_not_lie_there_is_refused(program: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        verify(program)


def test_the_two_memories_do_not_share_addresses() -> None:
    program = vmem_program()
    same = [replace(b, address=VMEM_PLACE) if n == 3 else b for n, b in enumerate(program.buffers)]
    assert program.buffers[1].address == VMEM_PLACE and program.resident == {1, 2}
    moved = replace(program, buffers=tuple(same))
    verify(moved)
    assert np.array_equal(np.asarray(_launch(moved, "early")[0]), -X)
