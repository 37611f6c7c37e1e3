"""The blocking of floating-point sums is a fact of the graph: bits depend on no core, chip or pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tpuflow.chips import CHIPS, Chip
from tpuflow.compiler import PIPELINE, compile_function, compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.isa.contraction import Contraction, SlidingAxis
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.program import Program
from tpuflow.lower.graph.blocking import LONGEST_SUM, axes_reduced_first, block_shape, depth_block, sum_block
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr

GENERIC = CHIPS["generic"]
F16 = jnp.float16


@dataclass(frozen=True)
class Sum:
    """A function that adds up, and the shapes of its arguments (f32 unless said)."""

    name: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: Any = np.float32

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(7)
        return [rng.standard_normal(shape).astype(self.dtype) for shape in self.shapes]


def conv(x: jax.Array, w: jax.Array, strides: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, w, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda *args: jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a).astype(jnp.float32))), argnums=tuple(range(len(args))))(*args)


def batch_norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + 1e-5)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return batch_norm(x, (-1,)) * scale


def normalised(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.nn.relu(batch_norm(conv(x, w), (0, 1, 2)))


def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """A training step with a convolution, batch and layer normalisation, attention and a cross-entropy."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        y = normalised(x, params["conv"]).reshape(x.shape[0], -1, 12)
        y = layer_norm(y, params["scale"])
        y = jax.nn.softmax(y @ y.swapaxes(1, 2)) @ y
        logits = y.reshape(x.shape[0], -1) @ params["dense"] + params["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 3])

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


SUMS = (
    Sum("rows", lambda x: x.sum(-1), ((64, 1000),)),
    Sum("long rows", lambda x: x.sum(-1), ((3, 20_000),)),
    Sum("columns", lambda x: x.sum(0), ((3000, 40),)),
    Sum("everything", lambda x: x.sum(), ((70, 1001),)),
    Sum("products", lambda x: (1 + x * 1e-3).prod(0), ((900, 3),)),
    Sum("channels first", lambda x: x.sum((0, 2, 3)), ((6, 5, 30, 30),)),
    Sum("prime axes", lambda x: x.sum((0, 1)), ((7, 257, 3),)),
    Sum("rows beside a mask", lambda x, m: (x * m[:, None]).sum((0, 1)), ((40, 1030), (40,))),
    Sum("outer and inner", lambda x: x.sum((0, 2)), ((9, 4, 700),)),
    Sum("softmax", jax.nn.softmax, ((64, 1000),)),
    Sum("long softmax", jax.nn.softmax, ((5, 5000),)),
    Sum("layer norm", gradients(layer_norm), ((300, 130), (130,))),
    Sum("batch norm", gradients(lambda x: batch_norm(x, (0, 1, 2))), ((5, 13, 13, 24),)),
    Sum("sums of negative zeros", lambda x: (-0.0 * jnp.abs(x)).sum(-1), ((40, 300),)),
    Sum("cumulative", lambda x: jnp.cumsum(x, 1), ((9, 700),)),
    Sum("windows", lambda x: lax.reduce_window(x, 0.0, lax.add, (40,), (3,), "SAME"), ((900,),)),
    Sum("square windows", lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 1), "SAME"), ((90, 80),)),
    Sum("scattered", lambda x, u: x.at[jnp.arange(500) % 7].add(u), ((9, 30), (500, 30))),
)
PRODUCTS = (
    Sum("deep product", lambda x, w: x @ w, ((9, 2300), (2300, 40)), F16),
    Sum("product of two deep axes", lambda x, w: jnp.einsum("abi,abj->ij", x, w), ((5, 300, 17), (5, 300, 9)), F16),
    Sum("product and sums", lambda x, w: (lambda y: (y, y.sum(0), (y * y).sum(0)))(jnp.dot(x, w, preferred_element_type=np.float32)),
        ((2000, 64), (64, 200)), F16),
    Sum("convolution", conv, ((1, 7, 7, 140), (3, 3, 140, 12)), F16),
    Sum("wide kernel", conv, ((1, 6, 6, 128), (5, 5, 128, 4)), F16),
    Sum("gradients of a convolution", gradients(lambda x, w: conv(x, w, 2)), ((3, 18, 18, 20), (3, 3, 20, 24)), F16),
    Sum("normalised convolution", gradients(normalised), ((4, 14, 14, 16), (3, 3, 16, 24)), F16),
)  # fmt: skip


def bits(program: Program, arrays: list[np.ndarray], engine: str = "reference") -> list[bytes]:
    return [np.asarray(x).tobytes() for x in Executable(program, engine=engine, fidelity="bitexact").launch(arrays)[0]]


@functools.cache
def on_generic(case: Sum) -> list[bytes]:
    return bits(compile_function(case.fn, case.arrays()), case.arrays())


def roomless(chip: Chip) -> Chip:
    """With an eighth of a chip's memory: smaller tiles."""
    return replace(chip, name=f"{chip.name}-small", vmem_bytes=chip.vmem_bytes // 8, acc_bytes=chip.acc_bytes // 8)


@pytest.mark.parametrize("cores", [2, 8, 32])
@pytest.mark.parametrize("case", (*SUMS, *PRODUCTS), ids=lambda c: c.name)
def test_bits_do_not_depend_on_the_number_of_cores(case: Sum, cores: int) -> None:
    chip = replace(GENERIC, name=f"generic-{cores}", cores=cores)
    assert bits(compile_function(case.fn, case.arrays(), chip=chip), case.arrays()) == on_generic(case)


@pytest.mark.parametrize("chip", ["ascend910", "bm1690", "tpu-v3", "tpu-v6e", "small"])
@pytest.mark.parametrize("case", (*SUMS, *PRODUCTS), ids=lambda c: c.name)
def test_bits_do_not_depend_on_the_chip(case: Sum, chip: str) -> None:
    row = CHIPS.get(chip, roomless(GENERIC))
    assert bits(compile_function(case.fn, case.arrays(), chip=row), case.arrays()) == on_generic(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", (*SUMS, *PRODUCTS), ids=lambda c: c.name)
def test_the_fast_engine_adds_in_the_same_order_on_32_cores(case: Sum) -> None:
    chip = replace(GENERIC, name="generic-32", cores=32)
    assert bits(compile_function(case.fn, case.arrays(), chip=chip), case.arrays(), "fast") == on_generic(case)


def after_every_pass(fn: Callable[..., Any], arguments: Any, chip: str) -> list[list[bytes]]:
    """Bits on the device after no pass, after the first, after the first two, ...; equal Programs run once."""
    graph = lower_jaxpr(jax.make_jaxpr(fn)(*arguments), "f")
    arrays = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    programs = [compile_graph(graph, chip=chip, passes=PIPELINE[:n]).strip() for n in range(len(PIPELINE) + 1)]
    found = {text: bits(program, arrays) for text, program in {disassemble(p): p for p in programs}.items()}
    return [found[disassemble(program)] for program in programs]


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["generic", "ascend910"])
@pytest.mark.parametrize("case", (*SUMS, *PRODUCTS), ids=lambda c: c.name)
def test_no_pass_changes_a_bit(case: Sum, chip: str) -> None:
    first, *rest = after_every_pass(case.fn, case.arrays(), chip)
    assert [n for n, found in enumerate(rest) if found != first] == []


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["generic", "ascend910"])
def test_no_pass_changes_a_bit_of_a_training_step(chip: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"conv": (3, 3, 3, 12), "scale": (12,), "dense": (8 * 8 * 12, 10), "bias": (10,)}
    params = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    first, *rest = after_every_pass(step, (params, rng.standard_normal((4, 8, 8, 3)).astype(np.float32)), chip)
    assert [n for n, found in enumerate(rest) if found != first] == []


# --- the rule itself --------------------------------------------------------------------------------------------------


sizes = st.lists(st.sampled_from((1, 2, 3, 5, 7, 8, 14, 17, 28, 56, 64, 128, 257, 1000, 1024, 5000)), min_size=1, max_size=5)


@given(sizes, st.data())
def test_blocks_are_boxes_that_cut_every_axis_but_the_first_evenly(shape: list[int], data: st.DataObject) -> None:
    axes = sorted(data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1)))
    block, summed = sum_block(shape, axes), [shape[axis] for axis in axes]
    box = block_shape(summed, block)
    assert math.prod(box) == block <= max(LONGEST_SUM, 1)
    long = [axis for axis, n in enumerate(summed) if n > 1]
    assert all(n % b == 0 for axis, (n, b) in enumerate(zip(summed, box, strict=True)) if long and axis != long[0])


@given(sizes, st.data())
def test_sums_that_would_have_short_blocks_are_taken_apart_until_none_has(shape: list[int], data: st.DataObject) -> None:
    axes = sorted(data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1)))
    while first := axes_reduced_first(shape, axes):
        assert first == tuple(axes[-len(first) :]) and len(first) < len(axes)
        assert not axes_reduced_first(shape, first)
        shape, axes = [n for axis, n in enumerate(shape) if axis not in first], axes[: -len(first)]


@pytest.mark.parametrize(
    ("lhs", "rhs", "block"),
    [
        ((32, 14, 14, 256), (3, 3, 256, 512), (3, 3, 128)),  # a whole kernel and some channels
        ((32, 14, 14, 64), (3, 3, 64, 512), (3, 3, 64)),  # all
        ((1, 7, 7, 128), (5, 5, 128, 8), (1, 3, 128)),  # a part of the kernel: with it a block would be too long
        ((1, 7, 7, 4096), (1, 1, 4096, 8), (1, 1, 512)),
    ],
)
def test_a_convolution_adds_up_a_whole_kernel_in_one_go_where_that_is_not_too_long(lhs: Any, rhs: Any, block: Any) -> None:
    whole = Contraction((0, 1, 2, 3), (4, 5, 3, 6), (0, 1, 2, 6), (SlidingAxis(1, 4), SlidingAxis(2, 5)))
    found = depth_block(whole, whole.by_label(lhs, rhs, (*lhs[:3], rhs[3])))
    assert tuple(found[label] for label in (4, 5, 3)) == block
