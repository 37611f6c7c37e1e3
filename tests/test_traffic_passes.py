"""Passes and tiles that save kernels and memory traffic: what they make of small graphs, and the modelled time that they save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import compile_function, compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.device.timing.calibration import Calibration
from tpuflow.device.timing.program import time_program
from tpuflow.dtypes import BF16, F16, F32, DType
from tpuflow.isa.contraction import Contraction, SlidingAxis
from tpuflow.isa.matrix import MatmulRead
from tpuflow.isa.program import Program
from tpuflow.isa.vector import Slice
from tpuflow.lower import tiling
from tpuflow.lower.assemble import Interface, assemble
from tpuflow.lower.bus_price import LEAST_BUS, prices
from tpuflow.lower.emit import site
from tpuflow.lower.emit.matmul import Product
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.parse import parse
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.passes import outline
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.fold_moves import FoldMoves
from tpuflow.lower.passes.fuse import Fuse
from tpuflow.lower.passes.merge_kernels import MergeKernels
from tpuflow.lower.passes.simplify import Simplify
from tpuflow.lower.passes.store_less import StoreLess


def T(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype, shape)


def fused(b: Builder, outputs: Sequence[Value]) -> Graph:
    return verify(Fuse()(Simplify()(b.finish(outputs))))


def fused_again(graph: Graph) -> Graph:
    return verify(Fuse()(Simplify()(graph)))


CHIP, FAST = get_chip("ascend910"), get_chip("tpu-v7x")
CALIBRATION = Calibration(kernel_seconds=5e-6)


def microseconds(graph: Graph, *passes: Pass, chip: Chip = CHIP) -> int:
    """Modelled time of a fused graph on the device after some passes."""
    for step in passes:
        graph = verify(step(graph))
    program = assemble(graph, plan_memory(graph, chip), chip, Interface())
    return round(time_program(program, calibration=CALIBRATION).device_seconds * 1e6)


def assert_same_bits(one: Graph, other: Graph) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(v.dtype.numpy) for v in one.inputs]
    for want, got in zip(interpret(one, *arrays), interpret(other, *arrays), strict=True):
        np.testing.assert_array_equal(got, want)


# --- simplify -----------------------------------------------------------------------------------------------------------


def moments(*, widened: bool = False) -> Graph:
    """The means of 64 channels, over differences from the first sample of each (of f32 values, if widened): f16[512,64] -> f32[64]."""
    b = Builder("moments", [T(F16, 512, 64)])
    (x,) = b.inputs
    first = b.convert(b.reshape(b.slice(b.convert(x, F32) if widened else x, (0, 0), (1, 64)), (64,)), F32)
    total = b.reduce("add", b.sub(b.convert(x, F32), b.broadcast(first, (512, 64), (1,))), (0,))
    return verify(FoldMoves()(Simplify()(b.finish([b.add(b.div(total, 512.0), first)]))))


def test_a_slice_of_a_wider_copy_leaves_the_array_as_it_is_stored() -> None:
    graph = verify(Fuse()(moments(widened=True)))
    assert [[str(v.type) for v in n.inputs] for n in graph.nodes] == [["f16[512,64]"]]
    assert_same_bits(moments(widened=True), moments())


def test_work_on_a_slice_is_done_in_the_kernel_that_needs_it() -> None:
    graph = verify(Fuse()(moments()))
    assert [n.attrs["kind"] for n in graph.nodes] == ["reduce"]
    assert microseconds(graph) == 7


# --- fuse: conversions of what products read ------------------------------------------------------------------------------


def layer(rows: int) -> Graph:
    """A dense layer in f16 with f32 weights, and the gradient of its input, fused for `CHIP`."""
    b = Builder("layer", [T(F16, rows, 1024), T(F16, rows, 512), T(F32, 1024, 512)])
    x, dy, w = b.inputs
    narrow = b.convert(w, F16)
    results = [b.convert(b.dot(x, narrow, (1,), (0,)), F16), b.convert(b.dot(dy, narrow, (1,), (1,)), F16)]
    return verify(Fuse(CHIP)(Simplify()(b.finish(results))))


def turned(rows: int) -> Graph:
    """A product in f16 with f32 weights that cannot stay on the chip: it contracts two axes, in another order there, and block by block."""
    b = Builder("turned", [T(F16, rows, 32, 64), T(F32, 64, 32, 512)])
    x, w = b.inputs
    return verify(Fuse(CHIP)(Simplify()(b.finish([b.convert(b.dot(x, b.convert(w, F16), (1, 2), (1, 0)), F16)]))))


def test_weights_that_are_read_for_many_tiles_of_rows_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    once = layer(8192), turned(8192)
    assert [[n.attrs["kind"] for n in graph.nodes] for graph in once] == [["map", "dot", "dot"], ["map", "dot"]]
    monkeypatch.setattr(outline, "start_seconds", lambda chip: 1.0)
    every_time = layer(8192), turned(8192)
    assert [[n.attrs["kind"] for n in graph.nodes] for graph in every_time] == [["dot", "dot"], ["dot"]]
    assert microseconds(once[0]) < microseconds(every_time[0]), "weights that stay on the chip are converted there once as well"
    assert microseconds(once[1]) < 0.7 * microseconds(every_time[1])


@pytest.mark.parametrize("rows", [32, 512, 1024])
def test_weights_that_are_read_a_few_times_are_converted_where_they_are_read(rows: int) -> None:
    assert [n.attrs["kind"] for n in layer(rows).nodes] == ["dot", "dot"]


def test_how_often_a_product_reads_its_operands_depends_on_the_other_ones_axes() -> None:
    b = Builder("f", [T(F16, 8, 1024, 64), T(F16, 8, 64, 2048), T(F16, 16, 28, 28, 64), T(F16, 3, 3, 64, 520)])
    x, y, image, kernel = b.inputs
    batched = b.dot(x, y, (2,), (1,), (0,), (0,))
    sliding = (SlidingAxis(1, 4), SlidingAxis(2, 5))
    padded = tuple(s.bound(s.axis, 28, low=1) for s in sliding)
    convolved = b.conv(image, kernel, Contraction((0, 1, 2, 3), (4, 5, 3, 6), (0, 1, 2, 6), sliding, padded), (16, 28, 28, 520))
    products = [next(n for n in b.finish([v]).nodes if v in n.results) for v in (batched, convolved)]
    assert [outline.times_read(products[0], v) for v in (x, y)] == [4, 2], "columns, rows; a batch axis is read once"
    assert [outline.times_read(products[1], v) for v in (image, kernel)] == [2, 25]


def safe_norm(*, by: str = "le") -> Graph:
    """A norm with a gradient at zero: where the norm is zero (or, as a check, not above one), ones are what its square root is of."""
    b = Builder("norm", [T(F32, 512, 128)])
    (x,) = b.inputs

    def norm(v: Value) -> Value:
        return b.sqrt(b.reduce("add", b.mul(v, v), (0, 1)))

    zero = b.full(T(F32), 0.0)
    small = b.emit("compare", (norm(x), zero), {"direction": "le"}).result
    inside = b.emit("compare", (norm(x), zero), {"direction": by}).result
    other = b.select(b.splat(inside, x.shape), b.full_like(x, 1.0), x)
    return b.finish([b.select(small, zero, norm(other))])


def test_what_a_choice_throws_away_is_not_told_apart_inside() -> None:
    graph = safe_norm()
    once = fused_again(graph)
    assert [n.attrs["kind"] for n in once.nodes] == ["reduce"]
    by_another = fused_again(safe_norm(by="lt"))
    assert [n.attrs["kind"] for n in by_another.nodes] == ["reduce", "reduce", "map"]
    for values in (np.zeros, np.ones, lambda shape: np.full(shape, np.nan)):
        x = values((512, 128)).astype(np.float32)
        np.testing.assert_array_equal(interpret(once, x)[0], interpret(graph, x)[0])
    assert (microseconds(by_another), microseconds(once)) == (22, 8)


# --- simplify and fuse: norms of weights ----------------------------------------------------------------------------------


def norms(*, squeezed: bool) -> Graph:
    """A 1x1 convolution's weights, narrowed, and their squared norm (with the axes of size 1 taken away before it, if squeezed)."""
    b = Builder("norms", [T(F32, 1, 1, 1024, 2048)])
    (w,) = b.inputs
    squares = b.mul(w, w)
    norm = b.reduce("add", b.reshape(squares, (1024, 2048)), (0, 1)) if squeezed else b.reduce("add", squares, (0, 1, 2, 3))
    return fused(b, [b.convert(w, F16), norm])


def test_a_norm_over_axes_of_size_1_squares_what_it_reads_and_stores_no_squares() -> None:
    graph = norms(squeezed=False)
    assert [[str(v.type) for v in n.results] for n in graph.nodes] == [["f16[1,1,1024,2048]"], ["f32[]"]]
    assert (microseconds(norms(squeezed=True)), microseconds(graph)) == (44, 36)


def test_cores_that_share_a_small_map_are_done_sooner_than_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> Graph:
        b = Builder("small", [T(F32, 256, 256)])
        return fused(b, [b.exp(b.inputs[0])])

    together = microseconds(small())
    monkeypatch.setattr(site, "share_tile", tiling.fill_tile)
    assert (microseconds(small()), together) == (16, 8)


# --- merge kernels ------------------------------------------------------------------------------------------------------


def updates(parameters: int) -> Graph:
    """Parameters less their gradients, unless any gradient is infinite: what a training step with loss scaling ends in."""
    b = Builder("updates", [T(F32, 64)] * (2 * parameters))
    old, gradients = b.inputs[:parameters], b.inputs[parameters:]
    flags = [b.reshape(b.reduce("and", b.emit("is_finite", (g,)).result, (0,)), (1,)) for g in gradients]
    finite = b.reduce("and", b.concatenate(flags, 0), (0,))
    return fused(b, [b.select(b.splat(finite, (64,)), b.sub(p, g), p) for p, g in zip(old, gradients, strict=True)])


def test_checks_and_updates_of_parameters_of_one_shape_are_three_kernels() -> None:
    graph = updates(20)
    merged = verify(MergeKernels()(graph))
    assert [n.attrs["kind"] for n in graph.nodes] == ["reduce"] * 20 + ["map"] * 21
    assert [n.attrs["kind"] for n in merged.nodes] == ["reduce", "map", "map"]
    assert_same_bits(graph, merged)
    assert (microseconds(graph), microseconds(graph, MergeKernels())) == (291, 23)


def test_kernels_that_depend_on_one_another_stay_apart() -> None:
    b = Builder("f", [T(F32, 8), T(F32, 8)])
    x, y = b.inputs
    total = b.reduce("add", x, (0,))
    graph = fused(b, [b.mul(y, 2.0), b.mul(x, b.splat(b.reduce("add", b.mul(b.exp(x), b.splat(total, (8,))), (0,)), (8,)))])
    merged = MergeKernels()(graph)
    assert sum(n.attrs["kind"] == "reduce" for n in merged.nodes) == 2
    assert sum(n.attrs["kind"] == "map" for n in merged.nodes) == 1


def test_a_kernel_does_not_wait_where_memory_is_short() -> None:
    """Each tanh ends a large array; waiting for one another, all of them would be there at once."""
    b = Builder("f", [T(F32, 4, 4)])
    (x,) = b.inputs
    sums = []
    for _ in range(3):
        x = b.dot(x, x, (1,), (0,))
        wide = b.dot(b.broadcast(x, (1024, 4, 4), (1, 2)), x, (2,), (0,))
        sums.append(b.reduce("add", b.exp(wide), (0, 1, 2)))
    graph = fused(b, sums)
    merged = MergeKernels()(graph)
    assert plan_memory(merged, CHIP).use.peak_bytes <= plan_memory(graph, CHIP).use.peak_bytes
    assert sum(n.op == "fused" and n.attrs["kind"] == "reduce" for n in merged.nodes) == 3


@pytest.mark.parametrize(("rows", "kernels"), [(65536, 3), (64, 1)], ids=["large", "small"])
def test_a_kernel_does_not_hold_what_is_large_elsewhere_than_at_the_peak_either(rows: int, kernels: int) -> None:
    """Gradients of biases, one layer after the other; the peak, where they would be no burden, is before them."""
    b = Builder("layers", [T(F32, 4 * rows, 64), T(F32, 64, 64)])
    x, w = b.inputs
    for _ in range(2):
        x = b.dot(b.exp(x), w, (1,), (0,))
    x, sums = b.slice(x, (0, 0), (rows, 64)), []
    for _ in range(3):
        x = b.dot(x, w, (1,), (0,))
        sums.append(b.reduce("add", b.exp(x), (0,)))
    merged = MergeKernels()(fused(b, [x, *sums]))
    assert sum(n.op == "fused" and n.attrs["kind"] == "reduce" for n in merged.nodes) == kernels


# --- store less ---------------------------------------------------------------------------------------------------------


def epilogue() -> Graph:
    """A gradient that comes out of a product, times what batch normalisation reads beside it: three sums over it."""
    b = Builder("gradient", [T(F16, 65536, 64), T(F16, 64, 64), T(F16, 65536, 64), T(F32, 64)])
    dy, w, x, scale = b.inputs
    g = b.convert(b.convert(b.dot(dy, w, (1,), (0,)), F16), F32)
    scaled = b.mul(g, b.broadcast(scale, (65536, 64), (1,)))
    sums = [b.reduce("add", v, (0,)) for v in (g, b.mul(g, b.convert(x, F32)), b.neg(scaled))]
    return fused(b, sums)


def test_what_a_product_would_store_three_times_it_stores_once_in_f16() -> None:
    graph = epilogue()
    less = verify(StoreLess()(graph))
    assert [str(v.type) for v in graph.nodes[0].results] == ["f16[65536,64]", "f32[65536,64]", "f32[65536,64]"]
    assert [[str(v.type) for v in n.results] for n in less.nodes] == [["f16[65536,64]"], ["f32[64]"] * 3]
    assert_same_bits(graph, less)
    assert microseconds(graph, StoreLess()) < 0.5 * microseconds(graph)


def test_a_piece_of_what_a_reader_joins_is_computed_there() -> None:
    """The gradient of a pooling joins what each place of a window gets; that of the middle is elementwise of the one that is stored."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.sum(lax.conv_general_dilated(pooled, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2)

    shapes = (jax.ShapeDtypeStruct((8, 32, 32, 64), jnp.float32), jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.float32))
    graph = verify(Fuse()(FoldMoves()(Simplify()(lower_jaxpr(jax.make_jaxpr(jax.grad(loss))(*shapes), name="pooled")))))
    less = verify(StoreLess()(graph))
    made = [[str(v.type) for v in n.results] for g in (graph, less) for n in g.nodes[-2:]]
    gradient, whole = "f32[8,16,16,64]", "f32[8,32,32,64]"
    assert made == [[gradient, gradient], [whole], [gradient], [whole]]
    assert_same_bits(graph, less)


def test_what_others_need_in_memory_is_stored_all_the_same() -> None:
    b = Builder("f", [T(F16, 4096, 64), T(F16, 64, 64)])
    x, w = b.inputs
    y = b.exp(b.convert(b.dot(x, w, (1,), (0,)), F32))
    graph = fused(b, [y, b.reduce("add", y, (0,))])
    assert str(StoreLess()(graph)) == str(graph)


def test_a_costly_chain_is_not_computed_again_to_save_a_narrow_array() -> None:
    b = Builder("f", [T(F32, 4096, 64)])
    (x,) = b.inputs
    y = b.convert(b.tanh(b.exp(b.sin(b.tanh(x)))), F16)
    graph = fused(b, [b.reduce("add", y, (0,)), b.reduce("max", y, (1,))])
    assert str(StoreLess()(graph)) == str(graph)


def test_a_kernel_that_pools_and_finds_the_winners_loads_its_operand_once() -> None:
    def step(x: jax.Array) -> tuple[jax.Array, ...]:
        pooled, back = jax.vjp(lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"), x)
        return back(jnp.tanh(pooled))

    shape = (8, 32, 32, 128)
    program = compile_function(step, (jax.ShapeDtypeStruct(shape, jnp.float32),), chip=CHIP)
    (kernel,) = (k for k in program.kernels() if "max" in k.name)
    read = [w for i in kernel.instructions for role, w in i.windows() if role == "read"]
    assert sum(program.buffers[w.buffer].elems == math.prod(shape) for w in read) == 1
    assert sum(isinstance(i, Slice) for i in kernel.instructions) == 9, "one for every place of the window"


# --- tiles of products --------------------------------------------------------------------------------------------------


def weight_gradient() -> Graph:
    """Of a dense layer or a 1x1 convolution: a small result, a long contraction."""
    b = Builder("gradient", [T(F16, 25088, 128), T(F16, 25088, 512)])
    return fused(b, [b.convert(b.dot(*b.inputs, (0,), (0,)), F16)])


def test_kernels_of_a_long_sum_read_no_more_than_those_of_a_short_one() -> None:
    def most_read(layers: int) -> int:
        b = Builder("f", [T(F32, 8192, 64), T(BF16, 64, 64)])
        x, w = b.inputs
        for _ in range(layers):
            y = b.convert(b.dot(b.convert(x, BF16), w, (1,), (0,)), BF16)
            x = b.add(x, b.convert(b.sub(y, b.broadcast(b.reduce("max", y, (0,)), (8192, 64), (1,))), F32))
        return max(len(node.inputs) for node in Fuse(get_chip("tpu-v3"))(Simplify()(b.finish([x]))).nodes if node.op == "fused")

    assert most_read(60) == most_read(15)


def test_a_long_contraction_is_shared_by_tiles_rather_than_added_up_between_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = replace(CHIP, acc_bytes=4 * 2**20, vmem_bytes=16 * 2**20)
    cut = microseconds(weight_gradient(), chip=roomy)
    monkeypatch.setattr(tiling, "tiles_seconds", lambda *arguments: (0.0, 0.0))
    assert cut < 0.9 * microseconds(weight_gradient(), chip=roomy), "the longest tiles leave cores to add up each other's sums"


def test_tiles_of_every_number_of_cores_take_the_contraction_in_its_blocks() -> None:
    whole = tiling.MatmulSizes((), (128,), (512,), (25088,))
    operands = tiling.Operands(2, 2, 16, 16, lambda tile: tile.products[1] * tile.products[3], (512,))
    roomy = replace(CHIP, acc_bytes=4 * 2**20, vmem_bytes=16 * 2**20)
    tiles = {cores: next(tiling.matmul_tiles(whole, replace(roomy, cores=cores), operands)) for cores in (1, 2, 8, 32)}
    assert len(set(tiles.values())) > 1
    assert {tile.contracted for tile in tiles.values()} == {(512,)}
    whole = tiling.MatmulSizes((), (32, 14, 14), (512,), (3, 3, 256))
    operands = replace(operands, depth=(3, 3, 128))
    tiles = {cores: next(tiling.matmul_tiles(whole, replace(CHIP, cores=cores), operands)) for cores in (1, 2, 8, 32)}
    assert {tile.contracted for tile in tiles.values()} == {(3, 3, 128)}


@pytest.mark.parametrize("chip", ["tpu-v3", "tpu-v5p"])
def test_a_weight_gradient_takes_in_its_whole_kernel_and_few_channels_rather_than_loading_both_operands_at_every_position(
    chip: str,
) -> None:
    def halos(tile: tiling.MatmulSizes) -> int:
        return 8 * math.prod(n + 6 for n in tile.rows[:2]) * tile.rows[2]

    whole = tiling.MatmulSizes((), (3, 3, 512), (512,), (32, 7, 7))
    operands = tiling.Operands(2, 2, 40, 40, halos, (8, 7, 7), overlapping=(0, 1), prices=tiling.Prices(1.0))
    height, width, channels = next(tiling.matmul_tiles(whole, get_chip(chip), operands)).rows
    assert (height, width) == (3, 3) and channels <= 128


def test_a_second_of_the_bus_is_worth_what_other_kernels_want_of_it_for_what_products_leave() -> None:
    def price(others: int, chip: str = "tpu-v5e") -> float:
        b = Builder("f", [T(BF16, 4096, 4096)] * (2 + others))
        sums = [b.add(x, x) for x in b.inputs[2:]]
        return prices(fused(b, [b.convert(b.dot(*b.inputs[:2], (1,), (0,)), BF16), *sums]), get_chip(chip)).bus

    found = [price(n) for n in (0, 1, 2, 20)]
    assert found == sorted(found) and found[0] == LEAST_BUS < found[2] < found[3] == 1
    assert price(20, "ascend910") == 0  # arrays stay nowhere


@pytest.mark.parametrize("chip", ["tpu-v5e", "tpu-v5p"])
def test_the_dearer_the_bus_the_less_products_move(chip: str) -> None:
    whole, row = tiling.MatmulSizes((), (8192,), (3072,), (768,)), get_chip(chip)
    operands = tiling.Operands(2, 2, 4, 4, lambda tile: tile.products[1] * tile.products[3], (384,), one_step=True)

    def moving(price: float) -> float:
        tile = next(tiling.matmul_tiles(whole, row, replace(operands, prices=tiling.Prices(price))))
        return tiling.tiles_seconds(whole, tile, row, operands)[1]

    seconds = [moving(price) for price in (0.0, 0.1, 1.0)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_room_is_worth_the_share_of_moves_that_arrays_which_fit_could_save() -> None:
    def price(rows: int) -> float:
        b = Builder("f", [T(BF16, 1024, 1024), T(BF16, rows, 4096)])
        small, large = b.inputs
        return prices(fused(b, [b.add(small, small), b.add(large, large)]), get_chip("tpu-v3")).room

    found = [price(rows) for rows in (16, 1 << 14, 1 << 16)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.05 < found[0]


def test_room_of_no_worth_does_not_count() -> None:
    whole, row = tiling.MatmulSizes((), (8192,), (3072,), (768,)), get_chip("tpu-v5e")
    operands = tiling.Operands(2, 2, 4, 4, lambda tile: tile.products[1] * tile.products[3], (384,), one_step=True)

    def seconds(room: float) -> list[float]:
        priced = replace(operands, prices=tiling.Prices(0.0, room))
        return [tiling.tiles_seconds(whole, tile, row, priced)[0] for tile in tiling.matmul_tiles(whole, row, priced)]

    assert seconds(0.0) == sorted(seconds(0.0)) and seconds(1.0) != sorted(seconds(1.0))


@pytest.mark.parametrize("chip", ["tpu-v3", "tpu-v5e"])
def test_short_tiles_of_what_passes_leave_room_for_more_of_the_operand_that_stays(chip: str) -> None:
    whole, row = tiling.MatmulSizes((), (4096,), (4096,), (1024,)), replace(get_chip(chip), vmem_bytes=16 * 2**20)
    crowded = tiling.Operands(
        2, 2, 24, 24, lambda tile: tile.products[1] * tile.products[3], (1024,), one_step=True, prices=tiling.Prices(0.2)
    )
    tiles = list(tiling.matmul_tiles(whole, row, crowded))
    seconds, moves = zip(*(tiling.tiles_seconds(whole, tile, row, crowded) for tile in tiles), strict=True)
    long = [i for i, tile in enumerate(tiles) if min(*tile.rows, *tile.columns) >= tiling.MATRIX_EDGE]
    assert long and moves[0] < 0.75 * min(moves[i] for i in long) and seconds[0] < 1.02 * min(seconds[i] for i in long)


@pytest.mark.parametrize("chip", ["tpu-v3", "tpu-v5p"])
def test_short_tiles_cost_reading_the_accumulators_more_often(chip: str) -> None:
    whole, row = tiling.MatmulSizes((), (4096,), (4096,), (4096,)), get_chip(chip)
    operands = tiling.Operands(2, 2, 4, 4, lambda tile: tile.products[1] * tile.products[3], (512,), one_step=True)
    tiles = [tiling.MatmulSizes((), (256,), (n,), (4096,), tiling.Stationary.LHS) for n in (128, 512)]
    short, long = (tiling.tiles_seconds(whole, tile, row, operands)[0] for tile in tiles)
    assert short > 1.02 * long


def test_every_core_keeps_weights_of_its_own_columns_where_these_outweigh_the_rows() -> None:
    def halos(tile: tiling.MatmulSizes) -> int:
        return 128 * tile.rows[0] * math.prod(n + 1 for n in tile.rows[1:])

    whole = tiling.MatmulSizes((), (256, 28, 28), (2, 2, 128), (2, 2, 128))
    operands = tiling.Operands(2, 2, 4, 4, halos, (2, 2, 128), one_step=True)
    tiles = next(tiling.matmul_tiles(whole, get_chip("tpu-v3"), replace(operands, prices=tiling.Prices(1.0, 0.0))))
    assert (tiles.stationary, math.prod(tiles.columns)) == (tiling.Stationary.RHS, 256)


def deep() -> Graph:
    """A product with so long a contraction that no operand can stay on the chip."""
    b = Builder("product", [T(F16, 4096, 32768), T(F16, 32768, 4096)])
    return fused(b, [b.convert(b.dot(*b.inputs, (1,), (0,)), F16)])


def test_tiles_are_longer_where_arrays_multiply_faster_than_the_next_tiles_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = replace(FAST, vmem_bytes=16 * 2**20)
    longer = microseconds(deep(), chip=chip)
    monkeypatch.setattr(tiling, "LONGER", 1)
    assert longer < 0.9 * microseconds(deep(), chip=chip)


@pytest.mark.parametrize(("vmem_mib", "tiles"), [(64, [4, 4, 64]), (16, [4, 4, 64]), (4, [8, 8, 64])])
def test_a_contraction_is_cut_alike_however_long_rows_and_columns_are(
    monkeypatch: pytest.MonkeyPatch, vmem_mib: int, tiles: list[int]
) -> None:
    graph, chip = deep(), replace(FAST, vmem_bytes=vmem_mib * 2**20)

    def grid() -> list[int]:
        (kernel,) = assemble(graph, plan_memory(graph, chip), chip, Interface()).kernels()
        return [axis.size for axis in kernel.grid]

    assert grid() == tiles
    monkeypatch.setattr(tiling, "LONGER", 1)
    assert grid()[-1] == tiles[-1]


def test_sums_that_leave_the_accumulators_rounded_have_the_same_bits() -> None:
    b = Builder("rounded", [T(F16, 256, 1536), T(F16, 1536, 256)])
    graph = fused(b, [b.convert(b.dot(*b.inputs, (1,), (0,)), F16)])
    tiled = parse(str(graph).replace("{kind=dot}", "{kind=dot} tiled([256, 512 of 1536 sequential, 256])"))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(np.float16) for v in graph.inputs]
    rounded, apart = (compile_graph(tiled, chip=chip, passes=()) for chip in (CHIP, FAST))
    leaving = [{i.dst.dtype for k in p.kernels() for i in k.instructions if isinstance(i, MatmulRead)} for p in (rounded, apart)]
    assert leaving == [{F16}, {F32}]
    for engine in ("reference", "fast"):
        np.testing.assert_array_equal(*(Executable(p, engine, fidelity="bitexact").launch(arrays)[0][0] for p in (rounded, apart)))


def convolved(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """A 3x3 convolution and its two gradients."""
    y, back = jax.vjp(lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), x, w)
    return (y, *back(dy))


def convolution(batch: int, side: int, channels: int) -> Program:
    """A 3x3 convolution in f16 with its gradients."""
    x, w = ((jax.ShapeDtypeStruct(s, jnp.float16)) for s in ((batch, side, side, channels), (3, 3, channels, channels)))
    return compile_function(convolved, (x, w, x), chip=CHIP)


def test_tiles_of_a_kernels_gradient_take_in_the_whole_kernel_rather_than_all_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds() -> list[int]:
        return [round(row.time.seconds * 1e6) for row in time_program(convolution(32, 14, 256), calibration=CALIBRATION).kernels]

    whole = seconds()
    monkeypatch.setattr(Product, "_overlapping", lambda product: ())
    (forward, weights, of_input), (_, apart, _) = whole, seconds()
    assert weights < 0.75 * apart and weights <= 1.05 * max(forward, of_input)


@pytest.mark.slow
def test_a_contraction_of_whole_kernels_is_added_up_as_the_reference_engine_does() -> None:
    program = convolution(1, 5, 144)
    forward, _, of_input = program.kernels()
    assert all(kernel.grid[-1].kind == "sequential" for kernel in (forward, of_input)), "channels are cut"
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(np.float16) for v in (program.buffers[i.buffer] for i in program.inputs)]
    reference, fast = (Executable(program, engine, "bitexact").launch(arrays)[0] for engine in ("reference", "fast"))
    for ours, theirs in zip(fast, reference, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_operand_without_room_in_two_types_is_converted_by_a_kernel_of_its_own() -> None:
    """AlexNet's first weight gradient: 8 rows of the cotangent go with 29 rows of an image, whose 3 channels fill 16 lanes of ascend910. In
    f32 and f16 they left so little of its 1.25 MB that the images were read 170 times.
    """

    def weight_gradient(images: jax.Array, cotangent: jax.Array) -> jax.Array:
        def convolution(kernel: jax.Array) -> jax.Array:
            dimensions = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(images.astype(jnp.float16), kernel, (4, 4), "SAME", dimension_numbers=dimensions)

        return jax.vjp(convolution, jnp.zeros((11, 11, 3, 64), jnp.float16))[1](cotangent)[0]

    given = jax.ShapeDtypeStruct((32, 227, 227, 3), jnp.float32), jax.ShapeDtypeStruct((32, 57, 57, 64), jnp.float16)
    programs = {chip: compile_function(weight_gradient, given, chip=chip) for chip in ("tpu-v3", "ascend910")}
    assert {chip: len(list(p.kernels())) for chip, p in programs.items()} == {"tpu-v3": 1, "ascend910": 2}
    smallest = sum(math.prod(x.shape) * x.dtype.itemsize for x in given)
    assert all(time_program(p).work.hbm_bytes < 3 * smallest for p in programs.values())
