"""What the verifier knows of HBM, against runs of every path: which buffers hold what was put there, byte by byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests import programs
from tests.program_builder import Builder
from tpuflow.device.verify import verify
from tpuflow.dtypes import F32, PRED, S32
from tpuflow.errors import ProgramError
from tpuflow.isa.program import Block, Infeed, Loop, Outfeed, Program, Switch, While

TRIPS = 3  # as many as there are buffers that a trip can lose one after the other, and one more
BYTES = 32


class _NotThere(Exception):
    """A path reads a buffer that does not hold what was put there."""


Owners = tuple[int, ...]
"""Which buffer was last put at every byte (-1: none)."""


def _paths(code: Sequence[Block], program: Program, owners: Owners) -> set[Owners]:
    """Memory after every path through the blocks from one memory; loops take 0 to TRIPS trips."""
    found = {owners}
    for block in code:
        found = set().union(*(_step(block, program, o) for o in found))
    return found


def _step(block: Block, program: Program, owners: Owners) -> set[Owners]:
    if isinstance(block, Infeed):
        b = program.buffers[block.buffer]
        return {(*owners[: b.address], *[block.buffer] * b.bytes, *owners[b.address + b.bytes :])}
    if isinstance(block, Outfeed):
        return {_read(block.buffer, program, owners)}
    if isinstance(block, Switch):
        return set().union(*(_paths(branch, program, _read(block.index, program, owners)) for branch in block.branches))
    if isinstance(block, Loop):
        return set(_trips((), block.body, program, {_read(block.trips, program, owners)}))
    assert isinstance(block, While)
    return set(_trips(block.condition, block.body, program, {owners}, block.predicate))


def _trips(
    condition: Sequence[Block], body: Sequence[Block], program: Program, heads: set[Owners], predicate: int = -1
) -> Iterator[Owners]:
    for _ in range(TRIPS + 1):
        tested: set[Owners] = set().union(*(_paths(condition, program, o) for o in heads))
        yield from (_read(predicate, program, o) if predicate >= 0 else o for o in tested)
        heads = set().union(*(_paths(body, program, o) for o in tested))


def _read(buffer: int, program: Program, owners: Owners) -> Owners:
    b = program.buffers[buffer]
    if any(o != buffer for o in owners[b.address : b.address + b.bytes]):
        raise _NotThere
    return owners


def _is_valid(program: Program) -> bool:
    start = [-1] * BYTES
    for p in program.inputs:
        b = program.buffers[p.buffer]
        start[b.address : b.address + b.bytes] = [p.buffer] * b.bytes
    try:
        for owners in _paths(program.code, program, tuple(start)):
            for p in program.outputs:
                _read(p.buffer, program, owners)
    except _NotThere:
        return False
    return True


def _random(rng: np.random.Generator) -> Program:
    """Feeds, loops and branches over ten buffers in 32 bytes: two inputs that stay apart, and others that lie over one another."""
    b = Builder()
    b.input("trips", S32)
    b.buffer(PRED, address=4)
    b.input("x", F32, donated=True)
    ports = [(b.infeed(f"i{n}", F32, (n,)), b.outfeed(f"o{n}", F32, (n,))) for n in (1, 2, 3)]
    flag = b.infeed("flag", PRED), b.outfeed("flag", PRED)
    b.buffers[2] = type(b.buffers[2])(F32, (), 8)
    sizes = [int(rng.integers(1, 4)) for _ in range(6)]
    arrays = [b.buffer(F32, (n,), address=int(rng.integers(1, (BYTES - 4 * n) // 4 + 1)) * 4) for n in sizes]

    def feed() -> Block:
        if rng.random() < 0.2:
            return Infeed(flag[0], 1) if rng.random() < 0.7 else Outfeed(flag[1], 1)
        n = int(rng.integers(len(arrays)))
        taken, sent = ports[sizes[n] - 1]
        return Infeed(taken, arrays[n]) if rng.random() < 0.6 else Outfeed(sent, arrays[n])

    def blocks(depth: int) -> tuple[Block, ...]:
        return tuple(block(depth) for _ in range(int(rng.integers(1, 4))))

    def block(depth: int) -> Block:
        draw = rng.random() if depth else 1.0
        if draw < 0.2:
            return Loop(0, blocks(depth - 1))
        if draw < 0.4:
            return While((*blocks(depth - 1), *((Infeed(flag[0], 1),) if rng.random() < 0.7 else ())), 1, blocks(depth - 1))
        if draw < 0.55:
            return Switch(0, tuple(blocks(depth - 1) for _ in range(int(rng.integers(1, 4)))))
        return feed()

    return b.program(*blocks(2))


def test_a_program_is_accepted_just_if_no_path_reads_what_is_not_there() -> None:
    rng, found = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(1500):
        program = _random(rng)
        try:
            verify(program)
            accepted = True
        except ProgramError as error:
            assert "constant or not donated" in str(error) or "not written, or overwritten" in str(error), error
            if "not donated" in str(error):
                continue
            accepted = False
        assert accepted == _is_valid(program), program.code
        found[accepted] += 1
    assert min(found.values()) > 150, found


def _nest(depth: int) -> Program:
    """Loops in loops, each of which loses at every trip what it found."""
    b = Builder()
    trips, item = b.input("trips", S32), b.infeed("item", F32)
    code: tuple[Block, ...] = ()
    for _ in range(depth):
        at = b.next_address
        first, second = (b.buffer(F32, address=at) for _ in range(2))
        code = (Infeed(item, first), Loop(trips, (*code, Infeed(item, second))))
    return b.program(*code)


def _over_one_another(count: int) -> Program:
    b = Builder()
    item, sent = b.infeed("item", F32, (100,)), b.outfeed("sent", F32, (100,))
    found = [b.buffer(F32, (100,), address=4 * n) for n in range(count)]
    return b.program(*(block for n in found for block in (Infeed(item, n), Outfeed(sent, n))))


def _branches(count: int) -> Program:
    b = Builder()
    index, item = b.input("index", S32), b.infeed("item", F32)
    found = [b.buffer(F32) for _ in range(count)]
    wide = b.buffer(F32, (16 * count,), address=b.buffers[found[0]].address)
    everything = b.infeed("all", F32, (16 * count,))
    return b.program(*(Infeed(item, n) for n in found), *(Switch(index, ((Infeed(everything, wide),), (Infeed(item, n),))) for n in found))


def _parts(count: int) -> Program:
    """A buffer filled in parts by as many kernels, again and again."""
    b = Builder()
    part, whole = b.input("part", F32, (4,)), b.buffer(F32, (4 * count,))
    sent = b.outfeed("sent", F32, (4 * count,))
    rows = []
    for n in range(count):
        k = programs.KernelBuilder(b)
        tile = k.load(k.window(part, k.tile(F32, [4])), reader="store")
        k.emit(programs.dma.Store(programs.Window(whole, tile, (programs.WindowAxis(4 * count, 1, 4 * n),))))
        k.release()
        rows.append(k.kernel())
    return b.program(*rows, Outfeed(sent, whole))


@pytest.mark.parametrize(
    ("make", "size", "seconds"), [(_nest, 30, 0.5), (_over_one_another, 20_000, 6), (_branches, 3_000, 4), (_parts, 500, 3)]
)
def test_verifying_takes_time_in_proportion_to_the_file(make: object, size: int, seconds: float) -> None:
    program = make(size)  # type: ignore[operator]
    began = time.process_time()
    verify(program)
    assert time.process_time() - began < seconds
