"""The fast engine overwrites a state where it lies: kernels in their buffers' shapes, and types in which they rest."""

from __future__ import annotations

import math
import re

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tpuflow
from tests import programs
from tpuflow.compiler import compile_function
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.shapes import in_shape_of_buffers
from tpuflow.device.runtime import Executable
from tpuflow.lower.tiling import TILE_BYTES

pytestmark = pytest.mark.optimised

WIDTH = 256


class OneMatrix(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, use_bias=False)(x)


@pytest.mark.parametrize("policy, arrays", [("fp32", 1), ("mixed", 1), ("fp16", 1), ("bf16", 2)])
def test_a_step_with_adam_needs_no_copy_of_its_state(policy: str, arrays: int) -> None:
    """Temporaries, in arrays of the parameters in f32: the gradient, and in bf16 what the product reads."""
    x, y = np.zeros((2 * 8, WIDTH), np.float32), np.zeros(2 * 8, np.int32)
    made = tpuflow.training_step(OneMatrix(), (x[:8], y[:8]), policy, optax.adamw(1e-3), "softmax_cross_entropy")
    sink = tpuflow.sink(made.step, (x, y), 2, state=made.state, batch_size=8)
    next(sink)
    engines = [FastEngine(executable.program) for executable in sink.executables]
    used = [t.compile().memory_analysis().temp_size_in_bytes for engine in engines for t in engine.translate(2, 2)]
    assert max(used) < (arrays + 0.9) * 4 * WIDTH * WIDTH


def _stacked(x, xs):
    def body(x, row):
        x = jnp.tanh(x + row)
        return x, (x * 2, x[:, :1])

    return lax.scan(body, x, xs)


def test_a_loop_does_not_copy_what_it_stacks() -> None:
    """A row lies in the buffer as [trips, rows, columns], and in the window that writes it as [trips, rows * columns]."""
    arrays = [np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((8, 64), (50, 8, 64))]
    program = compile_function(_stacked, arrays)
    (translated,) = FastEngine(program).translate()
    assert not re.findall(r"f32\[50,\S* copy\(.*", translated.compile().as_text())
    fast, reference = (Executable(program, engine, "bitexact").launch(arrays)[0] for engine in ("fast", "reference"))
    for one, other in zip(fast, reference, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("start", [-3, -1, 0, 2, 3, 9])
def test_a_row_outside_of_a_buffer_is_dropped_and_reads_as_filled(start: int) -> None:
    program = programs.update_slice_program((4, 3), (1, 3))
    x, row, place = np.arange(12, dtype=np.float32).reshape(4, 3), np.full((1, 3), -7, np.float32), np.array(start, np.int32)
    fast, reference = (Executable(program, engine, "bitexact").launch([x, row, place])[0] for engine in ("fast", "reference"))
    for one, other in zip(fast, reference, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all((x == -7).any() == (0 <= start < 4) for x in fast)


def _updated(state, change, rate):
    new = state * 0.5 + change * rate
    return new, change - new * new


def test_elementwise_work_on_whole_arrays_is_done_in_their_shape() -> None:
    arrays = [np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((33, 5, 70), (33, 5, 70), ())]
    program = compile_function(_updated, arrays, chip="tpu-v5e")
    (kernel,) = program.kernels()
    shaped = in_shape_of_buffers(kernel, program.buffers)
    assert {len(t.axes) for i in kernel.instructions for t in i.writes()} == {0, 1}
    assert not shaped.grid and {t.shape for i in shaped.instructions for t in i.writes()} == {(), (33, 5, 70)}
    fast, reference = (Executable(program, engine, "bitexact").launch(arrays)[0] for engine in ("fast", "reference"))
    for one, other in zip(fast, reference, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["reduce", "matmul", "take", "sort", "cumulative"])
def test_other_work_stays_as_it_is(name: str) -> None:
    program = programs.all_programs()[name]
    assert all(in_shape_of_buffers(k, program.buffers) is k for k in program.kernels())


def test_a_piece_of_a_buffer_stays_as_it_is() -> None:
    program = compile_function(lambda x: x[1:].reshape(-1) * 2, [np.zeros((4, 64), np.float32)])
    assert all(in_shape_of_buffers(k, program.buffers) is k for k in program.kernels())


@pytest.mark.parametrize("update", [False, True])
def test_a_long_slice_of_one_row_is_moved_in_full_tiles(update: bool) -> None:
    """A single row takes no more of the chip than its elements."""
    x, i, row = np.zeros((4, 2**20), np.float32), np.int32(2), np.ones((1, 2**20), np.float32)

    def moved(x, i, row):
        return lax.dynamic_update_slice(x, row, (i, 0)) if update else lax.dynamic_slice(x, (i, 0), row.shape)

    *_, kernel = compile_function(moved, (x, i, row), chip="tpu-v5e").kernels()
    assert math.prod(axis.size for axis in kernel.grid) == row.nbytes // TILE_BYTES
