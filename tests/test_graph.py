"""The graph: what its builder infers, what its verifier refuses, how its text reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tpuflow.dtypes import BF16, F16, F32, PRED, S32, U8, DType
from tpuflow.errors import GraphError
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import OPS, infer
from tpuflow.lower.graph.verify import verify


def T(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype, shape)


def _chain() -> Graph:
    b = Builder("f", [T(F32, 4, 5), T(F32, 5)], ["x", "bias"])
    x, bias = b.inputs
    with b.at("model.py:3 (f)", "Dense_0"):
        y = b.tanh(b.add(b.mul(x, 2.0), b.broadcast(bias, (4, 5), (1,))))
        body = b.region("body", [y.type])
        (y,) = b.loop(3, body.finish([body.exp(*body.inputs)]), [y])
    return b.finish([b.reduce("add", y, (0,))], ["sums"])


# --- text ---------------------------------------------------------------------------------------------------------------

_CHAIN_TEXT = """\
graph f(%0 'x': f32[4,5], %1 'bias': f32[5]) {
  %2: f32[4,5] = full{value=2.0}                                                                      # model.py:3 (f)  [Dense_0]
  %3: f32[4,5] = mul %0, %2                                                                           # model.py:3 (f)  [Dense_0]
  %4: f32[4,5] = broadcast{axes=(1)} %1                                                               # model.py:3 (f)  [Dense_0]
  %5: f32[4,5] = add %3, %4                                                                           # model.py:3 (f)  [Dense_0]
  %6: f32[4,5] = tanh %5                                                                              # model.py:3 (f)  [Dense_0]
  %7: s32[] = full{value=3}                                                                           # model.py:3 (f)  [Dense_0]
  %8: f32[4,5] = loop %7, %6 {                                                                        # model.py:3 (f)  [Dense_0]
    region body(%9: f32[4,5]) {
      %10: f32[4,5] = exp %9                                                                          # model.py:3 (f)  [Dense_0]
      return %10
    }
  }
  %11: f32[5] = reduce{axes=(0), op=add} %8
  return %11 'sums'
}
"""


def test_the_text_of_a_graph_is_one_node_a_line_with_the_source_at_the_right() -> None:
    assert str(_chain()) == _CHAIN_TEXT


def test_two_graphs_built_alike_have_one_text() -> None:
    assert str(_chain()) == str(_chain())


def test_small_constants_are_shown_and_large_ones_told_apart() -> None:
    def text(data: np.ndarray) -> str:
        b = Builder("f")
        return str(b.finish([b.constant(data)]))

    assert "constant{data=[1,2,3]}" in text(np.array([1, 2, 3], np.int32))
    assert text(np.arange(100.0, dtype=np.float32)) != text(np.arange(100.0, dtype=np.float32)[::-1])


# --- builder ------------------------------------------------------------------------------------------------------------


def test_a_python_scalar_takes_the_type_and_rounding_of_the_other_operand() -> None:
    b = Builder("f", [T(F16, 3), T(U8, 3)])
    half, byte = b.inputs
    made = [b.maker(v) for v in (b.full_like(half, 0.1), b.full_like(byte, -1), b.full_like(half, 1e9))]
    assert [n.attrs["value"] for n in made if n] == [float(np.float16(0.1)), 255, np.inf]
    assert b.add(half, 1).type == half.type and b.sub(1, half).type == half.type


def test_arithmetic_on_integer_splats_is_done_at_once() -> None:
    b = Builder("f", [T(F32, 3)])
    five = b.scalar(5, S32)
    assert b.known(b.min(b.add(five, 7), 10)) == 10
    assert b.known(b.lt(five, 6)) is True
    assert b.select(b.lt(five, 6), five, b.scalar(0, S32)) is five
    assert b.known(b.add(b.full_like(b.inputs[0], 1.5), 1.5)) is None, "float arithmetic belongs to the device"


def test_moves_of_splats_are_splats_and_moves_that_change_nothing_vanish() -> None:
    b = Builder("f", [T(F32, 3, 4)])
    (x,) = b.inputs
    splat = b.full_like(x, 2.0)
    assert b.known(b.broadcast(splat, (5, 3, 4), (1, 2))) == 2.0 and b.known(b.reshape(splat, (12,))) == 2.0
    assert b.known(b.convert(splat, BF16)) == 2.0
    assert all(
        v is x
        for v in (b.reshape(x, (3, 4)), b.transpose(x, (0, 1)), b.slice(x, (0, 0), (3, 4)), b.pad(x, 0, (0, 0), (0, 0)), b.convert(x, F32))
    )


def test_a_broadcast_of_a_broadcast_or_of_a_widened_reshape_is_one_broadcast() -> None:
    b = Builder("f", [T(F32, 4)])
    (x,) = b.inputs
    twice = b.maker(b.broadcast(b.broadcast(x, (3, 4), (1,)), (2, 3, 4), (1, 2)))
    widened = b.maker(b.broadcast(b.reshape(x, (1, 4)), (3, 4), (0, 1)))
    for node, axes in ((twice, (2,)), (widened, (1,))):
        assert node and node.inputs == (x,) and node.attrs["axes"] == axes


def test_what_is_made_from_no_elements_becomes_full() -> None:
    b = Builder("f", [T(F32, 0, 5), T(F32, 5, 0), T(S32, 2)])
    x, y, index = b.inputs
    values = {
        "sum": (b.reduce("add", x, (0,)), 0.0), "largest": (b.reduce("max", x, (0,)), -np.inf), "product": (b.dot(y, x, (1,), (0,)), 0.0),
        "padded": (b.pad(x, 3.0, (1, 0), (1, 0)), 3.0), "taken": (b.take_rows(x, index, 7.0), 7.0),
    }  # fmt: skip
    for name, (value, expected) in values.items():
        assert b.known(value) == expected, name
    assert b.known(b.exp(x)) == 0 and b.concatenate([x, b.full(T(F32, 2, 5), 1.0)], 0).shape == (2, 5)


def test_finish_leaves_out_what_nobody_needs_but_keeps_what_the_host_sees() -> None:
    b = Builder("f", [T(F32, 3)])
    (x,) = b.inputs
    b.exp(x)
    b.outfeed(0, b.sin(x))
    assert [n.op for n in b.finish([x]).nodes] == ["sin", "outfeed"]


def test_an_inlined_graph_computes_what_it_did_alone() -> None:
    inner = _chain()
    b = Builder("g", [v.type for v in inner.inputs])
    outer = verify(b.finish(b.inline(inner, b.inputs)))
    args = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5), np.ones(5, np.float32)
    np.testing.assert_array_equal(interpret(inner, *args)[0], interpret(outer, *args)[0])


def test_a_misfit_is_refused_with_the_operation_its_types_and_the_source() -> None:
    b = Builder("f", [T(F32, 3), T(F32, 4)])
    b.source = "model.py:7 (g)"
    with pytest.raises(GraphError, match=r"add\(f32\[3\], f32\[4\]\).*one type") as error:
        b.add(*b.inputs)
    assert "source: model.py:7 (g)" in error.value.__notes__


_X, _H, _I, _P = T(F32, 3, 4), T(F16, 3, 4), T(S32, 3), T(PRED, 3, 4)
_BAD: dict[str, tuple[str, tuple[TensorType, ...], dict[str, Any], tuple[TensorType, ...]]] = {
    "unknown operation": ("softmax", (_X,), {}, ()),
    "wrong number of operands": ("add", (_X,), {}, ()),
    "missing attribute": ("reduce", (_X,), {"op": "add"}, ()),
    "extra attribute": ("exp", (_X,), {"fast": True}, ()),
    "integer square root": ("sqrt", (_I,), {}, ()),
    "truth values added": ("add", (_P, _P), {}, ()),
    "mixed types": ("mul", (_X, _H), {}, ()),
    "shifted floats": ("shl", (_X, _X), {}, ()),
    "unknown comparison": ("compare", (_X, _X), {"direction": "almost"}, ()),
    "condition of another shape": ("select", (T(PRED), _X, _X), {}, ()),
    "conversion to pred": ("convert", (_X,), {}, (_P,)),
    "conversion that reshapes": ("convert", (_X,), {}, (T(F16, 12),)),
    "bitcast to another width": ("bitcast", (_X,), {}, (_H,)),
    "full of no type": ("full", (), {"value": 1.0}, ()),
    "iota beyond the rank": ("iota", (), {"axis": 2}, (_X,)),
    "broadcast that cuts": ("broadcast", (_X,), {"axes": (0, 1)}, (T(F32, 3, 5),)),
    "reshape that loses": ("reshape", (_X,), {}, (T(F32, 11),)),
    "transpose of one axis twice": ("transpose", (_X,), {"permutation": (0, 0)}, ()),
    "slice out of range": ("slice", (_X,), {"start": (0, 0), "limit": (3, 5), "stride": (1, 1)}, ()),
    "pad to a negative size": ("pad", (_X, T(F32)), {"low": (-2, 0), "high": (-2, 0), "interior": (0, 0)}, ()),
    "pad with another type": ("pad", (_X, T(F16)), {"low": (0, 0), "high": (1, 0), "interior": (0, 0)}, ()),
    "concatenation that does not fit": ("concatenate", (_X, T(F32, 3, 5)), {"axis": 0}, ()),
    "reduction by average": ("reduce", (_X,), {"op": "mean", "axes": (0,)}, ()),
    "reduction of an axis twice": ("reduce", (_X,), {"op": "add", "axes": (0, 0)}, ()),
    "running and": ("cumulative", (_I,), {"op": "and", "axis": 0, "reverse": False}, ()),
    "dot of different sizes": (
        "dot",
        (_X, _X),
        {"lhs_contract": (1,), "rhs_contract": (0,), "lhs_batch": (), "rhs_batch": (), "precision": "default"},
        (),
    ),
    "rows by float": ("take_rows", (_X, T(F32, 2)), {"fill": 0.0}, ()),
    "updates of another width": ("scatter_rows", (_X, _I, T(F32, 3, 5)), {"mode": "add"}, ()),
    "scatter by averaging": ("scatter_rows", (_X, _I, _X), {"mode": "mean"}, ()),
    "too few starts": ("dynamic_slice", (_X, T(S32)), {"sizes": (1, 1)}, ()),
    "update that is too large": ("dynamic_update_slice", (_X, T(F32, 4, 4), T(S32), T(S32)), {}, ()),
    "sort of different shapes": ("sort", (_X, _I), {"axis": 0, "count": 3, "keys": 1}, ()),
    "sort by no key": ("sort", (_X,), {"axis": 0, "count": 3, "keys": 0}, ()),
    "sort of which too many are wanted": ("sort", (_X,), {"axis": 0, "count": 4, "keys": 1}, ()),
}


@pytest.mark.parametrize("name", _BAD)
def test_every_operation_refuses_what_it_is_not_defined_on(name: str) -> None:
    op, inputs, attrs, asked = _BAD[name]
    with pytest.raises(GraphError):
        infer(op, inputs, attrs, (), asked)


# --- verifier -----------------------------------------------------------------------------------------------------------


def test_a_built_graph_is_well_formed() -> None:
    graph = _chain()
    assert verify(graph) is graph


def _swapped(graph: Graph) -> Graph:
    return replace(graph, nodes=graph.nodes[::-1])


def _foreign_output(graph: Graph) -> Graph:
    return replace(graph, outputs=(Value(T(F32, 5)),))


def _repeated(graph: Graph) -> Graph:
    return replace(graph, nodes=(*graph.nodes, graph.nodes[-1]))


def _mistyped(graph: Graph) -> Graph:
    node = graph.nodes[-1]
    wrong = replace(node, results=(Value(T(F16, 5)),))
    return replace(graph, nodes=(*graph.nodes[:-1], wrong), outputs=wrong.results)


def _misnamed(graph: Graph) -> Graph:
    return replace(graph, input_names=("x",))


def _captured(graph: Graph) -> Graph:
    """A region that uses a value of the graph around it."""
    i = next(i for i, n in enumerate(graph.nodes) if n.op == "loop")
    loop = graph.nodes[i]
    region = replace(loop.regions[0], outputs=(loop.inputs[1],))
    return replace(graph, nodes=(*graph.nodes[:i], replace(loop, regions=(region,)), *graph.nodes[i + 1 :]))


_BREAKS: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "a value used before it is defined": (_swapped, "not defined before its use"),
    "an output that is not defined": (_foreign_output, "is not defined in it"),
    "a value defined twice": (_repeated, "defined twice"),
    "a result of the wrong type": (_mistyped, "should be of type"),
    "names that do not fit the inputs": (_misnamed, "input names"),
    "a region that captures a value": (_captured, "not defined in it"),
}


@pytest.mark.parametrize("name", _BREAKS)
def test_the_verifier_finds(name: str) -> None:
    spoil, message = _BREAKS[name]
    with pytest.raises(GraphError, match=message):
        verify(spoil(_chain()))


def _fused(kind: str, make: Callable[[Builder], list[Value]], *types: TensorType) -> Graph:
    b = Builder("f", types)
    region = b.region("body", types)
    return b.finish(b.fused(Kind(kind), region.finish(make(region)), b.inputs))


_SCALE, _BIAS = T(F32), T(F32, 4)
_GOOD_FUSED = {
    "map": ("map", lambda r: [r.tanh(r.add(r.inputs[0], r.broadcast(r.inputs[1], (3, 4), (1,))))], _X, _BIAS),
    "scalar map": ("map", lambda r: [r.add(r.inputs[0], 1.0)], _SCALE),
    "reduce": ("reduce", lambda r: [r.sqrt(r.reduce("add", r.mul(r.inputs[0], r.inputs[0]), (0,)))], _X),
    "dot": ("dot", lambda r: [r.tanh(r.add(r.dot(r.inputs[0], r.inputs[1], (1,), (1,)), 1.0))], _X, T(F32, 5, 4)),
}
_BAD_FUSED = {
    "a map that transposes": ("map", lambda r: [r.transpose(r.exp(r.inputs[0]), (1, 0))], _X),
    "a map of two shapes": ("map", lambda r: [r.exp(r.inputs[0]), r.exp(r.inputs[1])], _X, _BIAS),
    "a reduction over different axes": (
        "reduce",
        lambda r: [r.reduce("add", r.inputs[0], (0,)), r.reduce("add", r.inputs[0], (1,))],
        T(F32, 4, 4),
    ),
    "no reduction": ("reduce", lambda r: [r.exp(r.inputs[0])], _X),
    "two dots": ("dot", lambda r: [r.dot(r.dot(r.inputs[0], r.inputs[0], (1,), (0,)), r.inputs[0], (1,), (0,))], T(F32, 4, 4)),
    "a dot of computed operands": ("dot", lambda r: [r.dot(r.exp(r.inputs[0]), r.inputs[0], (1,), (0,))], T(F32, 4, 4)),
}


@pytest.mark.parametrize("name", _GOOD_FUSED)
def test_a_fused_region_may_be(name: str) -> None:
    kind, make, *types = _GOOD_FUSED[name]
    graph = verify(_fused(kind, make, *types))
    args = [np.ones(t.shape, np.float32) for t in types]
    assert interpret(graph, *args)[0].shape == graph.outputs[0].shape


@pytest.mark.parametrize("name", _BAD_FUSED)
def test_a_fused_region_may_not_be(name: str) -> None:
    kind, make, *types = _BAD_FUSED[name]
    with pytest.raises(GraphError):
        verify(_fused(kind, make, *types))


# --- oracle -------------------------------------------------------------------------------------------------------------


def test_infeed_items_come_in_order_and_outfeed_collects_what_was_sent() -> None:
    b = Builder("f", [T(F32, 2)])
    body = b.region("body", [T(F32, 2)])
    (item,) = body.infeed(3, [T(F32, 2)])
    total = body.add(item, *body.inputs)
    body.outfeed(5, total)
    graph = verify(b.finish(b.loop(3, body.finish([total]), b.inputs)))
    sent: dict[int, list[np.ndarray]] = {}
    items = [[np.full(2, i, np.float32)] for i in (1, 10, 100)]
    (result,) = interpret(graph, np.zeros(2, np.float32), infeed={3: items}, outfeed=sent)
    assert [a[0] for a in sent[5]] == [1, 11, 111] and result[0] == 111
    with pytest.raises(GraphError, match="run dry"):
        interpret(graph, np.zeros(2, np.float32), infeed={3: items[:2]})


def test_the_oracle_refuses_arrays_that_do_not_fit() -> None:
    with pytest.raises(GraphError, match=r"f32\[4,5\] expected"):
        interpret(_chain(), np.zeros((4, 5), np.float16), np.zeros(5, np.float32))


def test_every_operation_can_be_interpreted() -> None:
    from tpuflow.lower.graph import interpret as oracle

    known = {*oracle.ELEMENTWISE, *oracle._OTHER, *oracle._CONTROL}
    assert set(OPS) == known


def test_attributes_cannot_be_changed() -> None:
    assert all(isinstance(node.attrs, MappingProxyType) for node in _chain().walk())
