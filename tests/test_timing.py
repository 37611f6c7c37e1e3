"""The timing engine: never faster than the roofline, never slower than one thing at a time, exact in its shortcut, blind to data."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import programs
from tests.emit_cases import CASES, kernels_of
from tests.event_oracle import oracle_time
from tpuflow.chips import CHIPS, Chip, get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.timing import time_program
from tpuflow.device.timing.calibration import Calibration, Machine, calibration_of
from tpuflow.device.timing.grid import GridPlan, grid_time, plan_grid
from tpuflow.device.timing.prices import PICOSECONDS, price
from tpuflow.device.timing.program import time_kernel
from tpuflow.device.timing.result import ProgramTime
from tpuflow.isa.program import Kernel, Loop, Program, walk

SHAPES = ((7, 5), (129, 257), (1000, 33))
SMALL = replace(get_chip("tpu-v3"), name="small", vmem_bytes=2**18, acc_bytes=2**14, matrix_rows=16, matrix_columns=16, vector_lanes=16)
KERNELS: dict[str, Callable[..., jax.Array]] = {
    "map": lambda a, b: jnp.tanh(a) * a + 1,
    "reduce": lambda a, b: a.sum(0),
    "row reduce": lambda a, b: (a * a).max(1),
    "matmul": lambda a, b: a @ b,
    "softmax": lambda a, b: jax.nn.softmax(a),
    "transpose": lambda a, b: a.T + 1,
    "cumulative": lambda a, b: jnp.cumsum(a, 0),
    "gather": lambda a, b: a[jnp.arange(a.shape[0])[::-1]],
    "dropout": lambda a, b: a * (jax.random.bits(jax.random.key(0, impl="rbg"), a.shape) < 2**30),
}


def compiled(function: Callable[..., jax.Array], shape: tuple[int, int], chip: Chip, dtype=jnp.float32) -> Program:
    """The Program of a function of a [rows, columns] and a [columns, rows] array, from shapes alone."""
    return compile_function(function, (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[::-1], dtype)), chip=chip)


@functools.cache
def random_plans() -> list[tuple[Kernel, GridPlan]]:
    """Sixty kernels of random operations, shapes and chips, each with its plan."""
    rng = random.Random(0)
    plans: list[tuple[Kernel, GridPlan]] = []
    while len(plans) < 60:
        chip = replace(
            SMALL,
            cores=rng.choice((1, 3)),
            vmem_bytes=rng.choice((2**17, 2**18, 2**19)),
            dma_seconds=rng.choice((0.0, 1e-7, 1e-6)),
            hbm_bytes_per_second=rng.choice((3e9, 5e10, 9e11)),
            issue_cycles=rng.choice((0.0, 7.0)),
        )
        program = compiled(KERNELS[rng.choice(sorted(KERNELS))], (rng.randint(1, 700), rng.randint(1, 500)), chip)
        machine = Machine.of(chip)
        plans += [(kernel, plan_grid(price(kernel, machine), machine)[0]) for kernel in program.kernels()]
    return plans


def test_adding_up_periods_gives_exactly_what_running_every_trip_gives():
    trips = 0
    for kernel, plan in random_plans():
        assert grid_time(plan) == grid_time(plan, unroll=True), kernel.name
        trips += int(np.prod([g.size for g in kernel.grid]))
    assert trips > 1000


def test_one_pass_in_program_order_is_the_event_driven_schedule():
    for kernel, plan in random_plans():
        assert grid_time(plan) == oracle_time(plan), kernel.name


def test_repeated_periods_are_not_run(monkeypatch: pytest.MonkeyPatch):
    program = compiled(KERNELS["map"], (8192, 8192), get_chip("tpu-v3"))
    (kernel,) = program.kernels()
    assert kernel.grid[0].size > 400
    runs = 0
    from tpuflow.device.timing.schedule import Core

    run = Core.run

    def counted(self: Core, ops: object) -> None:
        nonlocal runs
        runs += 1
        run(self, ops)  # type: ignore[arg-type]

    monkeypatch.setattr(Core, "run", counted)
    machine = Machine.of(program.chip)
    grid_time(plan_grid(price(kernel, machine), machine)[0])
    assert runs < 60


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("name", KERNELS)
def test_time_lies_between_the_roofline_and_one_thing_after_the_other(name: str, chip: Chip):
    for shape in SHAPES:
        for kernel in compiled(KERNELS[name], shape, chip).kernels():
            machine = Machine.of(chip)
            time = time_kernel(kernel, machine)
            assert time.work.roofline_seconds(machine) * PICOSECONDS <= time.picoseconds <= time.serial_picoseconds
            busiest = max(time.busy_picoseconds)
            assert time.picoseconds >= busiest, "no queue can work longer than the kernel runs"


@pytest.mark.parametrize("chip", ["generic", "tpu-v5e"])
@pytest.mark.parametrize("name", KERNELS)
def test_more_data_never_take_less_time(name: str, chip: str):
    row = get_chip(chip)
    times = [time_program(compiled(KERNELS[name], (64 * 2**i, 32 * 2**i), row)).picoseconds for i in range(6)]
    assert times == sorted(times)


@pytest.mark.parametrize("field", ["hbm_bytes_per_second", "clock_hz", "hbm_efficiency"])
def test_a_faster_chip_is_not_slower(field: str):
    """But for a little: what is faster may want the bus a moment earlier and then wait for something older (Graham's anomaly)."""
    slow = get_chip("tpu-v3")
    fast = replace(slow, **{field: getattr(slow, field) * 1.1})
    for name in KERNELS:
        program = compiled(KERNELS[name], (1000, 700), slow)
        assert time_program(replace(program, chip=fast)).picoseconds <= 1.02 * time_program(program).picoseconds


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["map", "matmul"])
def test_a_larger_share_of_a_peak_takes_no_longer_and_all_of_it_not_below_the_roofline(name: str, chip: Chip):
    program = compiled(KERNELS[name], (1000, 700), chip)
    for field in ("hbm_share", "matrix_share"):
        own = calibration_of(chip)
        half, nearly, whole = (time_program(program, calibration=replace(own, **{field: share})) for share in (0.5, 0.75, 1.0))
        assert whole.roofline_seconds <= whole.device_seconds <= nearly.device_seconds <= half.device_seconds
        assert whole.roofline_seconds == half.roofline_seconds, "the roofline is of the chip's peaks"
        assert half.device_seconds <= 2 * whole.device_seconds


def test_a_share_is_of_the_chips_own_efficiency_where_none_is_fitted():
    chip, program = get_chip("tpu-v3"), compiled(KERNELS["map"], (1000, 700), get_chip("tpu-v3"))
    own, same = Calibration(), Calibration(hbm_share=chip.hbm_efficiency, matrix_share=chip.matrix_efficiency)
    assert time_program(program, calibration=own).picoseconds == time_program(program, calibration=same).picoseconds


def test_neighbouring_loads_of_scalars_wait_for_memory_once():
    scalars = (jax.ShapeDtypeStruct((), jnp.float32),) * 3
    times = {}
    for wait in (0.0, 1e-6):
        chip = replace(get_chip("generic"), dma_seconds=wait)
        (kernel,) = compile_function(lambda x, y, z: jnp.exp(x) + y * z, scalars, chip=chip).kernels()
        assert sum(role == "read" for i in kernel.instructions for role, _ in i.windows()) == 3
        times[wait] = time_kernel(kernel, Machine.of(chip)).seconds
    assert times[1e-6] - times[0.0] == pytest.approx(2e-6)  # once for the loads, once for the store


def test_multiply_adds_and_bytes_are_those_of_the_graph():
    m, k = 300, 1000
    for chip in CHIPS.values():
        time = time_program(compiled(KERNELS["matmul"], (m, k), chip))
        assert time.work.macs == {"f32": m * m * k}
        assert time.work.written_bytes == 4 * m * m
        assert time.work.read_bytes >= 2 * 4 * m * k, "tiles are read at least once"
        time = time_program(compiled(KERNELS["map"], (m, k), chip))
        assert (time.work.read_bytes, time.work.written_bytes) == (4 * m * k, 4 * m * k)
        assert time.work.bus_bytes >= time.work.hbm_bytes


def test_a_padded_or_dilated_window_moves_only_what_is_in_the_buffer():
    def padded(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.pad(a, 0.0, ((0, 0, 1), (0, 0, 1)))

    time = time_program(compiled(padded, (64, 64), get_chip("generic")))
    assert 4 * 64 * 64 <= time.work.read_bytes <= 4 * 65 * 65
    assert time.work.written_bytes == 4 * 127 * 127


def test_time_needs_shapes_only_and_no_array_of_their_size():
    n = 2**15  # arrays of 4 GB
    program = compiled(KERNELS["map"], (n, n), get_chip("tpu-v5e"))
    assert time_program(program).work.hbm_bytes == 2 * 4 * n * n
    values = [np.zeros((64, 48), np.float32), np.full((48, 64), 7, np.float32)]
    from_values = compile_function(KERNELS["matmul"], values, chip="generic")
    assert time_program(from_values) == time_program(compiled(KERNELS["matmul"], (64, 48), get_chip("generic")))


def test_kernels_that_differ_in_buffers_only_are_timed_once():
    from tpuflow.device.timing.program import _remembered

    def deep(a: jax.Array, b: jax.Array, layers: int) -> jax.Array:
        for _ in range(layers):
            a = (a @ b) @ a
        return a

    _remembered.cache_clear()
    time_program(compiled(functools.partial(deep, layers=2), (300, 200), get_chip("tpu-v3")))
    few = _remembered.cache_info().misses
    time_program(compiled(functools.partial(deep, layers=20), (300, 200), get_chip("tpu-v3")))
    assert _remembered.cache_info().misses == few


def test_a_loop_takes_its_trips_times_its_body():
    program = programs.loop_program()
    (place,) = (place for place, block in walk(program.code) if isinstance(block, Loop))
    none, one, ten = (time_program(program, {place: n}) for n in (0, 1, 10))
    body = one.device_picoseconds - none.device_picoseconds
    assert body > 0 and ten.device_picoseconds == none.device_picoseconds + 10 * body
    assert {r.count for r in ten.kernels if r.place.startswith(place)} == {10}
    assert time_program(program).assumed and not ten.assumed


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    """A product for every matrix of w [N, D, D]."""
    return jax.lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x, w)[0]


def test_a_scan_takes_the_trips_that_the_program_itself_says():
    def time_of(layers: int) -> ProgramTime:
        shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((layers, 64, 64), (8, 64)))
        return time_program(compile_function(scanned, tuple(shapes), chip="generic"))

    seven, eight, nine = (time_of(n) for n in (7, 8, 9))
    assert not seven.assumed and list(seven.trips.values()) == [7]
    assert nine.work.macs["f32"] == 9 * 8 * 64 * 64
    assert nine.device_picoseconds - eight.device_picoseconds == eight.device_picoseconds - seven.device_picoseconds > 0


def test_a_trip_count_that_is_computed_is_not_taken_for_known():
    program = compile_function(lambda n, x: jax.lax.fori_loop(0, n, lambda _, c: c * 2.0, x), (jnp.int32(3), jnp.ones(8)))
    assert time_program(program).assumed


@pytest.mark.parametrize("case", CASES[::7], ids=lambda c: c.name)
def test_every_template_is_timed(case):
    for kernel in kernels_of(case):
        time = time_kernel(kernel, Machine.of(get_chip("generic")))
        assert 0 < time.picoseconds <= time.serial_picoseconds


@pytest.mark.parametrize(("chip", "kind"), [("tpu-v3", "bf16"), ("ascend910", "f16")])
def test_f32_products_on_a_chip_without_them_are_said_to_be_narrowed(chip: str, kind: str):
    f32, f16 = (compiled(KERNELS["matmul"], (64, 64), get_chip(chip), dtype) for dtype in (jnp.float32, jnp.float16))
    assert f"f32 products enter the arrays of {chip} as {kind}, in 1 pass" in time_program(f32).summary()
    assert not time_program(f16).narrowed
    assert not time_program(compiled(KERNELS["matmul"], (64, 64), get_chip("generic"))).narrowed


def test_the_input_pipeline_makes_what_the_host_sends_and_not_what_it_takes():
    """A loop of which each trip takes an array from the host and gives one back."""
    program, trips, sent, rate = programs.feed_program((10, 20)), 5, 10 * 20 * 4, 1e6
    (place,) = (place for place, block in walk(program.code) if isinstance(block, Loop))
    free, slow = (time_program(program, {place: trips}, calibration=Calibration(input_bytes_per_second=r)) for r in (0.0, rate))
    busy = free.device_picoseconds // trips
    over_link = round(2 * sent / program.chip.host_bytes_per_second * PICOSECONDS)
    assert free.feed_picoseconds == trips * max(0, over_link - busy) and free.feed_bytes == slow.feed_bytes == 2 * trips * sent
    assert slow.feed_picoseconds == trips * (round(sent / rate * PICOSECONDS) - busy)
