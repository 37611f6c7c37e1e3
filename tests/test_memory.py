"""HBM planning: live buffers are disjoint, updates happen in place where they may, copies only where they must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compile_cases import CASES
from tpuflow.chips import CHIPS
from tpuflow.compiler import PIPELINE
from tpuflow.dtypes import F32, PRED, S32, DType
from tpuflow.errors import OutOfMemoryError
from tpuflow.lower.addresses import ALIGNMENT_BYTES, Request, aligned, assign
from tpuflow.lower.emit import overwritable
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.lifetimes import lifetimes
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.memory_plan import MemoryPlan
from tpuflow.lower.passes.join_products import JoinProducts

CHIP = CHIPS["generic"]


def T(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype, shape)


def compiled(graph: Graph, *, joined: bool = True) -> Graph:
    """After all passes, or all but that which joins products to rows."""
    for step in PIPELINE:
        if joined or not isinstance(step, JoinProducts):
            graph = step(graph)
    return graph


def planned(name: str) -> tuple[Graph, MemoryPlan]:
    case = CASES[name]
    graph = compiled(case.graph())
    return graph, plan_memory(graph, CHIP, case.donated)


def copies(plan: MemoryPlan) -> int:
    return sum(len(c) for table in (plan.assigned_before, plan.assigned_after, plan.assigned_at_end) for c in table.values())


def node_of(graph: Graph, op: str) -> Node:
    return next(n for n in graph.walk() if n.op == op)


def planned_loop(
    step: Callable[[Builder, tuple[Value, ...]], list[Value]], *types: TensorType, donated: bool = True
) -> tuple[Node, MemoryPlan]:
    """A loop over donated inputs whose body is `step`."""
    b = Builder("f", [T(S32), *types])
    body = b.region("body", types)
    results = b.loop(b.inputs[0], body.finish(step(body, body.inputs)), b.inputs[1:])
    graph = compiled(b.finish(results))
    return node_of(graph, "loop"), plan_memory(graph, CHIP, (False, *(donated,) * len(types)))


# --- addresses ----------------------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.builds(
        lambda size, start, length: Request(size, start, start + length), st.integers(0, 2000), st.integers(0, 30), st.integers(0, 12)
    ),
    max_size=40,
)


@given(REQUESTS)
@settings(deadline=None)
def test_what_is_needed_at_one_time_never_overlaps(requests: list[Request]) -> None:
    addresses, top = assign(requests)
    placed = [(r, a) for r, a in zip(requests, addresses, strict=True) if r.bytes]
    for i, (one, at) in enumerate(placed):
        assert at % ALIGNMENT_BYTES == 0 and at + one.bytes <= top
        for other, place in placed[:i]:
            together = one.start <= other.end and other.start <= one.end
            assert not together or at + one.bytes <= place or place + other.bytes <= at


@given(REQUESTS)
@settings(deadline=None)
def test_memory_in_use_never_exceeds_the_sum_and_never_falls_below_the_peak(requests: list[Request]) -> None:
    _, top = assign(requests)
    loads = [sum(aligned(r.bytes) for r in requests if r.start <= t <= r.end) for t in range(50)]
    assert max(loads, default=0) <= top <= sum(aligned(r.bytes) for r in requests)


def test_the_smallest_fitting_hole_is_taken() -> None:
    sizes = [(4096, 0, 1), (256, 0, 9), (512, 0, 1), (256, 0, 9), (512, 2, 9)]
    addresses, _ = assign([Request(*row) for row in sizes])
    assert addresses[4] == addresses[2]


def test_gaps_that_an_order_in_time_leaves_are_packed() -> None:
    requests = [Request(4096, 0, 1), Request(1024, 0, 9), Request(4096, 0, 1), Request(8192, 2, 9)]
    assert assign(requests)[1] == 4096 + 1024 + 4096


# --- lifetimes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_buffers_that_share_bytes_are_never_needed_together(name: str) -> None:
    graph, plan = planned(name)
    lives = lifetimes(graph)
    needed: dict[int, list[tuple[int, int]]] = {}
    for value, spans in lives.spans.items():
        needed.setdefault(plan.buffer_of[value], []).extend(spans)
    for i, one in needed.items():
        for j, other in needed.items():
            a, b = plan.buffers[i], plan.buffers[j]
            half = (i, j) in plan.replaced or (j, i) in plan.replaced  # a kernel reads one where it then writes the other
            if i < j and a.address < b.address + b.bytes and b.address < a.address + a.bytes:
                assert not any(s <= f and t <= e for s, e in _ticks(one, half) for t, f in _ticks(other, half)), (i, j)


def _ticks(spans: list[tuple[int, int]], half: bool) -> list[tuple[int, int]]:
    return spans if half else [(s >> 1, e >> 1) for s, e in spans]


# --- sharing ------------------------------------------------------------------------------------------------------------


def test_a_state_is_updated_in_place_from_input_to_output() -> None:
    loop, plan = planned_loop(lambda b, c: [b.add(b.mul(c[0], 0.9), c[1]), b.mul(c[1], 0.5)], T(F32, 8), T(F32, 8))
    body = loop.regions[0]
    for i in range(2):
        places = {plan.buffer_of[v] for v in (loop.inputs[i + 1], body.inputs[i], body.outputs[i], loop.results[i])}
        assert places == {plan.outputs[i]}
    assert copies(plan) == 0


def test_invariant_carries_share_their_input() -> None:
    loop, plan = planned_loop(lambda b, c: [b.add(c[0], b.exp(c[1])), c[1], c[2]], T(F32, 8), T(F32, 8), T(F32, 8), donated=False)
    assert len({plan.buffer_of[v] for v in (loop.inputs[2], *loop.regions[0].inputs[1:2])}) == 1
    assert len(plan.assigned_before.get(loop, ())) == 1, "only the carry that changes needs a buffer of its own"


def test_a_carry_whose_old_value_is_read_later_is_copied() -> None:
    loop, plan = planned_loop(lambda b, c: [b.cumulative("add", c[1], 0), b.cumulative("mul", c[0], 0)], T(F32, 4), T(F32, 4))
    assert len(plan.assigned_at_end[loop.regions[0]]) == copies(plan) == 1, "the second result takes the place of what the first has read"


@pytest.mark.parametrize("order", [(1, 0), (1, 2, 0), (2, 0, 1), (1, 0, 3, 2)])
def test_permuted_carries_are_copied_over_a_spare(order: tuple[int, ...]) -> None:
    loop, plan = planned_loop(lambda b, c: [c[i] for i in order], *(T(F32, 4) for _ in order))
    moves = plan.assigned_at_end[loop.regions[0]]
    memory = {plan.buffer_of[v]: i for i, v in enumerate(loop.regions[0].inputs)}
    for move in moves:
        memory[move.target] = memory[move.source]
    assert tuple(memory[plan.buffer_of[v]] for v in loop.regions[0].inputs) == order
    cycles = 2 if len(order) == 4 else 1
    assert len(moves) == len(order) + cycles


def test_kept_inputs_are_never_written() -> None:
    for name in CASES:
        graph, plan = planned(name)
        kept = {plan.buffer_of[v] for v, given in zip(graph.inputs, CASES[name].donated, strict=True) if not given}
        kept |= {c.buffer for c in plan.constants}
        targets = {
            c.target for table in (plan.assigned_before, plan.assigned_after, plan.assigned_at_end) for cs in table.values() for c in cs
        }
        made = {plan.buffer_of[v] for n in graph.walk() if n.op == "fused" for v in n.results if v in plan.buffer_of}
        assert kept.isdisjoint(targets | made), name


def test_an_update_of_a_donated_input_touches_only_the_slice() -> None:
    graph, plan = planned("updated_slice_of_a_donated_input")
    assert plan.outputs[0] == plan.buffer_of[graph.inputs[0]] and copies(plan) == 0


def test_outputs_prefer_the_donated_input_they_are_computed_from() -> None:
    b = Builder("f", [T(F32, 8), T(F32, 8), T(F32, 8)])
    x, y, z = b.inputs
    graph = compiled(b.finish([b.exp(y), b.reduce("add", b.broadcast(x, (4, 8), (1,)), (0,))]))
    plan = plan_memory(graph, CHIP, (True, True, True))
    assert plan.outputs[0] == plan.buffer_of[y]
    assert plan.outputs[1] in (plan.buffer_of[x], plan.buffer_of[z])


def test_every_output_has_a_buffer_of_its_own() -> None:
    for name in CASES:
        graph, plan = planned(name)
        assert len(set(plan.outputs)) == len(graph.outputs), name
        assert [plan.buffers[i].shape for i in plan.outputs] == [v.shape for v in graph.outputs]


def test_a_branch_that_passes_its_operand_through_costs_nothing() -> None:
    b = Builder("f", [T(S32), T(F32, 8)])
    regions = [b.region(f"b{i}", [T(F32, 8)]) for i in range(2)]
    branches = [r.finish([r.exp(r.inputs[0]) if i else r.inputs[0]]) for i, r in enumerate(regions)]
    graph = compiled(b.finish(b.switch(b.inputs[0], branches, [b.inputs[1]])))
    plan = plan_memory(graph, CHIP, (False, True))
    assert copies(plan) == 0 and plan.outputs[0] == plan.buffer_of[b.inputs[1]]


def test_temporaries_of_a_chain_share_memory() -> None:
    b = Builder("f", [T(F32, 1000)])
    x = b.inputs[0]
    for _ in range(10):
        x = b.cumulative("add", x, 0)
    plan = plan_memory(compiled(b.finish([x])), CHIP)
    assert plan.use.temporary_bytes <= 2 * aligned(4000)


def softmax_between_products() -> Graph:
    b = Builder("f", [T(F32, 256, 64), T(F32, 64, 256), T(F32, 256, 64)])
    x, y, z = b.inputs
    scores = b.dot(x, y, (1,), (0,))
    shifted = b.sub(scores, b.broadcast(b.reduce("max", scores, (1,)), (256, 256), (0,)))
    return b.finish([b.dot(b.exp(shifted), z, (1,), (0,))])


def test_a_kernel_of_rows_overwrites_rows_that_nothing_else_reads() -> None:
    assert plan_memory(compiled(softmax_between_products()), CHIP).use.temporary_bytes == 0
    graph = compiled(softmax_between_products(), joined=False)
    plan = plan_memory(graph, CHIP)
    (rows,) = (n for n in graph.nodes if n.op == "fused" and n.attrs["kind"] == "rows")
    assert (plan.buffer_of[rows.inputs[0]], plan.buffer_of[rows.results[0]]) in plan.replaced
    assert plan.use.temporary_bytes == 256 * 256 * 4


def test_what_is_read_through_a_window_is_not_overwritten() -> None:
    b = Builder("f", [T(F32, 1), T(F32, 4096, 1)])
    region = Graph("map", (v := Value(T(F32, 1)),), (), ())
    seen = Value(T(F32, 1))
    window = Node("window", (v,), (seen,), {"view": (), "fill": 0.0})
    node = Node("fused", b.inputs[:1], (Value(T(F32, 1)),), {"kind": Kind.MAP}, (replace(region, nodes=(window,), outputs=(seen,)),))
    assert not overwritable(node)


def test_equal_constants_are_stored_once() -> None:
    b = Builder("f", [T(F32, 4)])
    row = np.arange(4, dtype=np.float32)
    body = b.region("body", [T(F32, 4)])
    (y,) = b.loop(3, body.finish([body.mul(body.inputs[0], body.constant(row))]), [b.inputs[0]])
    plan = plan_memory(compiled(b.finish([b.add(y, b.constant(row))])), CHIP)
    assert [c.data for c in plan.constants] == [row.tobytes()]


def test_what_a_block_reads_has_the_shape_it_reads() -> None:
    b = Builder("f", [T(S32, 1), T(PRED, 1)])
    body = b.region("body", [T(F32, 2, 2)])
    (item,) = body.infeed(0, [T(F32, 4)])
    body.outfeed(0, body.reshape(body.inputs[0], (4,)))
    (y,) = b.loop(b.reshape(b.inputs[0], ()), body.finish([body.reshape(item, (2, 2))]), [b.full(T(F32, 2, 2), 0.0)])
    graph = compiled(b.finish([y]))
    plan = plan_memory(graph, CHIP)
    shapes = {n.op: plan.buffers[plan.block_buffer_of[n]].shape for n in graph.walk() if n in plan.block_buffer_of}
    assert shapes == {"loop": (), "infeed": (4,), "outfeed": (4,)}


# --- what it costs ------------------------------------------------------------------------------------------------------


def test_the_plan_accounts_for_every_byte() -> None:
    _, plan = planned("recurrent_gradient")
    use = plan.use
    parts = (use.donated_bytes, use.input_bytes, use.constant_bytes, use.output_bytes, use.temporary_bytes)
    assert all(part >= 0 for part in parts) and sum(parts) == use.peak_bytes
    assert use.peak_bytes >= max(b.address + b.bytes for b in plan.buffers)


def test_too_little_memory_is_an_error_that_says_how_much_is_missing() -> None:
    small = replace(CHIP, name="tiny", hbm_bytes=1024, vmem_bytes_per_second=0.0)
    b = Builder("big", [T(F32, 1000)])
    with pytest.raises(
        OutOfMemoryError,
        match=r"'big' needs 8,192 bytes of HBM \(other inputs 4,096, outputs 4,096\): 7.00 KiB \(7,168 bytes\) more than the 1,024",
    ):
        plan_memory(compiled(b.finish([b.exp(b.inputs[0])])), small)
