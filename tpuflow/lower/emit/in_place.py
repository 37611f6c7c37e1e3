"""Buffer sharing (aliasing): which operands' HBM buffers the results of a node may overwrite.

Possible where every element is read and written through equal windows, or where only a piece of the operand is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tpuflow.lower.emit.nest import Labels
from tpuflow.lower.emit.region import ELEMENTWISE, Region, Roots
from tpuflow.lower.emit.templates import FORMS
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.passes.forms import by_form

PIECEWISE = ("dynamic_update_slice", "scatter_rows")


def overwritable(node: Node) -> frozenset[Value]:
    """The operands whose HBM buffer a result of the node may share, provided that nothing reads the operand afterwards.

    These are operand 0 of `dynamic_update_slice` and `scatter_rows`; and the operands of elementwise and fused nodes that have a result's
    type and are read only elementwise, at the place where that result is written: neither reduced nor multiplied by a matrix.
    """
    if node.op in PIECEWISE:
        return frozenset(node.inputs[:1]) - frozenset(node.inputs[1:])
    if node.op != "fused" and node.op not in ELEMENTWISE:
        return frozenset()
    types = {r.type for r in node.results}
    whole = _read_in_place(node) if node.op == "fused" else node.inputs
    return frozenset(v for v in whole if v.type in types)


def _read_in_place(node: Node) -> frozenset[Value]:
    """The operands of a fused node that are read only where a result is written."""
    return frozenset([node.inputs[i] for i in _numbers_read_in_place(node)])


@by_form
def _numbers_read_in_place(node: Node) -> tuple[int, ...]:
    """Their numbers."""
    (graph,) = node.regions
    elsewhere = _read_elsewhere(graph, node.attrs["kind"])
    outer = {v for own, v in zip(graph.inputs, node.inputs, strict=True) if own in elsewhere}
    return tuple(i for i, v in enumerate(node.inputs) if v not in outer)


def _read_elsewhere(graph: Graph, kind: Kind) -> Collection[Value]:
    """The inputs of a fused node's region that may be read where no result is written, or another one."""
    if kind is Kind.SEVERAL:
        return set(graph.inputs) - _read_in_place_by_one(graph.nodes)
    if any(n.op == "join" for n in graph.nodes):
        return graph.inputs  # its pieces may be read where others are written
    if kind is Kind.ROWS and any(n.op in PRODUCTS for n in graph.nodes):
        return graph.inputs  # parts of its batches take turns in a step: one is read at another place than the other is written
    region = Region(graph.nodes, dict.fromkeys(graph.inputs, 0), tuple((v, 0) for v in graph.outputs))
    levels = FORMS[kind].levels(region)
    loads: dict[Value, set[tuple[int, Labels]]] = {}
    for number, (roots, labels) in enumerate(levels):
        for value, used in region.accesses(roots, labels):
            loads.setdefault(value, set()).add((number, tuple(used)))
    stored = _StoredWindows.of(levels, region)
    elsewhere = {value for value, found in loads.items() if not stored.allow(found)}
    elsewhere.update(n.inputs[0] for n in graph.nodes if n.op in ("window", "random"))  # one number everywhere is a view that walks nowhere
    return elsewhere


def _read_in_place_by_one(members: Sequence[Node]) -> set[Value]:
    """The same of kernels that run together: operands of one of them only, with a type that no other member produces."""
    readers = Counter(v for member in members for v in member.inputs)
    makers = Counter(kind for member in members for kind in {(r.dtype, r.type.elems) for r in member.results})
    found: set[Value] = set()
    for member in members:
        types = {r.type for r in member.results}
        own = [v for v in _read_in_place(member) if v.type in types] if member.op == "fused" else []
        found.update(v for v in own if readers[v] == 1 and makers[v.dtype, v.type.elems] == 1)
    return found


@dataclass(frozen=True, slots=True)
class _StoredWindows:
    """For every level of a region the window through which it stores results (None: it stores none), and whether the region has reductions,
    whose results the last level then computes.
    """

    windows: Sequence[tuple[int | None, ...] | None]
    reduced: bool

    @classmethod
    def of(cls, levels: Sequence[Roots], region: Region) -> _StoredWindows:
        """From the levels of a region, in the order in which they store."""
        stored = set(region.results)
        windows = [None if stored.isdisjoint(roots) else tuple(labels) for roots, labels in levels]
        return cls(windows, bool(region.find("reduce")))

    def allow(self, loads: set[tuple[int, Labels]]) -> bool:
        """Whether an operand's loads, (level, labels), all use the window that its last level stores, and none follows that store.

        Results of reductions are stored after the last step, so that an operand of theirs may also be read in the level before.
        """
        last = max(number for number, _ in loads)
        first = last - 1 if self.reduced and last == len(self.windows) - 1 else last
        window = self.windows[last]
        return window is not None and all(number >= first and used == window for number, used in loads)
