"""Emission over random shapes, broadcasts, axis orders and windows: on chips of odd sizes the kernels still compute what the graph says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emit_cases import GENERIC, ROOMY, SMALL, Case, assemble, fuse, t
from tests.test_emit import assert_close, run
from tpuflow.chips import Chip
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import F16, F32, S32
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction, SlidingAxis
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.interpret import interpret

TINY = replace(SMALL, name="tiny", vector_lanes=2, vector_sublanes=2, matrix_rows=2, matrix_columns=4, vmem_bytes=16384, acc_bytes=512)
NARROW = replace(SMALL, name="narrow", vector_lanes=4, vmem_bytes=65536, acc_bytes=1024)

LONG, MORE_BYTES = 128, 2**20  # a block of a longer contraction of many axes may take more memory than the smaller chips have

chips = st.sampled_from((GENERIC, ROOMY, TINY, NARROW))
lengths = st.sampled_from((1, 1, 2, 3, 5, 7, 8, 9, 17, 24))
few = settings(max_examples=40, deadline=None)
fewer = settings(max_examples=20, deadline=None)  # of what three engines judge


def judge(case: Case, chip: Chip, *, in_place: bool = False, every_engine: bool = False) -> None:
    graph, arrays = case.graph(), case.arrays()
    program = assemble(graph, chip, in_place=in_place)
    found = run(program, [a.copy() for a in arrays])
    if every_engine:
        exact, _ = Executable(program, engine="fast", fidelity="bitexact").launch(arrays)
        native, _ = Executable(program, engine="fast").launch(arrays)
        for a, b, c in zip(found, exact, native, strict=True):
            assert a.tobytes() == np.asarray(b).tobytes()
            assert_close(np.asarray(c), a, F32 if a.dtype == np.float32 else S32)
    for got, want in zip(found, interpret(graph, *arrays), strict=True):
        assert got.tobytes() == want.tobytes()


def entering(b: Builder, x: Value, shape: Sequence[int], axes: Sequence[int]) -> Value:
    """A region input brought to the iteration shape (as it is when it has it)."""
    return x if tuple(axes) == tuple(range(len(shape))) and x.shape == tuple(shape) else b.broadcast(x, shape, axes)


@st.composite
def operand_axes(draw, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(a for a in range(len(shape)) if draw(st.booleans()))


@few
@given(st.data(), st.lists(lengths, max_size=5), chips, st.booleans())
def test_any_map_of_broadcast_operands(data, shape: list[int], chip: Chip, in_place: bool):
    axes = [tuple(range(len(shape))), *data.draw(st.lists(operand_axes(shape), max_size=3))]
    stretched = [[data.draw(st.booleans()) if i else False for _ in a] for i, a in enumerate(axes)]
    shapes = [[1 if s else shape[a] for a, s in zip(own, cut, strict=True)] for own, cut in zip(axes, stretched, strict=True)]

    def region(b: Builder, *inputs: Value) -> Sequence[Value]:
        entered = [entering(b, x, shape, a) for x, a in zip(inputs, axes, strict=True)]
        total = entered[0]
        for x in entered[1:]:
            total = b.add(b.mul(total, x), 0.5)
        if shape:
            total = b.add(total, b.iota(TensorType(F32, tuple(shape)), len(shape) - 1))
        return total, b.neg(entered[-1])

    judge(Case("map", fuse("map", region), tuple(t(F32, *s) for s in shapes)), chip, in_place=in_place)


@few
@given(st.data(), st.lists(lengths, min_size=1, max_size=5), chips)
def test_any_reduction_with_work_before_and_after(data, shape: list[int], chip: Chip):
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    kept = [n for a, n in enumerate(shape) if a not in axes]
    before, after = data.draw(operand_axes(shape)), data.draw(operand_axes(kept))
    op = data.draw(st.sampled_from(("add", "max", "min")))

    def region(b: Builder, x: Value, y: Value, z: Value) -> Value:
        total = b.reduce(op, b.mul(x, entering(b, y, shape, before)), axes)
        return b.add(b.add(total, b.reduce("add", x, axes)), entering(b, z, kept, after))

    types = (t(F32, *shape), t(F32, *(shape[a] for a in before)), t(F32, *(kept[a] for a in after)))
    judge(Case("reduce", fuse("reduce", region), types), chip)


@few
@given(st.data(), chips, st.sampled_from((F32, F16)))
def test_any_arrangement_of_batch_free_and_contracted_axes(data, chip: Chip, dtype):
    names = [f"{kind}{i}" for kind in "bkmn" for i in range(data.draw(st.integers(0, 2)))]
    size = {n: data.draw(st.sampled_from((1, 2, 3, 5, 8, 9, 17))) for n in names}
    lhs = data.draw(st.permutations([n for n in names if n[0] in "bkm"]))
    rhs = data.draw(st.permutations([n for n in names if n[0] in "bkn"]))
    both = {kind: [n for n in names if n[0] == kind] for kind in "bk"}
    attrs = [tuple(side.index(n) for n in both[kind]) for kind in "kb" for side in (lhs, rhs)]
    out = [*both["b"], *(n for n in lhs if n[0] == "m"), *(n for n in rhs if n[0] == "n")]
    result = [size[n] for n in out]
    bias = data.draw(operand_axes(result))

    def region(b: Builder, x: Value, y: Value, z: Value) -> Value:
        return b.add(b.dot(x, y, *attrs), entering(b, z, result, bias))

    types = (t(dtype, *(size[n] for n in lhs)), t(dtype, *(size[n] for n in rhs)), t(F32, *(result[a] for a in bias)))
    judge(Case("dot", fuse("dot", region), types), chip)


@st.composite
def slides(draw, axis: int, extent: int, outer: int, label: int) -> tuple[SlidingAxis, Bound, int, int]:
    """A sliding axis of lhs, which elements it reads, and the lengths of its labels."""
    size, inner = draw(st.sampled_from((1, 2, 3, 5, 8, 13))), draw(st.sampled_from((1, 1, 2, 3, 4, 9)))
    sliding = SlidingAxis(axis, label, draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3, -1, -2))))
    return sliding, sliding.bound(outer, extent, draw(st.integers(-3, extent + 2)), draw(st.integers(1, 3))), size, inner


@pytest.mark.slow
@fewer
@given(st.data(), chips, st.sampled_from((F32, F16, S32)))
def test_any_convolution(data, chip: Chip, dtype):
    """Spatial axes anywhere, strides, dilations of both operands, reversed kernels, padding and cropping, batch axes, an epilogue."""
    names = [f"{kind}{i}" for kind, most in (("b", 1), ("k", 2), ("m", 1), ("n", 1)) for i in range(data.draw(st.integers(0, most)))]
    spatial = [f"s{i}" for i in range(data.draw(st.integers(1, 2)))]
    size = {n: data.draw(st.sampled_from((1, 2, 3, 5, 9))) for n in (*names, *spatial)}
    lhs = data.draw(st.permutations([n for n in names if n[0] in "bkm"] + spatial))
    label = {n: i for i, n in enumerate((*names, *spatial, *(f"r{n}" for n in spatial)))}
    slid = {n: data.draw(slides(lhs.index(n), size[n], label[n], label[f"r{n}"])) for n in spatial}
    outer, inner = {n: length for n, (*_, length, _) in slid.items()}, {f"r{n}": length for n, (*_, length) in slid.items()}
    rhs = data.draw(st.permutations([n for n in names if n[0] in "bkn"] + list(inner)))
    out = data.draw(st.permutations([n for n in names if n[0] in "bmn"] + spatial))
    lhs_labels, rhs_labels, out_labels = (tuple(label[n] for n in side) for side in (lhs, rhs, out))
    sliding, bounds = tuple(s for s, *_ in slid.values()), tuple(b for _, b, *_ in slid.values())
    whole, shape = Contraction(lhs_labels, rhs_labels, out_labels, sliding, bounds), [(size | outer)[n] for n in out]
    if math.prod((size | inner)[n] for n in rhs if n not in out) > LONG:
        chip = replace(chip, vmem_bytes=max(chip.vmem_bytes, MORE_BYTES))

    def region(b: Builder, x: Value, y: Value) -> Value:
        product = b.conv(x, y, whole, shape)
        return b.max(product, b.full_like(product, 0))

    types = (t(dtype, *(size[n] for n in lhs)), t(dtype, *((size | inner)[n] for n in rhs)))
    judge(Case("conv", fuse("dot", region), types), chip, every_engine=True)


@few
@given(st.data(), st.lists(lengths, min_size=1, max_size=4), chips, st.sampled_from((F32, S32)))
def test_any_slice_padding_and_update(data, shape: list[int], chip: Chip, dtype):
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    limit = tuple(data.draw(st.integers(s + 1, n)) for s, n in zip(start, shape, strict=True))
    stride = tuple(data.draw(st.integers(1, 3)) for _ in shape)
    interior = tuple(data.draw(st.integers(0, 2)) for _ in shape)
    low, high = (tuple(data.draw(st.integers(-1 if n > 2 else 0, 3)) for n in shape) for _ in range(2))
    extent = tuple(hi - lo for lo, hi in zip(start, limit, strict=True))

    def build(b: Builder, x: Value, fill: Value) -> Sequence[Value]:
        piece = b.slice(x, start, limit)
        starts = [b.scalar(s, S32) for s in start]
        made = [
            b.slice(x, start, limit, stride), b.pad(x, 3, low, high, interior), b.pad(x, fill, low, high, interior),
            b.dynamic_slice(x, starts, extent), b.dynamic_update_slice(x, b.neg(piece), starts),
            b.transpose(b.reverse(x, (len(shape) - 1,)), tuple(reversed(range(len(shape))))), b.concatenate([x, b.neg(x)], 0),
        ]  # fmt: skip
        return [v for v in made if v is not x]

    judge(Case("moves", build, (t(dtype, *shape), t(dtype))), chip)
