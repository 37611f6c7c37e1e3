"""Rules of windows and of the tiles' blocked axes."""

from __future__ import annotations

from collections.abc import Sequence

from tpuflow.dtypes import S32
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Buffer, Kernel
from tpuflow.isa.refusal import Refusal
from tpuflow.isa.rules import check_immediate
from tpuflow.isa.windows import view_problem

LARGEST = 2**31 - 1


def check_window(kernel: Kernel, buffers: Sequence[Buffer], window: Window) -> None:
    """A window fits its buffer and tile: types, ranks, a dense view, grid axes that exist, s32 registers."""
    if not 0 <= window.buffer < len(buffers):
        raise Refusal(f"buffer {window.buffer} does not exist; the program has {len(buffers)}")
    buffer, tile = buffers[window.buffer], window.tile
    if tile.space == "acc" or tile.dtype != buffer.dtype:
        found = f"buffer {window.buffer} of {buffer.dtype} and a tile of {tile.dtype} in {tile.space}"
        raise Refusal(f"{found}; expected one type, and the tile in vmem or smem")
    if buffer.space == "host":
        raise Refusal(f"buffer {window.buffer} is at the host; expected it in hbm or on the chip: only copies reach what is at the host")
    if len(window.axes) != len(tile.axes):
        raise Refusal(f"the window has {len(window.axes)} axes, its tile {len(tile.axes)}; expected as many")
    for axis, blocked in zip(window.axes, tile.axes, strict=True):
        _check_axis(kernel, axis)
        _check_reach(kernel, axis, blocked)
    problem = view_problem(window, buffer.elems)
    if problem:
        raise Refusal(f"window of buffer {window.buffer}: {problem}; expected a permuted dense view")
    check_immediate(window.fill, tile.dtype)


def _check_axis(kernel: Kernel, axis: WindowAxis) -> None:
    grid = [g for g, _ in axis.grid]
    if len(set(grid)) != len(grid) or any(not 0 <= g < len(kernel.grid) for g in grid):
        raise Refusal(f"window axis moves with grid axes {grid}; expected different ones of {len(kernel.grid)}")
    numbers = (axis.extent, axis.pitch, axis.origin, axis.step, axis.dilation, *(e for _, e in axis.grid))
    if any(abs(n) > LARGEST for n in numbers) or axis.extent < 0 or axis.dilation < 1:
        names = "extent, pitch, origin, step, dilation, moves"
        raise Refusal(f"a window axis has {names} {numbers}; expected extent >= 0, dilation >= 1, all below 2^31")
    register = axis.register
    if register is not None and (register.space != "smem" or register.dtype != S32):
        raise Refusal(f"the window's register is {register.dtype} in {register.space}; expected s32 in smem")


def _check_reach(kernel: Kernel, axis: WindowAxis, tile: TileAxis) -> None:
    """Positions are 32-bit numbers, whose sum with a register or row number must not wrap back into the view."""
    limit = LARGEST if axis.register is None and axis.step else LARGEST // 2
    moved = sum(abs(elements) * max(0, kernel.grid[g].size - 1) for g, elements in axis.grid)
    reach = max(abs(axis.origin) + moved + abs(axis.step) * max(0, tile.size - 1), axis.extent * axis.dilation)
    if reach > limit:
        raise Refusal(f"a window axis reaches {reach} positions from its start; expected at most {limit}")


def check_tile(kernel: Kernel, tile: Tile) -> None:
    """Every blocked axis is covered exactly by its grid axis, the last tile not empty."""
    for axis in tile.axes:
        if axis.grid < 0:
            if axis.size < 0 or axis.extent != 0 or axis.grid != -1:
                raise Refusal(f"an unblocked tile axis is {axis}; expected size >= 0 and extent 0")
            continue
        if axis.grid >= len(kernel.grid):
            raise Refusal(f"a tile axis is blocked by grid axis {axis.grid}; the kernel has {len(kernel.grid)}")
        trips = kernel.grid[axis.grid].size
        if axis.size < 1 or not 0 <= axis.extent <= LARGEST or trips != -(-axis.extent // axis.size):
            raise Refusal(
                f"a tile axis of {axis.extent} elements in blocks of {axis.size} runs over grid axis {axis.grid} of {trips} trips; "
                f"expected {-(-axis.extent // max(1, axis.size))}"
            )
