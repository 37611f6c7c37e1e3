"""Mixed precision of a graph: products take operands in a 16-bit type, and what is computed from them stays in it where that is safe.

`tpuflow.amp.autocast` does this to a function before it is differentiated. Here the gradient is there already, as in a program that JAX
hands over as StableHLO: sums, exponentials and powers are told by their operations, losses, masters and normalisations are not told at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tpuflow.dtypes import F32, DType
from tpuflow.lower.graph.graph import NO_ATTRS, Graph, Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import DEFAULT

FULL_PRECISION = frozenset(("atan2", "bitcast", "exp", "expm1", "log", "log1p", "pow", "rsqrt"))
"""Elementwise operations that are computed in f32: those of `amp.rules.FULL_PRECISION` that the graph has, and what looks at bits."""
EXTREMES = ("max", "min")
"""What a reduction or a running combination computes in the type of its operand; sums and products are f32."""
MOVES = frozenset(
    "broadcast concatenate dynamic_slice dynamic_update_slice join pad reshape reverse slice take_rows transpose window".split()
)


def autocast(graph: Graph, compute: DType) -> Graph:
    """The graph with products of f32 in `compute` (f16 or bf16), rounded to it once, after the bias if one is added.

    Other operations take the widest type of their operands; splats do not widen. Sums, squares and `FULL_PRECISION` are f32. Inputs,
    outputs, and what loops, branches, collectives, scatters and the host take and give keep their types. Types that are not f32, and
    products for which a precision was asked, are left alone.
    """
    return _Autocast(compute, graph).graph()


class _Autocast:
    """The state of a rewriting: `now` tells what has taken the place of a value, in which type; `sums` are products that are still f32."""

    def __init__(self, compute: DType, graph: Graph):
        self.compute, self.before = compute, graph
        self.readers = Counter(v for node in graph.nodes for v in node.inputs) + Counter(graph.outputs)
        self.makers: dict[Value, Node] = {}
        self.now: dict[Value, Value] = {}
        self.sums: set[Value] = set()
        self.weak: set[Value] = set()
        self.converted: dict[tuple[Value, DType], Value] = {}
        self.nodes: list[Node] = []

    def graph(self) -> Graph:
        """The rewritten graph."""
        for node in self.before.nodes:
            self.makers.update(dict.fromkeys(node.results, node))
            if all(v in self.weak for v in node.inputs) and (node.op == "full" or (node.inputs and _is_typed(node))):
                self.weak.update(node.results)
            _rule(node)(self, node)
        outputs = tuple(self.in_type(v, v.dtype, self.makers[v]) if v in self.makers else v for v in self.before.outputs)
        return replace(self.before, nodes=tuple(self.nodes), outputs=outputs)

    def in_type(self, value: Value, dtype: DType, node: Node) -> Value:
        """What has taken the place of a value of the old graph, in a type; conversions get the source of `node`."""
        if value in self.sums:
            self.sums.remove(value)
            self.now[value] = self.convert(value, self.compute, node)
        return self.convert(self.now.get(value, value), dtype, node)

    def convert(self, value: Value, dtype: DType, node: Node) -> Value:
        """A value of the new graph in another type."""
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self.converted:
            made = Value(TensorType(dtype, value.shape), value.name)
            self.nodes.append(replace(node, op="convert", inputs=(value,), results=(made,), attrs=NO_ATTRS, regions=()))
            self.converted[value, dtype] = made
        return self.converted[value, dtype]

    def put(self, node: Node, dtypes: Sequence[DType], made: Sequence[DType] | None = None) -> None:
        """Add a node with operands in these types. made: the types of its results, if they are others than in the old graph."""
        inputs = tuple(self.in_type(v, dtype, node) for v, dtype in zip(node.inputs, dtypes, strict=True))
        types = [v.dtype for v in node.results] if made is None else made
        results = tuple(v if v.dtype == t else Value(TensorType(t, v.shape), v.name) for v, t in zip(node.results, types, strict=True))
        self.now.update((old, new) for old, new in zip(node.results, results, strict=True) if new is not old)
        self.nodes.append(node.on(inputs, results) if (inputs, results) != (node.inputs, node.results) else node)

    def type_of(self, value: Value) -> DType:
        """The type of what has taken the place of a value."""
        return self.compute if value in self.sums else self.now.get(value, value).dtype


def _as_traced(state: _Autocast, node: Node) -> None:
    """Operands and results in the types of the old graph, also in regions."""
    if node.regions:
        node = replace(node, regions=tuple(autocast(region, state.compute) for region in node.regions))
    state.put(node, [v.dtype for v in node.inputs])


def _in_widest(state: _Autocast, node: Node) -> None:
    """Operands that were f32 in the widest type of those that are not weak."""
    if node.op == "add" and (product := _biased(state, node)) is not None:
        return _add_bias(state, node, product)
    strong = [state.type_of(v) for v in node.inputs if v.dtype == F32 and v not in state.weak]
    if not strong or F32 in strong:
        return _as_traced(state, node)
    narrow = ([state.compute if v.dtype == F32 else v.dtype for v in values] for values in (node.inputs, node.results))
    return state.put(node, *narrow)


def _each_alone(state: _Autocast, node: Node) -> None:
    """Operands that are not combined: each keeps the type it has."""
    types = [state.type_of(v) for v in node.inputs]
    state.put(node, types, types)


def _biased(state: _Autocast, node: Node) -> int | None:
    """Which operand of an addition is a product whose only use it is, if the other is a smaller array, broadcast."""
    for i, value in enumerate(node.inputs):
        other = state.makers.get(node.inputs[1 - i])
        if value in state.sums and state.readers[value] == 1 and other is not None and other.op == "broadcast":
            return i
    return None


def _add_bias(state: _Autocast, node: Node, product: int) -> None:
    sums, bias = node.inputs[product], node.inputs[1 - product]
    state.sums.remove(sums)
    rounded = state.convert(state.in_type(bias, state.compute, node), F32, node)
    inputs = (sums, rounded) if product == 0 else (rounded, sums)
    state.nodes.append(node.on(inputs, node.results))
    state.now[node.result] = state.convert(node.result, state.compute, node)


def _product(state: _Autocast, node: Node) -> None:
    if any(v.dtype != F32 for v in node.inputs) or node.attrs["precision"] != DEFAULT:
        return _as_traced(state, node)
    state.put(node, [state.compute] * 2)
    state.sums.add(node.result)
    return None


def _convert(state: _Autocast, node: Node) -> None:
    """A conversion that the program asks for, from the type that its operand has now."""
    (value,) = node.inputs
    if value.dtype != F32 or node.result.dtype != state.type_of(value):
        return state.put(node, [state.type_of(value) if value.dtype == F32 else value.dtype])
    state.now[node.result] = state.in_type(value, node.result.dtype, node)
    return None


def _rule(node: Node) -> Callable[[_Autocast, Node], None]:
    if node.op in _RULES:
        return _RULES[node.op]
    squares = node.op == "mul" and node.inputs[0] is node.inputs[1]
    return _in_widest if _is_typed(node) and not squares else _as_traced


def _is_typed(node: Node) -> bool:
    """Whether the result has the type of its operands, whichever that is."""
    if node.op in ("reduce", "cumulative"):
        return node.attrs["op"] in EXTREMES
    return node.op in MOVES or (node.op in ELEMENTWISE and node.op not in FULL_PRECISION)


_RULES: Mapping[str, Callable[[_Autocast, Node], None]] = MappingProxyType(
    {
        **dict.fromkeys(PRODUCTS, _product),
        "convert": _convert,
        "barrier": _each_alone,
        "sort": _each_alone,
    }
)


__all__ = ["autocast"]
