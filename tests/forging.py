"""Programs that no compiler would make: drawn block by block, or built to cost whoever loads them dearly. All are seeded.

`forged(rng)` is the bytes of one, with right checksums and less than 100 kB long. Some are valid, most are nearly so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import numpy as np

from tests import programs
from tests.mutation import get, places, put
from tests.program_builder import PARALLEL, SEQUENTIAL, Builder, KernelBuilder
from tpuflow.dtypes import BF16, COMPUTED, F16, F32, PRED, S8, S32, U8, DType
from tpuflow.errors import ProgramFileError
from tpuflow.isa import dma, vector
from tpuflow.isa.collectives import Await
from tpuflow.isa.file import to_bytes
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import Block, Copy, GridAxis, Infeed, Kernel, Loop, Outfeed, Port, Program, Switch, While

MOST_BYTES = 100_000
EXTREMES = (0, 1, -1, 7, 2**15, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63))
Rng = np.random.Generator
T = TypeVar("T")
Family = Callable[[Rng], Program]


def forged(rng: Rng) -> bytes:
    """One file."""
    while True:
        program = _pick(rng, FAMILIES)(rng)
        try:
            data = to_bytes(program)
        except ProgramFileError:  # a field that has no place in a file: nested too deep, or no integer of 64 bits
            continue
        if len(data) < MOST_BYTES:
            return data


def fed(program: Program, rng: Rng) -> Program:
    """The program in a loop whose every trip takes one of its inputs from an infeed and sends its outputs to outfeeds."""
    steady = [p for p in program.inputs if not p.donated and p.buffer not in {q.buffer for q in program.outputs}]
    chosen = {p.buffer for p in steady if rng.random() < 0.5}
    fed_ports = tuple(replace(p, buffer=-1) for p in steady if p.buffer in chosen)
    infeeds = tuple(Infeed(n, p.buffer) for n, p in enumerate(p for p in steady if p.buffer in chosen))
    outfeeds = tuple(Outfeed(n, p.buffer) for n, p in enumerate(program.outputs))
    end = max((b.address + b.bytes for b in program.buffers), default=0)
    trips = len(program.buffers)
    made = replace(
        program,
        buffers=(*program.buffers, replace(programs.feed_program().buffers[0], address=(end + 63) // 64 * 64)),
        inputs=(*(p for p in program.inputs if p.buffer not in chosen), Port("turns", S32, (), trips)),
        infeeds=fed_ports,
        outfeeds=tuple(replace(p, buffer=-1, donated=False) for p in program.outputs),
        buffer_names=(),
    )
    first = () if rng.random() < 0.3 else program.code  # outputs are whole before the loop, unless nothing makes them so
    return replace(made, code=(*infeeds, *first, Loop(trips, (*infeeds, *program.code, *outfeeds))))


# --- blocks drawn at random


@dataclass
class _Drawing:
    """A program under construction over a few scalars, arrays and ports; buffers may lie over one another."""

    rng: Rng
    b: Builder = field(default_factory=Builder)
    of: dict[DType, list[int]] = field(default_factory=lambda: {S32: [], F32: [], PRED: []})
    own: dict[DType, list[int]] = field(default_factory=lambda: {S32: [], F32: [], PRED: []})
    arrays: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    filled: set[int] = field(default_factory=set)
    semaphores: int = 0

    def prepare(self) -> None:
        """Inputs, constants, results, and a port of every kind."""
        b, rng = self.b, self.rng
        for n in range(int(rng.integers(1, 4))):
            self.of[S32].append(b.input(f"s{n}", S32, donated=bool(rng.random() < 0.5)))
            self.of[F32].append(b.input(f"f{n}", F32, donated=bool(rng.random() < 0.7)))
            self.arrays.append(b.input(f"a{n}", F32, (9, 130), donated=bool(rng.random() < 0.7)))
        self.of[S32].append(b.constant(int(rng.integers(0, 4)), S32))
        self.of[PRED].append(b.constant(bool(rng.random() < 0.5)))
        for dtype in (S32, F32, PRED):
            for _ in range(int(rng.integers(1, 4))):
                self.own[dtype].append(b.buffer(dtype, address=self._address()))
            self.of[dtype] += self.own[dtype]
        self.arrays += [b.buffer(F32, (9, 130), address=self._address()) for _ in range(2)]
        if rng.random() < 0.3:
            self._stay(self.arrays[-1])
        if rng.random() < 0.5:
            self.kept = [b.buffer(F32, (9, 130)) for _ in range(int(rng.integers(1, 3)))]
            for buffer in self.kept:
                self._stay(buffer)
        for name, dtype, shape in (("in_s", S32, ()), ("in_f", F32, ()), ("in_a", F32, (9, 130))):
            b.infeed(name, dtype, shape)
            b.outfeed(name.replace("in", "out"), dtype, shape)
        for n, buffer in enumerate(rng.choice(self._all(), 2, replace=False)):
            b.output(f"o{n}", int(buffer))

    def _address(self) -> int | None:
        """Sometimes that of another buffer, or near it."""
        if self.rng.random() < 0.9:
            return None
        return int(self.b.buffers[self.rng.integers(len(self.b.buffers))].address + self.rng.integers(0, 2) * 4)

    def _stay(self, buffer: int) -> None:
        """Put an array into VMEM: above the tiles of all kernels, or where they may be."""
        self.b.buffers[buffer] = replace(self.b.buffers[buffer], space="vmem", address=int(self.rng.choice((2**12, 2**20, 2**23))))

    def _all(self) -> list[int]:
        return [*self.of[S32], *self.of[F32], *self.of[PRED], *self._in_hbm()]

    def blocks(self, depth: int, most: int = 5) -> tuple[Block, ...]:
        """A few blocks, nested `depth` deep at most; between some of them, something is copied to or from VMEM."""
        made: list[Block] = []
        for _ in range(int(self.rng.integers(1, most))):
            made += self._copied(depth) if self.kept and self.rng.random() < 0.25 else [self.block(depth)]
        return tuple(made)

    def _copied(self, depth: int) -> list[Block]:
        """A copy between HBM and VMEM, what runs meanwhile, and the wait for it, mostly where it must be; then the copy is read."""
        rng = self.rng
        vmem, semaphore = int(rng.choice(self.kept)), self.semaphores
        there = vmem not in self.filled or rng.random() < 0.5
        source, target = (int(rng.choice(self._in_hbm())), vmem) if there else (vmem, self._target(self._in_hbm()))
        self.semaphores += 1
        self.filled.add(vmem)
        meanwhile = [self.block(max(depth - 1, 0)) for _ in range(int(rng.integers(0, 3)))]
        awaited: list[Block] = [Await(semaphore if rng.random() < 0.97 else semaphore + 1)] if rng.random() < 0.97 else []
        read = programs.map_kernel(self.b, [target], self._target(self.arrays), programs.unary("neg"), (8, 128))
        return [Copy(source, target, semaphore), *meanwhile, *awaited, *((read,) if rng.random() < 0.7 else ())]

    def block(self, depth: int) -> Block:
        """One block."""
        rng = self.rng
        draw = rng.random()
        if depth and draw < 0.45:
            kind = rng.integers(3)
            if kind == 0:
                return Loop(self._of(S32), self.blocks(depth - 1))
            if kind == 1:
                return While(self.blocks(depth - 1, 3), self._of(PRED), self.blocks(depth - 1))
            return Switch(self._of(S32), tuple(self.blocks(depth - 1, 3) for _ in range(int(rng.integers(1, 4)))))
        if draw < 0.6:
            return self._feed()
        return self._kernel()

    def _feed(self) -> Block:
        port = int(self.rng.integers(3))
        found = (self._in_hbm() if self.rng.random() < 0.98 else self.arrays) if port == 2 else self.of[(S32, F32)[port]]
        return Infeed(port, self._target(found)) if self.rng.random() < 0.5 else Outfeed(port, int(self.rng.choice(found)))

    def _of(self, dtype: DType) -> int:
        return int(self.rng.choice(self.of[dtype]))

    def _array(self) -> int:
        return int(self.rng.choice(self.arrays))

    def _in_hbm(self) -> list[int]:
        return [n for n in self.arrays if not self.b.buffers[n].is_resident]

    def _target(self, found: Sequence[int]) -> int:
        """A buffer to write, seldom one that must stay."""
        kept = {c.buffer for c in self.b.constants} | {p.buffer for p in self.b.inputs if not p.donated}
        may = [n for n in found if n not in kept]
        return int(self.rng.choice(may if may and self.rng.random() < 0.99 else found))

    def _kernel(self) -> Kernel:
        rng, b = self.rng, self.b
        kind = rng.integers(4)
        if kind == 0:
            sources, out = [self._array(), self._array()], self._target(self.arrays)
            if out in sources:
                return programs.map_kernel(b, [out], out, programs.unary(_pick(rng, ("neg", "abs"))), (8, 128))
            return programs.map_kernel(b, sources, out, programs.binary(_pick(rng, ("add", "max"))), (8, 128))
        if kind == 1:
            x, y, out = self._of(S32), self._of(S32), self._target(self.of[PRED])
            return programs.scalar_kernel(b, [x, y], out, lambda dst, s: vector.Compare("lt", dst, s[0], s[1]))
        dtype = _pick(rng, (S32, F32))
        if kind == 2:
            return programs.set_scalar(b, self._target(self.of[dtype]), int(rng.integers(-1, 5)))
        return programs.scalar_kernel(
            b,
            [self._of(dtype), self._of(dtype)],
            self._target(self.of[dtype]),
            lambda dst, s: vector.Binary(_pick(rng, ("add", "sub", "mul")), dst, *s),
        )


def drawn(rng: Rng) -> Program:
    """Random blocks, after a start that makes most buffers valid."""
    d = _Drawing(rng)
    d.prepare()
    start = [programs.set_scalar(d.b, n, 1) for dtype in (S32, F32, PRED) for n in d.own[dtype] if rng.random() < 0.95]
    start += [Infeed(2, n) for n in d.arrays[-2:] if n in d._in_hbm() and rng.random() < 0.95]
    return d.b.program(*start, *d.blocks(int(rng.integers(1, 5))))


def all_types() -> tuple[Program, ...]:
    """The hand-built programs, some of them in every type that they can be made for."""
    made = [programs.map_program(op=op, dtype=dtype) for dtype in COMPUTED if dtype != PRED for op in ("max", "mul")]
    made += [programs.reduce_program(op="add", dtype=dtype) for dtype in (F16, BF16, S32, U8)]
    made += [programs.matmul_program(dtype=dtype) for dtype in (F16, BF16, S8)]
    return (*programs.all_programs().values(), *made, programs.conv_program(BF16), programs.cumulative_program(op="max"))


def hand_built(rng: Rng) -> Program:
    """One of the hand-built programs, fed in a loop more often than not."""
    program = _pick(rng, HAND_BUILT)
    return fed(program, rng) if rng.random() < 0.7 else program


# --- wild numbers


def wild(rng: Rng) -> Program:
    """A program with one or two integers, the chip's among them, that are extreme."""
    program = _pick(rng, (drawn, hand_built))(rng)
    for _ in range(int(rng.integers(1, 3))):
        if rng.random() < 0.2:
            program = replace(program, chip=own_chip(program, rng))
            continue
        found = [path for path, words in places(program) if not words and not isinstance(get(program, path), bool)]
        program = put(program, found[rng.integers(len(found))], int(rng.choice(EXTREMES)))
    return program


def own_chip(program: Program, rng: Rng) -> object:
    """The chip's row with a few other numbers."""
    numbers = [f.name for f in fields(program.chip) if not isinstance(getattr(program.chip, f.name), str)]
    made = {}
    for name in rng.choice(numbers, int(rng.integers(1, 4)), replace=False):
        wanted = type(getattr(program.chip, str(name)))
        value = _pick(rng, (*EXTREMES, float("nan"), float("inf"), -1.0, 1e-300, 1e300)) if wanted is float else int(rng.choice(EXTREMES))
        made[str(name)] = wanted(value)
    return replace(program.chip, **made)


def own_memory(rng: Rng) -> Program:
    """A chip of the file's own with as much memory as it likes, and buffers or tiles that fill it."""
    program = hand_built(rng)
    size = 2 ** int(rng.integers(30, 61))
    chip = replace(program.chip, **dict.fromkeys(("hbm_bytes", "vmem_bytes", "acc_bytes", "smem_bytes"), size))
    big = replace(program.buffers[0], dtype=F32, shape=(min(2**31 - 1, size // 8), 1), address=size // 2)
    kernel = Kernel((), (), (), (vector.Constant(Tile("vmem", 0, F32, (TileAxis(1), TileAxis(min(2**31 - 1, size // 8)))), 1.0),), ())
    more = _pick(rng, ((big,), ()))
    return replace(
        program, chip=chip, buffers=(*program.buffers, *more), code=(*program.code, *(() if more else (kernel,))), buffer_names=()
    )


# --- structures that cost dearly


def nested(rng: Rng) -> Program:
    """Loops in loops, each of which loses at every trip what it found; or while loops in the conditions of while loops."""
    b = Builder()
    trips, x = b.input("trips", S32), b.input("x", F32, donated=True)
    more = b.buffer(PRED)
    b.output("x", x)
    b.infeed("item", F32)
    code: tuple[Block, ...] = ()
    tall, in_conditions = int(rng.integers(5, 31)), rng.random() < 0.3
    for _ in range(tall):
        at = b.next_address
        first, second = (b.buffer(F32, address=at) for _ in range(2))
        if in_conditions:
            stop = programs.set_scalar(b, more, False)
            code = (While((*code, stop), more, (Infeed(0, first),)),)
        else:
            code = (Infeed(0, first), Loop(trips, (*code, Infeed(0, second))))
    return b.program(*code)


def overlapping(rng: Rng) -> Program:
    """Many buffers that lie over one another, some of them filled, sent and read."""
    b = Builder()
    x, out = b.input("x", F32), b.new_output("out", F32)
    item, sent = b.infeed("item", F32, (64,)), b.outfeed("sent", F32, (64,))
    count, step = int(rng.integers(100, 3000)), int(rng.choice((4, 60, 256)))
    found = [b.buffer(F32, (64,), address=4096 + step * n) for n in range(count)]
    code: list[Block] = []
    for n in rng.choice(found, int(rng.integers(1, 5))):
        code += [Infeed(item, int(n)), Outfeed(sent, int(n if rng.random() < 0.9 else rng.choice(found)))]
    return b.program(programs.copy_scalar(b, x, out), *code)


def many_branches(rng: Rng) -> Program:
    """A switch of many branches that fill one buffer or several."""
    b = Builder()
    index, out = b.input("index", S32), b.new_output("out", F32)
    item, others = b.infeed("item", F32), [b.buffer(F32) for _ in range(4)]
    branches = tuple(
        (Infeed(item, out), *((Infeed(item, int(rng.choice(others))),) if rng.random() < 0.2 else ()))
        for _ in range(int(rng.integers(2, 60)))
    )
    return b.program(Switch(index, branches))


def many_stores(rng: Rng) -> Program:
    """A kernel that stores one buffer piece by piece, the pieces side by side or laid between one another; some perhaps twice."""
    b = Builder()
    count, width = int(rng.integers(2, 40)), int(rng.integers(1, 4))
    out = b.new_output("out", F32, (count * width,))
    k = KernelBuilder(b)
    tile = k.tile(F32, [width])
    k.emit(vector.Constant(tile, 1.0))
    ready = k.semaphore()
    k.emit(dma.Signal("vector", ready), dma.Wait("store", ready))
    strided = rng.random() < 0.5
    for n in rng.permutation(count) if rng.random() < 0.8 else rng.integers(0, count, count):
        step = count if strided else 1
        k.emit(dma.Store(Window(out, tile, (WindowAxis(count * width, 1, int(n) * (1 if strided else width), step=step),))))
    return b.program(k.kernel())


def many_tiles(rng: Rng) -> Program:
    """Tiles of many slots that lie over one another, written and read in turn."""
    b = Builder()
    b.output("x", b.input("x", F32))
    grid = [(int(rng.choice((1, 3, 200))), PARALLEL), (int(rng.choice((1, 5, 100))), SEQUENTIAL)]
    k = KernelBuilder(b, grid)
    several = int(rng.choice((2, 3, 4, 16, 64)))
    tiles = [
        Tile("vmem", int(rng.integers(0, 64)) * 512, F32, (TileAxis(int(rng.choice((1, 128, 4096)))),), int(rng.choice((1, several))))
        for _ in range(int(rng.integers(2, 200)))
    ]
    for tile in tiles:
        k.emit(vector.Constant(tile, 1.0), vector.Unary("neg", tile, tile))
    return b.program(k.kernel())


def many_operands(rng: Rng) -> Program:
    """A sort of many operands."""
    b = Builder()
    b.output("x", b.input("x", F32))
    k = KernelBuilder(b)
    count = int(rng.integers(1, 300))
    sources, results = ([k.tile(F16, [8]) for _ in range(count)] for _ in range(2))
    k.emit(*(vector.Constant(t, float(n)) for n, t in enumerate(sources)), vector.Sort(tuple(results), tuple(sources), 0, 1))
    return b.program(k.kernel())


def long_grid(rng: Rng) -> Program:
    """A kernel of many grid axes and long ones, clipped here and there."""
    b = Builder()
    b.output("x", b.input("x", F32))
    sizes = [int(rng.choice((1, 2, 3, 2**10, 2**20, 2**31 - 1))) for _ in range(int(rng.integers(1, 10)))]
    parallel = int(rng.integers(0, len(sizes) + 1))
    grid = tuple(GridAxis(n, PARALLEL if i < parallel else SEQUENTIAL) for i, n in enumerate(sizes))
    axes = tuple(
        TileAxis(2, int(g), 2 * sizes[g] - int(rng.integers(0, 2)))
        for g in rng.choice(len(sizes), min(len(sizes), int(rng.integers(0, 4))), replace=False)
    )
    tile = Tile("vmem", 0, F32, axes)
    return b.program(Kernel(grid, (), (), (vector.Constant(tile, 1.0), vector.Unary("abs", tile, tile)), ()))


HAND_BUILT = all_types()
FAMILIES: tuple[Family, ...] = (
    drawn, drawn, drawn, drawn, hand_built, hand_built, wild, wild, wild, own_memory, nested, overlapping, many_branches, many_stores,
    many_tiles, many_operands, long_grid,
)  # fmt: skip


def _pick(rng: Rng, things: Sequence[T]) -> T:
    return things[int(rng.integers(len(things)))]
