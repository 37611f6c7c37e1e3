"""Hand-built Programs: one function for every kind of Program that the engines are tested with.

Their kernels follow the discipline that the compiler's emission follows: a loaded tile has a `free` and a `ready` semaphore, a stored
one too, and temporaries of one queue have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tests.program_builder import PARALLEL, SEQUENTIAL, Builder, KernelBuilder, blocks
from tpuflow import dtypes
from tpuflow.dtypes import F32, S32, DType
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.bounds import Bound
from tpuflow.isa.collectives import Await
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Copy, Infeed, Kernel, Loop, Outfeed, Program, Switch, While

VMEM_PLACE = 2**20  # bytes; above the tiles of a map kernel


def map_kernel(
    b: Builder, ins: Sequence[int], out: int, compute: Callable[[Tile, list[Tile], KernelBuilder], Sequence[Instruction]],
    size: Sequence[int], slots: int = 2, name: str = "map",
) -> Kernel:  # fmt: skip
    """A double-buffered elementwise kernel over all axes of `out`; `compute(dst, sources, builder)` gives its instructions."""
    shape = b.shape(out)
    k = KernelBuilder(b, [(blocks(n, s), PARALLEL) for n, s in zip(shape, size, strict=True)], name)
    axes = [k.axis(n, s, i) for i, (n, s) in enumerate(zip(shape, size, strict=True))]
    sources = [k.load(k.window(i, k.tile(b.buffers[i].dtype, axes, slots=slots))) for i in ins]
    dst = k.tile(b.buffers[out].dtype, axes, slots=slots)
    k.result(dst, *compute(dst, sources, k), window=k.window(out, dst))
    k.release()
    return k.kernel()


def binary(op: str) -> Callable[[Tile, list[Tile], KernelBuilder], Sequence[Instruction]]:
    """`compute` of a `map_kernel` with one binary instruction."""
    return lambda dst, sources, k: [vector.Binary(op, dst, sources[0], sources[1])]


def unary(op: str) -> Callable[[Tile, list[Tile], KernelBuilder], Sequence[Instruction]]:
    """`compute` of a `map_kernel` with one unary instruction."""
    return lambda dst, sources, k: [vector.Unary(op, dst, sources[0])]


def map_program(shape: Sequence[int] = (20, 300), size: Sequence[int] = (8, 128), op: str = "add", dtype: DType = F32) -> Program:
    """out = x op y, double-buffered, with edges that need not divide."""
    b = Builder()
    x, y, out = b.input("x", dtype, shape), b.input("y", dtype, shape), b.new_output("out", dtype, shape)
    return b.program(map_kernel(b, [x, y], out, binary(op), size))


def in_place_program(shape: Sequence[int] = (20, 300), size: Sequence[int] = (8, 128)) -> Program:
    """x = x + y in a donated buffer."""
    b = Builder()
    x, y = b.input("x", F32, shape, donated=True), b.input("y", F32, shape)
    b.output("out", x)
    return b.program(map_kernel(b, [x, y], x, binary("add"), size, name="update"))


def reduce_program(shape: Sequence[int] = (20, 300), size: Sequence[int] = (8, 128), op: str = "add", dtype: DType = F32) -> Program:
    """out[i] = reduce over j of x[i, j]; the columns are a sequential axis, the accumulator is carried over its steps."""
    b = Builder()
    x, out = b.input("x", dtype, shape), b.new_output("out", dtype, (shape[0], 1))
    k = KernelBuilder(b, [(blocks(shape[0], size[0]), PARALLEL), (blocks(shape[1], size[1]), SEQUENTIAL)], "reduce")
    rows, columns = k.axis(shape[0], size[0], 0), k.axis(shape[1], size[1], 1)
    acc = k.tile(dtype, [rows, 1], slots=2, rate="point")
    free, ready = k.semaphore(2), k.semaphore()
    identity = {"add": 0, "mul": 1, "max": -np.inf, "min": np.inf}[op]
    k.emit(dma.Wait("vector", free), vector.Constant(acc, identity), section="prologue")
    source = k.load(k.window(x, k.tile(dtype, [rows, columns], slots=2)))
    k.emit(vector.ReduceInto(op, acc, source, (1,), size[1]))
    k.release()
    k.emit(dma.Signal("vector", ready), dma.Wait("store", ready), section="epilogue")
    k.emit(dma.Store(k.window(out, acc)), dma.Signal("store", free), section="epilogue")
    return b.program(k.kernel())


def matmul_kernel(b: Builder, a: int, w: int, out: int, size: tuple[int, int, int], name: str = "matmul") -> Kernel:
    """out[m, n] = a[m, k] . w[k, n] with sequential K-tiles, an accumulator, and a read-out through vector memory."""
    (m, k_extent), n = b.shape(a), b.shape(w)[1]
    grid = [(blocks(m, size[0]), PARALLEL), (blocks(n, size[1]), PARALLEL), (blocks(k_extent, size[2]), SEQUENTIAL)]
    k = KernelBuilder(b, grid, name)
    rows, columns, depth = k.axis(m, size[0], 0), k.axis(n, size[1], 1), k.axis(k_extent, size[2], 2)
    dtype = b.buffers[a].dtype
    acc_dtype = F32 if dtype.is_float else S32
    acc = k.tile(acc_dtype, [rows, columns], space="acc")
    dst = k.tile(acc_dtype, [rows, columns], slots=2, rate="point")
    k.emit(matrix.MatmulZero(acc), section="prologue")
    left = k.load(k.window(a, k.tile(dtype, [rows, depth], slots=2)), reader="matrix")
    right = k.load(k.window(w, k.tile(dtype, [depth, columns], slots=2)), reader="matrix")
    k.emit(matrix.MatmulAccumulate(acc, left, right, (0, 1), (0, 2), (2, 1)))
    k.release()
    k.result(dst, matrix.MatmulRead(dst, acc), window=k.window(out, dst), writer="matrix", section="epilogue")
    return k.kernel()


def matmul_program(shape: tuple[int, int, int] = (20, 40, 70), size: tuple[int, int, int] = (8, 16, 32), dtype: DType = F32) -> Program:
    """out = a . w of shape (m, n, k)."""
    b = Builder()
    m, n, depth = shape
    a, w = b.input("a", dtype, (m, depth)), b.input("w", dtype, (depth, n))
    out = b.new_output("out", F32 if dtype.is_float else S32, (m, n))
    return b.program(matmul_kernel(b, a, w, out, size))


def conv_program(dtype: DType = F32) -> Program:
    """out[i, o] = sum over r, c of x[2 i + 2 r - 3, c] w[r, c, o]: halo tiles of x, blocks of every label, zeros on both sides."""
    b = Builder()
    (length, channels), (window, features), positions = (20, 6), (5, 7), 11
    x, w = b.input("x", dtype, (length, channels)), b.input("w", dtype, (window, channels, features))
    acc_dtype = F32 if dtype.is_float else S32
    out = b.new_output("out", acc_dtype, (positions, features))
    k = KernelBuilder(b, [(blocks(positions, 4), PARALLEL), (blocks(window, 2), SEQUENTIAL), (blocks(channels, 4), SEQUENTIAL)], "conv")
    rows, taps, depth = k.axis(positions, 4, 0), k.axis(window, 2, 1), k.axis(channels, 4, 2)
    acc = k.tile(acc_dtype, [rows, features], space="acc")
    dst = k.tile(acc_dtype, [rows, features], slots=2, rate="point")
    k.emit(matrix.MatmulZero(acc), section="prologue")
    pair = SlidingAxis(0, 3, stride=2, dilation=2)
    halo = k.tile(dtype, [pair.reach(4, 2), depth], slots=2)
    walks = (WindowAxis(length, channels, -3, ((0, 8), (1, 4))), WindowAxis(channels, 1, grid=((2, 4),)))
    left = k.load(Window(x, halo, walks), reader="matrix")
    right = k.load(k.window(w, k.tile(dtype, [taps, depth, features], slots=2)), reader="matrix")
    inside = Bound(length, ((0, 2), (3, 2)), origin=-3)
    k.emit(matrix.MatmulAccumulate(acc, left, right, (0, 1), (0, 2), (3, 2, 1), (pair,), bounds=(inside,)))
    k.release()
    k.result(dst, matrix.MatmulRead(dst, acc), window=k.window(out, dst), writer="matrix", section="epilogue")
    return b.program(k.kernel())


def scalar_kernel(
    b: Builder, ins: Sequence[int], out: int, *ops: Callable[[Tile, list[Tile]], Instruction], name: str = "scalar"
) -> Kernel:
    """Registers loaded, computed on and stored by the scalar queue; every op writes the result register."""
    k = KernelBuilder(b, (), name)
    sources = [k.load(k.window(i, k.tile(b.buffers[i].dtype, space="smem"))) for i in ins]
    dst = k.tile(b.buffers[out].dtype, space="smem")
    k.emit(*(op(dst, sources) for op in ops), dma.Store(k.window(out, dst)))
    return k.kernel()


def copy_scalar(b: Builder, source: int, out: int) -> Kernel:
    """out = source, for 0-d buffers of one type."""
    k = KernelBuilder(b, (), "copy")
    tile = k.load(k.window(source, k.tile(b.buffers[source].dtype, space="smem")))
    k.emit(dma.Store(k.window(out, tile)))
    return k.kernel()


def set_scalar(b: Builder, out: int, value: float | int | bool) -> Kernel:
    """out = value, for a 0-d buffer."""
    return scalar_kernel(b, [], out, lambda dst, _: vector.Constant(dst, value), name="set")


def loop_program(shape: Sequence[int] = (20, 130), size: Sequence[int] = (8, 128)) -> Program:
    """`trips` times: state = state * decay (in place in a donated buffer); a counter counts the trips."""
    b = Builder()
    trips, state, decay = b.input("trips", S32), b.input("state", F32, shape, donated=True), b.input("decay", F32, shape)
    count = b.new_output("count", S32)
    b.output("state", state)
    one = b.constant(1, S32)
    step = map_kernel(b, [state, decay], state, binary("mul"), size, name="decay")
    bump = scalar_kernel(b, [count, one], count, lambda dst, s: vector.Binary("add", dst, s[0], s[1]), name="count")
    return b.program(set_scalar(b, count, 0), Loop(trips, (step, bump)))


def while_program() -> Program:
    """while x < limit: x = x * 2; count = count + 1."""
    b = Builder()
    x, limit = b.input("x", F32, donated=True), b.input("limit", F32)
    b.output("x", x)
    count, more = b.new_output("count", S32), b.buffer(dtypes.PRED)
    two, one = b.constant(2, F32), b.constant(1, S32)
    condition = scalar_kernel(b, [x, limit], more, lambda dst, s: vector.Compare("lt", dst, s[0], s[1]), name="condition")
    double = scalar_kernel(b, [x, two], x, lambda dst, s: vector.Binary("mul", dst, s[0], s[1]), name="double")
    bump = scalar_kernel(b, [count, one], count, lambda dst, s: vector.Binary("add", dst, s[0], s[1]), name="count")
    return b.program(set_scalar(b, count, 0), While((condition,), more, (double, bump)))


def switch_program(shape: Sequence[int] = (10, 20)) -> Program:
    """out = (x + y, x * y, x - y)[clamp(index)]."""
    b = Builder()
    index, x, y = b.input("index", S32), b.input("x", F32, shape), b.input("y", F32, shape)
    out = b.new_output("out", F32, shape)
    branches = tuple((map_kernel(b, [x, y], out, binary(op), (8, 128), name=op),) for op in ("add", "mul", "sub"))
    return b.program(Switch(index, branches))


def feed_program(shape: Sequence[int] = (10, 20)) -> Program:
    """`trips` times: total = total + item of the infeed; the total goes to the outfeed."""
    b = Builder()
    trips, total = b.input("trips", S32), b.input("total", F32, shape, donated=True)
    b.output("total", total)
    item = b.buffer(F32, shape, "item")
    source, sink = b.infeed("items", F32, shape), b.outfeed("totals", F32, shape)
    add = map_kernel(b, [total, item], total, binary("add"), (8, 128), name="accumulate")
    return b.program(Loop(trips, (Infeed(source, item), add, Outfeed(sink, total))))


def take_program(rows: int = 30, width: int = 200, count: int = 13, size: tuple[int, int] = (8, 128), fill: float = -1.0) -> Program:
    """out[r, :] = table[index[r], :], `fill` where the index is out of range."""
    b = Builder()
    table, index = b.input("table", F32, (rows, width)), b.input("index", S32, (count,))
    out = b.new_output("out", F32, (count, width))
    k = KernelBuilder(b, [(blocks(count, size[0]), PARALLEL), (blocks(width, size[1]), PARALLEL)], "take")
    lines, columns = k.axis(count, size[0], 0), k.axis(width, size[1], 1)
    numbers = k.load(k.window(index, k.tile(S32, [lines], slots=2)), reader="load")
    tile = k.tile(F32, [lines, columns], slots=2)
    axes = (WindowAxis(rows, width, step=0), WindowAxis(width, 1, grid=((1, size[1]),)))
    free, ready = k.semaphore(2), k.semaphore()
    k.emit(dma.Wait("load", free), dma.LoadIndexed(Window(table, tile, axes, fill), numbers), dma.Signal("load", ready))
    k.emit(dma.Wait("vector", ready))
    dst = k.tile(F32, [lines, columns], slots=2)
    k.result(dst, vector.Unary("neg", dst, tile), window=k.window(out, dst))
    k.emit(dma.Signal("vector", free))
    k.release()
    return b.program(k.kernel())


def scatter_program(mode: str = "add", rows: int = 30, width: int = 200, count: int = 13, size: tuple[int, int] = (8, 128)) -> Program:
    """table[index[r], :] = mode(table[index[r], :], updates[r, :]) for r in order, in place; rows out of range are dropped."""
    b = Builder()
    table = b.input("table", F32, (rows, width), donated=True)
    index, updates = b.input("index", S32, (count,)), b.input("updates", F32, (count, width))
    b.output("table", table)
    k = KernelBuilder(b, [(blocks(count, size[0]), PARALLEL), (blocks(width, size[1]), PARALLEL)], "scatter")
    lines, columns = k.axis(count, size[0], 0), k.axis(width, size[1], 1)
    numbers = k.load(k.window(index, k.tile(S32, [lines], slots=2)), reader="store")
    values = k.load(k.window(updates, k.tile(F32, [lines, columns], slots=2)), reader="store")
    axes = (WindowAxis(rows, width, step=0), WindowAxis(width, 1, grid=((1, size[1]),)))
    k.emit(dma.StoreIndexed(mode, Window(table, values, axes), numbers))
    k.release()
    return b.program(k.kernel())


def cumulative_program(shape: Sequence[int] = (20, 300), size: Sequence[int] = (8, 128), op: str = "add") -> Program:
    """out = cumulative op of x along the columns; the carry goes from step to step."""
    b = Builder()
    x, out = b.input("x", F32, shape), b.new_output("out", F32, shape)
    k = KernelBuilder(b, [(blocks(shape[0], size[0]), PARALLEL), (blocks(shape[1], size[1]), SEQUENTIAL)], "cumulative")
    rows, columns = k.axis(shape[0], size[0], 0), k.axis(shape[1], size[1], 1)
    carry = k.tile(F32, [rows, 1])
    k.emit(vector.Constant(carry, {"add": 0.0, "mul": 1.0, "max": -np.inf, "min": np.inf}[op]), section="prologue")
    source, dst = k.load(k.window(x, k.tile(F32, [rows, columns], slots=2))), k.tile(F32, [rows, columns], slots=2)
    k.result(dst, vector.Cumulative(op, dst, carry, source, 1), window=k.window(out, dst))
    k.release()
    return b.program(k.kernel())


def sort_program(shape: tuple[int, int] = (20, 50), rows: int = 8) -> Program:
    """keys sorted along the columns, and the columns' numbers in that order."""
    b = Builder()
    keys = b.input("keys", F32, shape)
    values, order = b.new_output("values", F32, shape), b.new_output("order", S32, shape)
    k = KernelBuilder(b, [(blocks(shape[0], rows), PARALLEL)], "sort")
    axes = [k.axis(shape[0], rows, 0), TileAxis(shape[1])]
    source, numbers = k.load(k.window(keys, k.tile(F32, axes, slots=2))), k.tile(S32, axes)
    k.emit(vector.Iota(numbers, 1))
    first, second = k.tile(F32, axes, slots=2), k.tile(S32, axes, slots=2)
    free, ready = k.semaphore(2), k.semaphore()
    k.emit(dma.Wait("vector", free), vector.Sort((first, second), (source, numbers), 1, 1), dma.Signal("vector", ready))
    k.emit(dma.Wait("store", ready), dma.Store(k.window(values, first)), dma.Store(k.window(order, second)), dma.Signal("store", free))
    k.release()
    return b.program(k.kernel())


def move_kernel(
    b: Builder, source: int, out: int, axes: Sequence[WindowAxis], size: Sequence[int], fill: float = 0.0, name: str = "move"
) -> Kernel:
    """out = a window of source: load through `axes`, move, store plainly. Grid axis i walks axis i of out."""
    shape = b.shape(out)
    k = KernelBuilder(b, [(blocks(n, s), PARALLEL) for n, s in zip(shape, size, strict=True)], name)
    tiles = [k.axis(n, s, i) for i, (n, s) in enumerate(zip(shape, size, strict=True))]
    tile = k.load(Window(source, k.tile(b.buffers[source].dtype, tiles, slots=2), tuple(axes), fill), reader="store")
    k.emit(dma.Store(k.window(out, tile)))
    k.release()
    return k.kernel()


def move_program(kind: str) -> Program:
    """One window at work: "transpose", "pad", "dilate", "reverse", "stretch", "stride"."""
    b = Builder()
    x = b.input("x", F32, (20, 30))
    walk0, walk1 = ((0, 8),), ((1, 16),)
    shape, axes = {
        "transpose": ((30, 20), (WindowAxis(30, 1, grid=walk0), WindowAxis(20, 30, grid=walk1))),
        "pad": ((25, 33), (WindowAxis(20, 30, -2, walk0), WindowAxis(30, 1, -3, walk1))),
        "dilate": ((60, 91), (WindowAxis(20, 30, -1, walk0, dilation=3), WindowAxis(30, 1, -2, walk1, dilation=3))),
        "reverse": ((20, 30), (WindowAxis(20, 30, 19, ((0, -8),), -1), WindowAxis(30, 1, grid=walk1))),
        "stretch": ((20, 40, 30), (WindowAxis(20, 30, grid=walk0), WindowAxis(1, 1, step=0), WindowAxis(30, 1, grid=((2, 16),)))),
        "stride": ((7, 15), (WindowAxis(20, 30, 1, ((0, 24),), 3), WindowAxis(30, 1, 0, ((1, 32),), 2))),
    }[kind]
    out = b.new_output("out", F32, shape)
    return b.program(move_kernel(b, x, out, axes, (8, 16) if len(shape) == 2 else (8, 8, 16), fill=7.0, name=kind))


MOVES = ("transpose", "pad", "dilate", "reverse", "stretch", "stride")


def concatenate_program() -> Program:
    """out = x above y: two partial stores that cover a buffer together."""
    b = Builder()
    x, y, out = b.input("x", F32, (11, 30)), b.input("y", F32, (9, 30)), b.new_output("out", F32, (20, 30))
    kernels = []
    for source, origin in ((x, 0), (y, 11)):
        k = KernelBuilder(b, [(blocks(b.shape(source)[0], 8), PARALLEL)], f"part{origin}")
        tile = k.load(k.window(source, k.tile(F32, [k.axis(b.shape(source)[0], 8, 0), 30], slots=2)), reader="store")
        axes = (WindowAxis(20, 30, origin, ((0, 8),)), WindowAxis(30, 1))
        k.emit(dma.Store(Window(out, tile, axes)))
        k.release()
        kernels.append(k.kernel())
    return b.program(*kernels)


def update_slice_program(shape: tuple[int, int] = (20, 30), part: tuple[int, int] = (5, 30)) -> Program:
    """x[start : start + 5] = update in a donated buffer, then out = x[start : start + 5] again: windows with a register."""
    b = Builder()
    x, update, start = b.input("x", F32, shape, donated=True), b.input("update", F32, part), b.input("start", S32)
    out = b.new_output("out", F32, part)
    b.output("x", x)
    kernels = []
    for name, source, target in (("put", update, x), ("get", x, out)):
        k = KernelBuilder(b, (), name)
        register = k.load(k.window(start, k.tile(S32, space="smem")))
        mover = "store" if name == "put" else "load"
        ready = k.semaphore()
        k.emit(dma.Signal("scalar", ready), dma.Wait(mover, ready))
        moving = (WindowAxis(shape[0], shape[1], register=register), WindowAxis(shape[1], 1))
        tile = k.tile(F32, part)
        loaded = k.load(Window(x, tile, moving) if name == "get" else k.window(source, tile), reader="store")
        k.emit(dma.Store(Window(x, loaded, moving) if name == "put" else k.window(target, loaded)))
        k.release()
        kernels.append(k.kernel())
    return b.program(*kernels)


def two_layer_program(shape: tuple[int, int, int, int] = (20, 30, 40, 10)) -> Program:
    """out = max(x . w1, 0) . w2 with an f32 zero constant broadcast from a register: three kernels, several queues."""
    b = Builder()
    n, i, h, o = shape
    x, w1, w2 = b.input("x", F32, (n, i)), b.input("w1", F32, (i, h)), b.input("w2", F32, (h, o))
    zero = b.constant(0.0, F32)
    hidden, active, out = b.buffer(F32, (n, h)), b.buffer(F32, (n, h)), b.new_output("out", F32, (n, o))
    k = KernelBuilder(b, [(blocks(n, 8), PARALLEL)], "relu")
    axes = [k.axis(n, 8, 0), TileAxis(h)]
    register = k.load(k.window(zero, k.tile(F32, space="smem", slots=2)))
    free, ready = k.semaphore(1), k.semaphore()
    k.emit(dma.Signal("scalar", ready), dma.Wait("vector", ready))
    splat = k.tile(F32, axes)
    k.emit(vector.Broadcast(splat, register, ()), dma.Signal("vector", free), dma.Wait("scalar", free))
    source, dst = k.load(k.window(hidden, k.tile(F32, axes, slots=2))), k.tile(F32, axes, slots=2)
    k.result(dst, vector.Binary("max", dst, source, splat), window=k.window(active, dst))
    k.release()
    return b.program(matmul_kernel(b, x, w1, hidden, (8, 16, 16)), k.kernel(), matmul_kernel(b, active, w2, out, (8, 16, 16), "matmul2"))


def resident_program(shape: tuple[int, int] = (20, 300), size: tuple[int, int] = (8, 128)) -> Program:
    """out[i, j] = x[i, j] * scale[i]: the scale is loaded once a point, in the prologue, and stays for all steps."""
    b = Builder()
    x, scale, out = b.input("x", F32, shape), b.input("scale", F32, (shape[0], 1)), b.new_output("out", F32, shape)
    k = KernelBuilder(b, [(blocks(shape[0], size[0]), PARALLEL), (blocks(shape[1], size[1]), SEQUENTIAL)], "resident")
    rows, columns = k.axis(shape[0], size[0], 0), k.axis(shape[1], size[1], 1)
    factor = k.load(k.window(scale, k.tile(F32, [rows, 1], slots=2, rate="point")), section="prologue")
    release, k.releases = k.releases, []
    source, dst = k.load(k.window(x, k.tile(F32, [rows, columns], slots=2))), k.tile(F32, [rows, columns], slots=2)
    wide = k.tile(F32, [rows, columns])
    stretch, multiply = vector.Broadcast(wide, factor, (0, 1)), vector.Binary("mul", dst, source, wide)
    k.result(dst, stretch, multiply, window=k.window(out, dst))
    k.release()
    k.emit(*release, section="epilogue")
    return b.program(k.kernel())


def counter_program(width: int = 130, steps: int = 3) -> Program:
    """out = the sum of the table's blocks of four rows; a register that counts up every step moves the window."""
    b = Builder()
    table, out = b.input("table", F32, (4 * steps, width)), b.new_output("out", F32, (4, width))
    k = KernelBuilder(b, [(blocks(width, 128), PARALLEL), (steps, SEQUENTIAL)], "counter")
    columns = k.axis(width, 128, 0)
    row, four = k.tile(S32, space="smem"), k.tile(S32, space="smem")
    total = k.tile(F32, [4, columns], slots=2, rate="point")
    unused, counted, used, free, ready = (k.semaphore(n) for n in (1, 0, 1, 2, 0))
    k.emit(dma.Wait("scalar", unused), vector.Constant(row, -4), vector.Constant(four, 4), section="prologue")
    k.emit(dma.Wait("vector", free), vector.Constant(total, 0.0), section="prologue")
    k.emit(dma.Wait("scalar", used), vector.Binary("add", row, row, four), dma.Signal("scalar", counted), dma.Wait("load", counted))
    moving = (WindowAxis(4 * steps, width, register=row), WindowAxis(width, 1, grid=((0, 128),)))
    source = k.load(Window(table, k.tile(F32, [4, columns], slots=2), moving))
    k.emit(dma.Signal("load", used), vector.Binary("add", total, total, source))
    k.release()
    k.emit(dma.Signal("load", unused), dma.Signal("vector", ready), dma.Wait("store", ready), section="epilogue")
    k.emit(dma.Store(k.window(out, total)), dma.Signal("store", free), section="epilogue")
    return b.program(k.kernel())


def vmem_program(
    first: int = VMEM_PLACE, second: int = 2 * VMEM_PLACE, shape: Sequence[int] = (16, 256), last: Sequence[int] = (8, 128)
) -> Program:
    """out = -(-(-x)); both arrays in between stay in VMEM, at these addresses. `last`: the tiles of the third kernel."""
    b = Builder()
    x, one, two = b.input("x", F32, shape), b.buffer(F32, shape, address=first), b.buffer(F32, shape, address=second)
    out = b.new_output("out", F32, shape)
    rows = ((x, one, "first", (8, 128)), (one, two, "second", (8, 128)), (two, out, "third", last))
    code = [map_kernel(b, [source], target, unary("neg"), tile, name=name) for source, target, name, tile in rows]
    b.buffers[one], b.buffers[two] = (replace(b.buffers[n], space="vmem") for n in (one, two))
    return b.program(*code)


def copies_program() -> Program:
    """out = -y + -x + -(-x): -x is made in VMEM and copied to HBM, where the last kernel reads it; y is copied to VMEM ahead of its
    reader."""
    b, shape = Builder(), (16, 256)
    x, y = b.input("x", F32, shape), b.input("y", F32, shape)
    made, ahead = (b.buffer(F32, shape, address=VMEM_PLACE * n) for n in (1, 2))
    kept, twice, other = (b.buffer(F32, shape) for _ in range(3))
    out = b.new_output("out", F32, shape)

    def negated(source: int, target: int, name: str) -> Kernel:
        return map_kernel(b, [source], target, unary("neg"), (8, 128), name=name)

    last = map_kernel(
        b, [other, kept, twice], out, lambda dst, s, k: [vector.Binary("add", dst, s[0], s[1]), vector.Binary("add", dst, dst, s[2])],
        (8, 128), name="last",
    )  # fmt: skip
    code = (
        negated(x, made, "make"), Copy(made, kept, 0), Copy(y, ahead, 1), negated(made, twice, "between"), Await(1), Await(0),
        negated(ahead, other, "reader"), last,
    )  # fmt: skip
    b.buffers[made], b.buffers[ahead] = (replace(b.buffers[n], space="vmem") for n in (made, ahead))
    return b.program(*code)


def all_programs() -> dict[str, Program]:
    """One of each, by name."""
    made = {
        "map": map_program(), "map_f16": map_program(dtype=dtypes.F16), "in_place": in_place_program(), "reduce": reduce_program(),
        "reduce_max": reduce_program(op="max"), "matmul": matmul_program(), "matmul_s32": matmul_program(dtype=S32), "conv": conv_program(),
        "loop": loop_program(),
        "while": while_program(), "switch": switch_program(), "feed": feed_program(), "take": take_program(), "scatter": scatter_program(),
        "cumulative": cumulative_program(), "sort": sort_program(), "concatenate": concatenate_program(),
        "update_slice": update_slice_program(), "resident": resident_program(), "vmem": vmem_program(), "copies": copies_program(),
        "counter": counter_program(), "two_layer": two_layer_program(), "empty": map_program((0, 5), (8, 128)),
    }  # fmt: skip
    return made | {kind: move_program(kind) for kind in MOVES}


def random_inputs(program: Program, seed: int = 0, low: int = -4, high: int = 4) -> list[np.ndarray]:
    """One array a port: standard normal floats, small integers, fair booleans."""
    rng = np.random.default_rng(seed)
    return [random_array(rng, p.dtype, p.shape, low, high) for p in program.inputs]


def random_array(rng: np.random.Generator, dtype: DType, shape: Sequence[int], low: int = -4, high: int = 4) -> np.ndarray:
    """Standard normal floats, integers of [low, high) (non-negative ones if unsigned), fair booleans."""
    if dtype.is_float:
        return np.asarray(rng.standard_normal(tuple(shape))).astype(dtype.numpy)
    if dtype.kind == "pred":
        return np.asarray(rng.random(tuple(shape)) < 0.5)
    return np.asarray(rng.integers(0 if dtype.kind == "uint" else low, high, tuple(shape))).astype(dtype.numpy)
