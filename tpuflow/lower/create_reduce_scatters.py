"""Turn an all-reduce of which every chip reads only its own slice into a reduce-scatter (XLA's ReduceScatterCreator).

Called when a partitioned module is imported.

A partitioner makes such sums of gradients whose parameters, or optimizer's state, are cut over the chips that share the work. Half the
bytes are sent. The order in which a part is summed may be another, so this is no pass, which would keep every bit, but part of how a
partitioned program is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpuflow.dtypes import S32
from tpuflow.isa.meshes import axes_numbered
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.operations import collectives
from tpuflow.lower.operations.by_position import by_position
from tpuflow.lower.operations.collectives import Group

Sizes = Mapping[str, int]
Names = tuple[str, ...]


def create_reduce_scatters(graph: Graph, sizes: Sizes) -> Graph:
    """The graph with reduce-scatters where they are possible, regions included; `sizes` are those of the mesh's axes.

    Before: %1 = collective all_reduce %0; %2 = dynamic_slice %1 at the chip's own place.    After: %2 = collective reduce_scatter %0.
    Over mesh axes on which the slice's start does not depend, the slice is all-reduced.
    """
    uses = Counter([*(v for node in graph.nodes for v in node.inputs), *graph.outputs])
    makers = {v: node for node in graph.nodes for v in node.results}
    sums = _Sums(sizes, makers, uses)
    b = Builder(graph.name, [v.type for v in graph.inputs], graph.input_names)
    b.inputs, b.mesh = graph.inputs, sizes
    env: dict[Value, Value] = {v: v for v in graph.inputs}
    for node in graph.nodes:
        found = sums.cut_by(node) if node.op == "dynamic_slice" else None
        with b.at(node.source, node.scope):
            results = (_scattered(b, found, env),) if found is not None else _copied(b, node, [env[v] for v in node.inputs], sizes)
        env.update(zip(node.results, results, strict=True))
    return b.finish([env[v] for v in graph.outputs], graph.output_names)


def _copied(b: Builder, node: Node, operands: Sequence[Value], sizes: Sizes) -> Sequence[Value]:
    regions = tuple(create_reduce_scatters(region, sizes) for region in node.regions)
    return b.emit(node.op, operands, dict(node.attrs), [v.type for v in node.results], regions).results


@dataclass(frozen=True, slots=True)
class _ShardOfSum:
    """A chip's shard of an all-reduce: the operand `summed`, its reducer and mesh `axes`; and for each axis of the array the shard's
    length, its start, and the mesh axes over which it is sharded.
    """

    summed: Value
    reducer: str
    axes: Names
    sizes: tuple[int, ...]
    starts: tuple[Value, ...]
    cut: tuple[Names, ...]

    @property
    def scattered(self) -> Names:
        """The mesh axes of the sum that the array is cut over."""
        return tuple(name for names in self.cut for name in names if name in self.axes)


@dataclass(frozen=True, slots=True)
class _Sums:
    """The sums of a graph: who made each value, and how often it is used."""

    mesh: Sizes
    makers: Mapping[Value, Node]
    uses: Mapping[Value, int]

    def cut_by(self, node: Node) -> _ShardOfSum | None:
        """The shard of a sum that a slice takes; None if it slices something else or elsewhere, or if the whole sum has another reader."""
        whole, *starts = node.inputs
        reducer, axes, summed = "", (), whole
        while (maker := self._sum(summed)) is not None and reducer in ("", maker.attrs["reducer"]):
            reducer, axes, summed = maker.attrs["reducer"], (*axes, *maker.attrs["axes"]), maker.inputs[0]
        lengths = node.attrs["sizes"]
        cut = [self._cut(n, own, start) for n, own, start in zip(whole.shape, lengths, starts, strict=True)]
        if any(names is None or 0 < len(set(names) & set(axes)) < len(names) for names in cut):
            return None
        part = _ShardOfSum(summed, reducer, axes, tuple(lengths), tuple(starts), tuple(names for names in cut if names is not None))
        return part if part.scattered else None

    def _sum(self, value: Value) -> Node | None:
        """The all-reduce that defines a value with a single use; None otherwise."""
        maker = self.makers.get(value)
        is_sum = maker is not None and maker.op == "collective" and maker.attrs["kind"] == "all_reduce"
        return maker if is_sum and self.uses[value] == 1 else None

    def _cut(self, length: int, own: int, start: Value) -> Names | None:
        """The mesh axes, major first, over which an axis is sharded if pieces of `own` elements begin at `start`; None if it is not."""
        if own == length:
            return ()
        numbers = by_position(self.makers.get, self.mesh, start)
        if numbers is None or length % own or (numbers % own).any():
            return None
        names = axes_numbered(numbers // own, self.mesh)
        return names if names is not None and Group.of(self.mesh, names).chips * own == length else None


def _scattered(b: Builder, part: _ShardOfSum, env: Mapping[Value, Value]) -> Value:
    """Slice first along the axes whose start is equal on all chips that sum together; then reduce-scatter axis by axis; then all-reduce
    over the mesh axes that are left.
    """
    x = env[part.summed]
    for d, names in enumerate(part.cut):
        if names and names[0] not in part.axes:
            x = _sliced(b, x, d, env[part.starts[d]], part.sizes[d])
    for d, names in enumerate(part.cut):
        if names and names[0] in part.axes:
            x = collectives.reduce_scatter(b, part.reducer, x, Group.of(b.mesh, names), d, tiled=True)
    rest = [name for name in part.axes if name not in part.scattered]
    return collectives.all_reduce(b, part.reducer, x, Group.of(b.mesh, rest))


def _sliced(b: Builder, x: Value, axis: int, start: Value, size: int) -> Value:
    zero = b.scalar(0, S32)
    starts = [start if d == axis else zero for d in range(len(x.shape))]
    return b.dynamic_slice(x, starts, [size if d == axis else n for d, n in enumerate(x.shape)])
