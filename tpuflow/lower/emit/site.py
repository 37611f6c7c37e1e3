"""What a template is given, and what it makes of it: plans of kernels, built with the first tiles that fit on the chip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.chips import Chip
from tpuflow.errors import CompileError, OutOfMemoryError
from tpuflow.isa.program import GridAxis, Kernel, kernel_title
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.nest import Nest, cut_as
from tpuflow.lower.emit.onchip import DoesNotFit
from tpuflow.lower.emit.region import Region
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.graph.tiling import Space, Tiling
from tpuflow.lower.tiling import TILE_BYTES, fill_tile, share_tile, shrinking

Kernels = tuple[Kernel, ...]
TileRule = Callable[[Space, int, Chip, int], tuple[int, ...]]
"""How large tiles are: `share_tile`, for all cores, or `fill_tile`, as large as they may be."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """The kernels of a node, and how those that can be cut are."""

    kernels: Kernels
    tilings: tuple[Tiling, ...]


def kernel_name(node: Node) -> str:
    """What a kernel is called in listings and profiles: what it does, and the type it makes."""
    nodes = [n for n in node.regions[0].walk() if n.op != "fused"] if node.op == "fused" else [node]
    ops = [n.attrs["op"] if n.op in ("reduce", "cumulative") else n.op for n in nodes if n.op not in ("full", "broadcast", "window")]
    ops = ops or [n.op for n in nodes] or ["copy"]
    shown = "+".join(ops if len(ops) <= 4 else [*ops[:3], f"{len(ops) - 3} more"])
    kind = f"{node.attrs['kind']} " if node.op == "fused" else {"reduce": "reduce ", "cumulative": "cumulative "}.get(node.op, "")
    return f"{kind}{shown} {node.results[0].type}"


@dataclass(frozen=True, slots=True)
class Site:
    """One node to emit: `region` maps its values to buffers (a node that is not fused is a region of itself).

    `scope` is the name stack of the node of the graph, also where a part of that node is emitted by itself.

    `given` are the tilings that are settled beforehand, one a kernel; none: they are chosen, among others by the `bus_price` of the program
    (`tpuflow/lower/bus_price.py`).
    """

    node: Node
    region: Region
    chip: Chip
    scope: str
    given: tuple[Tiling, ...] = ()
    bus_price: float = 0.0

    def kernel(self, grid: tuple[GridAxis, ...] = ()) -> KernelBuilder:
        """A new kernel builder for this node."""
        return KernelBuilder(self.chip, grid, kernel_name(self.node), self.scope, self.node.source)

    def buffer(self, operand: int) -> int:
        """The HBM buffer of an operand."""
        return self.region.inputs[self.node.inputs[operand]]

    @property
    def target(self) -> int:
        """The HBM buffer of the first result."""
        return self.region.outputs[0][1]

    def fit(self, attempt: Callable[[Nest], KernelBuilder], space: Space, element_bytes: int) -> Plans:
        """A kernel over a space, to be tried with ever smaller tiles."""

        def ways(rule: TileRule) -> Iterator[Tiling]:
            cuts = (rule(space, element_bytes, self.chip, budget) for budget in shrinking(TILE_BYTES))
            return map(space.tiling, cuts)

        return self.planned(lambda tiling: attempt(cut_as(space, tiling)), ways)

    def planned(
        self,
        record: Callable[[Tiling], KernelBuilder],
        ways: Callable[[TileRule], Iterable[Tiling]],
        otherwise: Callable[[], Plans] | None = None,
    ) -> Plans:
        """One kernel of this node."""
        return (Plan(self.node, self.scope, record, ways, otherwise),)


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel before it is cut: how it is recorded under a tiling, and the tilings to try, by a rule for the size of tiles.

    Where none fits on the chip, the kernels of `otherwise` take its place, if there are any. One that is not `cut` is of one step; it has
    one tiling, which nobody is told.
    """

    node: Node
    scope: str
    record: Callable[[Tiling], KernelBuilder]
    ways: Callable[[TileRule], Iterable[Tiling]]
    otherwise: Callable[[], Plans] | None = None
    cut: bool = True

    def largest(self) -> KernelBuilder:
        """The kernel with tiles as large as any that may be tried."""
        return self.record(next(iter(self.ways(fill_tile))))

    def fitting(self, given: Sequence[Tiling]) -> tuple[Kernel, Tiling, KernelBuilder]:
        """The first kernel that fits on the chip, with tilings that are given or, if there are none, tiles for all cores. Where none does,
        and nothing else takes its place, queues hand over what they compute in one slot: the matrix unit waits for the vector unit, and in
        turn.

        Raises:
          DoesNotFit: none does.
          CompileError: the tiling given is of another kernel.
        """
        reason = DoesNotFit()
        for tiling, cramped in _roomier_first(given or _distinct(self.ways(share_tile)), last_resort=self.otherwise is None):
            try:
                recorded = self.record(tiling)
                return recorded.build(cramped=cramped), tiling, recorded
            except DoesNotFit as error:
                reason = error
        raise reason


Plans = tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class OperandNumbers:
    """The numbers of a node's operands, by the buffers that it reads and those that it writes."""

    read: Mapping[int, int]
    written: Mapping[int, int]

    @classmethod
    def of(cls, read: Sequence[int], written: Sequence[int], inputs: int) -> OperandNumbers:
        """Those of buffers in order; a node of so many inputs need not read the last of them. It may read a result that it has written."""
        made = {buffer: inputs + i for i, buffer in reversed(list(enumerate(written)))}
        return cls(made | {buffer: i for i, buffer in reversed(list(enumerate(read)))}, made)

    def on(self, tiling: Tiling, recorded: KernelBuilder) -> Tiling:
        """A tiling with what the kernel recorded under it reads and writes."""
        reads = (access.numbered(self.read[access.operand], self.read.__getitem__) for access in recorded.reads)
        writes = (access.numbered(self.written[access.operand], self.read.__getitem__) for access in recorded.writes)
        return replace(tiling, reads=tuple(reads), writes=tuple(writes))


def build(plans: Plans, given: Sequence[Tiling], numbers: OperandNumbers) -> Emitted:
    """The kernels of plans; where tilings are given, those that can be cut take one each.

    Raises:
      OutOfMemoryError: a kernel does not fit on the chip, whatever its tiles.
      CompileError: the tilings given are of other kernels, fewer or more, or say other accesses.
    """
    kernels: list[Kernel] = []
    tilings: list[Tiling] = []
    left = list(plans)
    while left:
        plan = left.pop(0)
        settled = _settled(plan, given, len(tilings))
        try:
            kernel, tiling, recorded = plan.fitting(settled)
        except DoesNotFit as error:
            if plan.otherwise is None or settled:
                raise _too_large(plan, error, "the tiles given" if settled else "the smallest tiles it can have") from error
            left[:0] = plan.otherwise()
            continue
        kernels.append(kernel)
        if plan.cut:
            tilings.append(_checked(plan, tiling, numbers.on(tiling, recorded)))
    if len(tilings) < len(given):
        raise CompileError(
            f"{plans[0].node.source if plans else 'a node'}: the node has {len(given)} tilings, but becomes {len(tilings)} kernels; "
            "give one for each."
        )
    return Emitted(tuple(kernels), tuple(tilings))


def _settled(plan: Plan, given: Sequence[Tiling], number: int) -> Sequence[Tiling]:
    """The tiling that is settled for a kernel, if any is."""
    if not plan.cut or not given:
        return ()
    if number == len(given):
        raise CompileError(f"{plan.node.source}: the node has {len(given)} tilings, but becomes more kernels; give one for each.")
    return given[number : number + 1]


def _checked(plan: Plan, given: Tiling, found: Tiling) -> Tiling:
    """The tiling with its accesses, once these are known to be what a given one says, if it says any."""
    inputs = len(plan.node.inputs)
    names = [*(f"operand {i}" for i in range(inputs)), *(f"result {i}" for i in range(len(plan.node.results)))]
    for word, said, true in (("reads", given.reads, found.reads), ("writes", given.writes, found.writes)):
        if said and said != true:
            texts = (", ".join(access.text(names, found.sizes) for access in side) for side in (said, true))
            raise CompileError(
                "{}: a kernel that is said to {word} {} {word}s {}; correct the text, or leave out what it {word}s.".format(
                    plan.node.source or plan.node.op, *texts, word=word[:-1]
                )
            )
    return found


def _too_large(plan: Plan, reason: DoesNotFit, tiles: str) -> OutOfMemoryError:
    title = kernel_title(plan.scope, kernel_name(plan.node))
    return OutOfMemoryError(
        f"{plan.node.source}: kernel {title!r} does not fit on the chip with {tiles}: {reason}. "
        f"Split the operation, or choose a chip with more on-chip memory."
    )


def _roomier_first(tilings: Iterable[Tiling], *, last_resort: bool) -> Iterator[tuple[Tiling, bool]]:
    """Each tiling and, as a last resort, each once more, to be built cramped."""
    tried = []
    for tiling in tilings:
        tried.append(tiling)
        yield tiling, False
    if last_resort:
        yield from ((tiling, True) for tiling in tried)


def _distinct(tilings: Iterable[Tiling]) -> Iterator[Tiling]:
    """What has not been tried before."""
    tried: set[Tiling] = set()
    for tiling in tilings:
        if tiling not in tried:
            tried.add(tiling)
            yield tiling
