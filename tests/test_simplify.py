"""Simplify, PruneCarries and ReadChosen: what each does, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.compile_cases import CASES
from tests.graphs import T, bits, kinds, ops, simplified
from tpuflow.dtypes import BF16, F16, F32, PRED, S32, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.passes.fuse import Fuse
from tpuflow.lower.passes.prune_carries import PruneCarries
from tpuflow.lower.passes.read_chosen import ReadChosen
from tpuflow.lower.passes.simplify import Simplify

# --- simplify -----------------------------------------------------------------------------------------------------------


def test_views_of_views_collapse() -> None:
    b = Builder("f", [T(F32, 2, 3, 4)])
    (x,) = b.inputs
    back = b.transpose(b.transpose(x, (2, 0, 1)), (1, 2, 0))
    flat = b.reshape(b.reshape(x, (6, 4)), (24,))
    graph = simplified(b, back, flat)
    assert graph.outputs[0] is graph.inputs[0]
    assert ops(graph) == {"reshape": 1}


def test_a_slice_within_one_part_of_a_concatenation_is_a_slice_of_that() -> None:
    b = Builder("f", [T(F32, 2, 4), T(F32, 2, 3)])
    x, y = b.inputs
    both = b.concatenate([x, y], 1)
    graph = simplified(b, b.slice(both, (0, 4), (2, 7)), b.slice(both, (1, 5), (2, 7)), b.slice(both, (0, 3), (2, 5)))
    assert [(n.op, n.inputs[0].shape) for n in graph.nodes] == [("concatenate", (2, 4)), ("slice", (2, 3)), ("slice", (2, 7))]
    assert graph.outputs[0] is graph.inputs[1], "all of a part"


def test_a_broadcast_takes_its_operand_through_reshapes_and_broadcasts() -> None:
    b = Builder("f", [T(F32, 5)])
    row = b.broadcast(b.reshape(b.inputs[0], (1, 5)), (4, 5), (0, 1))
    graph = simplified(b, b.broadcast(row, (2, 4, 5), (1, 2)))
    assert [(n.op, n.attrs["axes"]) for n in graph.nodes] == [("broadcast", (2,))]


def test_positions_moved_are_positions() -> None:
    b = Builder("f")
    row = b.iota(T(S32, 5), 0)
    graph = simplified(b, b.broadcast(row, (4, 5), (1,)), b.transpose(b.broadcast(row, (4, 5), (1,)), (1, 0)), b.reshape(row, (5, 1)))
    assert [(n.op, n.attrs["axis"]) for n in graph.nodes] == [("iota", 1), ("iota", 0), ("iota", 0)]


def test_what_is_stretched_is_stored_first() -> None:
    b = Builder("f", [T(S32, 4, 5)])
    graph = verify(Fuse()(b.finish([b.add(b.inputs[0], b.broadcast(b.iota(T(S32, 5), 0), (4, 5), (1,)))])))
    assert kinds(graph) == ["map", "map"]


def test_equal_nodes_become_one_and_different_zeros_do_not() -> None:
    b = Builder("f", [T(F32, 3)])
    (x,) = b.inputs
    graph = simplified(b, b.exp(x), b.exp(x), b.full_like(x, 0.0), b.full_like(x, -0.0))
    assert ops(graph) == {"exp": 1, "full": 2}


def test_dead_nodes_go_and_effects_stay() -> None:
    b = Builder("f", [T(F32, 3)])
    (x,) = b.inputs
    b.infeed(0, [T(F32, 2)])
    b.outfeed(0, b.exp(x))
    graph = Simplify()(Graph("f", b.inputs, (*b.finish([x]).nodes, b.emit("tanh", (x,))), (x,)))
    assert [n.op for n in graph.nodes] == ["infeed", "exp", "outfeed"]


def test_splats_are_computed_as_the_device_computes_them() -> None:
    b = Builder("f")
    sixty_thousand = b.full(T(F16, 4), 60000.0)
    overflow = b.div(b.mul(b.full(T(F16, 4), 2.0), sixty_thousand), sixty_thousand)
    tiny = b.mul(b.full(T(F32), 1e-30), b.full(T(F32), 1e-10))
    graph = simplified(b, overflow, tiny)
    assert [n.attrs["value"] for n in graph.nodes] == [np.inf, 0.0]


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_float_algebra_that_rounds_differently_is_left_alone(dtype: DType) -> None:
    b = Builder("f", [T(dtype, 3)])
    (x,) = b.inputs
    scaled = b.mul(b.mul(x, 1.1), 1.3)
    graph = simplified(b, b.add(x, 0.0), b.mul(x, 1.0), b.div(x, 3.0), scaled, b.sub(x, x), b.neg(b.neg(x)))
    assert {op: n for op, n in ops(graph).items() if op != "full"} == {"add": 1, "mul": 3, "div": 1, "sub": 1, "neg": 2}


def test_integer_identities_vanish() -> None:
    b = Builder("f", [T(S32, 3), T(PRED, 3)])
    x, p = b.inputs
    true = b.full_like(p, True)
    graph = simplified(b, b.add(x, 0), b.mul(1, x), b.or_(x, 0), b.and_(x, -1), b.shl(x, 0), b.and_(p, true))
    assert not graph.nodes and graph.outputs == (x,) * 5 + (p,)


def test_a_known_condition_chooses() -> None:
    b = Builder("f", [T(F32, 3), T(F32, 3), T(PRED, 3)])
    x, y, p = b.inputs
    false = b.full_like(p, False)
    graph = simplified(b, b.select(false, x, y), b.select(p, x, x))
    assert graph.outputs == (y, x)


def test_transposes_become_dimension_numbers_of_products() -> None:
    b = Builder("f", [T(F32, 5, 4), T(F32, 6, 5)])
    x, y = b.inputs
    product = b.dot(b.transpose(x, (1, 0)), b.transpose(y, (1, 0)), (1,), (0,))
    graph = simplified(b, product, b.transpose(product, (1, 0)))
    assert ops(graph) == {"dot": 2}


def test_a_transpose_passes_all_roundings_of_a_product_and_becomes_its_dimension_numbers() -> None:
    b = Builder("f", [T(F16, 5, 4), T(F16, 6, 5)])
    x, y = b.inputs
    rounded = b.convert(b.convert(b.dot(x, y, (0,), (1,)), F16), F32)
    assert ops(simplified(b, b.transpose(rounded, (1, 0)))) == {"dot": 1, "convert": 2}


def test_a_transpose_stays_where_the_sum_would_run_in_another_order() -> None:
    b = Builder("f", [T(F32, 3, 4, 5), T(F32, 4, 3, 6)])
    x, y = b.inputs
    turned = b.transpose(x, (1, 0, 2))
    graph = simplified(b, b.dot(turned, y, (0, 1), (0, 1)))
    assert ops(graph) == {"transpose": 1, "dot": 1}


def test_a_conversion_there_and_back_vanishes_only_after_a_rounding() -> None:
    b = Builder("f", [T(F16, 3), T(F32, 3)])
    stored, wide = b.inputs
    rounded = b.convert(wide, F16)
    graph = simplified(b, b.convert(b.convert(stored, F32), F16), b.convert(b.convert(rounded, F32), F16))
    assert ops(graph) == {"convert": 3}, "an input may hold NaNs that a conversion would make canonical"
    assert graph.outputs[1] is rounded


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_what_only_chooses_among_wider_copies_chooses_before_they_are_wider(dtype: DType) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    other = np.random.default_rng(0).permutation(every)
    p = every % 3 == 0
    b = Builder("f", [T(dtype, 2**16), T(dtype, 2**16), T(PRED, 2**16)])
    x, y = (b.convert(a, F32) for a in b.inputs[:2])
    half = b.full(T(F32, 2**16), 0.5)
    made = [b.max(x, y), b.min(x, half), b.select(b.inputs[2], x, y), b.gt(x, y), b.le(half, y)]
    before = b.finish(made)
    after = verify(Simplify()(before))
    assert {n.inputs[-1].dtype for n in after.nodes if n.op in ("max", "min", "select", "compare")} == {dtype}
    arguments = (every.view(dtype.numpy), other.view(dtype.numpy), p)
    for ours, theirs in zip(interpret(after, *arguments), interpret(before, *arguments), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


def test_what_chooses_among_wider_copies_and_something_else_stays_wide() -> None:
    b = Builder("f", [T(F16, 3), T(BF16, 3), T(F32, 3)])
    half, brain, wide = b.inputs
    x, y = b.convert(half, F32), b.convert(brain, F32)
    graph = simplified(b, b.max(x, y), b.max(x, wide), b.max(x, b.full(T(F32, 3), 0.1)), b.max(b.add(x, x), b.add(x, y)))
    assert {n.result.dtype for n in graph.nodes if n.op == "max"} == {F32}


def test_a_narrowing_conversion_is_never_skipped() -> None:
    b = Builder("f", [T(F32, 3)])
    graph = simplified(b, b.convert(b.convert(b.inputs[0], F16), F32))
    assert ops(graph) == {"convert": 2}


def test_reductions_of_single_elements_are_views() -> None:
    b = Builder("f", [T(F32, 1, 5, 1)])
    graph = simplified(b, b.reduce("add", b.inputs[0], (0, 2)), b.reduce("max", b.inputs[0], (0, 1)))
    assert ops(graph) == {"reshape": 1, "reduce": 1}


def test_stacked_scalars_are_combined_one_by_one_unless_the_order_of_the_sum_counts() -> None:
    b = Builder("f", [T(PRED), T(PRED), T(PRED), T(F32), T(F32), T(F32)])
    preds, numbers = ([b.reshape(x, (1,)) for x in part] for part in (b.inputs[:3], b.inputs[3:]))
    graph = simplified(b, b.reduce("and", b.concatenate(preds, 0), (0,)), b.reduce("add", b.concatenate(numbers, 0), (0,)))
    assert ops(graph) == {"and": 2, "reshape": 3, "concatenate": 1, "reduce": 1}


def test_known_branches_and_trips_are_inlined() -> None:
    b = Builder("f", [T(F32, 3)])
    (x,) = b.inputs
    branches = [b.region(f"b{i}", [x.type]) for i in range(2)]
    bodies = [r.finish([r.exp(r.inputs[0]) if i else r.tanh(r.inputs[0])]) for i, r in enumerate(branches)]
    (chosen,) = b.switch(b.scalar(7, S32), bodies, [x])
    once, never = b.region("once", [x.type]), b.region("never", [x.type])
    (y,) = b.loop(1, once.finish([once.sqrt(once.inputs[0])]), [chosen])
    (z,) = b.loop(0, never.finish([never.neg(never.inputs[0])]), [y])
    assert [n.op for n in simplified(b, z).nodes] == ["exp", "sqrt"]


# --- prune carries ------------------------------------------------------------------------------------------------------


def test_carries_that_nothing_needs_go_and_splats_are_made_inside() -> None:
    graph = PruneCarries()(Simplify()(CASES["carries_nobody_needs"].graph()))
    (loop,) = (n for n in verify(graph).nodes if n.op == "loop")
    assert len(loop.results) == 1
    assert [n.op for n in loop.regions[0].nodes] == ["full", "add"]


def test_what_a_loop_or_a_branch_takes_repeated_is_repeated_inside() -> None:
    b = Builder("f", [T(S32), T(F32, 3, 8), T(PRED, 8)])
    count, x, mask = b.inputs
    wide = b.broadcast(mask, (3, 8), (1,))
    body = b.region("body", [x.type, wide.type])
    y = body.select(body.inputs[1], body.exp(body.inputs[0]), body.inputs[0])
    (looped, _) = b.loop(count, body.finish([y, body.inputs[1]]), [x, wide])
    branches = [b.region(name, [x.type, wide.type]) for name in ("then", "else")]
    (chosen,) = b.switch(count, [r.finish([r.select(r.inputs[1], r.inputs[0], r.inputs[0])]) for r in branches], [looped, wide])
    graph = b.finish([chosen])
    made = verify(PruneCarries()(graph))
    assert [n.op for n in made.nodes] == ["loop", "switch"]
    assert [str(v.type) for v in made.nodes[0].inputs] == ["s32[]", "f32[3,8]", "pred[8]"]
    assert all(region.nodes[0].op == "broadcast" for node in made.nodes for region in node.regions)
    rng = np.random.default_rng(0)
    arrays = [np.int32(2), rng.standard_normal((3, 8)).astype(np.float32), rng.integers(0, 2, 8).astype(bool)]
    np.testing.assert_array_equal(*(interpret(g, *arrays)[0] for g in (graph, made)))


def test_a_carry_that_an_effect_reads_stays() -> None:
    b = Builder("f", [T(F32)])
    body = b.region("body", [T(F32)])
    body.outfeed(0, body.inputs[0])
    b.loop(3, body.finish([body.exp(body.inputs[0])]), b.inputs)
    graph = verify(PruneCarries()(b.finish([b.inputs[0]])))
    assert len(graph.nodes[-1].results) == 1


def test_switches_lose_unused_results_and_operands() -> None:
    b = Builder("f", [T(S32), T(F32), T(F32)])
    index, x, y = b.inputs
    regions = [b.region(f"b{i}", [x.type, y.type]) for i in range(2)]
    branches = [r.finish([r.exp(r.inputs[0]), r.tanh(r.inputs[1])]) for r in regions]
    graph = verify(PruneCarries()(b.finish(b.switch(index, branches, [x, y])[:1])))
    assert graph.nodes[-1].inputs == (index, x) and len(graph.nodes[-1].results) == 1


# --- read chosen --------------------------------------------------------------------------------------------------------


def chosen(b: Builder, p: Value, x: Value, y: Value) -> Value:
    """One or the other whole array by a 0-d condition."""
    return b.select(b.splat(p, x.shape), x, y)


def test_an_update_reads_the_state_that_its_condition_keeps() -> None:
    b = Builder("f", [T(PRED), T(F32, 4), T(F32, 4)])
    good, state, change = b.inputs
    new = b.add(state, change)
    step = b.mul(new, new)
    kept = chosen(b, good, new, state)
    graph = verify(b.finish([kept, chosen(b, good, step, change)]))
    assert str(verify(ReadChosen()(graph))).splitlines() == [
        "graph f(%0: pred[], %1: f32[4], %2: f32[4]) {",
        "  %3: f32[4] = add %1, %2",
        "  %4: pred[4] = broadcast{axes=()} %0",
        "  %5: f32[4] = select %4, %3, %1",
        "  %6: f32[4] = mul %5, %5",
        "  %7: pred[4] = broadcast{axes=()} %0",
        "  %8: f32[4] = select %7, %6, %2",
        "  return %5, %8",
        "}",
    ]


def _kept_and(read: Callable[[Builder, Value, Value, Value], list[Value]]) -> Graph:
    """A state kept where p holds, and what `read` makes of p, the new state and the old one."""
    b = Builder("f", [T(F32, 4), T(F32, 4)])
    state, change = b.inputs
    p = b.reduce("and", b.is_finite(change), (0,))
    new = b.add(state, change)
    others = read(b, p, new, state)
    return verify(b.finish([chosen(b, p, new, state), *others]))


def _reads_in_a_region(b: Builder, p: Value, new: Value, old: Value) -> list[Value]:
    region = b.region("body", [new.type])
    (found,) = b.loop(3, region.finish([region.exp(region.inputs[0])]), [new])
    return [chosen(b, p, found, old)]


def _sends(b: Builder, p: Value, new: Value, old: Value) -> list[Value]:
    b.outfeed(0, new)
    return []


@pytest.mark.parametrize(
    "read",
    [
        lambda b, p, new, old: [new],
        lambda b, p, new, old: [b.exp(new)],
        lambda b, p, new, old: [chosen(b, p, old, b.exp(new))],
        lambda b, p, new, old: [chosen(b, b.not_(p), b.exp(new), old)],
        lambda b, p, new, old: [chosen(b, p, b.exp(new), b.tanh(new))],
        lambda b, p, new, old: [chosen(b, b.reduce("and", b.is_finite(new), (0,)), b.exp(new), old)],
        _reads_in_a_region,
        _sends,
    ],
)
def test_what_may_be_asked_for_where_the_condition_does_not_hold_is_read_as_it_was(read: Callable[..., list[Value]]) -> None:
    graph = _kept_and(read)
    assert str(ReadChosen()(graph)) == str(graph)


def test_a_condition_that_is_decided_later_is_not_waited_for() -> None:
    b = Builder("f", [T(F32, 4), T(F32, 4)])
    state, change = b.inputs
    new = b.add(state, change)
    step = b.exp(new)
    p = b.reduce("and", b.is_finite(step), (0,))
    graph = verify(b.finish([chosen(b, p, new, state), chosen(b, p, step, state)]))
    assert str(ReadChosen()(graph)) == str(graph)


def test_choices_of_choices_and_of_either_side() -> None:
    def read(b: Builder, p: Value, new: Value, old: Value) -> list[Value]:
        inner = chosen(b, p, b.exp(b.neg(new)), old)
        return [chosen(b, p, b.tanh(inner), old), chosen(b, p, b.mul(new, inner), b.full_like(new, 0.0))]

    graph = _kept_and(read)
    changed = verify(ReadChosen()(graph))
    assert str(changed) != str(graph)
    for change in ([1.0, 2.0, 3.0, 4.0], [1.0, np.inf, np.nan, 4.0]):
        arrays = [np.ones(4, np.float32), np.asarray(change, np.float32)]
        for want, got in zip(interpret(graph, *arrays), interpret(changed, *arrays), strict=True):
            np.testing.assert_array_equal(bits(got), bits(want))
