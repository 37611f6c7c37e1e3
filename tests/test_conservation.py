"""Multiply-adds and bytes are the same in the graph, in the Program run trip by trip, and in the timing, which runs nothing."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from models.lenet import LeNet5
from models.mlp import MLP
from tests.places import tile_positions
from tpuflow.chips import get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.timing import time_program
from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.isa.instruction import Instruction, Tile, Window
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Copy, Kernel, Program, walk
from tpuflow.lower.graph.graph import Graph, Value
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.graph.products import sizes_of
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr

SMALL = replace(get_chip("generic"), name="small", vmem_bytes=2**18, acc_bytes=2**14, matrix_rows=16, matrix_columns=16, vector_lanes=16)
IMAGES = {"MLP": (5, 28, 28), "LeNet5": (3, 32, 32, 1)}
MODELS: dict[str, Any] = {"MLP": MLP(hidden=(70, 33)), "LeNet5": LeNet5()}


def _gradient(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a model's loss and the shapes of its arguments."""
    model, images = MODELS[name], jax.ShapeDtypeStruct(IMAGES[name], np.float32)
    return jax.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)), (jax.eval_shape(model.init, jax.random.key(0), images), images)


@functools.cache
def _graph_and_program(name: str) -> tuple[Graph, Program]:
    function, shapes = _gradient(name)
    return lower_jaxpr(jax.make_jaxpr(function)(*shapes), name), compile_function(function, shapes, chip=SMALL)


def _graph_multiply_adds(graph: Graph) -> int:
    products = (node for node in graph.nodes if node.op in PRODUCTS)
    return sum(math.prod(sizes_of(n).values()) for n in products)


def _bytes(values: Sequence[Value]) -> int:
    return sum(value.type.elems * value.dtype.bytes for value in values)


def _trips(kernel: Kernel) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Every instruction of every trip, with the grid's indices: the prologue at the first step of a point, the epilogue at the last."""
    steps = [range(g.size) for g in kernel.grid if g.kind != "parallel"]
    for point in itertools.product(*(range(g.size) for g in kernel.grid if g.kind == "parallel")):
        indices = [(*point, *step) for step in itertools.product(*steps)]
        yield from ((i, indices[0]) for i in kernel.prologue)
        yield from ((i, index) for index in indices for i in kernel.body)
        yield from ((i, indices[-1]) for i in kernel.epilogue)


def _valid(tile: Tile, index: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis.valid(index[axis.grid] if axis.grid >= 0 else 0) for axis in tile.axes)


def _touched_bytes(window: Window, index: tuple[int, ...]) -> int:
    """Bytes of the different elements of the buffer that the window shows."""
    places = (len(np.unique(element[exists])) for element, exists in tile_positions(window, index))
    return math.prod(places) * window.tile.dtype.bytes


def _counted(program: Program) -> tuple[int, Counter[tuple[str, str]]]:
    """Multiply-adds, and bytes by memory and direction, added up trip by trip."""
    macs, moved = 0, Counter[tuple[str, str]]()
    for kernel in program.kernels():
        for instruction, index in _trips(kernel):
            for role, window in instruction.windows():
                moved[program.buffers[window.buffer].space, role] += _touched_bytes(window, index)
            if isinstance(instruction, MatmulAccumulate):
                shapes = (_valid(tile, index) for tile in (instruction.a, instruction.b, instruction.acc))
                macs += math.prod(instruction.contraction.by_label(*shapes).values())
    for copy in (block for _, block in walk(program.code) if isinstance(block, Copy)):
        for role, buffer in (("read", program.buffers[copy.source]), ("write", program.buffers[copy.target])):
            moved[buffer.space, role] += buffer.bytes
    return macs, moved


@pytest.mark.parametrize("name", MODELS)
def test_multiply_adds_and_bytes_are_the_same_in_graph_program_and_timing(name):
    graph, program = _graph_and_program(name)
    work = time_program(program).work
    macs, moved = _counted(program)
    read, written = moved["hbm", "read"], moved["hbm", "write"]
    assert _graph_multiply_adds(graph) == macs == sum(work.macs.values())
    assert written == work.written_bytes >= _bytes(graph.outputs)
    # The timing counts the part of a window that a padded edge cuts off; where nothing is padded there is none.
    assert _bytes(graph.inputs) <= read <= work.read_bytes <= (1.1 if name == "LeNet5" else 1.0) * read
    assert 0 < moved["vmem", "read"] <= work.resident_read_bytes and 0 < moved["vmem", "write"] <= work.resident_written_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_program_lies_between_its_roofline_and_one_thing_after_the_other(name):
    time = time_program(_graph_and_program(name)[1])
    serial = sum(row.count * row.time.serial_picoseconds for row in time.kernels)
    assert time.roofline_seconds * PICOSECONDS <= time.device_picoseconds <= serial


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "O2"])
@pytest.mark.parametrize("chip", ["ascend910", "tpu-v3"])
def test_a_larger_batch_never_trains_in_less_memory_nor_but_for_a_thousandth_in_less_time(chip, policy):
    """Where kernels are mostly floor (LeNet on an Ascend), twice the points may share the cores better: 0.01 % less at 32 than at 16."""
    batches = (16, 32, 64, 128, 256, 512)
    shapes = [(jax.ShapeDtypeStruct((batch, 32, 32, 1), np.float32), jax.ShapeDtypeStruct((batch,), np.int32)) for batch in batches]
    found = [tpuflow.estimate_training(LeNet5(), shape, chip=chip, policy=policy) for shape in shapes]
    seconds, memory = [f.step_seconds for f in found], [f.memory.peak_memory_in_bytes for f in found]
    assert memory == sorted(memory)
    assert all(larger >= 0.999 * smaller for smaller, larger in itertools.pairwise(seconds)), seconds


@pytest.mark.parametrize("chip", ["generic", "ascend910", "tpu-v4"])
def test_a_convolution_with_a_stride_over_its_whole_input_costs_what_the_product_of_what_it_reads_costs(chip: str):
    """An axis of one window, which nothing walks along, is not what the kernel's tiles are padded for."""
    x, w = jax.ShapeDtypeStruct((32, 2, 2, 1024), jnp.float16), jax.ShapeDtypeStruct((1, 1, 1024, 2048), jnp.float16)

    def strided(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def read(x: Any, w: Any) -> Any:
        return jnp.dot(x[:, 0, 0], w[0, 0])

    long, short = (tpuflow.estimate(f, x, w, chip=chip).time.seconds for f in (strided, read))
    assert long < 1.3 * short
