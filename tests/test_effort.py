"""What is refused because no engine could hold, count or translate it, or because finding out would take too long."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests import programs
from tests.program_builder import PARALLEL, SEQUENTIAL, Builder, KernelBuilder
from tpuflow.chips import CHIPS
from tpuflow.chips.checking import DIVISORS, LEAST, MOST, row_problem
from tpuflow.device.timing import time_program
from tpuflow.device.verify import verify
from tpuflow.dtypes import F32, S32
from tpuflow.errors import ProgramError
from tpuflow.isa import dma, vector
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Buffer, GridAxis, Kernel, Port, Program


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A collection of garbage walks through all that earlier tests have left, which takes seconds and is no effort of ours."""
    gc.disable()
    yield
    gc.enable()


def refuses(program: Program, words: str) -> None:
    began = time.process_time()
    with pytest.raises(ProgramError, match=words):
        verify(program)
    assert time.process_time() - began < 2


def of_kernel(kernel: Kernel) -> Program:
    b = Builder()
    b.output("x", b.input("x", F32))
    return b.program(kernel)


# --- the chip's row


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_of_the_catalog_has_a_row_that_one_can_compute_with(name: str) -> None:
    assert row_problem(CHIPS[name]) == ""


@pytest.mark.parametrize("field", DIVISORS)
@pytest.mark.parametrize("value", [0, -1, 2**63 - 1, math.nan, math.inf])
def test_a_row_that_divides_by_nothing_or_by_too_much_is_refused(field: str, value: float) -> None:
    program = programs.map_program()
    refuses(
        replace(program, chip=dataclasses.replace(program.chip, **{field: value})), rf"^chip: {field} is .*; expected a positive number"
    )


NUMBERS = [f.name for f in dataclasses.fields(Builder().chip) if not isinstance(getattr(Builder().chip, f.name), str)]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [LEAST, MOST, 5e-324, 1e-13, 1e300])
def test_a_row_of_extreme_numbers_is_refused_or_can_be_computed_with(field: str, value: float) -> None:
    wanted = type(getattr(Builder().chip, field))
    for program in (programs.matmul_program(), programs.feed_program()):
        program = replace(program, chip=dataclasses.replace(program.chip, **{field: wanted(value)}))
        if row_problem(program.chip):
            refuses(program, f"^chip: {field} is .*; expected")
        else:
            assert time_program(program).seconds >= 0


def test_a_row_with_negative_memory_is_refused() -> None:
    program = programs.map_program()
    refuses(replace(program, chip=replace(program.chip, vmem_bytes=-1)), "^chip: vmem_bytes is -1; expected 0, or a number")


# --- sizes


@pytest.mark.parametrize("shape", [(2**31,), (2**40, 0), (0, 2**30, 2**30)], ids=str)
def test_an_array_that_could_not_be_made_is_refused_even_if_it_has_no_elements(shape: tuple[int, ...]) -> None:
    program = programs.map_program()
    refuses(replace(program, buffers=(*program.buffers, Buffer(F32, shape, 0)), buffer_names=()), "buffer 3 has shape")
    refuses(replace(program, outfeeds=(Port("sent", F32, shape),)), "outfeed 'sent' has shape")


@pytest.mark.parametrize("size", [2**31, 2**40, 2**63 - 1])
@pytest.mark.parametrize("kind", [PARALLEL, SEQUENTIAL])
def test_a_grid_axis_that_no_counter_holds_is_refused(size: int, kind: str) -> None:
    refuses(of_kernel(Kernel((GridAxis(size, kind),), (), (), (), ())), f"size={size}.*expected size >= 0 and < 2\\^31")


def test_a_tile_without_elements_must_still_have_axes_that_fit() -> None:
    tile = Tile("vmem", 0, F32, (TileAxis(0), TileAxis(2**40)))
    refuses(of_kernel(Kernel((), (), (), (vector.Constant(tile, 1.0),), ())), "a tile has sizes \\[0, 1099511627776\\]")


@pytest.mark.parametrize(("moved", "register"), [(2**22, False), (2**21, True)])
def test_positions_that_would_wrap_are_refused(moved: int, register: bool) -> None:
    b = Builder()
    x, start = b.input("x", F32, (8,)), b.input("start", S32)
    b.output("x", x)
    k = KernelBuilder(b, [(513, PARALLEL)])
    at = k.load(k.window(start, k.tile(S32, space="smem"))) if register else None
    k.emit(dma.Load(Window(x, k.tile(F32, [8]), (WindowAxis(8, 1, grid=((0, moved),), register=at),))))
    refuses(b.program(k.kernel()), f"a window axis reaches {512 * moved + 7} positions from its start; expected at most")


# --- effort


def _over_one_another(tiles: int, slots: int) -> Kernel:
    """A kernel whose first tile lies over all others."""
    wide = Tile("vmem", 0, F32, (TileAxis(128 * tiles),))
    narrow = [Tile("vmem", 512 * n, F32, (TileAxis(128),), slots) for n in range(tiles)]
    body = [i for t in narrow for i in (vector.Constant(t, 1.0), vector.Constant(wide, 1.0))]
    return Kernel((GridAxis(1000, PARALLEL), GridAxis(1000, SEQUENTIAL)), (), (), tuple(body), ())


def test_a_kernel_whose_order_takes_too_long_to_walk_is_refused() -> None:
    verify(of_kernel(_over_one_another(20, 2)))
    refuses(of_kernel(_over_one_another(20, 61)), r"takes \d+ visits of on-chip memory, with (\d+) of \1 left")
    refuses(of_kernel(_over_one_another(2000, 1)), "visits of on-chip memory")


def test_kernels_share_what_may_be_spent_on_them() -> None:
    kernels = [_over_one_another(n, 16) for n in range(3, 40)]
    b = Builder()
    b.output("x", b.input("x", F32))
    refuses(b.program(*kernels), r"^kernel \d+, .*visits|^kernel \d+: .*visits of on-chip memory, with (?!0 of)\d+ of \d+ left")


def _clipped(axes: int, instructions: int) -> Kernel:
    sizes = [TileAxis(2, g, 5) for g in range(axes)]
    tiles = [Tile("vmem", 0, F32, (a,)) for a in sizes]
    body = [vector.Constant(t, 1.0) for _ in range(instructions) for t in tiles]
    return Kernel(tuple(GridAxis(3, PARALLEL) for _ in range(axes)), (), (), tuple(body), ())


def test_clipped_tiles_in_too_many_shapes_are_refused() -> None:
    verify(of_kernel(_clipped(6, 10)))
    refuses(of_kernel(_clipped(7, 1)), r"shorter along the grid axes \[0, 1, 2, 3, 4, 5, 6\]; expected at most 6")
    refuses(of_kernel(_clipped(6, 100)), "all the shapes that clipped tiles give them, are 38400, with")


# --- many of a thing


def _stores(count: int, *, strided: bool) -> Program:
    b = Builder()
    out = b.new_output("out", F32, (4 * count,))
    k = KernelBuilder(b)
    tile, ready = k.tile(F32, [4]), k.semaphore()
    k.emit(vector.Constant(tile, 1.0), dma.Signal("vector", ready), dma.Wait("store", ready))
    for n in range(count):
        k.emit(dma.Store(Window(out, tile, (WindowAxis(4 * count, 1, n if strided else 4 * n, step=count if strided else 1),))))
    return b.program(k.kernel())


@pytest.mark.parametrize("strided", [False, True])
def test_many_stores_to_one_buffer_are_told_apart_quickly(strided: bool) -> None:
    program = _stores(1500, strided=strided)
    began = time.process_time()
    verify(program)
    assert time.process_time() - began < 2
    kernel = next(program.kernels())
    refuses(replace(program, code=(replace(kernel, body=(*kernel.body, kernel.body[-1]), sources=()),)), "not shown to write different")


def test_a_sort_of_many_operands_is_verified_quickly() -> None:
    b = Builder()
    b.output("x", b.input("x", F32))
    k = KernelBuilder(b)
    sources, results = ([k.tile(F32, [8]) for _ in range(4000)] for _ in range(2))
    k.emit(*(vector.Constant(t, 1.0) for t in sources), vector.Sort(tuple(results), tuple(sources), 0, 1))
    began = time.process_time()
    verify(b.program(k.kernel()))
    assert time.process_time() - began < 2
