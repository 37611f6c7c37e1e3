"""FetchAhead: an item that every trip of a loop takes from the host is on its way during the trip before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.dtypes import S32
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.memories import at_host, is_fetch
from tpuflow.lower.passes.analysis import effectful, producers
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.host_uses import MOST_NODES
from tpuflow.lower.passes.ordering import held_bytes
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of
from tpuflow.lower.passes.schedule import sizes_of
from tpuflow.lower.passes.unit_seconds import FILLED_SHARE, total_bytes

_NUMBER = TensorType(S32)


@dataclass(frozen=True, slots=True)
class FetchAhead(ChipPass):
    """Carry the item of an array at the host through the loop that takes one in each trip: the first is fetched before the loop, and each
    trip fetches that of the next. The last trip fetches some item that nobody reads. The first of the trip's items go first, as many as
    memory has room for.

    Before: loop %h { %i = sub 3, %n; %x = device_put{hbm} %h, %i; ... }.
    After: %0 = device_put{hbm} %h, 3; loop %h, %0 { %i = sub 3, %n; ... %x; %j = sub 3, %n + 1; %y = device_put{hbm} %h, %j; return %y }.
    Needs: fused graph; numbers of items that are computed from scalars that the loop carries.    Keeps: every bit.    Never: takes
    room for one more item where the chip's HBM would be too small.
    """

    def __call__(self, graph: Graph) -> Graph:
        if not any(is_fetch(node) and len(node.inputs) > 1 for node in graph.walk()):
            return graph
        return self._region(graph, total_bytes(v for v in graph.inputs if v not in at_host(graph.nodes)))

    def _region(self, graph: Graph, outside_bytes: int) -> Graph:
        """A region with its loops; `outside_bytes` is what the others and its inputs hold meanwhile."""
        if not any(node.regions and node.op != "fused" for node in graph.nodes):
            return graph
        sizes = sizes_of(graph, self.chip)
        nodes: list[Node] = []
        for node, held in zip(graph.nodes, held_bytes(graph.nodes, sizes), strict=True):
            if not node.regions or node.op == "fused":
                nodes.append(node)
                continue
            beside = outside_bytes + held - total_bytes(v for v in node.results if v not in sizes.at_host)
            new = replace(node, regions=tuple(self._region(region, beside) for region in node.regions))
            nodes += self._ahead(new, beside) if node.op == "loop" else [new]
        return replace(graph, nodes=tuple(nodes))

    def _ahead(self, loop: Node, beside_bytes: int) -> list[Node]:
        """The nodes in the place of a loop."""
        (body,) = loop.regions
        room_bytes = FILLED_SHARE * self.chip.available_hbm_bytes - beside_bytes
        room_bytes -= max(held_bytes(body.nodes, sizes_of(body, self.chip)), default=0)
        fetches: dict[Node, list[Node]] = {}
        for node in body.nodes:
            if (numbering := _numbering(body, node)) is not None and bytes_of(node.result.type) <= room_bytes:
                room_bytes -= bytes_of(node.result.type)
                fetches[node] = numbering
        if not fetches:
            return [loop]
        before, after = (_Copies(dict(zip(body.inputs, values, strict=True))) for values in (loop.inputs[1:], body.outputs))
        firsts = tuple(before.fetched(fetch, numbering) for fetch, numbering in fetches.items())
        nexts = tuple(after.fetched(fetch, numbering) for fetch, numbering in fetches.items())
        rest = tuple(node for node in body.nodes if node not in fetches)
        carried = tuple(fetch.result for fetch in fetches)
        inner = replace(body, inputs=(*body.inputs, *carried), nodes=(*rest, *after.nodes), outputs=(*body.outputs, *nexts))
        lasts = tuple(Value(v.type) for v in carried)
        return [*before.nodes, replace(loop, inputs=(*loop.inputs, *firsts), results=(*loop.results, *lasts), regions=(inner,))]


def _numbering(body: Graph, fetch: Node) -> list[Node] | None:
    """The nodes that compute the number of an item which a loop's body takes from an array that every trip finds as it was; None if it is
    no such item, or its number is computed from more than scalars."""
    if not is_fetch(fetch) or len(fetch.inputs) < 2:
        return None
    whole, number = fetch.inputs
    kept = {v for v, out in zip(body.inputs, body.outputs, strict=True) if v is out}
    if whole not in kept or not whole.shape[0]:
        return None
    makers, given = producers(body.nodes), set(body.inputs)
    found: set[Node] = set()
    wanted = [number]
    while wanted:
        value = wanted.pop()
        node = makers.get(value)
        if value.type.elems != 1 or len(found) > MOST_NODES or (node is None and value not in given):
            return None
        if node is not None and node not in found:
            if effectful(node) or (node.regions and node.op != "fused"):
                return None
            found.add(node)
            wanted += node.inputs
    return [node for node in body.nodes if node in found]


@dataclass(slots=True)
class _Copies:
    """Nodes that fetch the items of another trip; `names` are those of what the body computes them from in that one."""

    names: dict[Value, Value]
    nodes: list[Node] = field(default_factory=list)
    done: set[Node] = field(default_factory=set)

    def fetched(self, fetch: Node, numbering: Iterable[Node]) -> Value:
        """The item that a fetch takes."""
        for node in numbering:
            if node not in self.done:
                self.done.add(node)
                self.nodes.append(_copied(node, self.names))
        whole, number = (self.names[v] for v in fetch.inputs)
        within = _clamped(number, whole.shape[0])
        item = Value(fetch.result.type)
        self.nodes += [within, replace(fetch, inputs=(whole, within.result), results=(item,))]
        return item


def _copied(node: Node, names: dict[Value, Value]) -> Node:
    """A node of its own that computes the same from other values; `names` learns its results."""
    results = tuple(Value(v.type, v.name) for v in node.results)
    if node.op == "fused":
        builder = RegionBuilder()
        node = builder.fused(node, builder.inline_region(node), node.results)
    copy = node.on(_renamed(node.inputs, names), results)
    names.update(zip(node.results, results, strict=True))
    return copy


def _renamed(values: Sequence[Value], names: Mapping[Value, Value]) -> tuple[Value, ...]:
    return tuple(names[v] for v in values)


def _clamped(number: Value, count: int) -> Node:
    """The number of an item that there is: after the last trip there is none of the next."""
    given, zero, last, least, within = (Value(_NUMBER) for _ in range(5))
    nodes = (
        Node("full", (), (zero,), {"value": 0}), Node("full", (), (last,), {"value": count - 1}),
        Node("max", (given, zero), (least,)), Node("min", (least, last), (within,)),
    )  # fmt: skip
    region = Graph(Kind.MAP.value, (given,), nodes, (within,))
    return Node("fused", (number,), (Value(_NUMBER),), {"kind": Kind.MAP}, (region,))
