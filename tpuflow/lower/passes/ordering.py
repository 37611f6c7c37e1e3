"""Topological orders of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.passes.analysis import effectful


def in_order(nodes: Iterable[Node], reluctant: Mapping[Node, Iterable[Node]] | None = None) -> list[Node]:
    """Nodes after everything they read, effects in the given order, otherwise as early in the given order as possible.

    `reluctant` names nodes that rather run after certain others; they give way as long as anything else can run.
    """
    queue = _Queue(list(nodes), reluctant or {})
    ordered = list(iter(queue.next, None))
    assert len(ordered) == len(queue.nodes), "a graph has no cycles"
    return ordered


class _Queue:
    """Nodes whose requirements are met, earliest first; the reluctant ones wait apart until what they wait for has run."""

    def __init__(self, nodes: list[Node], reluctant: Mapping[Node, Iterable[Node]]) -> None:
        number = {node: i for i, node in enumerate(nodes)}
        self.nodes = nodes
        self.needs = _requirements(nodes)
        self.wishes: list[set[int]] = [{number[o] for o in reluctant.get(n, ()) if o is not n} for n in nodes]
        self.followers, self.wished_by = _inverted(self.needs), _inverted(self.wishes)
        self.ready = [i for i, needs in enumerate(self.needs) if not needs]
        self.shy: list[int] = []

    def next(self) -> Node | None:
        """The next node to run; None at the end."""
        while self.ready and self.wishes[self.ready[0]]:
            heappush(self.shy, heappop(self.ready))
        if not self.ready and not self.shy:
            return None
        i = heappop(self.ready or self.shy)
        self._done(i)
        return self.nodes[i]

    def _done(self, i: int) -> None:
        for j in self.followers[i]:
            self.needs[j].discard(i)
            if not self.needs[j]:
                heappush(self.ready, j)
        for j in self.wished_by[i]:
            self.wishes[j].discard(i)
            if not self.wishes[j] and j in self.shy:
                self.shy.remove(j)
                heapify(self.shy)
                heappush(self.ready, j)


def _requirements(nodes: list[Node]) -> list[set[int]]:
    """For each node the numbers of the nodes that must come first."""
    maker: dict[Value, int] = {value: i for i, node in enumerate(nodes) for value in node.results}
    needs = [{maker[v] for v in node.inputs if v in maker} for node in nodes]
    last = None
    for i, node in enumerate(nodes):
        if effectful(node):
            if last is not None:
                needs[i].add(last)
            last = i
    return needs


def _inverted(needs: list[set[int]]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in needs]
    for i, before in enumerate(needs):
        for j in sorted(before):
            followers[j].append(i)
    return followers
