"""The order of kernels: what lets go of memory runs as soon as it can, whatever place it was written in."""

from __future__ import annotations

import math
import random

from tpuflow.dtypes import F32
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.passes.ordering import Sizes, Times, in_order

BIG, SCALAR = TensorType(F32, (1000,)), TensorType(F32)


def node(name: str, type: TensorType, *inputs: Value) -> Node:
    return Node("add", inputs, (Value(type, name),))


def names(nodes: list[Node]) -> list[str]:
    return [n.result.name for n in nodes]


def sizes(nodes: list[Node], *kept: Value) -> Sizes:
    return Sizes({n: n.result.type.elems * 4 for n in nodes}, frozenset(kept))


def backward() -> list[Node]:
    """Two layers' gradients [1000], each with an update that was written at the end, behind the scalar that both need."""
    x, p = Value(BIG, "x"), Value(BIG, "p")
    two = node("gradient2", BIG, x)
    one = node("gradient1", BIG, two.result)
    rate = node("rate", SCALAR)
    updates = [node(f"update{i}", SCALAR, g.result, rate.result, p) for i, g in ((1, one), (2, two))]
    return [two, one, rate, *updates]


def test_a_gradient_goes_into_its_update_before_the_next_layer_makes_another():
    nodes = backward()
    assert names(in_order(nodes)) == ["gradient2", "gradient1", "rate", "update1", "update2"]
    relieved = names(in_order(nodes, sizes=sizes(nodes)))
    assert relieved[0] == "rate", "it takes next to nothing, and the updates wait for it"
    assert relieved.index("update1") == relieved.index("gradient1") + 1


def test_what_is_read_through_a_view_is_not_let_go_of():
    x = Value(BIG, "x")
    made = node("made", BIG, x)
    view = Node("reshape", (made.result,), (Value(BIG, "view"),))
    other = node("other", BIG, x)
    first, last = node("first", BIG, made.result), node("last", BIG, view.result)
    nodes = [made, view, other, first, last]
    order = names(
        in_order(nodes, sizes=Sizes({n: 4000 if n.op != "reshape" else 0 for n in nodes}, frozenset([made.result, other.result])))
    )
    assert order.index("other") < order.index("first"), "an output is never let go of"
    assert sorted(order) == sorted(names(nodes))


def sent(gradients: list[Node]) -> list[Node]:
    """Of each gradient an eighth, summed over the chips: the starts as a row, then the waits."""
    part = TensorType(F32, (BIG.elems // 8,))
    starts = [Node("start", (g.result,), (Value(part, f"start {g.result.name}"),)) for g in gradients]
    return [*starts, *(Node("await", (s.result, s.inputs[0]), (Value(part, f"wait {s.inputs[0].name}"),)) for s in starts)]


def backward_sent(seconds: float, room_bytes: float = math.inf) -> list[str]:
    """Four layers' gradients, a second each, the transfers of which were written behind all of them and take `seconds`."""
    gradients = gradients_in_a_row(4)
    return ordered([*gradients, *sent(gradients)], seconds, room_bytes)


def gradients_in_a_row(count: int) -> list[Node]:
    """Each made of the one before."""
    gradients = [node("gradient 0", BIG, Value(BIG, "x"))]
    for n in range(1, count):
        gradients.append(node(f"gradient {n}", BIG, gradients[-1].result))
    return gradients


def ordered(nodes: list[Node], seconds: float, room_bytes: float = math.inf, sending: float | None = None) -> list[str]:
    """Where transfers take so many seconds, all of them on the links unless `sending` says it, and others one; what is gathered takes the
    place of something."""
    made = {n: 0 if n.op == "await" or n.result.name.startswith("gather") else n.result.type.elems * 4 for n in nodes}
    times = {n: seconds if n.op == "start" else 1.0 for n in nodes}
    return names(
        in_order(
            nodes,
            sizes=Sizes(made, frozenset(), room_bytes),
            times=Times(times, times if sending is None else dict.fromkeys(nodes, sending)),
        )
    )


def test_what_is_sent_is_started_as_it_is_made_and_awaited_once_kernels_have_hidden_it():
    order = backward_sent(seconds=1.0)
    assert order[:5] == ["gradient 0", "start gradient 0", "gradient 1", "start gradient 1", "wait gradient 0"]
    order = backward_sent(seconds=2.0)
    assert order.index("gradient 2") < order.index("wait gradient 0") < order.index("gradient 3"), "two kernels hide it"
    assert order.index("wait gradient 1") > order.index("gradient 3"), "the links take one after the other"
    gradients = gradients_in_a_row(5)
    order = ordered([*gradients, *sent(gradients)], seconds=2.0, sending=0.5)
    assert order.index("wait gradient 1") < order.index("gradient 4"), "what is on its way keeps no other from being sent"
    order = backward_sent(seconds=math.inf)
    assert [o for o in order if o.startswith("gradient")] == order[0:8:2], "what nothing hides is waited for at the end"


def test_where_memory_is_short_a_transfer_is_awaited_though_it_is_not_hidden():
    order = backward_sent(seconds=100.0, room_bytes=2.6 * 4 * BIG.elems)
    assert order.index("wait gradient 0") < order.index("gradient 2"), "a third gradient has no room"


def test_an_update_follows_what_it_receives_with_all_that_it_needs_beside_that():
    """So that the links may work on its result while other layers' gradients are made, and at once."""
    gradients = gradients_in_a_row(4)
    nodes = [*gradients, *sent(gradients)]
    received, parameter = [n.result for n in nodes if n.op == "await"], Value(BIG, "p")
    shares = [node(f"share {i}", v.type, parameter) for i, v in enumerate(received)]
    updates = [node(f"update {i}", v.type, v, share.result) for i, (v, share) in enumerate(zip(received, shares, strict=True))]
    gathers = [Node("start", (u.result,), (Value(BIG, f"gather {i}"),)) for i, u in enumerate(updates)]
    order = ordered([*nodes, *shares, *updates, *gathers], seconds=0.5)
    assert order.index("wait gradient 0") < order.index("share 0") < order.index("gradient 2")
    assert all(order.index(f"gather {i}") == order.index(f"update {i}") + 1 for i in range(4))


def test_any_order_keeps_dependences_and_effects():
    rng = random.Random(0)
    for _ in range(50):
        values, nodes = [Value(BIG)], []
        for i in range(30):
            inputs = tuple(rng.sample(values, min(len(values), rng.randint(1, 3))))
            nodes.append(Node("outfeed", inputs[:1], ()) if i % 7 == 3 else node("add", rng.choice((BIG, SCALAR)), *inputs))
            values += nodes[-1].results
        nodes += sent([n for n in nodes if n.results][::3])
        made = {n: sum(v.type.elems * 4 for v in n.results) for n in nodes}
        deferred = {n: rng.sample(nodes, 2) for n in rng.sample(nodes, 5)}
        room_bytes, seconds = rng.choice((0, 9000, math.inf)), {n: rng.choice((0.0, 1.0, 5.0)) for n in nodes}
        order = in_order(nodes, deferred, Sizes(made, frozenset(values[-2:]), room_bytes), rng.choice((None, Times(seconds, seconds))))
        place = {n: i for i, n in enumerate(order)}
        maker = {v: n for n in nodes for v in n.results}
        assert len(place) == len(nodes)
        assert all(place[maker[v]] < place[n] for n in nodes for v in n.inputs if v in maker)
        effects = [n for n in order if n.op == "outfeed"]
        assert effects == [n for n in nodes if n.op == "outfeed"]
