"""FoldMoves: fold slices, pads, reversals and transposes into windows through which elementwise nodes and reductions read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tpuflow.isa.instruction import MAX_RANK
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.graph.scalars import scalar_of
from tpuflow.lower.passes.analysis import live_nodes
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.views import MOVES, Scalar, ViewOf, after, whole

READERS = ELEMENTWISE | {"reduce", "join"}


@dataclass(frozen=True, slots=True)
class FoldMoves(Pass):
    """Replace a chain of moves that elementwise nodes and reductions read by one `window`, which costs them nothing.

    One that only stretches an array becomes its `broadcast`.

    Before: %2 = pad %0, %1; %3 = slice %2; %4 = max %3, %5.    After: %3 = window{view} %0; %4 = max %3, %5.
    Needs: simplified graph.    Keeps: every bit; the moves themselves where something else reads them.
    Never: folds what a window cannot say (a reshape of a slice, two padding values), or moves whose value is computed in the same kernel.
    """

    def __call__(self, graph: Graph) -> Graph:
        folding = _Folding({}, {}, {})
        nodes = [new for node in graph.nodes for new in folding.rewritten(self.map_regions(node))]
        return replace(graph, nodes=live_nodes(nodes, graph.outputs))


@dataclass(slots=True)
class _Folding:
    """The state of the walk over a region: the node that defines each value, what each is a view of, and the windows emitted so far."""

    maker: dict[Value, Node]
    seen: dict[Value, ViewOf | None]
    windows: dict[Value, Value]

    def rewritten(self, node: Node) -> list[Node]:
        """The node with windows as operands, after those that it needs: windows, then broadcasts, which a further run makes again."""
        self.maker.update(dict.fromkeys(node.results, node))
        if node.op not in READERS:
            return [node]
        made: list[Node] = []
        inputs = tuple(self._window(v, node, made) for v in node.inputs)
        made.sort(key=lambda new: new.op != "window")
        return [*made, node if inputs == node.inputs else replace(node, inputs=inputs)]

    def _window(self, value: Value, user: Node, made: list[Node]) -> Value:
        if value in self.windows:
            return self.windows[value]
        seen = self._chain(value)
        if seen is None or not seen.moves or not value.shape or sum(n != 1 for n in value.shape) > MAX_RANK:
            return value
        maker = self.maker[value]
        op, attrs = _reading(seen, value)
        result = Value(TensorType(value.dtype, value.shape))
        made.append(Node(op, (seen.source,), (result,), MappingProxyType(attrs), (), maker.source, maker.scope))
        self.windows[value] = made[-1].result
        return made[-1].result

    def _chain(self, value: Value) -> ViewOf | None:
        """The value as a view of the array in memory from which a chain of moves leads to it; None if no move defines it."""
        if value not in self.seen:
            self.seen[value] = self._followed(self.maker.get(value))
        return self.seen[value]

    def _followed(self, node: Node | None) -> ViewOf | None:
        if node is None or node.op not in MOVES or not node.result.type.elems:
            return None
        operand = node.inputs[0]
        fill = self._number(node.inputs[1]) if node.op == "pad" else None
        before = self._chain(operand)
        longer = None if before is None else after(before, node, fill)
        return after(whole(operand), node, fill) if longer is None else longer

    def _number(self, value: Value) -> Scalar | None:
        made = self.maker.get(value)
        return made.attrs["value"] if made is not None and made.op == "full" else None


def _reading(seen: ViewOf, value: Value) -> tuple[str, dict[str, Any]]:
    """The op that reads a value where it is seen, with its attributes: a broadcast where that is all there is to it, else a window."""
    axes = _stretched(seen, value)
    if axes is not None:
        return "broadcast", {"axes": axes}
    fill = scalar_of(0, value.dtype) if seen.fill is None else seen.fill
    return "window", {"view": tuple(sorted(seen.view, key=lambda v: v.axis)), "fill": fill}


def _stretched(seen: ViewOf, value: Value) -> tuple[int, ...] | None:
    """The axes of a `broadcast` that is equal to a view: all axes of the source whole and in order (those of size 1 after the one before);
    None if the view is no broadcast.
    """
    walks = sorted(seen.view, key=lambda v: -v.pitch)
    if not all(v.is_identity(value.shape[v.axis]) for v in walks):
        return None
    rest, axes = iter(walks), list[int]()
    for n in seen.source.shape:
        after_last = axes[-1] + 1 if axes else 0
        walk = None if n == 1 else next(rest, None)
        axes.append(after_last if walk is None else walk.axis)
    lengths = tuple(v.extent for v in walks) == tuple(n for n in seen.source.shape if n != 1)
    ascending = all(x < y for x, y in itertools.pairwise(axes)) and (not axes or axes[-1] < len(value.shape))
    return tuple(axes) if lengths and ascending else None
