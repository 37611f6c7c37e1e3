"""Which results may overwrite which operands: where every element is read and written through equal windows, or only a piece is written."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tpuflow.lower.emit.nest import Labels
from tpuflow.lower.emit.region import ELEMENTWISE, Region, Roots
from tpuflow.lower.emit.templates import FORMS
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import PRODUCTS

PIECEWISE = ("dynamic_update_slice", "scatter_rows")


def overwritable(node: Node) -> frozenset[Value]:
    """The operands whose HBM buffer a result of the node may have, where the operand's value is then dead.

    Operand 0 of `dynamic_update_slice` and `scatter_rows`; and those of elementwise and fused nodes that are of a result's type and enter
    only as they are: not reduced, not multiplied, and broadcast only before they take part as they are.
    """
    if node.op in PIECEWISE:
        return frozenset(node.inputs[:1]) - frozenset(node.inputs[1:])
    if node.op != "fused" and node.op not in ELEMENTWISE:
        return frozenset()
    types = {r.type for r in node.results}
    whole = _entering_whole(node) if node.op == "fused" else node.inputs
    return frozenset(v for v in whole if v.type in types)


@functools.lru_cache(maxsize=8)
def _entering_whole(node: Node) -> frozenset[Value]:
    """The operands of a fused node that enter only as they are. Several passes ask, one after the other: the last few are remembered."""
    (graph,) = node.regions
    if node.attrs["kind"] is Kind.SEVERAL:
        whole = _entering_one(graph.nodes)
        return frozenset(outer for own, outer in zip(graph.inputs, node.inputs, strict=True) if own in whole)
    if any(n.op == "join" for n in graph.nodes):
        return frozenset()  # its pieces may be read where others are written
    if node.attrs["kind"] is Kind.ROWS and any(n.op in PRODUCTS for n in graph.nodes):
        return frozenset()  # parts of its batches take turns in a step: one is read at another place than the other is written
    region = Region(graph.nodes, dict.fromkeys(graph.inputs, 0), tuple((v, 0) for v in graph.outputs))
    levels = FORMS[node.attrs["kind"]].levels(region)
    ways: dict[Value, set[tuple[int, Labels]]] = {}
    for number, (roots, labels) in enumerate(levels):
        for value, used in region.accesses(roots, labels):
            ways.setdefault(value, set()).add((number, tuple(used)))
    one_place = _OnePlace.of(levels, region)
    otherwise = {value for value, found in ways.items() if not one_place.takes(found)}
    otherwise.update(n.inputs[0] for n in graph.nodes if n.op == "window")  # one number everywhere is a view that walks nowhere
    return frozenset(node.inputs) - {outer for own, outer in zip(graph.inputs, node.inputs, strict=True) if own in otherwise}


def _entering_one(members: Sequence[Node]) -> set[Value]:
    """The operands that one of the kernels that run together reads, and only as they are, where the others make nothing alike."""
    readers = Counter(v for member in members for v in member.inputs)
    makers = Counter(kind for member in members for kind in {(r.dtype, r.type.elems) for r in member.results})
    found: set[Value] = set()
    for member in members:
        types = {r.type for r in member.results}
        own = [v for v in _entering_whole(member) if v.type in types] if member.op == "fused" else []
        found.update(v for v in own if readers[v] == 1 and makers[v.dtype, v.type.elems] == 1)
    return found


@dataclass(frozen=True, slots=True)
class _OnePlace:
    """Of every level of a region the window that it stores, None if it stores nothing, and whether the last is what is made of
    reductions."""

    windows: Sequence[tuple[int | None, ...] | None]
    reduced: bool

    @classmethod
    def of(cls, levels: Sequence[Roots], region: Region) -> _OnePlace:
        """Look at a region."""
        stored = set(region.results)
        windows = [None if stored.isdisjoint(roots) else tuple(labels) for roots, labels in levels]
        return cls(windows, bool(region.find("reduce")))

    def takes(self, ways: set[tuple[int, Labels]]) -> bool:
        """Whether all loads of an operand are of the window that its level stores, and none comes after that is stored.

        What is made of reductions is stored when all steps are over: an operand of it may be read in these too.
        """
        last = max(number for number, _ in ways)
        first = last - 1 if self.reduced and last == len(self.windows) - 1 else last
        window = self.windows[last]
        return window is not None and all(number >= first and used == window for number, used in ways)
