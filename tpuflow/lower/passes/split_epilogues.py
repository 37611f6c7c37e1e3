"""SplitEpilogues: a product whose epilogue waits for something runs before the memory peak all the same, and its epilogue by itself."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.passes.analysis import depending
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import roofline_seconds
from tpuflow.lower.passes.live_values import LiveValues
from tpuflow.lower.passes.region_builder import bytes_of, is_kernel
from tpuflow.lower.passes.sums import part
from tpuflow.lower.passes.unit_seconds import start_seconds, total_bytes


@dataclass(frozen=True, slots=True)
class SplitEpilogues(ChipPass):
    """Cut a product's kernel in two where its operands would be live across the memory peak for the sake of its epilogue.

    So with the weights that a language model has in common for its embedding and its head: the gradient by the head waited for that by the
    embedding, which is the last, and the gradient of the logits with it.
    Before: ...peak...; %3 = fused{dot; add} %x, %dy, %late.
    After:  %2 = fused{dot} %x, %dy; ...peak...; %3 = fused{add} %2, %late.
    Needs: scheduled, fused graph.    Keeps: every operation and every rounding, so every bit.
    Never: keeps as many bytes as it frees; nor, where the program fits on the chip anyway, takes more time than moving the freed bytes
    `HELD_MOVES` times. `saves_memory`: it is known not to fit.
    """

    saves_memory: bool = False

    def saving_memory(self) -> SplitEpilogues:
        """This pass for a program that does not fit."""
        return replace(self, saves_memory=True)

    def __call__(self, graph: Graph) -> Graph:
        live = LiveValues.of(graph, [self.map_regions(node) for node in graph.nodes], self.chip, saves_memory=self.saves_memory)
        while _sweep(live):
            pass
        return replace(graph, nodes=tuple(live.nodes))


def _sweep(live: LiveValues) -> bool:
    """Cut what runs after the peak and pays, the largest gain first; whether anything changed."""
    live.find_peak()
    found = [(gain, node) for node in live.nodes[live.peak + 1 :] if is_kernel(node, Kind.DOT) and (gain := _freed_bytes(live, node)) > 0]
    changed = [_split(live, node) for _, node in sorted(found, key=lambda entry: -entry[0])]
    return any(changed)


def _split(live: LiveValues, node: Node) -> bool:
    """Cut a kernel, and run its product as soon as its operands are there, if that pays."""
    parts = _parts(live, node)
    if parts is None:
        return False
    product, epilogue = parts
    freed = _freed_bytes(live, product, node) - total_bytes(v for v in product.results if v not in node.results)
    spent = roofline_seconds(product, live.chip) + roofline_seconds(epilogue, live.chip) - roofline_seconds(node, live.chip)
    if freed <= 0 or spent + start_seconds(live.chip) > live.worth_seconds(freed):
        return False
    at = live.place[node]
    live.put(at, epilogue)
    live.insert(at, product)
    peak = live.nodes[live.peak]
    ready = 1 + max(_ready(live, v) for v in product.inputs)
    behind = next(i for i in range(ready, at) if live.nodes[i].op != "reshape")  # the peak, or what is before it; views come along
    order = live.order_with_earlier(at, [behind])
    assert order is not None, "what a product reads is there before the peak"
    live.reorder([live.nodes[i] for i in order])
    live.peak = live.place[peak]
    return True


def _freed_bytes(live: LiveValues, product: Node, reader: Node | None = None) -> int:
    """Bytes of a product's operands that are live at the peak for its kernel (`reader`) only."""
    at = live.place[reader or product]
    roots = {live.root.get(v, v) for v in product.inputs}
    held = roots - {live.root.get(v, v) for v in live.nodes[live.peak].inputs}
    return sum(bytes_of(v.type) for v in held if v in live.maker and live.place[live.maker[v]] < live.peak and live.last_read(v) == at)


def _ready(live: LiveValues, value: Value) -> int:
    """The position from which a value is there: of its maker, or where it is only another shape, of what it is a view of."""
    while (maker := live.maker.get(value)) is not None and maker.op == "reshape":
        (value,) = maker.inputs
    return -1 if maker is None else live.place[maker]


def _parts(live: LiveValues, node: Node) -> tuple[Node, Node] | None:
    """A kernel with the product, and as much of the epilogue as can run before the peak, and a map with the rest; None if there are not
    both."""
    (region,) = node.regions
    early = {own for own, outer in zip(region.inputs, node.inputs, strict=True) if _ready(live, outer) < live.peak}
    for inner in region.nodes:
        if early.issuperset(inner.inputs):
            early.update(inner.results)
    maker = {v: inner for inner in region.nodes for v in inner.results}
    product = next(inner for inner in region.nodes if inner.op in PRODUCTS)
    if product.result not in early or early.issuperset(region.outputs) or len({*region.outputs}) < len(region.outputs):
        return None
    made = depending(region.nodes, [product.result]) & early
    crossing = [v for inner in region.nodes if early.isdisjoint(inner.results) for v in inner.inputs if v in made]
    stored = dict.fromkeys(_narrowest(v, maker) for v in crossing)
    results = dict(zip(region.outputs, node.results, strict=True))
    known = {v: results.get(v) or Value(v.type, v.name) for v in stored} | {v: outer for v, outer in results.items() if v in made}
    late = {v: outer for v, outer in results.items() if v not in made}
    operands = dict(zip(region.inputs, node.inputs, strict=True))
    return (
        part(node, Kind.DOT, region.nodes, operands, known),
        part(node, Kind.MAP, _slice(region, late, known), operands | known, late),
    )


def _narrowest(value: Value, maker: dict[Value, Node]) -> Value:
    """What a value was before it was only made wider."""
    node = maker[value]
    while node.op == "convert" and node.inputs[0].dtype.bytes <= node.result.dtype.bytes:
        value = node.inputs[0]
        node = maker[value]
    return value


def _slice(region: Graph, outputs: Iterable[Value], known: Container[Value]) -> list[Node]:
    """The nodes of a region that compute some values from known ones, in order."""
    wanted, found = set(outputs), []
    for inner in reversed(region.nodes):
        if not wanted.isdisjoint(inner.results) and inner.results[0] not in known:
            found.append(inner)
            wanted.update(inner.inputs)
    return found[::-1]
