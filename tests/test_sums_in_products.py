"""SumInProduct: products that also sum their results over the rows: which do, what it saves, and that every engine agrees."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.norm import BatchNorm
from tests.emit_cases import assemble
from tests.graphs import kinds
from tests.test_traffic_passes import T, assert_same_bits, fused, microseconds
from tests.tolerances import LAYER_STATISTICS
from tpuflow.chips import get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.device.timing.program import sink_time
from tpuflow.dtypes import F16, F32
from tpuflow.isa.matrix import MOST_BLOCKS, MatmulAccumulate
from tpuflow.isa.program import Kernel, Program, walk
from tpuflow.isa.vector import ReduceInto
from tpuflow.lower.graph.blocking import DEPTH
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.operations.convolution import ConvAxes, convolution
from tpuflow.lower.operations.window import SlidingWindow
from tpuflow.lower.passes.sum_in_product import SumInProduct


def normalised(rows: int, depth: int, *, by_column: bool = True) -> Graph:
    """A product in f16, its first two moments over the rows (or the columns), and the product normalised by them."""
    b = Builder("normalised", [T(F16, rows, depth), T(F16, depth, 256)])
    y = b.convert(b.dot(*b.inputs, (1,), (0,)), F16)
    wide, axis = b.convert(y, F32), 0 if by_column else 1
    total, square = b.reduce("add", wide, (axis,)), b.reduce("add", b.mul(wide, wide), (axis,))
    kept = (1 - axis,)
    return fused(b, [b.convert(b.div(b.sub(wide, b.broadcast(total, y.shape, kept)), b.broadcast(square, y.shape, kept)), F16)])


def test_a_product_sums_its_results_while_they_are_on_the_chip() -> None:
    graph = normalised(65536, 64)
    joined = verify(SumInProduct()(graph))
    assert (kinds(graph), kinds(joined)) == (["dot", "reduce", "map"], ["dot", "map"])
    assert_same_bits(normalised(640, 64), SumInProduct()(normalised(640, 64)))
    assert microseconds(graph, SumInProduct()) < 0.65 * microseconds(graph)


def test_sums_along_rows_and_of_deep_products_stay_as_they_are() -> None:
    for graph in (normalised(65536, 64, by_column=False), normalised(65536, MOST_BLOCKS * DEPTH + 1)):
        assert kinds(SumInProduct()(graph)) == kinds(graph)


def test_sums_over_two_products_are_made_by_the_later_one() -> None:
    b = Builder("late", [T(F16, 65536, 64), T(F16, 64, 64)])
    x, w = b.inputs
    y = b.convert(b.dot(x, w, (1,), (0,)), F16)
    z = b.convert(b.dot(y, w, (1,), (0,)), F16)
    graph = fused(b, [b.reduce("add", b.mul(b.convert(y, F32), b.convert(z, F32)), (0,)), y])
    joined = verify(SumInProduct()(graph))
    assert kinds(joined) == ["dot", "dot"]
    assert [[str(v.type) for v in n.results] for n in joined.nodes] == [["f16[65536,64]"], ["f32[65536,64]", "f32[64]"]]


def test_columns_of_sums_are_cut_so_that_all_cores_go_through_the_rows_side_by_side() -> None:
    b = Builder("wide", [T(F16, 32768, 768), T(F16, 768, 3072)])
    y = b.convert(b.dot(*b.inputs, (1,), (0,)), F16)
    alone = fused(b, [y])
    graph = verify(SumInProduct()(fused(b, [y, b.reduce("add", b.convert(y, F32), (0,))])))
    assert kinds(graph) == ["dot"]
    assert microseconds(graph) <= 1.3 * microseconds(alone), "four times as long if the rows of a column were taken one after the other"


def test_a_long_sum_is_made_in_blocks_by_one_instruction_where_that_saves_time() -> None:
    joined = SumInProduct()(normalised(65536, 2048))
    assert kinds(joined) == ["dot", "map"]
    assert {i.block for i in accumulating(assemble(joined, get_chip("tpu-v3")))} == {DEPTH}
    assert microseconds(joined, chip=get_chip("tpu-v3")) < 0.85 * microseconds(normalised(65536, 2048), chip=get_chip("tpu-v3"))
    assert_same_bits(normalised(128, 2048), SumInProduct()(normalised(128, 2048)))


def test_a_sum_so_long_that_tiles_would_get_small_is_made_apart() -> None:
    joined, chip = SumInProduct()(normalised(65536, 16384)), get_chip("tpu-v3")
    assert kinds(joined) == ["dot", "map"]
    assert len(assemble(joined, chip).code) == 3
    assert microseconds(joined, chip=chip) == microseconds(normalised(65536, 16384), chip=chip)


def convolved(images: int, size: int, channels: int, stride: int = 1) -> Graph:
    """A convolution of a 3x3 kernel in f16, padded by one, and the sums of its results and of their squares."""
    b = Builder("convolved", [T(F16, images, size, size, channels), T(F16, 3, 3, channels, 8)])
    x, w = b.inputs
    window = SlidingWindow.of((3, 3), (stride, stride), ((1, 1), (1, 1)))
    y = convolution(b, x, w, ConvAxes((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)), window)
    wide = b.convert(y, F32)
    return fused(b, [y, b.reduce("add", wide, (0, 1, 2)), b.reduce("add", b.mul(wide, wide), (0, 1, 2))])


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "stride"), [(256, 1), (200, 1), (256, 2)])
def test_a_convolution_of_blocks_of_channels_sums_its_results_with_the_same_bits_on_every_engine(channels: int, stride: int) -> None:
    graph = convolved(8, 9 * stride, channels, stride)
    joined = verify(SumInProduct()(graph))
    assert (kinds(graph), kinds(joined)) == (["dot", "reduce"], ["dot"])
    whole, apart = (assemble(g, get_chip("tpu-v3")) for g in (joined, graph))
    assert [(bool(i.pairs), i.block) for i in accumulating(whole)] == [(True, 128)]
    assert [i.block for i in accumulating(apart)] == [0]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(v.dtype.numpy) for v in graph.inputs]
    want = Executable(apart, engine="reference").launch(arrays)[0]
    for found in (Executable(whole, engine="reference"), Executable(whole, fidelity="bitexact")):
        for one, other in zip(want, found.launch(arrays)[0], strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_weights_of_a_convolution_are_read_once_where_its_results_are_summed() -> None:
    chip = get_chip("tpu-v3")
    read = [sink_time(assemble(g, chip), 1).work.read_bytes for g in (convolved(32, 28, 256), SumInProduct()(convolved(32, 28, 256)))]
    assert read[1] < read[0]


@pytest.mark.slow
def test_sums_that_do_not_fit_beside_their_product_leave_two_kernels() -> None:
    chip = replace(get_chip("generic"), vmem_bytes=448 * 1024)
    graph = SumInProduct()(normalised(256, 512))
    assert kinds(graph) == ["dot", "map"]
    whole, cut = (assemble(graph, c) for c in (get_chip("generic"), chip))
    assert [len(program.code) for program in (whole, cut)] == [2, 3]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(v.dtype.numpy) for v in graph.inputs]
    one, other = (np.asarray(Executable(p, fidelity="bitexact").launch(arrays)[0][0]) for p in (whole, cut))
    np.testing.assert_array_equal(one, other)


# --- through the compiler -----------------------------------------------------------------------------------------------


def summing(program: Program) -> list[Kernel]:
    """The kernels that both multiply and sum."""
    kernels = [block for _, block in walk(program.code) if isinstance(block, Kernel)]
    both = (MatmulAccumulate, ReduceInto)
    return [k for k in kernels if all(any(isinstance(i, kind) for i in k.body) for kind in both)]


def accumulating(program: Program) -> list[MatmulAccumulate]:
    """The products of a program."""
    kernels = [block for _, block in walk(program.code) if isinstance(block, Kernel)]
    return [i for k in kernels for i in k.instructions if isinstance(i, MatmulAccumulate)]


def layer(params: dict, stats: dict, x: jax.Array, dy: jax.Array) -> tuple:
    """Two convolutions with batch normalisation after each: values, statistics and gradients."""
    norm = BatchNorm()

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def forward(params: dict, x: jax.Array) -> tuple[jax.Array, list]:
        moved = []
        for name in ("one", "two"):
            variables = {"params": params[name]["norm"], "batch_stats": stats[name]}
            y, state = norm.apply(variables, convolved(x, params[name]["kernel"]), True, mutable=["batch_stats"])
            x = jax.nn.relu(y).astype(x.dtype)
            moved.append(state)
        return x, moved

    y, back, state = jax.vjp(forward, params, x, has_aux=True)
    return y, state, back(dy)


def layer_arrays() -> tuple:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def made(kernel: tuple[int, ...]) -> dict:
        return {"kernel": draw(*kernel), "norm": {"scale": jnp.ones(kernel[-1]), "bias": jnp.zeros(kernel[-1])}}

    params = {"one": made((3, 3, 4, 8)), "two": made((1, 1, 8, 12))}
    stats = {name: {"mean": jnp.zeros(n), "var": jnp.ones(n)} for name, n in (("one", 8), ("two", 12))}
    return params, stats, draw(2, 9, 9, 4), draw(2, 9, 9, 12)


SMALL = replace(
    get_chip("generic"), name="small", vector_sublanes=4, vector_lanes=8, matrix_rows=8, matrix_columns=8, vmem_bytes=48 * 1024,
    acc_bytes=4096,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("chip", [get_chip("generic"), SMALL], ids=lambda c: c.name)
def test_layers_that_sum_in_their_products_compute_what_jax_does_on_every_engine(chip) -> None:
    arrays = layer_arrays()
    program = compile_function(layer, arrays, chip=chip)
    assert len(summing(program)) >= 3
    assert chip is not SMALL or any(g.kind == "sequential" for k in summing(program) for g in k.grid)
    flat = [np.asarray(a) for a in jax.tree.leaves(arrays)]
    reference = Executable(program, engine="reference").launch(flat)[0]
    exact, native = (Executable(program, fidelity=fidelity).launch(flat)[0] for fidelity in ("bitexact", "native"))
    for want, found in zip(reference, exact, strict=True):
        assert np.asarray(want).tobytes() == np.asarray(found).tobytes()
    for want, found in zip(jax.tree.leaves(jax.jit(layer)(*arrays)), native, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=LAYER_STATISTICS * max(1.0, float(np.abs(want).max())))


def test_native_values_of_such_kernels_are_lifted_whole() -> None:
    arrays = layer_arrays()
    executable = Executable(compile_function(layer, arrays, chip=SMALL))
    executable.launch([np.asarray(a) for a in jax.tree.leaves(arrays)])
    assert {row.tier for row in executable.profile()} == {1}
