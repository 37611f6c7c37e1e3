"""The load-time verifier: it accepts what is valid, refuses what is not with a message that teaches, and what it accepts runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests import programs
from tests.mutation import mutate
from tests.program_builder import Builder, KernelBuilder, edit_kernel, substitute
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.verify import verify
from tpuflow.dtypes import BF16, F16, F32, PRED, S32, U32
from tpuflow.errors import ProgramError
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.bounds import Bound
from tpuflow.isa.calls import HostFunction
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import CallHost, GridAxis, Infeed, Kernel, Loop, Outfeed, Program, Switch, While

PROGRAMS = programs.all_programs()


@pytest.mark.parametrize("name", PROGRAMS)
def test_valid_programs_are_accepted(name: str) -> None:
    verify(PROGRAMS[name])
    verify(PROGRAMS[name].strip())


def refuses(program: Program, *words: str) -> None:
    """The verifier refuses with a message that has all the words (regular expressions)."""
    with pytest.raises(ProgramError) as raised:
        verify(program)
    for w in words:
        assert raised.match(w)


# --- tables


def with_buffer(number: int, **changes: Any) -> Program:
    """The map program (x, y, out) with a buffer changed."""
    program = programs.map_program()
    buffers = list(program.buffers)
    buffers[number] = replace(buffers[number], **changes)
    return replace(program, buffers=tuple(buffers))


def with_port(kind: str, **changes: Any) -> Program:
    """The map program with its first input or output changed."""
    program = programs.map_program()
    first, *rest = getattr(program, kind)
    return replace(program, **{kind: (replace(first, **changes), *rest)})


def test_tables_that_do_not_fit_are_refused() -> None:
    refuses(with_buffer(0, address=-4), "buffer table: buffer 0 lies at bytes -4 to 23996 of hbm; generic has 17179869184")
    refuses(with_buffer(2, address=2**34), "buffer table: buffer 2 lies at bytes 17179869184")
    refuses(with_buffer(1, shape=(20, -1)), r"buffer 1 has shape \[20, -1\]; expected sizes >= 0")
    refuses(with_buffer(1, address=64), "inputs and constants: buffers 0 and 1 overlap at byte 64")
    refuses(with_port("inputs", buffer=9), "signature: buffer 9 does not exist; the program has 3")
    refuses(with_port("inputs", buffer=1), "inputs and constants: buffer(s 1 and 1| 1)")
    refuses(with_port("inputs", dtype=S32), r"input 'x' is s32\[20, 300\], its buffer 0 f32\[20, 300\]")
    refuses(with_port("outputs", donated=True), "output 'out' is donated; expected only inputs to be")
    feed = programs.feed_program()
    refuses(replace(feed, infeeds=(replace(feed.infeeds[0], buffer=0),)), "infeed 'items' has buffer 0")


def test_constants_that_do_not_fit_are_refused() -> None:
    program = programs.loop_program()
    (one,) = program.constants
    refuses(replace(program, constants=(replace(one, data=b"\1"),)), "constants: buffer 4 gets 1 bytes; expected 4")
    refuses(replace(program, constants=(one, one)), "inputs and constants: buffer.* 4")
    b = Builder()
    flag = b.output("flag", b.constant(np.array([True])))
    bad = b.program()
    verify(bad)
    refuses(replace(bad, constants=(replace(bad.constants[0], data=b"\2"),)), f"buffer {flag} of pred holds bytes other than 0 and 1")


def test_blocks_that_do_not_fit_are_refused() -> None:
    loop, feed = programs.loop_program(), programs.feed_program()
    refuses(replace(loop, code=(Loop(1, ()),)), r"loop 0: the trip count is buffer 1, f32\[20, 130\]; expected s32\[\]")
    refuses(replace(loop, code=(While((), 3, ()),)), r"while 0: the predicate is buffer 3, s32\[\]; expected pred\[\]")
    refuses(replace(loop, code=(Switch(0, ()),)), "switch 0: no branches")
    refuses(replace(loop, code=(Loop(99, ()),)), "loop 0: buffer 99 does not exist")
    refuses(replace(feed, code=(Infeed(1, 2),)), "infeed 0: port 1 does not exist; the program has 1 infeeds")
    refuses(replace(feed, code=(Outfeed(0, 0),)), r"outfeed 0: buffer 0 is s32\[\], port 'totals' f32\[10, 20\]; expected the same")
    array = ((F32, (20, 130)),)
    asks = replace(loop, functions=(HostFunction(np.sort, "", array, array),))
    refuses(replace(loop, code=(CallHost(0, (1,), (1,)),)), "callhost 0: function 0 of the host does not exist; the program has 0")
    refuses(replace(asks, code=(CallHost(0, (), (1,)),)), r"callhost 0: has sources \[\]; expected 1")
    refuses(replace(asks, code=(CallHost(0, (1,), (3,)),)), r"buffer 3 of its targets is s32\[\]; expected the elements of f32\[20, 130\]")
    deep: Any = ()
    for _ in range(80):
        deep = (Loop(0, deep),)
    refuses(replace(loop, code=deep), "nested 33 deep; expected at most 32")


# --- kernels


def with_kernel(change: Callable[[Kernel], Kernel], program: Program | None = None) -> Program:
    """The map program (or another) with its first kernel changed."""
    return edit_kernel(program or programs.map_program(), change)


def with_tile(change: Callable[[Tile], Tile], program: Program | None = None) -> Program:
    """The program with every tile operand of its first kernel changed, consistently."""

    def changed(i: Instruction) -> Instruction:
        made = {}
        for name, kind, value in i.fields():
            if kind.name == "tile":
                made[name] = change(value)
            elif kind.name == "window":
                made[name] = replace(value, tile=change(value.tile))
        return replace(i, **made)  # type: ignore[type-var]

    return with_kernel(lambda k: substitute(k, changed), program)


def test_kernels_of_a_wrong_form_are_refused() -> None:
    grid = programs.map_program().code[0].grid  # type: ignore[union-attr]
    diagonal, late = replace(grid[0], kind="diagonal"), replace(grid[0], kind="sequential")
    refuses(with_kernel(lambda k: replace(k, grid=(diagonal, grid[1]))), "^kernel 0 'map': a grid axis is .*diagonal")
    refuses(with_kernel(lambda k: replace(k, grid=(late, grid[1]))), "expected the parallel ones first")
    refuses(
        with_kernel(lambda k: replace(k, prologue=k.body[:3], body=k.body[3:])), "without sequential axes has a prologue or an epilogue"
    )
    refuses(with_kernel(lambda k: replace(k, semaphores=(-1, *k.semaphores[1:]))), "initial semaphore counts are")
    longer = replace(grid[0], size=4)
    refuses(with_kernel(lambda k: replace(k, grid=(longer, grid[1]))), "20 elements in blocks of 8 runs over grid axis 0 of 4")


def test_tiles_outside_their_memory_are_refused() -> None:
    refuses(
        with_tile(lambda t: replace(t, address=t.address + 2**24)), r"body\[1\] load: a tile lies at bytes 16777216 to 16785408 of vmem"
    )
    refuses(with_tile(lambda t: replace(t, slots=0)), "a tile has 0 slots; expected 1 to 64")
    refuses(with_tile(lambda t: replace(t, rate="often")), "its slots used by 'often'")
    refuses(with_tile(lambda t: replace(t, space="cache")), "in 'cache'")
    refuses(with_tile(lambda t: replace(t, axes=(*t.axes, *[TileAxis(1)] * 5))), "a tile of rank 7 in 'vmem'")
    refuses(with_tile(lambda t: replace(t, axes=(replace(t.axes[0], grid=7), t.axes[1]))), "blocked by grid axis 7; the kernel has 2")
    refuses(with_tile(lambda t: replace(t, axes=(t.axes[0], TileAxis(128, -1, 5)))), "an unblocked tile axis is .* extent 0")


def with_window(change: Callable[[Window], Window], program: Program | None = None) -> Program:
    """The program with the window of its first load changed."""
    done: list[int] = []

    def changed(i: Instruction) -> Instruction:
        if not isinstance(i, dma.Load) or done:
            return i
        done.append(1)
        return replace(i, window=change(i.window))

    return with_kernel(lambda k: substitute(k, changed), program)


def with_axis(**changes: Any) -> Program:
    """The map program with axis 0 of its first load's window changed."""
    return with_window(lambda w: replace(w, axes=(replace(w.axes[0], **changes), w.axes[1])))


def test_windows_that_do_not_fit_are_refused() -> None:
    register = Tile("vmem", 0, S32)
    refuses(with_axis(extent=21), r"view extents \[21, 300\] hold 6300 elements, the buffer 6000")
    refuses(with_axis(pitch=299), "not row-major in any order")
    refuses(with_axis(dilation=0), "dilation >= 1")
    refuses(with_axis(origin=2**31), "below 2\\^31")
    refuses(with_axis(grid=((2, 8),)), r"moves with grid axes \[2\]")
    refuses(with_axis(grid=((0, 8), (0, 8))), r"moves with grid axes \[0, 0\]")
    refuses(with_axis(register=register), "the window's register is s32 in vmem; expected s32 in smem")
    refuses(with_window(lambda w: replace(w, axes=w.axes[:1])), "the window has 1 axes, its tile 2")
    refuses(with_window(lambda w: replace(w, buffer=3)), "buffer 3 does not exist")
    refuses(with_window(lambda w: replace(w, fill="x")), "the immediate 'x' is not a value of f32")  # type: ignore[arg-type]
    refuses(with_tile(lambda t: replace(t, dtype=BF16)), "buffer 0 of f32 and a tile of bf16 in vmem; expected one type")


A, B, ROW = TileAxis(8), TileAxis(128), TileAxis(1)


def vmem(dtype: Any, *axes: TileAxis, at: int = 0) -> Tile:
    """A tile in vector memory."""
    return Tile("vmem", at, dtype, axes)


def _bounded(bound: Bound) -> Instruction:
    return matrix.MatmulAccumulate(ACC, X, vmem(F32, B, TileAxis(16)), (0, 1), (0, 2), (2, 1), bounds=(bound,))


X, Y, P = vmem(F32, A, B), vmem(F32, A, B, at=0x1000), vmem(PRED, A, B, at=0x2000)
ACC = Tile("acc", 0, F32, (A, TileAxis(16)))
OPERANDS = {
    "binary types": (vector.Binary("add", X, X, vmem(F16, A, B)), "b is f16; expected f32, the type of dst"),
    "binary axes": (vector.Binary("add", X, X, vmem(F32, B, A)), r"b has axes \[128, 8\]; expected \[8, 128\]"),
    "binary space": (vector.Binary("add", X, X, replace(ACC, axes=(A, B))), "operands lie in acc, vmem; expected all in vmem, or all"),
    "binary op": (vector.Binary("and", X, X, X), "'and' is not defined on f32; binary operations on it: add, sub"),
    "unary op": (vector.Unary("popcnt", X, X), "'popcnt' is not defined on f32"),
    "op name": (vector.Unary("gelu", X, X), "op is 'gelu'; expected one of neg, abs"),
    "compare": (vector.Compare("lt", X, X, X), "dst is f32; expected pred"),
    "select": (vector.Select(X, X, X, X), "pred is f32; expected pred"),
    "is_finite": (vector.IsFinite(P, P), "a is pred; expected a type of kind float or int or uint"),
    "bitcast": (vector.Bitcast(vmem(F16, A, B), X), "bits of f32 read as f16"),
    "constant": (vector.Constant(vmem(U32, A, B), -1), "the immediate -1 is not a value of u32"),
    "constant of pred": (vector.Constant(P, 2), "the immediate 2 is not a value of pred"),
    "iota axis": (vector.Iota(X, 2), "axis is 2; dst has rank 2"),
    "iota type": (vector.Iota(P, 0), "dst is pred"),
    "random type": (vector.Random(X, vmem(U32, TileAxis(4)), (128, 1)), "dst is f32; expected u32"),
    "random state": (vector.Random(vmem(U32, A, B), vmem(U32, B), (128, 1)), r"state has axes \[128\]; expected \[4\]"),
    "random strides": (vector.Random(vmem(U32, A, B), vmem(U32, TileAxis(4)), (1,)), r"strides are \(1,\); expected 2, one an axis of dst"),
    "broadcast": (vector.Broadcast(X, vmem(F32, A), (1,)), r"axis \[8\] of a lies along \[128\] of dst"),
    "broadcast order": (vector.Broadcast(X, vmem(F32, B, A), (1, 0)), "expected ascending axes of dst"),
    "transpose": (vector.Transpose(X, X, (1, 0)), r"dst has axes \[8, 128\]; expected \[128, 8\]"),
    "permutation": (vector.Transpose(X, X, (0, 0)), r"permutation is \(0, 0\)"),
    "slice of too few": (vector.Slice(X, X, (1, 0), (1, 1)), r"axis 0 of a is \[8\]; expected one that is not cut .*, of at least 9"),
    "slice without strides": (vector.Slice(X, X, (0, 0), (1, 0)), r"strides \(1, 0\) of a with rank 2; expected 2 of each"),
    "slice of another rank": (vector.Slice(X, vmem(F32, B), (0,), (1,)), r"starts are \(0,\) .* of a with rank 1; expected 2 of each"),
    "reduce_into axes": (vector.ReduceInto("add", X, X, (1, 1), 8), "expected ascending axes of a"),
    "reduce_into order": (vector.ReduceInto("add", X, X, (1, 0), 8), "expected ascending axes of a"),
    "reduce_into block": (vector.ReduceInto("add", vmem(F32, A, ROW), X, (1,), 0), "block is 0; expected at least 1 element"),
    "reduce_into": (vector.ReduceInto("max", vmem(F32, ROW, B), X, (1,), 8), r"acc has axes \[1, 128\]; expected \[8, 1\]"),
    "cumulative": (vector.Cumulative("add", X, X, X, 1), r"carry has axes \[8, 128\]; expected \[8, 1\]"),
    "cumulative places": (vector.Cumulative("add", X, vmem(F32, A, ROW), Y, 1), "dst and carry overlap"),
    "sort keys": (vector.Sort((X,), (Y,), 1, 2), "1 results, 1 operands, 2 keys"),
    "sort types": (vector.Sort((X,), (vmem(S32, A, B),), 1, 1), "a result is f32, its operand s32"),
    "sort count": (vector.Sort((vmem(F32, A, TileAxis(129)),), (X,), 1, 1), "results have 129 elements along axis 1; expected 1 to 128"),
    "sort shapes": (vector.Sort((vmem(F32, A, ROW), Y), (X, Y), 1, 1), r"dsts\[1\] has axes \[8, 128\]; expected \[8, 1\]"),
    "sort places": (vector.Sort((X, X), (X, Y), 1, 1), "two results overlap"),
    "matmul labels": (matrix.MatmulAccumulate(ACC, X, vmem(F32, B, A), (0, 1), (0, 2), (2, 1)), r"label 1 is axis \[16\] and axis \[8\]"),
    "matmul sums": (matrix.MatmulAccumulate(ACC, X, vmem(F32, TileAxis(16)), (0, 1), (0, 2), (1,)), "expected every label in at least"),
    "matmul types": (
        matrix.MatmulAccumulate(replace(ACC, dtype=S32), X, vmem(F32, B, TileAxis(16)), (0, 1), (0, 2), (2, 1)),
        r"s32 \+= f32 \. f32; expected operands of one numeric type",
    ),
    "matmul precision": (
        matrix.MatmulAccumulate(ACC, vmem(F16, A, B), vmem(F16, B, TileAxis(16)), (0, 1), (0, 2), (2, 1), precision="bf16"),
        "f16 operands at precision bf16; expected exact, or operands of f32",
    ),
    "matmul blocks": (
        matrix.MatmulAccumulate(ACC, X, vmem(F32, B, TileAxis(16)), (0, 1), (0, 2), (2, 1), block=1),
        "block is 1 of 128 contracted positions; expected at most 64 blocks",
    ),
    "matmul blocks of bounds": (
        matrix.MatmulAccumulate(ACC, X, vmem(F32, B, TileAxis(16)), (0, 1), (0, 2), (2, 1), bounds=(Bound(128, ((2, 1),)),), block=64),
        r"contracted labels \(2,\) and labels \(2,\) in pairs and bounds; expected a last contracted label that is in neither",
    ),
    "conv halo": (
        matrix.MatmulAccumulate(ACC, X, vmem(F32, TileAxis(3), B, TileAxis(16)), (0, 1), (0, 2), (3, 2, 1), (SlidingAxis(0, 3, 2, 1),)),
        r"axis 0 of a is \[8\]; expected \[17\], the reach of \[8\] in strides of 2 and \[3\] in strides of 1",
    ),
    "conv axis": (
        matrix.MatmulAccumulate(ACC, X, vmem(F32, B, TileAxis(16)), (0, 1), (0, 2), (2, 1), (SlidingAxis(2, 3, 1, 1),)),
        r"pairs are of the axes \[2\]; expected different axes of a",
    ),
    "conv label": (
        matrix.MatmulAccumulate(ACC, X, vmem(F32, B, TileAxis(16)), (0, 1), (0, 2), (2, 1), (SlidingAxis(0, 2, 1, 1),)),
        "expected every label in at least two of the three, once in each",
    ),
    "conv stride": (
        matrix.MatmulAccumulate(ACC, X, vmem(F32, B, TileAxis(16)), (0, 1), (0, 2), (2, 1), (SlidingAxis(0, 3, 0, 1),)),
        "a pair has stride 0, dilation 1",
    ),
    "bound of no operand": (_bounded(Bound(8, ((0, 1), (1, 1)))), r"terms \(\(0, 1\), \(1, 1\)\); expected labels of a, \(0, 2\), or of b"),
    "bound of unknown label": (_bounded(Bound(8, ((7, 1),))), "expected labels of a"),
    "bound without terms": (_bounded(Bound(8, ())), "expected labels of a"),
    "bound that stands still": (_bounded(Bound(8, ((0, 0),))), "expected different labels, and factors other than 0"),
    "bound twice along a label": (_bounded(Bound(8, ((0, 1), (0, 1)))), "expected different labels"),
    "bound of no dilation": (_bounded(Bound(8, ((0, 1),), dilation=0)), "extent 8 and dilation 0"),
    "bound far away": (_bounded(Bound(8, ((0, 2**30),))), "of places 0 to 7516192768; expected 32-bit numbers"),
    "matmul space": (matrix.MatmulZero(X), "acc lies in vmem; expected acc"),
    "mm_read": (matrix.MatmulRead(vmem(S32, A, TileAxis(16)), ACC), "dst is s32; expected f32, the type of acc, or bf16 or f16"),
    "semaphore": (dma.Signal("load", 5), "semaphore 5 does not exist; the kernel has 0"),
    "queue": (dma.Signal("dma", 0), "on is 'dma'; expected one of scalar, matrix"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_do_not_fit_are_refused(name: str) -> None:
    instruction, words = OPERANDS[name]
    b = Builder()
    kernel = Kernel((), (), (), (instruction,), (), "k", ("user.py:3",))
    refuses(b.program(kernel), rf"^kernel 0 'k', body\[0\] {instruction.mnemonic}: ", words, "Source: user.py:3")


def test_a_slice_is_of_axes_that_are_whole_in_every_tile() -> None:
    cut = vmem(F32, TileAxis(8, 0, 20), B)
    kernel = Kernel((GridAxis(3, "parallel"),), (), (), (vector.Slice(vmem(F32, TileAxis(4), B), cut, (0, 0), (2, 1)),), (), "k")
    refuses(
        Builder().program(kernel),
        r".*axis 0 of a is \[8 of 20 by grid 0\]; expected one that is not cut into tiles, of at least 7 elements",
    )


def test_indexed_transfers_that_do_not_fit_are_refused() -> None:
    def change(**fields: Any) -> Callable[[Kernel], Kernel]:
        return lambda k: substitute(k, lambda i: replace(i, **fields) if isinstance(i, dma.StoreIndexed) else i)

    program = programs.scatter_program()
    (store,) = [i for i in program.code[0].body if isinstance(i, dma.StoreIndexed)]  # type: ignore[union-attr]
    stepping = replace(store.window, axes=(replace(store.window.axes[0], step=1), store.window.axes[1]))
    refuses(with_kernel(change(mode="sub"), program), "mode is 'sub'; expected one of set, add")
    refuses(with_kernel(change(index=replace(store.index, dtype=U32)), program), "index is u32")
    refuses(with_kernel(change(window=stepping), program), "the window's axis 0 has step 1, dilation 1; expected 0 and 1")


def test_a_semaphore_has_one_signaller_and_one_waiter() -> None:
    def on(i: Instruction) -> Instruction:
        return replace(i, on="vector") if isinstance(i, dma.Signal) and i.semaphore == 3 else i

    refuses(with_kernel(lambda k: substitute(k, on)), "read here while nothing orders that after its write")
    refuses(
        with_kernel(lambda k: replace(k, body=(*k.body, dma.Signal("store", 1), dma.Wait("vector", 1)))), "signalled by store and by load"
    )


def test_too_many_slots_to_walk_are_refused() -> None:
    slots = iter((61, 59, 2) * 20)
    chosen: dict[int, int] = {}
    program = with_tile(lambda t: replace(t, slots=chosen.setdefault(t.address, next(slots)), address=t.address * 64))
    refuses(program, r"tiles have \[1, 2, 59, 61\] slots by step.*at most 64|\[1, .*\] slots by step")


# --- HBM within a kernel


def store_kernel(
    axes: Sequence[WindowAxis], tile_axes: Sequence[TileAxis | int], shape: Sequence[int], grid: Sequence[tuple[int, str]]
) -> Program:
    """A kernel that stores ones through a window."""
    b = Builder()
    out = b.new_output("out", F32, shape)
    k = KernelBuilder(b, grid)
    tile = k.tile(F32, tile_axes, slots=2)
    k.result(tile, vector.Constant(tile, 1.0), window=Window(out, tile, tuple(axes)))
    return b.program(k.kernel())


def test_a_store_must_write_each_element_once() -> None:
    whole = (WindowAxis(16, 1, grid=((0, 8),)),)
    verify(store_kernel(whole, [TileAxis(8, 0, 16)], (16,), [(2, "parallel")]))
    refuses(store_kernel(whole, [TileAxis(8, 0, 16)], (16,), [(2, "parallel"), (3, "sequential")]), "may write an element more than once")
    overlapping = (WindowAxis(16, 1, grid=((0, 7),)),)
    refuses(store_kernel(overlapping, [TileAxis(8, 0, 16)], (16,), [(2, "parallel")]), "may write an element more than once of buffer 0")
    standing = (WindowAxis(16, 1, step=0),)
    refuses(store_kernel(standing, [2], (16,), []), "may write an element more than once")


def test_what_a_store_leaves_out_makes_the_buffer_only_partly_written() -> None:
    every_second = (WindowAxis(16, 1, step=2),)
    refuses(store_kernel(every_second, [8], (16,), []), "output 'out' is buffer 0, which is only partly written at the end")
    shifted = (WindowAxis(16, 1, origin=-1),)
    refuses(store_kernel(shifted, [16], (16,), []), "only partly written")
    reversed_ = (WindowAxis(16, 1, origin=15, step=-1),)
    verify(store_kernel(reversed_, [16], (16,), []))


def test_an_indexed_store_must_bring_each_row_once() -> None:
    def widened(k: Kernel) -> Kernel:
        return replace(k, grid=(k.grid[0], k.grid[1], replace(k.grid[0], size=2)))

    refuses(with_kernel(widened, programs.scatter_program()), "may write a row more than once")


def test_a_kernel_updates_a_buffer_in_place_or_not_at_all() -> None:
    def shifted(w: Window) -> Window:
        return replace(w, axes=(replace(w.axes[0], origin=1), w.axes[1]))

    refuses(
        with_window(shifted, programs.in_place_program()), "reads buffer 0, which it also writes, at another place", "Source: update.py:2"
    )


def test_two_stores_of_a_kernel_to_one_buffer_must_be_apart() -> None:
    def two(origin: int) -> Program:
        b = Builder()
        out = b.new_output("out", F32, (16,))
        k = KernelBuilder(b)
        tile = k.tile(F32, [8], slots=2)
        for start in (0, origin):
            k.result(tile, vector.Constant(tile, 1.0), window=Window(out, tile, (WindowAxis(16, 1, start),)))
        return b.program(k.kernel())

    refuses(two(7), "two stores of one kernel to buffer 0 are not shown to write different elements")
    refuses(two(8), "is overwritten here while nothing orders that")  # both use slot 0: one semaphore does not speak for the other
    b = Builder()
    out = b.new_output("out", F32, (16,))
    k = KernelBuilder(b)
    for start in (0, 8):
        tile = k.tile(F32, [8])
        k.result(tile, vector.Constant(tile, 1.0), window=Window(out, tile, (WindowAxis(16, 1, start),)))
    verify(b.program(k.kernel()))


# --- HBM over blocks


def test_what_only_some_branches_write_is_not_valid_after_them() -> None:
    program = programs.switch_program()
    (switch,) = program.code
    partly = replace(program, code=(replace(switch, branches=(*switch.branches[:2], ())),))  # type: ignore[union-attr, type-var]
    refuses(partly, "output 'out' is buffer 3, which is not written")


def test_what_a_loop_writes_may_not_have_been_written() -> None:
    b = Builder()
    trips, x, out = b.input("trips", S32), b.input("x", F32, (8, 128)), b.new_output("out", F32, (8, 128))
    kernel = programs.map_kernel(b, [x], out, programs.unary("neg"), (8, 128))
    refuses(b.program(Loop(trips, (kernel,))), "output 'out' is buffer 2, which is not written")
    verify(b.program(kernel, Loop(trips, (kernel,))))


def test_a_loop_must_leave_what_its_next_trip_reads() -> None:
    b = Builder()
    trips, x = b.input("trips", S32), b.input("x", F32, (8, 128), donated=True)
    over = b.buffer(F32, (8, 128), address=b.buffers[x].address)
    kept, out = b.buffer(F32, (8, 128)), b.new_output("out", F32, (8, 128))
    read = programs.map_kernel(b, [x], kept, programs.unary("neg"), (8, 128), name="read")
    clobber = programs.map_kernel(b, [kept], over, programs.unary("neg"), (8, 128), name="clobber")
    done = programs.map_kernel(b, [kept], out, programs.unary("abs"), (8, 128), name="done")
    verify(b.program(read, clobber, done))
    again = b.program(read, Loop(trips, (read, clobber)), done)
    refuses(again, "^kernel 1.body.0 'read', body.1. load: reads buffer 1, which is not written, or overwritten")


def test_predicates_and_counts_must_be_valid_where_they_are_tested() -> None:
    program = programs.while_program()
    untested = replace(program.code[1], condition=())  # type: ignore[type-var]
    refuses(replace(program, code=(untested,)), "while 0: tests buffer 3, which is not written")
    b = Builder()
    refuses(b.program(Loop(b.buffer(S32), ())), "loop 0: takes its trip count from buffer 0, which is not written")
    refuses(replace(programs.feed_program(), code=(Outfeed(0, 2),)), "outfeed 0: sends buffer 2, which is not written")


def test_an_output_may_be_an_input_that_nothing_touches() -> None:
    b = Builder()
    b.output("same", b.input("x", F32, (3,)))
    verify(b.program())


# --- what is accepted runs


def _reordered(program: Program, rng: random.Random) -> Program:
    """The program with one instruction dropped, doubled, or swapped with the next."""

    def change(k: Kernel) -> Kernel:
        section = rng.choice([s for s in ("prologue", "body", "epilogue") if getattr(k, s)])
        code = list(getattr(k, section))
        n = rng.randrange(len(code))
        what = rng.random()
        if what < 0.3:
            del code[n]
        elif what < 0.5:
            code.insert(rng.randrange(len(code) + 1), code[n])
        elif n + 1 < len(code):
            code[n], code[n + 1] = code[n + 1], code[n]
        return replace(k, **{section: tuple(code)}, sources=())

    return edit_kernel(program, change, rng.randrange(len(list(program.kernels()))))


def _run(program: Program, schedule: str) -> list[bytes]:
    rng = np.random.default_rng(3)
    inputs = [np.asarray(2, np.int32) if p.name == "trips" else programs.random_array(rng, p.dtype, p.shape) for p in program.inputs]
    infeeds = [programs.random_array(rng, p.dtype, (4, *p.shape)) for p in program.infeeds]
    outputs, outfeeds = ReferenceEngine(program, verify=False, schedule=schedule).launch(inputs, infeeds)
    return [x.tobytes() for x in (*outputs, *outfeeds)]


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_program_is_refused_or_runs_without_hazard_and_alike_under_both_schedules(seed: int) -> None:
    """Soundness of the verifier: 400 changes (operands, windows, addresses, semaphores, order)."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    names = [n for n in PROGRAMS if n != "while"]  # a changed condition might never turn false
    for _ in range(50):
        program = PROGRAMS[rng.choice(names)]
        changed = _reordered(program, rng) if rng.random() < 0.4 else mutate(program, numbers)[0]
        try:
            verify(changed)
        except ProgramError:
            continue
        assert _run(changed, "late") == _run(changed, "early")


def test_verifying_is_quick() -> None:
    """About 0.4 ms a kernel, a tenth of it if its structure was seen before; held with room for a busy machine."""
    b = Builder()
    x, w = b.input("x", F32, (64, 64)), b.input("w", F32, (64, 64))
    kernels = []
    for n in range(200):
        out = b.buffer(F32, (64, 64))
        kernels.append(programs.matmul_kernel(b, x, w, out, (8, 16, 32 if n % 2 else 16)))
        x = out
    b.output("out", x)
    program = b.program(*kernels)
    start = time.process_time()
    verify(program)
    assert time.process_time() - start < 0.2
