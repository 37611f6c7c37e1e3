"""JoinSmall: kernels of one tile, whatever their shapes, that do not depend on one another run as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tpuflow.dtypes import DType
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import FUSIBLE_MOVES
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.merge_kernels import Memory, common_scope
from tpuflow.lower.passes.region_builder import TILES_BYTES, bytes_of, is_kernel

SMALL_BYTES = 256 * 1024  # an array of at most this size is small: half a tile, so that it is one tile even if padded
LEAST_BYTES = 512  # the smallest size of a tile, even of a scalar
MAX_NODES = 2048
SPARE_BYTES = 64 * 1024  # by which the memory peak may grow, for scalars that stay live longer


@dataclass(frozen=True, slots=True)
class JoinSmall(Pass):
    """Let small kernels wait until something needs what one of them makes, and then run together all that wait.

    What reads the results of others that wait is a layer above them. A joined kernel is a fused node of kernels: straight-line code, all
    loads first, as its members have a grid of one step each; their arrays need not be alike in anything.

    Before: %2 = fused{add} %0; %3 = fused{dot} %1, %1; %4 = fused{mul} %3; %5 = fused{dot} %2, %4.
    After:  %3 = fused{dot} %1, %1; %2, %4 = fused{fused{add}; fused{mul}} %0, %3; %5 = fused{dot} %2, %4.
    Needs: fused graph.    Keeps: every kernel's own work, so every bit.
    Never: lets a kernel wait that has a large array or would hold up memory, takes more than on-chip memory holds, or costs an update
    its place.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        while len(joined := _Joining(graph, nodes).joined()) < len(nodes):
            nodes = joined
        return replace(graph, nodes=tuple(nodes))


@dataclass(slots=True, eq=False)
class _Pack:
    """Kernels that will be one: operands (`reads`), region inputs that results may overwrite (`replaced`), types of results (`made`)."""

    members: list[Node] = field(default_factory=list)
    reads: set[Value] = field(default_factory=set)
    replaced: set[Value] = field(default_factory=set)
    made: set[tuple[DType, int]] = field(default_factory=set)
    bytes: int = 0
    nodes: int = 0
    kernels: int = 0


class _Joining:
    """Visits the nodes in order. `layers`: waiting nodes by depth of dependence on one another. `placed`: (position, node) of others."""

    def __init__(self, graph: Graph, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.inputs, self.outputs = set(graph.inputs), set(graph.outputs)  # and views of them
        for node in nodes:
            if node.op == "reshape" and node.inputs[0] in self.inputs:
                self.inputs.add(node.result)
        for node in reversed(nodes):
            if node.op == "reshape" and node.result in self.outputs:
                self.outputs.add(node.inputs[0])
        self.layers: list[list[tuple[int, Node]]] = []
        self.layer_of: dict[Value, int] = {}
        self.placed: list[tuple[int, Node]] = []
        self.moved: dict[Value, int] = {}
        self.memory = Memory(graph, nodes, SPARE_BYTES)

    def joined(self) -> list[Node]:
        """The nodes, with groups of small ones as one node each."""
        for position, node in enumerate(self.nodes):
            above = max((self.layer_of.get(v, -1) for v in node.inputs), default=-1)
            if _is_small(node):
                self._wait(position, node, above + 1)
            elif node.op == "reshape" and above >= 0:
                self._wait(position, node, above)
            else:
                self._run(position, above)
                self.placed.append((position, node))
        self._run(len(self.nodes), len(self.layers) - 1)
        return [node for _, node in sorted(self.placed, key=lambda entry: entry[0])]

    def _wait(self, position: int, node: Node, layer: int) -> None:
        if layer == len(self.layers):
            self.layers.append([])
        self.layers[layer].append((position, node))
        self.layer_of.update(dict.fromkeys(node.results, layer))

    def _run(self, now: int, last: int) -> None:
        """Place all waiting layers up to number `last` before the node at position `now`."""
        if last < 0:
            return
        for layer in self.layers[: last + 1]:
            self._place(now, layer)
        self.layers = self.layers[last + 1 :]
        self.layer_of = {v: layer - last - 1 for v, layer in self.layer_of.items() if layer > last}

    def _place(self, now: int, layer: Iterable[tuple[int, Node]]) -> None:
        """Place one layer: packs of several nodes run now; single nodes and views stay in place, unless their operands have moved."""
        packs = [p for p in self._packs([n for at, n in layer if n.op != "reshape" and self._may_wait(n, at, now)]) if p.kernels > 1]
        for pack in packs:
            self.placed.append((now, _one(pack.members)))
            self.moved.update((v, now) for node in pack.members for v in node.results)
        packed = {node for pack in packs for node in pack.members}
        for at, node in layer:
            if node not in packed:
                self._stay(at, node)

    def _may_wait(self, node: Node, position: int, now: int) -> bool:
        """Whether the node can be delayed to `now` without raising the memory peak; if so, the delay is accounted for."""
        if not self.memory.allows(node.inputs, node.results, position, now):
            return False
        self.memory.delay(node.inputs, node.results, position, now)
        return True

    def _stay(self, position: int, node: Node) -> None:
        at = max([position, *(self.moved.get(v, 0) for v in node.inputs)])
        self.placed.append((at, node))
        self.moved.update(dict.fromkeys(node.results, at))

    def _packs(self, nodes: Iterable[Node]) -> list[_Pack]:
        packs: list[_Pack] = []
        for node in nodes:
            size = _on_chip_bytes(node)
            pack = next((p for p in packs if self._fits(node, size, p)), None)
            if pack is None:
                pack = _Pack()
                packs.append(pack)
            self._add(node, size, pack)
        return packs

    def _fits(self, node: Node, size: int, pack: _Pack) -> bool:
        """Whether there is room, and every array that one of them overwrites can still be overwritten."""
        if pack.bytes + size > TILES_BYTES or pack.nodes + _nodes(node) > MAX_NODES:
            return False
        mine, made = self._replaced(node), {_kind(v.type) for v in node.results}
        apart = pack.replaced.isdisjoint(node.inputs) and mine.isdisjoint(pack.reads)
        return apart and made.isdisjoint(map(_kind_of, pack.replaced)) and pack.made.isdisjoint(map(_kind_of, mine))

    def _add(self, node: Node, size: int, pack: _Pack) -> None:
        pack.members.append(node)
        pack.reads.update(node.inputs)
        pack.replaced |= self._replaced(node)
        pack.made.update(_kind(v.type) for v in node.results)
        pack.bytes += size
        pack.nodes += _nodes(node)
        pack.kernels += len(node.inputs) if node.op == "concatenate" else 1

    def _replaced(self, node: Node) -> set[Value]:
        """Region inputs whose buffer a result of the node that leaves the region may take."""
        leaving = {_kind(v.type) for v in node.results if v in self.outputs}
        return {v for v in node.inputs if v in self.inputs and _kind(v.type) in leaving}


def _kind(type: TensorType) -> tuple[DType, int]:
    """Equal for arrays that can share a buffer."""
    return type.dtype, type.elems


def _kind_of(value: Value) -> tuple[DType, int]:
    return _kind(value.type)


def _is_small(node: Node) -> bool:
    """Whether a node is a map, a reduction, work on rows or a move of small arrays only, and of one at least."""
    if not (node.op in FUSIBLE_MOVES or is_kernel(node, Kind.MAP, Kind.REDUCE, Kind.ROWS)) or not node.inputs or _in_pieces(node):
        return False
    return all(0 < bytes_of(v.type) <= SMALL_BYTES for v in _values(node))


def _in_pieces(node: Node) -> bool:
    """Whether a kernel reads one array through several windows, as pooling does, or joins several pieces, as its gradient does: its many
    DMAs are better divided among cores.
    """
    inside = [n for region in node.regions for n in region.nodes]
    read = Counter(n.inputs[0] for n in inside if n.op == "window")
    return any(times > 1 for times in read.values()) or any(n.op == "join" for n in inside)


def _values(node: Node) -> list[Value]:
    return [*node.inputs, *node.results, *(v for region in node.regions for n in region.nodes for v in n.results)]


def _nodes(node: Node) -> int:
    return sum(len(region.nodes) for region in node.regions) or 1


def _on_chip_bytes(node: Node) -> int:
    """A kernel's on-chip bytes, estimated: its operands and results, and the largest array once more for intermediates."""
    held = sum(max(bytes_of(v.type), LEAST_BYTES) for v in (*node.inputs, *node.results))
    return held + max(bytes_of(v.type) for v in _values(node))


def _one(members: Sequence[Node]) -> Node:
    """A node of `Kind.SEVERAL` with the members in its region."""
    inner = {v: Value(v.type, v.name) for node in members for v in (*node.inputs, *node.results)}
    nodes = [replace(n, inputs=tuple(inner[v] for v in n.inputs), results=tuple(inner[v] for v in n.results)) for n in members]
    inputs = tuple(dict.fromkeys(v for node in members for v in node.inputs))
    results = tuple(v for node in members for v in node.results)
    region = Graph("several", tuple(inner[v] for v in inputs), tuple(nodes), tuple(inner[v] for v in results))
    kind = MappingProxyType({"kind": Kind.SEVERAL})
    return Node("fused", inputs, results, kind, (region,), members[0].source, common_scope(members))
