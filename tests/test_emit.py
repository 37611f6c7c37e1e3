"""Emission: every template's kernels compute what the graph says, on a chip where everything fits and on one where nothing does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.emit_cases import CASES, DOTS, GENERIC, MAPS, REDUCES, SMALL, Case, assemble, fuse, kernels_of, t
from tests.program_builder import edit_kernel, substitute
from tpuflow.chips import get_chip
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import BF16, F16, F32, PRED, S32, DType
from tpuflow.errors import CompileError, OutOfMemoryError
from tpuflow.isa.contraction import Contraction, SlidingAxis
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.dma import Load, Signal, Store, Wait
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Kernel, Program
from tpuflow.isa.vector import Slice
from tpuflow.lower.emit import emit_copy, emit_node, overwritable
from tpuflow.lower.graph.blocking import even_blocks, fill_product
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.tiling import Space
from tpuflow.lower.graph.view import ViewAxis
from tpuflow.lower.tiling import core_blocks, fill_tile, share_tile

pytestmark = pytest.mark.optimised

# Rounding once per operation in the element type against NumPy's own order of sums: a few units in the last place of the largest term.
TOLERANCE = {F32: 2e-5, F16: 2e-2, BF16: 8e-2}
CHIPS = {"generic": lambda case: GENERIC, "small": lambda case: case.small}
ids = [c.name for c in CASES]


def run(program: Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    outputs, _ = Executable(program, engine="reference").launch(arrays)
    return [np.asarray(o) for o in outputs]


def assert_close(found: np.ndarray, expected: np.ndarray, dtype: DType) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if dtype.is_float:
        wide, exact = found.astype(np.float64), expected.astype(np.float64)
        scale = max(1.0, float(np.max(np.abs(exact[np.isfinite(exact)]), initial=0.0)))
        np.testing.assert_allclose(wide, exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("chip_of", CHIPS)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_kernels_compute_what_the_graph_says(case: Case, chip_of: str):
    graph, chip = case.graph(), CHIPS[chip_of](case)
    arrays = case.arrays()
    found = run(assemble(graph, chip), arrays)
    for got, want in zip(found, interpret(graph, *arrays), strict=True):
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_in_place_updates_give_the_same_bits(case: Case):
    graph = case.graph()
    arrays = case.arrays()
    apart = run(assemble(graph, case.small), arrays)
    shared = run(assemble(graph, case.small, in_place=True), [a.copy() for a in arrays])
    for a, b in zip(apart, shared, strict=True):
        assert a.tobytes() == b.tobytes()


def _balance(kernel: Kernel, instructions) -> list[int]:
    counts = [0] * len(kernel.semaphores)
    for i in instructions:
        if isinstance(i, Signal | Wait):
            counts[i.semaphore] += 1 if isinstance(i, Signal) else -1
    return counts


@pytest.mark.parametrize("chip_of", CHIPS)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_every_semaphore_balances_and_has_one_sender_and_one_receiver(case: Case, chip_of: str):
    for kernel in kernels_of(case, CHIPS[chip_of](case)):
        assert not any(_balance(kernel, kernel.body))
        assert not any(_balance(kernel, kernel.prologue + kernel.epilogue))
        for kind in (Signal, Wait):
            ends = {(i.semaphore, i.on) for i in kernel.instructions if isinstance(i, kind)}
            assert len(ends) == len(kernel.semaphores)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_kernels_have_a_name_and_a_source_for_every_instruction(case: Case):
    for kernel in kernels_of(case):
        assert kernel.name
        assert len(kernel.sources) == len(kernel.instructions)


def test_a_kernel_of_one_step_has_no_grid_and_all_its_work_in_the_body():
    (kernel,) = kernels_of(next(c for c in REDUCES if c.name == "sum_rows"))
    assert kernel.grid == () and not kernel.prologue and not kernel.epilogue


def test_a_reduction_that_does_not_fit_runs_in_sequence():
    (kernel,) = kernels_of(next(c for c in REDUCES if c.name == "sum_columns_f16"), SMALL)
    assert [g.kind for g in kernel.grid] == ["parallel", "sequential"]
    assert kernel.prologue and kernel.epilogue


def test_scalars_run_on_the_scalar_queue_alone():
    for name in ("scalar", "one_element", "fused_scalar"):
        for kernel in kernels_of(next(c for c in MAPS if c.name == name)):
            assert {i.queue for i in kernel.instructions} == {"scalar"}
            assert not kernel.semaphores


def _windows_of_three(b: Builder, x: Value) -> Value:
    """The greatest of each three neighbours of every second row of x [61, 128], all three of each column."""
    shape = (30, 128)
    views = [(ViewAxis(61, 128, 0, origin, 2), ViewAxis(128, 1, 1)) for origin in range(3)]
    one, two, three = (b.emit("window", [x], {"view": v, "fill": 0.0}, [t(F32, *shape)]).result for v in views)
    return b.max(b.max(one, two), three)


@pytest.mark.parametrize("clock_hz", [1e12, 1e6], ids=["fast vector unit", "slow vector unit"])
def test_windows_that_overlap_are_slices_of_one_load_where_that_takes_less_time(clock_hz: float):
    case = Case("three", fuse("map", _windows_of_three), (t(F32, 61, 128),))
    chip = replace(SMALL, clock_hz=clock_hz)
    (kernel,) = kernels_of(case, chip)
    counts = [sum(isinstance(i, of) for i in kernel.instructions) for of in (Load, Slice)]
    assert counts == ([1, 3] if clock_hz == 1e12 else [3, 0])
    assert math.prod(g.size for g in kernel.grid) > 1, "tiles overlap"
    arrays = case.arrays()
    for engine in ("reference", "fast"):
        (found,) = Executable(assemble(case.graph(), chip), engine=engine, fidelity="bitexact").launch(arrays)[0]
        assert np.asarray(found).tobytes() == interpret(case.graph(), *arrays)[0].tobytes()


def test_slices_of_two_kinds_of_one_tile_mean_the_same_on_both_engines():
    """The pieces of such a tile are not lifted as one stretch: what one stride takes of it is no stretch of the other's."""
    case = Case("three", fuse("map", _windows_of_three), (t(F32, 61, 128),))
    program = assemble(case.graph(), replace(SMALL, clock_hz=1e12))
    slices = [i for k in program.kernels() for i in k.body if isinstance(i, Slice)]
    other = edit_kernel(program, lambda k: substitute(k, lambda i: replace(i, strides=(1, 1)) if i is slices[0] else i))
    arrays = case.arrays()
    first, second = (
        np.asarray(Executable(other, engine=engine, fidelity="bitexact").launch(arrays)[0][0]) for engine in ("reference", "fast")
    )
    assert first.tobytes() == second.tobytes() != run(program, arrays)[0].tobytes()


@pytest.mark.parametrize(("start_up", "slots"), [(0.2e-6, 2), (1e-6, 3), (5e-6, 4)])
def test_tiles_that_are_moved_have_slots_for_their_moves_start_up_and_temporaries_one(start_up: float, slots: int):
    case = Case("large", fuse("map", lambda b, x, y: b.add(b.mul(x, y), y)), (t(F32, 8192, 128), t(F32, 8192, 128)))
    (kernel,) = kernels_of(case, replace(GENERIC, dma_seconds=start_up))
    moved = {i.window.tile for i in kernel.instructions if isinstance(i, Load | Store)}
    rest = {tile for i in kernel.instructions for tile in (*i.reads(), *i.writes())} - moved
    assert {tile.slots for tile in moved} == {slots}
    assert {tile.slots for tile in rest} == {1}


def test_slots_for_a_start_up_do_not_cost_tiles_their_size():
    case = next(c for c in MAPS if c.name == "fused_adam")
    (short,), (long,) = (kernels_of(case, replace(SMALL, dma_seconds=seconds)) for seconds in (0.0, 1e-6))
    assert short.grid == long.grid


def test_dead_temporaries_give_their_bytes_to_later_ones():
    def long_chain(b: Builder, x: Value) -> Value:
        for _ in range(20):
            x = b.neg(b.tanh(x))
        return x

    (kernel,) = kernels_of(Case("chain", fuse("map", long_chain), (t(F32, 1024, 128),)))
    assert len({tile.address for i in kernel.instructions for tile in i.writes()}) <= 4


def test_a_neighbouring_pair_of_axes_merges_unless_an_operand_has_only_one_of_them():
    whole = Case("whole", lambda b, x: b.neg(x), (t(F32, 4, 5, 6),))
    rows = Case("rows", fuse("map", lambda b, x, r: b.add(x, b.broadcast(r, x.shape, (0,)))), (t(F32, 4, 5, 6), t(F32, 4)))
    (flat,), (pair,) = kernels_of(whole), kernels_of(rows)
    assert max(len(tile.axes) for i in flat.instructions for tile in i.writes()) == 1
    assert max(len(tile.axes) for i in pair.instructions for tile in i.writes()) == 2


def test_matmul_operands_keep_the_axis_order_of_their_buffers():
    case = next(c for c in DOTS if c.name == "matmul_both_transposed")
    (kernel,) = kernels_of(case)
    loads = [i.window for i in kernel.instructions if isinstance(i, Load)]
    assert [tuple(a.extent for a in w.axes) for w in loads] == [(40, 33), (50, 40)]
    assert not [i for i in kernel.instructions if i.mnemonic == "transpose"]


def test_a_whole_contraction_stays_in_one_tile_up_to_1024():
    short = Case("short", lambda b, x, y: b.dot(x, y, (1,), (0,)), (t(F32, 64, 784), t(F32, 784, 512)))
    deep = Case("deep", lambda b, x, y: b.dot(x, y, (1,), (0,)), (t(F32, 64, 1100), t(F32, 1100, 512)))
    assert kernels_of(short)[0].sequential == ()
    (kernel,) = kernels_of(deep)
    assert [kernel.grid[i].size for i in kernel.sequential] == [3]


def test_known_padding_takes_one_kernel_and_unknown_padding_two():
    known = Case("known", lambda b, x: b.pad(x, 0.0, (1,), (1,)), (t(F32, 30),))
    unknown = Case("unknown", lambda b, x, v: b.pad(x, v, (1,), (1,)), (t(F32, 30), t(F32)))
    assert [k.name.split()[0] for k in kernels_of(known)] == ["full", "pad"]
    assert [k.name.split()[0] for k in kernels_of(unknown)] == ["pad", "pad"]


def test_in_place_is_allowed_only_where_reads_and_writes_go_through_equal_windows():
    def replaced(build, *types: TensorType) -> list[int]:
        node = Case("case", build, types).graph().nodes[-1]
        return [i for i, v in enumerate(node.inputs) if v in overwritable(node)]

    assert replaced(lambda b, x, y: b.add(x, y), t(F32, 8), t(F32, 8)) == [0, 1]
    assert replaced(lambda b, x: b.convert(x, S32), t(F32, 8)) == []
    assert replaced(lambda b, x: b.transpose(x, (1, 0)), t(F32, 8, 8)) == []
    assert replaced(fuse("map", lambda b, x: b.add(x, b.broadcast(x, (8, 8), (0, 1)))), t(F32, 8, 8)) == [0]
    assert replaced(fuse("map", lambda b, x, r: b.add(x, b.broadcast(r, (8, 8), (1,)))), t(F32, 8, 8), t(F32, 8)) == [0]
    sgd = next(c for c in DOTS if c.name == "fused_sgd").graph().nodes[-1]
    assert overwritable(sgd) == {sgd.inputs[2]} and len(sgd.inputs) == 4
    assert replaced(fuse("dot", lambda b, x: b.add(b.dot(x, x, (1,), (0,)), x)), t(F32, 8, 8)) == []
    assert replaced(lambda b, x, u, i: b.dynamic_update_slice(x, u, (i,)), t(F32, 8), t(F32, 2), t(S32)) == [0]
    assert replaced(lambda b, x, i: b.scatter_rows(x, i, x, "add"), t(F32, 8), t(S32, 8)) == []


def test_copies_move_any_type_between_buffers_of_any_shape():
    for dtype, shape in ((F32, ()), (PRED, (3, 5)), (F16, (4000,))):
        graph = Case("copy", lambda b, x: b.reshape(x, (x.type.elems, 1)), (t(dtype, *shape),)).graph()
        program = assemble(graph, SMALL)
        code = emit_copy(program.inputs[0].buffer, program.outputs[0].buffer, program.buffers, SMALL)
        data = np.arange(math.prod(shape)).reshape(shape).astype(dtype.numpy)
        (found,) = run(replace(program, code=code), [data])
        assert found.tobytes() == data.tobytes()


def test_nothing_is_emitted_for_arrays_without_elements():
    x, y = Value(t(F32, 0, 5)), Value(t(F32, 0, 5))
    program = assemble(Case("empty", lambda b, v: b.neg(v), (t(F32, 3),)).graph(), GENERIC)
    buffers = (replace(program.buffers[0], shape=(0, 5)),)
    assert emit_node(Node("neg", (x,), (y,)), lambda v: 0, buffers, GENERIC).kernels == ()


def test_sums_and_products_over_nothing_are_identities():
    x, total = Value(t(F32, 0, 5)), Value(t(F32, 5))
    largest = Node("reduce", (x,), (total,), {"op": "max", "axes": (0,)})
    a, b, product = Value(t(F32, 3, 0)), Value(t(F32, 0, 4)), Value(t(F32, 3, 4))
    attrs = {"lhs_contract": (1,), "rhs_contract": (0,), "lhs_batch": (), "rhs_batch": (), "precision": "default"}
    for node, expected in ((largest, np.full(5, -np.inf)), (Node("dot", (a, b), (product,), attrs), np.zeros((3, 4)))):
        program = assemble(Case("shell", lambda b, v: b.neg(v), (t(F32, *expected.shape),)).graph(), GENERIC)
        empty = replace(program.buffers[0], shape=(0,))
        place = {node.result: 1}
        kernels = emit_node(node, lambda v, place=place: place.get(v, 2), (*program.buffers, empty), GENERIC).kernels
        (found,) = run(replace(program, code=kernels), [np.zeros(expected.shape, np.float32)])
        np.testing.assert_array_equal(found, expected.astype(np.float32))


CONV_KERNEL = """\
    grid parallel 2, parallel 6
    semaphores 0, 2, 0, 2, 0, 2
    %t0 = acc[0x0] f32[1@g0/2, 1@g1/6, 5, 5] x1 step
    %t1 = vmem[0x0] f32[1@g0/2, 3, 7, 4] x2 step
    %t2 = vmem[0x600] f32[3, 3, 4, 5] x2 step
    %t3 = vmem[0xf00] f32[1@g0/2, 1@g1/6, 5, 5] x2 step
    %w0 = b0 %t1 [2:308 at 1*g0 + j, 11:28 at -1 + 2*g1 + j, 7:4 at j, 4:1 at j] fill 0
    %w1 = b1 %t2 [3:60 at j, 3:20 at 2 + -1*j, 4:5 at j, 5:1 at j] fill 0
    %w2 = b2 %t3 [2:150 at 1*g0 + j, 6:25 at 1*g1 + j, 5:5 at j, 5:1 at j] fill 0
    body
      matrix.mm_zero %t0
      load.load %w0
      load.load %w1
      matrix.mm_accumulate exact %t0, %t1, %t2, acc_axes=[0, 1, 2, 3], a_axes=[0, 1, 2, 4], b_axes=[5, 6, 4, 3], \
pairs=[1 stride 2 label 5 dilation 1, 2 stride 1 label 6 dilation 1], bounds=[11 at (-1 + 2*x1 + 1*x5)/1], block=0
      matrix.mm_read %t3, %t0
      store.store %w2
"""


def test_a_convolution_is_one_kernel_with_halo_tiles():
    """Rows in strides of 2 with one row of zeros above, columns under a kernel that is read from its end: semaphores left out."""
    rows, columns = SlidingAxis(1, 4, stride=2), SlidingAxis(2, 5, dilation=-1)
    read = (rows.bound(1, 11, low=1), columns.bound(2, 7, low=-2))
    whole = Contraction((0, 1, 2, 3), (4, 5, 3, 6), (0, 1, 2, 6), (rows, columns), read)
    case = Case("conv", lambda b, x, w: b.conv(x, w, whole, (2, 6, 5, 5)), (t(F32, 2, 11, 7, 4), t(F32, 3, 3, 4, 5)))
    text = disassemble(assemble(case.graph(), SMALL)).split("code\n")[1]
    lines = [line.split("    ;")[0] for line in text.splitlines()]
    kept = [line for line in lines if ".wait" not in line and ".signal" not in line and not line.startswith("  kernel")]
    assert "\n".join(kept) + "\n" == CONV_KERNEL


def test_what_cannot_be_put_on_the_chip_says_so():
    long = Case("long", lambda b, x: b.sort([x], 0)[0], (t(F32, 100_000),))
    with pytest.raises(OutOfMemoryError, match="sort.*does not fit on the chip"):
        kernels_of(long, SMALL)
    deep = Case("deep", lambda b, x: b.transpose(x, (7, 6, 5, 4, 3, 2, 1, 0)), (t(F32, *(2,) * 8),))
    with pytest.raises(CompileError, match="8 axes that do not collapse"):
        kernels_of(deep)
    with pytest.raises(CompileError, match="'infeed' is not emitted"):
        emit_node(Node("infeed", (), ()), lambda v: 0, (), GENERIC)


def test_tile_sizes_cut_axes_into_equal_pieces_of_whole_registers():
    assert even_blocks(100, 200, 8) == 100
    assert even_blocks(1100, 512, 128) == 384
    assert even_blocks(100, 30, 8) == 24
    assert even_blocks(100, 5, 8) == 5
    assert fill_product((4, 6, 10), 60) == (1, 6, 10)
    assert fill_product((4, 6, 10), 35) == (1, 3, 10)
    assert fill_product((3, 3, 256), 512, 16) == (1, 2, 256)
    assert fill_product((3, 3, 256), 512, 16, first=(0, 1)) == (3, 3, 48)
    assert fill_product((3, 3, 256), 512, 128, first=(0, 1)) == (1, 2, 256), "no room for a whole register of channels beside the kernel"
    assert fill_tile(Space((10, 10_000_000)), 4, GENERIC)[0] == 8
    assert fill_tile(Space((64, 784)), 4, GENERIC) == (64, 784)


@pytest.mark.parametrize(
    ("extent", "limit", "multiple", "cores", "block"),
    [
        (25088, 512, 56, 2, 448),  # 56 blocks; 50 would end in a shorter one
        (12544, 512, 8, 2, 448),  # 28
        (25088, 1024, 8, 1, 1008),  # one core keeps whatever it is
        (1000, 512, 8, 2, 504),  # an even number of equal blocks would be half as long
        (100, 512, 8, 2, 100),
        (99, 40, 8, 2, 40),
        (32, 10, 1, 4, 8),
    ],
)
def test_cores_that_keep_arrays_cut_the_outermost_axis_into_equal_blocks_if_they_are_not_much_shorter(
    extent: int, limit: int, multiple: int, cores: int, block: int
) -> None:
    assert core_blocks(extent, limit, replace(get_chip("tpu-v3"), cores=cores), multiple) == block
    assert core_blocks(extent, limit, get_chip("ascend910"), multiple) == even_blocks(extent, limit, multiple)


@pytest.mark.parametrize(
    ("sizes", "alone", "shared"),
    [((4, 4), 1, 1), ((64, 784), 1, 32), ((5408, 512), 22, 123), ((65536, 1024), 512, 863)],
    ids=["tiny", "one-tile", "few", "many"],
)
def test_cores_share_a_space_evenly_unless_starting_moves_takes_longer_than_moving(sizes, alone, shared):
    ascend = get_chip("ascend910")
    found = [rule(Space(sizes), 4, ascend) for rule in (fill_tile, share_tile)]
    assert [math.prod(-(-n // t) for n, t in zip(sizes, tile, strict=True)) for tile in found] == [alone, shared]
    assert share_tile(Space(sizes), 4, GENERIC) == fill_tile(Space(sizes), 4, GENERIC), (
        "one core, and start-ups as long as a fair part of a tile"
    )


def test_a_kernel_begins_with_the_scalars_that_it_loads():
    def build(b, x, y, z):
        return b.add(b.mul(x, b.splat(y, x.shape)), b.splat(z, x.shape))

    (kernel,) = kernels_of(Case("scaled", fuse("map", build), (t(F32, 640, 128), t(F32), t(F32))))
    assert [i.window.buffer for i in kernel.body if isinstance(i, Load)] == [1, 2, 0]
    works = [i for i in kernel.body if not isinstance(i, Wait | Signal)]
    assert all(isinstance(i, Load) and i.window.tile.space == "smem" for i in works[:2])


def test_more_scalars_than_the_registers_hold_at_once_are_loaded_as_they_are_needed():
    def build(b, *scalars):
        total = scalars[0]
        for scalar in scalars[1:]:
            total = b.add(total, scalar)
        return total

    case = Case("total", fuse("map", build), (t(F32),) * 300)
    (kernel,) = kernels_of(case, SMALL)
    assert sum(isinstance(i, Load) for i in kernel.body) * 4 > SMALL.smem_bytes
    arrays = case.arrays()
    (found,) = run(assemble(case.graph(), SMALL), arrays)
    assert found.tobytes() == interpret(case.graph(), *arrays)[0].tobytes()


def _least_vmem(fits: Callable[[int], object]) -> int:
    """The fewest bytes of VMEM, in whole alignments, with which something is emitted that is with 1 MiB."""
    low, high = 0, 2**20 // 128
    while high - low > 1:
        middle = (low + high) // 2
        try:
            fits(128 * middle)
            high = middle
        except OutOfMemoryError:
            low = middle
    return 128 * high


def test_where_nothing_else_fits_what_is_computed_for_the_matrix_unit_has_one_slot():
    """As a convolution's gradient whose block of the contraction, with its halo, takes nearly all of the chip."""

    def build(b: Builder, x: Value, y: Value) -> Value:
        return b.dot(b.convert(x, BF16), b.convert(y, BF16), (1,), (1,))

    case = Case("converted", fuse("dot", build), (t(F32, 20, 700), t(F32, 20, 700)))

    def program(vmem_bytes: int) -> Program:
        return assemble(case.graph(), replace(GENERIC, name="cramped", vmem_bytes=vmem_bytes))

    least = _least_vmem(program)
    roomy, more, cramped = program(2**20), program(2 * least), program(least)

    def slots(program: Program) -> set[int]:
        return {tile.slots for k in program.kernels() for i in k.body if isinstance(i, MatmulAccumulate) for tile in (i.a, i.b)}

    assert 1 not in slots(more) and 1 in slots(cramped)
    arrays = case.arrays()
    expected, *others = (run(p, arrays)[0].tobytes() for p in (roomy, more, cramped))
    assert others == [expected] * 2
    (fast,) = Executable(cramped, engine="fast", fidelity="bitexact").launch(arrays)[0]
    assert np.asarray(fast).tobytes() == expected
