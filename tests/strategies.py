"""Hypothesis strategies that build random instructions, kernels and Programs from the declarations.

What they build is well formed as data (every field holds a value of its kind), not valid as a program: tiles overlap, semaphores do
not balance, buffers are read before they are written. For round trips and for fuzzing the verifier.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from tpuflow.chips import CHIPS, Chip
from tpuflow.dtypes import DTYPES
from tpuflow.isa.bounds import Bound
from tpuflow.isa.codec import DECLARED
from tpuflow.isa.collectives import KIND_CODES, REDUCERS, Await, Collective, MeshAxis, Position
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.instruction import MAX_RANK, RATES, SPACES, FieldKind, Instruction, Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import (
    BUFFER_SPACES,
    GRID_KINDS,
    Block,
    Buffer,
    CallHost,
    Constant,
    Copy,
    GridAxis,
    Infeed,
    Kernel,
    Loop,
    Outfeed,
    Port,
    Program,
    Switch,
    While,
)

small = st.integers(0, 300)
numbers = st.one_of(small, st.integers(0, 2**64 - 1))
signed = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**63 - 1))
dtypes = st.sampled_from(DTYPES)
scalars: st.SearchStrategy[int | float | bool] = st.one_of(st.booleans(), signed, st.floats())
names = st.text(max_size=8)
shapes = st.lists(small, max_size=4).map(tuple)


def tuples(item: st.SearchStrategy[Any], most: int, least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of `least` to `most` items."""
    return st.lists(item, min_size=least, max_size=most).map(tuple)


tile_axes = st.builds(TileAxis, signed, st.integers(-1, 5), signed)
tiles = st.builds(Tile, st.sampled_from(SPACES), signed, dtypes, tuples(tile_axes, MAX_RANK), signed, st.sampled_from(RATES))
window_axes = st.builds(
    WindowAxis, signed, signed, signed, tuples(st.tuples(st.integers(0, 5), signed), 3), signed, signed, st.none() | tiles
)
windows = st.builds(Window, signed, tiles, tuples(window_axes, MAX_RANK), scalars)

KINDS = {
    "tile": lambda kind: tiles,
    "tiles": lambda kind: tuples(tiles, 3, least=1),
    "window": lambda kind: windows,
    "choice": lambda kind: st.sampled_from(tuple(kind.choices)),
    "axes": lambda kind: tuples(numbers, MAX_RANK),
    "pairs": lambda kind: tuples(st.builds(SlidingAxis, signed, signed, signed, signed), MAX_RANK),
    "bounds": lambda kind: tuples(st.builds(Bound, signed, tuples(st.tuples(signed, signed), 3), signed, signed), MAX_RANK),
    "number": lambda kind: numbers,
    "flag": lambda kind: st.booleans(),
    "immediate": lambda kind: scalars,
}


def field_values(kind: FieldKind) -> st.SearchStrategy[Any]:
    """Values of an instruction field."""
    return KINDS[kind.name](kind)


def instructions_of(cls: type[Instruction]) -> st.SearchStrategy[Instruction]:
    """Random instructions of one class."""
    return st.builds(cls, **{name: field_values(kind) for name, kind in cls.kinds.items()})


instructions = st.one_of([instructions_of(cls) for cls in DECLARED])


@st.composite
def kernels(draw: st.DrawFn, code: st.SearchStrategy[Instruction] = instructions) -> Kernel:
    """Kernels of a few instructions, some with source lines."""
    kernel = Kernel(
        grid=draw(tuples(st.builds(GridAxis, signed, st.sampled_from(GRID_KINDS)), 4)),
        semaphores=draw(tuples(signed, 4)),
        prologue=draw(tuples(code, 2)),
        body=draw(tuples(code, 4)),
        epilogue=draw(tuples(code, 2)),
        name=draw(names),
    )
    length = len(kernel.instructions)
    return dataclasses.replace(kernel, sources=draw(st.just(()) | tuples(names, length, length)))


def _nested(inner: st.SearchStrategy[Block]) -> st.SearchStrategy[Block]:
    body = tuples(inner, 2)
    return st.builds(Loop, signed, body) | st.builds(While, body, signed, body) | st.builds(Switch, signed, tuples(body, 3))


collectives = st.builds(
    Collective, st.sampled_from(tuple(KIND_CODES)), st.sampled_from(tuple(REDUCERS)), tuples(signed, MAX_RANK), signed, signed, signed,
    tuples(st.tuples(signed, signed), 3), names, names,
)  # fmt: skip
blocks = st.recursive(
    kernels() | st.builds(Infeed, signed, signed) | st.builds(Outfeed, signed, signed) | st.builds(Position, signed, signed)
    | collectives | st.builds(Await, signed) | st.builds(Copy, signed, signed, signed, signed)
    | st.builds(CallHost, signed, tuples(signed, 3), tuples(signed, 3)), _nested, max_leaves=4,
)  # fmt: skip
buffers = st.builds(Buffer, dtypes, shapes, signed, st.sampled_from(BUFFER_SPACES))
ports = st.builds(Port, names, dtypes, shapes, signed, st.booleans(), st.booleans(), names, tuples(tuples(signed, 3), 3))
chips = st.sampled_from(tuple(CHIPS.values())) | st.builds(
    Chip,
    **{
        f.name: {"str": names, "int": signed, "float": st.floats()}[str(f.type)]
        for f in dataclasses.fields(Chip)
    },
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of a few blocks; constants fit their buffers, or do not."""
    table = draw(tuples(buffers, 4))
    return Program(
        chip=draw(chips),
        buffers=table,
        constants=draw(tuples(st.builds(Constant, st.integers(-1, 5), st.binary(max_size=40)), 3)),
        inputs=draw(tuples(ports, 2)),
        outputs=draw(tuples(ports, 2)),
        infeeds=draw(tuples(ports, 2)),
        outfeeds=draw(tuples(ports, 2)),
        code=draw(tuples(blocks, 3)),
        mesh=draw(tuples(st.builds(MeshAxis, names, signed), 3)),
        name=draw(names),
        buffer_names=draw(st.just(()) | tuples(names, len(table), len(table))),
    )
