"""A window in a kernel's prologue stands where the first step is, in its epilogue where the last one is, in every tier and fidelity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests import programs
from tests.program_builder import PARALLEL, SEQUENTIAL, Builder, KernelBuilder, edit_kernel, substitute
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import F32
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.instruction import Instruction, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Program

STEPS, WIDTH = 3, 128


def moving_prologue(rows: int, grid: int) -> Program:
    """out[i, j] = x[i, j] * scale[r]: the window of scale, loaded in the prologue, moves by `rows` with the steps; `grid` points."""
    b = Builder()
    x, out = b.input("x", F32, (8 * grid, STEPS * WIDTH)), b.new_output("out", F32, (8 * grid, STEPS * WIDTH))
    scale = b.input("scale", F32, (8 + rows * STEPS, 1))
    k = KernelBuilder(b, [(grid, PARALLEL), (STEPS, SEQUENTIAL)], "moving")
    lines, columns = k.axis(8 * grid, 8, 0), k.axis(STEPS * WIDTH, WIDTH, 1)
    walk = (WindowAxis(8 + rows * STEPS, 1, grid=((1, rows),)), WindowAxis(1, 1))
    factor = k.load(Window(scale, k.tile(F32, [8, 1], slots=2, rate="point"), walk), section="prologue")
    release, k.releases = k.releases, []
    source, dst = k.load(k.window(x, k.tile(F32, [lines, columns], slots=2))), k.tile(F32, [lines, columns], slots=2)
    part, wide = k.tile(F32, [TileAxis(1), TileAxis(1)]), k.tile(F32, [lines, columns])
    k.result(
        dst,
        vector.Constant(part, -np.inf),
        vector.ReduceInto("max", part, factor, (0,), 8),
        vector.Broadcast(wide, part, (0, 1)),
        vector.Binary("mul", dst, source, wide),
        window=k.window(out, dst),
    )
    k.release()
    k.emit(*release, section="epilogue")
    return b.program(k.kernel())


def moving_epilogue(grid: int) -> Program:
    """out[p, steps - 1] = the sum of x over the steps: the window of out, stored in the epilogue, moves with the steps."""
    b = Builder()
    x, out = b.input("x", F32, (8 * grid, STEPS * WIDTH)), b.input("old", F32, (8 * grid, STEPS), donated=True)
    b.output("out", out)
    k = KernelBuilder(b, [(grid, PARALLEL), (STEPS, SEQUENTIAL)], "moving")
    lines, columns = k.axis(8 * grid, 8, 0), k.axis(STEPS * WIDTH, WIDTH, 1)
    total = k.tile(F32, [lines, 1], slots=2, rate="point")
    free, ready = k.semaphore(2), k.semaphore()
    k.emit(dma.Wait("vector", free), vector.Constant(total, -np.inf), section="prologue")
    source = k.load(k.window(x, k.tile(F32, [lines, columns], slots=2)))
    k.emit(vector.ReduceInto("max", total, source, (1,), WIDTH))
    k.release()
    axes = (WindowAxis(8 * grid, STEPS, grid=((0, 8),)), WindowAxis(STEPS, 1, grid=((1, 1),)))
    k.emit(dma.Signal("vector", ready), dma.Wait("store", ready), dma.Store(Window(out, total, axes)), section="epilogue")
    k.emit(dma.Signal("store", free), section="epilogue")
    return b.program(k.kernel())


def halo_prologue(sequential: str) -> Program:
    """out[i, o] = sum over t, c of x[i + t - 2, c] w[t, c, o], the halo tile of x loaded in the prologue; blocks of positions are parallel,
    those of `sequential` ("features" or "taps") sequential. With taps it stands at the first of their blocks."""
    b = Builder()
    (length, channels), (window, features), positions = (16, 6), (6, 12), 16
    x, w = b.input("x", F32, (length, channels)), b.input("w", F32, (window, channels, features))
    out = b.new_output("out", F32, (positions, features))
    k = KernelBuilder(b, [(4, PARALLEL), (3, SEQUENTIAL)], "halo")
    by_taps = sequential == "taps"
    rows, taps, columns = (
        k.axis(positions, 4, 0),
        k.axis(window, 2, 1) if by_taps else window,
        features if by_taps else k.axis(features, 4, 1),
    )
    acc, dst = k.tile(F32, [rows, columns], space="acc"), k.tile(F32, [rows, columns], slots=2, rate="point" if by_taps else "step")
    pair = SlidingAxis(0, 3, stride=1, dilation=1)
    halo = k.tile(F32, [pair.reach(4, 2 if by_taps else window), channels], slots=2, rate="point")
    walk = WindowAxis(length, channels, -2, ((0, 4), (1, 2)) if by_taps else ((0, 4),)), WindowAxis(channels, 1)
    left = k.load(Window(x, halo, walk), reader="matrix", section="prologue")
    release, k.releases = k.releases, []
    k.emit(matrix.MatmulZero(acc), section="prologue" if by_taps else "body")
    right = k.load(k.window(w, k.tile(F32, [taps, channels, columns], slots=2)), reader="matrix")
    inside = Bound(length, ((0, 1), (3, 1)), origin=-2)
    k.emit(matrix.MatmulAccumulate(acc, left, right, (0, 1), (0, 2), (3, 2, 1), (pair,), bounds=(inside,)))
    k.release()
    section = "epilogue" if by_taps else "body"
    k.result(dst, matrix.MatmulRead(dst, acc), window=k.window(out, dst), writer="matrix", section=section)
    k.emit(*release, section="epilogue")
    return b.program(k.kernel())


def outputs(program: Program, inputs: list[np.ndarray]) -> np.ndarray:
    """The one output, from both engines and in both fidelities."""
    found = [
        np.asarray(Executable(program, engine, fidelity).launch([x.copy() for x in inputs])[0][0])
        for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native"))
    ]
    assert all(np.array_equal(found[0], x) for x in found[1:])
    return found[0]


@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 8])
def test_a_window_of_the_prologue_stands_at_the_first_step(rows: int, grid: int) -> None:
    program = moving_prologue(rows, grid)
    x, scale = programs.random_inputs(program)
    np.testing.assert_array_equal(outputs(program, [x, scale]), x * scale[:8].max())


@pytest.mark.parametrize("grid", [1, 2])
def test_a_window_of_the_epilogue_stands_at_the_last_step(grid: int) -> None:
    program = moving_epilogue(grid)
    x, old = programs.random_inputs(program)
    wanted = old.copy()
    wanted[:, STEPS - 1] = x.max(axis=1)
    np.testing.assert_array_equal(outputs(program, [x, old]), wanted)


@pytest.mark.parametrize("sequential, tier", [("features", 1), ("taps", 3)])
def test_halos_of_the_prologue_are_lifted_unless_a_sequential_axis_moves_them(sequential: str, tier: int) -> None:
    program = halo_prologue(sequential)
    x, w = programs.random_inputs(program)
    found = [
        Executable(program, engine, fidelity) for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native"))
    ]
    exact, bits, native = (np.asarray(executable.launch([x.copy(), w.copy()])[0][0]) for executable in found)
    np.testing.assert_array_equal(bits, exact)
    np.testing.assert_allclose(native, exact, rtol=1e-5, atol=1e-5)
    assert list(found[2].tiers.values()) == [tier]


def test_a_tile_that_one_axis_blocks_may_be_moved_by_another() -> None:
    def moved(i: Instruction) -> Instruction:
        if not isinstance(i, dma.Load) or i.window.buffer != 1:
            return i
        rows, one = i.window.axes
        return replace(i, window=replace(i.window, axes=(replace(rows, grid=((1, 8),)), one)))

    program = edit_kernel(programs.resident_program(), lambda k: substitute(k, moved))
    x, scale = programs.random_inputs(program)
    first = [scale[:8], scale[:8], scale[:4]]  # the last point has four rows
    np.testing.assert_array_equal(outputs(program, [x, scale]), x * np.concatenate(first))
