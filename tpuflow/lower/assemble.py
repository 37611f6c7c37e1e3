"""Assembly: a planned graph becomes a Program: buffers, constants, ports, and nested blocks of kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tpuflow.chips import Chip
from tpuflow.errors import CompileError
from tpuflow.isa.calls import Call, HostFunction, count
from tpuflow.isa.collectives import Await, Collective, MeshAxis, Position
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Loop, Outfeed, Port, Program, Switch, While
from tpuflow.lower.bus_price import prices
from tpuflow.lower.emit import Repeated, emit_copy, emit_node
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import HOST_ARRAY
from tpuflow.lower.graph.tiling import Tiling
from tpuflow.lower.lifetimes import immediates
from tpuflow.lower.memory_plan import Assignment, MemoryPlan
from tpuflow.lower.operations.collectives import NamedCut
from tpuflow.lower.shards import WHOLE, numbered
from tpuflow.lower.tiling import Prices

T = TypeVar("T")
Tilings = dict[Node, tuple[Tiling, ...]]
"""Of every node that becomes kernels, how these are cut."""


def scheduled(graph: Graph, tilings: Tilings) -> Graph:
    """A graph whose nodes say how their kernels are cut: what it compiles to is settled by it."""
    nodes = []
    for node in graph.nodes:
        regions = node.regions if node.op == "fused" else tuple(scheduled(region, tilings) for region in node.regions)
        nodes.append(replace(node, regions=regions, tilings=tilings.get(node, ())))
    return replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class Interface:
    """What the signature says beyond names and types, one entry an input or output (or none): donated, weakly typed, random keys, and how
    the host's array is cut over the chips of `mesh`; `host_inputs` are in the host's memory.

    The outfeed ports of `calls` come before those that are named.
    """

    donated: tuple[bool, ...] = ()
    weak_inputs: tuple[bool, ...] = ()
    weak_outputs: tuple[bool, ...] = ()
    input_keys: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    infeeds: tuple[str, ...] = ()
    outfeeds: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    mesh: tuple[MeshAxis, ...] = ()
    input_cuts: tuple[NamedCut, ...] = ()
    output_cuts: tuple[NamedCut, ...] = ()
    infeed_cuts: tuple[NamedCut, ...] = ()
    outfeed_cuts: tuple[NamedCut, ...] = ()
    host_inputs: tuple[bool, ...] = ()

    @property
    def copies(self) -> tuple[int, ...]:
        """On how many chips each input is the same; empty without a mesh."""
        sizes = {axis.name: axis.size for axis in self.mesh}
        cuts = self.input_cuts if self.mesh else ()
        return tuple(math.prod(sizes.values()) // math.prod(sizes[name] for names in cut for name in names) for cut in cuts)


def assemble(graph: Graph, plan: MemoryPlan, chip: Chip, interface: Interface, tilings: Tilings | None = None) -> Program:
    """The Program of a planned graph; `tilings` learns how the kernels of every node are cut.

    Raises:
      CompileError: a node cannot be emitted for this chip, or a port is used with two types.
    """
    axes = {axis.name: n for n, axis in enumerate(interface.mesh)}
    assembler = _Assembler(plan, chip, prices(graph, chip), axes, {} if tilings is None else tilings)
    code = assembler.blocks(graph)
    return Program(
        chip=chip,
        buffers=plan.buffers,
        constants=plan.constants,
        inputs=_inputs(graph, plan, interface),
        outputs=_outputs(graph, plan, interface),
        infeeds=_feeds(assembler.infeeds, interface.infeeds, "infeed", interface.infeed_cuts, interface.mesh),
        outfeeds=_feeds(assembler.outfeeds, _outfeed_names(interface), "outfeed", interface.outfeed_cuts, interface.mesh),
        code=code,
        mesh=interface.mesh,
        name=graph.name,
        buffer_names=plan.names,
        calls=interface.calls,
        functions=tuple(assembler.functions),
    )


def _inputs(graph: Graph, plan: MemoryPlan, interface: Interface) -> tuple[Port, ...]:
    names, cuts = graph.input_names, interface.input_cuts
    ports = _ports("input", graph.inputs, names, interface.weak_inputs, interface.input_keys, cuts, interface.mesh)
    return tuple(
        replace(port, buffer=plan.buffer_of[value], donated=_at(interface.donated, i, False))
        for i, (port, value) in enumerate(zip(ports, graph.inputs, strict=True))
    )


def _outputs(graph: Graph, plan: MemoryPlan, interface: Interface) -> tuple[Port, ...]:
    names, cuts = graph.output_names, interface.output_cuts
    ports = _ports("output", graph.outputs, names, interface.weak_outputs, interface.output_keys, cuts, interface.mesh)
    return tuple(replace(port, buffer=buffer) for port, buffer in zip(ports, plan.outputs, strict=True))


def _ports(
    kind: str,
    values: Sequence[Value],
    names: Sequence[str],
    weak: Sequence[bool] = (),
    keys: Sequence[str] = (),
    cuts: Sequence[NamedCut] = (),
    mesh: Sequence[MeshAxis] = (),
) -> Iterator[Port]:
    """A port for each value, of no buffer yet."""
    for i, value in enumerate(values):
        cut = numbered(_at(cuts, i, WHOLE), mesh)
        name = _at(names, i, f"{kind} {i}")
        yield Port(name, value.dtype, value.shape, weak=_at(weak, i, False), key=_at(keys, i, ""), cut=cut)


def _outfeed_names(interface: Interface) -> tuple[str, ...]:
    return (*(f"host call {i}" for i in range(count(interface.calls))), *interface.outfeeds)


def _feeds(
    used: Mapping[int, Value], names: Sequence[str], kind: str, cuts: Sequence[NamedCut], mesh: Sequence[MeshAxis]
) -> tuple[Port, ...]:
    ports = max(used, default=-1) + 1
    missing = [i for i in range(ports) if i not in used]
    if missing:
        raise CompileError(f"{kind} ports {missing} are never used, but port {ports - 1} is; number the ports from 0 without gaps.")
    return tuple(_ports(kind, [used[i] for i in range(ports)], names, cuts=cuts, mesh=mesh))


def _at(items: Sequence[T], i: int, default: T) -> T:
    return items[i] if i < len(items) else default


@dataclass(slots=True)
class _Assembler:
    """Walks the regions; remembers what crosses each port."""

    plan: MemoryPlan
    chip: Chip
    prices: Prices
    axes: Mapping[str, int]
    tilings: Tilings
    moving: dict[Value, int] = field(default_factory=dict)
    infeeds: dict[int, Value] = field(default_factory=dict)
    outfeeds: dict[int, Value] = field(default_factory=dict)
    functions: list[HostFunction] = field(default_factory=list)
    splats: dict[Value, int | float | bool] = field(default_factory=dict)
    repeated: Repeated = field(default_factory=Repeated)

    def blocks(self, region: Graph) -> tuple[Block, ...]:
        """The blocks of a region, with the copies at its end."""
        immediate = immediates(region)
        self.splats |= {n.result: n.attrs["value"] for n in region.nodes if n.op == "full"}
        code: list[Block] = []
        for node in region.nodes:
            if immediate.isdisjoint(node.results):
                code += self.assigned(self.plan.assigned_before.get(node, ()), node.source)
                code += _BLOCKS.get(node.op, _Assembler.kernels)(self, node)
                code += self.assigned(self.plan.assigned_after.get(node, ()), node.source)
        return tuple(code + self.assigned(self.plan.assigned_at_end.get(region, ()), ""))

    def assigned(self, assignments: Sequence[Assignment], source: str) -> list[Block]:
        """Kernels that move buffers to others; between HBM and the host, copies."""
        return [block for c in assignments for block in self._assigned(c, source)]

    def _assigned(self, move: Assignment, source: str) -> list[Block]:
        if any(self.plan.buffers[n].space == "host" for n in (move.source, move.target)):
            semaphore = self._free_semaphore()
            return [Copy(move.source, move.target, semaphore), Await(semaphore)]
        return list(emit_copy(move.source, move.target, self.plan.buffers, self.chip, source))

    def kernels(self, node: Node) -> list[Block]:
        """The kernels that compute a node."""
        plan = self.plan
        emitted = emit_node(node, plan.buffer_of.__getitem__, plan.buffers, self.chip, self.splats.get, self.repeated, self.prices)
        self.tilings[node] = emitted.tilings
        return list(emitted.kernels)

    def nothing(self, node: Node) -> list[Block]:
        """A view of a buffer, or data that come with the Program."""
        return []

    def loop(self, node: Node) -> list[Block]:
        """A counted loop."""
        return [Loop(self.plan.block_buffer_of[node], self.blocks(node.regions[0]))]

    def while_(self, node: Node) -> list[Block]:
        """A conditional loop."""
        condition, body = node.regions
        return [While(self.blocks(condition), self.plan.block_buffer_of[node], self.blocks(body))]

    def switch(self, node: Node) -> list[Block]:
        """A choice of branches."""
        return [Switch(self.plan.block_buffer_of[node], tuple(self.blocks(branch) for branch in node.regions))]

    def infeed(self, node: Node) -> list[Block]:
        """The next item of a port, one buffer."""
        port = self._port(self.infeeds, node, node.result)
        return [Infeed(port, self.plan.block_buffer_of[node])]

    def outfeed(self, node: Node) -> list[Block]:
        """An item for the host."""
        port = self._port(self.outfeeds, node, node.inputs[0])
        return [Outfeed(port, self.plan.block_buffer_of[node])]

    def call_host(self, node: Node) -> list[Block]:
        """A call that the device waits for."""
        ends = (tuple(self.plan.buffer_of[v] for v in values) for values in (node.inputs, node.results))
        self.functions.append(node.attrs["function"])
        return [CallHost(len(self.functions) - 1, *ends)]

    def position(self, node: Node) -> list[Block]:
        """A scalar that says where the chip is."""
        return [Position(self.axes[node.attrs["axis"]], self.plan.buffer_of[node.result])]

    def start(self, node: Node) -> list[Block]:
        """A collective."""
        semaphore = self._semaphore(node)
        attrs, source, target = node.attrs, self.plan.buffer_of[node.inputs[0]], self.plan.buffer_of[node.result]
        axes = tuple(self.axes[name] for name in attrs["axes"])
        return [Collective(attrs["kind"], attrs["reducer"], axes, source, target, semaphore, attrs["pairs"], node.scope, node.source)]

    def start_put(self, node: Node) -> list[Block]:
        """A copy to or from the host."""
        source, *item = (self.plan.buffer_of[value] for value in node.inputs)
        return [Copy(source, self.plan.buffer_of[node.result], self._semaphore(node), item[-1] if item else -1)]

    def _semaphore(self, node: Node) -> int:
        """The first semaphore that nothing is on its way for: what the node starts is, from now on."""
        semaphore = self.moving[node.result] = self._free_semaphore()
        return semaphore

    def _free_semaphore(self) -> int:
        return next(n for n in itertools.count() if n not in self.moving.values())

    def await_(self, node: Node) -> list[Block]:
        """The end of a collective or copy."""
        return [Await(self.moving.pop(node.inputs[0]))]

    def _port(self, used: dict[int, Value], node: Node, value: Value) -> int:
        port = node.attrs["port"]
        if used.setdefault(port, value).type != value.type:
            raise CompileError(f"{node.source}: {node.op} port {port} carries {used[port].type} elsewhere, here {value.type}.")
        return port


_BLOCKS: Mapping[str, Callable[[_Assembler, Node], list[Block]]] = {
    "reshape": _Assembler.nothing,
    "barrier": _Assembler.nothing,
    "constant": _Assembler.nothing,
    HOST_ARRAY: _Assembler.nothing,
    "loop": _Assembler.loop,
    "while": _Assembler.while_,
    "switch": _Assembler.switch,
    "infeed": _Assembler.infeed,
    "outfeed": _Assembler.outfeed,
    "call_host": _Assembler.call_host,
    "position": _Assembler.position,
    "start": _Assembler.start,
    "start_put": _Assembler.start_put,
    "await": _Assembler.await_,
}
