"""Passes: each keeps the meaning of every graph, and does what its docstring shows."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compile_cases import CASES
from tests.graphs import T, bits, kinds, ops
from tpuflow.chips import CHIPS
from tpuflow.compiler import PIPELINE
from tpuflow.dtypes import F16, F32, S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.jaxpr.importer import lower_jaxpr
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.fold_moves import FoldMoves
from tpuflow.lower.passes.fuse import Fuse
from tpuflow.lower.passes.hoist_invariants import HoistInvariants
from tpuflow.lower.passes.schedule import Schedule
from tpuflow.lower.passes.simplify import Simplify
from tpuflow.lower.passes.widen_after_reshape import WidenAfterReshape

# --- every pass ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_pass_of_the_pipeline_keeps_every_bit(name: str) -> None:
    case = CASES[name]
    graph = verify(case.graph())
    expected = interpret(graph, *case.arguments)
    for step in PIPELINE:
        graph = verify(step(graph))
        for want, got in zip(expected, interpret(graph, *case.arguments), strict=True):
            np.testing.assert_array_equal(bits(got), bits(want), err_msg=f"after {step.name}")


@pytest.mark.parametrize("step", dict.fromkeys(PIPELINE), ids=lambda step: step.name)
@pytest.mark.parametrize("name", ["dense_layer", "nested", "scan_with_results", "recurrent_gradient"])
def test_a_pass_changes_nothing_the_second_time(name: str, step: Pass) -> None:
    graph = CASES[name].graph()
    for before in PIPELINE[: PIPELINE.index(step)]:
        graph = before(graph)
    once = step(graph)
    assert str(step(once)) == str(once)


SHAPES = ((), (4,), (4, 4))
MOVES = ("unary", "binary", "compare_select", "choose", "broadcast", "reduce", "dot", "convert", "reshape", "splat", "iota", "loop")


def random_graph(choices: list[tuple[str, int, int, int]], outputs: int) -> Graph:
    """A graph whose nodes are drawn by numbers: an operation, and which earlier values of a fitting shape it reads."""
    b = Builder("random", [T(F32, *shape) for shape in SHAPES])
    pool: list[Value] = list(b.inputs)

    def like(shape: tuple[int, ...], number: int) -> Value:
        fitting = [v for v in pool if v.shape == shape]
        return fitting[-1 - number % len(fitting)]

    def make(move: str, x: Value, other: int, number: int) -> Value:
        y = like(x.shape, other)
        match move:
            case "unary":
                return [b.tanh, b.abs, b.floor][number % 3](x)
            case "binary":
                return [b.add, b.mul, b.max, b.sub][number % 4](x, y)
            case "compare_select":
                return b.select(b.gt(x, y), y, like(x.shape, number))
            case "choose":
                return b.select(b.splat(b.gt(b.inputs[0], b.full(T(F32), float(number % 2))), x.shape), y, x)
            case "broadcast":
                return b.broadcast(x, (4, 4), [(0,), (1,)][number % 2] if x.shape else ()) if len(x.shape) < 2 else b.transpose(x, (1, 0))
            case "reduce":
                return b.reduce("max" if number % 2 else "add", x, (number % len(x.shape),)) if x.shape else b.neg(x)
            case "dot":
                return b.dot(x, y, (len(x.shape) - 1,), (0,)) if x.shape else b.exp(b.min(x, 1.0))
            case "convert":
                return b.convert(b.convert(x, F16), F32)
            case "reshape":
                return b.add(b.reshape(b.reshape(x, (*x.shape, 1)), x.shape), 1.0)
            case "splat":
                return b.full_like(x, float(number % 3))
            case "iota":
                return b.iota(x.type, number % len(x.shape)) if x.shape else b.neg(x)
        body = b.region("body", [x.type, y.type])
        one, two = body.inputs
        return b.loop(2, body.finish([body.mul(two, 0.5), body.tanh(body.add(one, two))]), [x, y])[0]

    for move, of, other, number in choices:
        pool.append(make(move, pool[-1 - of % len(pool)], other, number))
    return b.finish(pool[-outputs:])


NUMBERS = st.integers(0, 7)
CHOICES = st.lists(st.tuples(st.sampled_from(MOVES), NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(CHOICES, st.integers(1, 4))
def test_random_graphs_keep_their_meaning(choices: list[tuple[str, int, int, int]], outputs: int) -> None:
    graph = verify(random_graph(choices, outputs))
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.standard_normal(shape), np.float32) for shape in SHAPES]
    expected = interpret(graph, *arrays)
    for step in PIPELINE:
        graph = verify(step(graph))
        for want, got in zip(expected, interpret(graph, *arrays), strict=True):
            np.testing.assert_array_equal(bits(got), bits(want), err_msg=f"after {step.name}")
    plan_memory(graph, CHIPS["generic"])


def test_passes_are_named_after_what_they_do() -> None:
    assert [step.name for step in PIPELINE] == [
        "keep-on-host",
        "fetch-items",
        "simplify",
        "prune-carries",
        "simplify",
        "carry-converted",
        "convert-early",
        "read-chosen",
        "fold-moves",
        "widen-after-reshape",
        "fuse",
        "hoist-invariants",
        "schedule",
        "split-epilogues",
        "merge-kernels",
        "store-less",
        "sum-in-product",
        "fuse-rows",
        "sum-in-map",
        "merge-kernels",
        "rematerialize",
        "join-products",
        "fetch-ahead",
        "join-small",
        "split-collectives",
        "schedule",
        "prefetch-from-host",
    ]
    assert all(re.search(r"Before: .*After: .*Needs: .*Keeps: .*Never: ", type(step).__doc__ or "", re.DOTALL) for step in PIPELINE)


# --- fuse ---------------------------------------------------------------------------------------------------------------


def fused(b: Builder, *outputs: Value) -> Graph:
    return verify(Schedule()(Fuse()(Simplify()(b.finish(outputs)))))


def test_an_elementwise_graph_with_several_results_is_one_kernel() -> None:
    b = Builder("f", [T(F32, 8, 4), T(F32, 4), T(F32)])
    x, row, s = b.inputs
    y = b.add(b.mul(x, b.broadcast(row, (8, 4), (1,))), b.splat(s, (8, 4)))
    graph = fused(b, b.tanh(y), b.exp(y), b.gt(y, 0.0))
    assert kinds(graph) == ["map"] and len(graph.nodes[0].results) == 3


def test_a_product_takes_its_epilogue_and_operand_conversions() -> None:
    b = Builder("f", [T(F16, 8, 4), T(F32, 4, 6), T(F32, 6)])
    x, w, bias = b.inputs
    h = b.add(b.dot(x, b.convert(w, F16), (1,), (0,)), b.broadcast(bias, (8, 6), (1,)))
    graph = fused(b, b.max(b.convert(h, F16), 0.0), b.gt(h, 0.0))
    assert kinds(graph) == ["dot"]


def test_a_reduction_takes_prologue_siblings_and_epilogue() -> None:
    b = Builder("f", [T(F32, 8, 4)])
    (x,) = b.inputs
    mean = b.div(b.reduce("add", b.exp(x), (1,)), 4.0)
    square = b.reduce("add", b.mul(b.exp(x), b.exp(x)), (1,))
    graph = fused(b, b.sub(square, mean))
    assert kinds(graph) == ["reduce"]


def test_softmax_is_three_kernels_and_stores_no_exponentials() -> None:
    graph = Fuse()(Simplify()(CASES["softmax"].graph()))
    assert kinds(graph) == ["reduce", "reduce", "map"]
    assert all(v.shape == (8,) for node in graph.nodes[:2] for v in node.results)


def test_two_products_added_are_two_kernels() -> None:
    b = Builder("f", [T(F32, 8, 4), T(F32, 4, 6), T(F32, 8, 5), T(F32, 5, 6)])
    x, w, y, u = b.inputs
    graph = fused(b, b.tanh(b.add(b.dot(x, w, (1,), (0,)), b.dot(y, u, (1,), (0,)))))
    assert kinds(graph) == ["dot", "dot"]


def test_no_fusion_closes_a_cycle() -> None:
    """x + 1 and (x + 1) * (its own sum) share an operand, but the sum lies between them."""
    b = Builder("f", [T(F32, 8, 4)])
    y = b.add(b.exp(b.inputs[0]), 1.0)
    total = b.reduce("add", y, (0, 1))
    scaled = b.mul(y, b.splat(total, (8, 4)))
    graph = fused(b, y, scaled)
    assert kinds(graph) == ["map", "reduce", "map"]
    x = np.ones((8, 4), np.float32)
    np.testing.assert_array_equal(interpret(graph, x)[1], interpret(b.finish([y, scaled]), x)[1])


def test_kernels_that_were_joined_in_vain_are_not_lost() -> None:
    """The select reads two kernels of one level, and a slice that waits for one of them: it follows neither."""
    b = Builder("step", [T(F32, 8), T(S32, 1), T(S32, 1)])
    x, i, v = b.inputs
    at = b.min(b.max(i, 0), 7)
    piece = b.emit("dynamic_slice", (x, b.reshape(at, ())), {"sizes": (1,)}).result
    chosen = b.select(b.ge(i, 0), b.convert(v, F32), piece)
    graph = b.finish([b.emit("dynamic_update_slice", (x, chosen, b.reshape(at, ()))).result])
    arrays = (np.arange(8, dtype=np.float32), np.array([3], np.int32), np.array([50], np.int32))
    np.testing.assert_array_equal(interpret(verify(Fuse()(graph)), *arrays)[0], interpret(graph, *arrays)[0])


def test_scalar_work_of_one_level_is_one_kernel() -> None:
    b = Builder("f", [T(F32), T(S32), T(F32)])
    x, n, y = b.inputs
    graph = fused(b, b.exp(x), b.add(n, 1), b.mul(b.tanh(y), 3.0))
    assert kinds(graph) == ["map"]


def test_loops_get_splats_of_their_own() -> None:
    b = Builder("f", [T(S32)])
    body = b.region("body", [T(F32, 4)] * 2)
    x, y = body.inputs
    zero = b.full(T(F32, 4), 0.0)
    graph = fused(b, *b.loop(b.inputs[0], body.finish([body.add(x, 1.0), body.sub(y, 1.0)]), [zero, zero]))
    loop = graph.nodes[-1]
    assert loop.inputs[1] is not loop.inputs[2]


def test_effects_keep_their_order() -> None:
    b = Builder("f", [T(F32, 4)])
    b.outfeed(0, b.exp(b.inputs[0]))
    (x,) = b.infeed(0, [T(F32, 4)])
    b.outfeed(1, x)
    b.outfeed(0, b.tanh(x))
    graph = fused(b, b.reduce("add", x, (0,)))
    assert [n.op for n in graph.nodes if n.op in ("infeed", "outfeed")] == ["outfeed", "infeed", "outfeed", "outfeed"]


def test_a_padding_number_needs_no_kernel() -> None:
    b = Builder("f", [T(F32, 4)])
    assert kinds(fused(b, b.pad(b.inputs[0], 1.5, (1,), (2,)))) == ["full", "pad"]


# --- hoist invariants ---------------------------------------------------------------------------------------------------


def _loop_of(graph: Graph) -> Node:
    return next(n for n in graph.nodes if n.op in ("loop", "while"))


def test_kernels_that_no_trip_changes_leave_the_loop() -> None:
    graph = CASES["work_that_no_trip_changes"].graph()
    for step in PIPELINE:
        graph = step(graph)
    (both,) = _loop_of(graph).regions[-1].nodes
    assert kinds(both.regions[0]) == ["map", "map"], "the carry and the counter"


def test_what_a_loop_overwrites_is_made_in_every_trip() -> None:
    b = Builder("f", [T(F32, 4), T(F32, 1), T(S32)])
    start, row, at = b.inputs
    body = b.region("body", [start.type, row.type, at.type])
    empty = body.full(start.type, 0.0)
    filled = body.dynamic_update_slice(empty, body.inputs[1], [body.inputs[2]])
    (result, *_) = b.loop(3, body.finish([body.add(body.inputs[0], filled), *body.inputs[1:]]), [start, row, at])
    graph = verify(HoistInvariants()(Fuse()(Simplify()(b.finish([result])))))
    assert kinds(_loop_of(graph).regions[0]) == ["map", "dynamic_update_slice", "map"]


# --- schedule -----------------------------------------------------------------------------------------------------------


def test_a_parameter_is_overwritten_after_its_last_reader() -> None:
    b = Builder("f", [T(F32, 4, 4), T(F32, 4, 4)])
    w, g = b.inputs
    new = b.sub(w, b.mul(g, 0.1))
    other = b.dot(g, b.reshape(b.reshape(w, (16,)), (4, 4)), (1,), (0,))
    graph = Schedule()(Fuse()(b.finish([new, other])))
    assert kinds(graph)[-1] == "map"


# --- widen after reshape ---------------------------------------------------------------------------------------------------


def widened(*, outputs: bool = False, twice: bool = False) -> Graph:
    """A product rounded to f16, widened again, and regrouped: an output as well, or its wide values read twice."""
    b = Builder("widened", [T(F16, 4, 8), T(F16, 8, 6), T(F32, 3, 8)])
    x, w, other = b.inputs
    wide = b.convert(b.convert(b.dot(x, w, (1,), (0,)), F16), F32)
    flat = b.reshape(wide, (3, 8))
    results = [b.mul(flat, other), *([flat] if outputs else []), *([b.neg(wide)] if twice else [])]
    return b.finish(results)


def test_what_a_reshape_keeps_from_its_reader_is_stored_narrow() -> None:
    graph, rng = widened(), np.random.default_rng(0)
    after = verify(WidenAfterReshape()(graph))
    stored = [[str(v.type) for v in n.results] for n in Fuse()(after).nodes]
    assert stored == [["f16[4,6]"], ["f16[3,8]"], ["f32[3,8]"]]
    arrays = [rng.standard_normal(v.shape).astype(v.dtype.numpy) for v in graph.inputs]
    np.testing.assert_array_equal(interpret(graph, *arrays)[0], interpret(after, *arrays)[0])


@pytest.mark.parametrize("graph", [widened(outputs=True), widened(twice=True)], ids=["an output", "read as it was"])
def test_what_something_needs_wide_is_widened_where_it_was(graph: Graph) -> None:
    assert str(WidenAfterReshape()(graph)) == str(graph)


# --- fold moves -----------------------------------------------------------------------------------------------------------


def folded(b: Builder, *outputs: Value) -> Graph:
    graph = b.finish(outputs)
    after = verify(FoldMoves()(graph))
    arrays = [np.arange(v.type.elems, dtype=v.dtype.numpy).reshape(v.shape) for v in graph.inputs]
    for want, got in zip(interpret(graph, *arrays), interpret(after, *arrays), strict=True):
        np.testing.assert_array_equal(got, want)
    return after


def test_a_pad_and_a_slice_become_the_window_of_their_reader() -> None:
    b = Builder("pool", [T(F32, 7)])
    padded = b.pad(b.inputs[0], -1.0, [1], [2])
    graph = folded(b, b.max(b.slice(padded, [0], [9], [2]), b.slice(padded, [1], [10], [2])))
    assert "\n".join(line.split("  #")[0].rstrip() for line in str(graph).splitlines()) == (
        "graph pool(%0: f32[7]) {\n"
        "  %1: f32[5] = window{fill=-1.0, view=(7*1:d0*2-1)} %0\n"
        "  %2: f32[5] = window{fill=-1.0, view=(7*1:d0*2+0)} %0\n"
        "  %3: f32[5] = max %1, %2\n"
        "  return %3\n"
        "}"
    )


MOVED: dict[str, tuple[tuple[int, ...], Callable[[Builder, Value], Value]]] = {
    "transpose": ((3, 4, 5), lambda b, x: b.transpose(x, (2, 0, 1))),
    "reverse": ((3, 4), lambda b, x: b.reverse(x, (0, 1))),
    "reversed pad": ((3, 4), lambda b, x: b.reverse(b.pad(x, 0.0, (1, 0), (2, 1)), (0,))),
    "strided slice of a transpose": ((9, 4), lambda b, x: b.slice(b.transpose(x, (1, 0)), (1, 2), (4, 9), (1, 3))),
    "spread elements": ((3, 4), lambda b, x: b.pad(x, 0.0, (1, -2), (2, 1), (2, 1))),
    "spread, then every third": ((5, 4), lambda b, x: b.slice(b.pad(x, 0.0, (2, 0), (2, 0), (1, 0)), (1, 0), (13, 4), (3, 1))),
    "split axis of a transpose": ((4, 6), lambda b, x: b.transpose(b.reshape(x, (4, 2, 3)), (1, 0, 2))),
    "merged axes, then a slice": ((4, 6), lambda b, x: b.slice(b.reshape(x, (24,)), (3,), (20,), (2,))),
    "one row": ((4, 6), lambda b, x: b.reshape(b.slice(x, (2, 0), (3, 6)), (6,))),
    "one column": ((4, 6), lambda b, x: b.reshape(b.slice(x, (0, 5), (4, 6)), (4,))),
    "one plane, stretched": ((3, 4, 5), lambda b, x: b.broadcast(b.reshape(b.slice(x, (0, 3, 0), (3, 4, 5)), (3, 5)), (3, 2, 5), (0, 2))),
    "pad of an axis of size 1": ((4, 1), lambda b, x: b.pad(x, 0.0, (0, 1), (0, 2))),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_chain_of_moves_is_one_window(name: str) -> None:
    shape, move = MOVED[name]
    b = Builder("moves", [T(F32, *shape)])
    assert ops(folded(b, b.neg(move(b, b.inputs[0])))) == {"window": 1, "neg": 1}


KEPT: dict[str, tuple[tuple[int, ...], Callable[[Builder, Value], Value]]] = {
    "two padding values": ((4,), lambda b, x: b.pad(b.pad(x, 0.0, (1,), (1,)), 1.0, (1,), (1,))),
    "pad of a slice": ((9,), lambda b, x: b.pad(b.slice(x, (2,), (6,)), 0.0, (1,), (1,))),
    "slices merged by a reshape": ((4, 6), lambda b, x: b.transpose(b.reshape(b.slice(x, (0, 1), (4, 5)), (2, 8)), (1, 0))),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_one_window_cannot_say_takes_two_steps(name: str) -> None:
    shape, move = KEPT[name]
    b = Builder("moves", [T(F32, *shape)])
    found = ops(folded(b, b.neg(move(b, b.inputs[0]))))
    assert found["window"] == 1 and found.keys() & {"pad", "slice", "reshape"}


def test_moves_that_something_else_reads_stay() -> None:
    b = Builder("both", [T(F32, 3, 4)])
    turned = b.transpose(b.inputs[0], (1, 0))
    assert ops(folded(b, b.neg(turned), turned)) == {"window": 1, "neg": 1, "transpose": 1}


# --- normalisation --------------------------------------------------------------------------------------------------------


def _batch_norm(scale: jax.Array, bias: jax.Array, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """relu(batch norm(x)), its statistics, and the gradients of all three operands."""

    def forward(scale: jax.Array, bias: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        mean = x.mean((0, 1, 2))
        var = jnp.square(x - mean).mean((0, 1, 2))
        return jax.nn.relu((x - mean) * (jax.lax.rsqrt(var + 1e-5) * scale) + bias), (mean, var)

    y, backward, statistics = jax.vjp(forward, scale, bias, x, has_aux=True)
    return (y, *statistics, *backward(dy))


def test_batch_norm_forward_and_backward_is_five_kernels_that_store_nothing_large_between_them() -> None:
    vector, image = jax.ShapeDtypeStruct((64,), np.float32), jax.ShapeDtypeStruct((4, 14, 14, 64), np.float32)
    graph = lower_jaxpr(jax.make_jaxpr(_batch_norm)(vector, vector, image, image), "batch_norm")
    for step in PIPELINE:
        graph = step(graph)
    assert sorted(kinds(graph)) == ["map", "reduce", "reduce", "reduce", "reduce"]
    large = [v for node in graph.nodes for v in node.results if v.type.elems > 64]
    assert set(large) <= set(graph.outputs)
