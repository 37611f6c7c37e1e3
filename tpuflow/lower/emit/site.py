"""The interface of emission templates: a `Site`, the node to emit, goes in; `Plan`s come out, kernels that are yet to be tiled.

`build` then records each plan with the first tiling that fits on the chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.chips import Chip
from tpuflow.errors import CompileError, OutOfMemoryError
from tpuflow.isa.program import GridAxis, Kernel, kernel_title
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.nest import Nest, cut_as
from tpuflow.lower.emit.onchip import DoesNotFit
from tpuflow.lower.emit.region import Region
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.graph.tiling import Space, Tiling
from tpuflow.lower.tiling import ALONE, TILE_BYTES, Prices, fill_tile, share_tile, shrinking

Kernels = tuple[Kernel, ...]
TileRule = Callable[[Space, int, Chip, int], tuple[int, ...]]
"""(space, bytes of an element, chip, bytes of a tile at most) -> tile sizes; `share_tile` divides for all cores, `fill_tile` fills."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """The kernels of a node, and the tilings of those that have one."""

    kernels: Kernels
    tilings: tuple[Tiling, ...]


def kernel_name(node: Node) -> str:
    """The name of a kernel in listings and profiles: its kind, its operations and its first result's type."""
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

    `fixed_tilings` are prescribed by the node, one for each kernel; if there are none they are chosen, for products also by the program's
    `prices` (`tpuflow/lower/bus_price.py`). `shared`: buffers of results, and those of operands that they may become one with.
    """

    node: Node
    region: Region
    chip: Chip
    scope: str
    fixed_tilings: tuple[Tiling, ...] = ()
    prices: Prices = ALONE
    shared: Mapping[int, int] = field(default_factory=dict)

    def kernel(self, grid: tuple[GridAxis, ...] = ()) -> KernelBuilder:
        """A new kernel builder for this node."""
        return KernelBuilder(self.chip, grid, kernel_name(self.node), self.scope, self.node.source, shared=self.shared)

    def buffer(self, operand: int) -> int:
        """The HBM buffer of an operand."""
        return self.region.inputs[self.node.inputs[operand]]

    @property
    def target(self) -> int:
        """The HBM buffer of the first result."""
        return self.region.outputs[0][1]

    def fit(self, attempt: Callable[[Nest], KernelBuilder], space: Space, element_bytes: int) -> Plans:
        """The plan of a kernel over a space, to be tried with ever smaller tiles; `attempt` records it for a loop nest."""

        def candidates(rule: TileRule) -> Iterator[Tiling]:
            cuts = (rule(space, element_bytes, self.chip, budget) for budget in shrinking(TILE_BYTES))
            return map(space.tiling, cuts)

        return self.plan_kernel(lambda tiling: attempt(cut_as(space, tiling)), candidates)

    def plan_kernel(
        self,
        record: Callable[[Tiling], KernelBuilder],
        candidates: Callable[[TileRule], Iterable[Tiling]],
        fallback: Callable[[], Plans] | None = None,
    ) -> Plans:
        """The plan of one kernel of this node; see `Plan`."""
        return (Plan(self.node, self.scope, record, candidates, fallback),)


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel before it is tiled: `record` records it under a tiling, `candidates` yields the tilings to try, given a rule for tile sizes.

    Where no candidate fits on the chip, the plans of `fallback` take its place, if there is one. A kernel that is not `tiled` has a single
    step; its only tiling is not reported.
    """

    node: Node
    scope: str
    record: Callable[[Tiling], KernelBuilder]
    candidates: Callable[[TileRule], Iterable[Tiling]]
    fallback: Callable[[], Plans] | None = None
    tiled: bool = True

    def record_largest(self) -> KernelBuilder:
        """The kernel recorded with the largest tiles that may be tried."""
        return self.record(next(iter(self.candidates(fill_tile))))

    def fits(self) -> bool:
        """Whether the kernel fits on the chip with the smallest tiles that may be tried, single-buffered."""
        *_, least = self.candidates(share_tile)
        try:
            self.record(least).build(single_buffered=True)
        except DoesNotFit:
            return False
        return True

    def first_fit(self, fixed: Sequence[Tiling]) -> tuple[Kernel, Tiling, KernelBuilder]:
        """The first kernel that fits on the chip, under `fixed` tilings or, if there are none, the candidates for all cores.

        Where none fits and there is no fallback, they are tried again with single-buffered intermediates: matrix and vector unit then wait
        for each other.

        Raises:
          DoesNotFit: none does.
          CompileError: a fixed tiling is of another kernel.
        """
        reason = ""
        tilings = fixed or _distinct(self.candidates(share_tile))
        for tiling, single_buffered in _double_buffered_first(tilings, last_resort=self.fallback is None):
            try:
                recorded = self.record(tiling)
                return recorded.build(single_buffered=single_buffered), tiling, recorded
            except DoesNotFit as error:
                reason = str(error)  # not the error, which refers to this frame: a cycle
        raise DoesNotFit(reason)


Plans = tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class OperandNumbers:
    """Operand numbers (inputs first, then results) of a node, by the HBM buffers that it reads and those that it writes."""

    read: Mapping[int, int]
    written: Mapping[int, int]

    @classmethod
    def of(cls, read: Sequence[int], written: Sequence[int], inputs: int) -> OperandNumbers:
        """From the buffers of operands and of results, in order. `inputs`: the number of the node's operands, the last of which may be
        unread. A result that was written may be read.
        """
        made = {buffer: inputs + i for i, buffer in reversed(list(enumerate(written)))}
        return cls(made | {buffer: i for i, buffer in reversed(list(enumerate(read)))}, made)

    def on(self, tiling: Tiling, recorded: KernelBuilder) -> Tiling:
        """A tiling with the accesses of the kernel that was recorded under it."""
        reads = (access.numbered(self.read[access.operand], self.read.__getitem__) for access in recorded.reads)
        writes = (access.numbered(self.written[access.operand], self.read.__getitem__) for access in recorded.writes)
        return replace(tiling, reads=tuple(reads), writes=tuple(writes))


def build(plans: Plans, fixed: Sequence[Tiling], numbers: OperandNumbers) -> Emitted:
    """The kernels of plans, each with the first tiling that fits; with `fixed` tilings, every tiled kernel takes the next of these.

    Raises:
      OutOfMemoryError: a kernel does not fit on the chip, whatever its tiles.
      CompileError: the fixed tilings are of other kernels, too few or too many, or their accesses differ from the kernels'.
    """
    kernels: list[Kernel] = []
    tilings: list[Tiling] = []
    left = list(plans)
    while left:
        plan = left.pop(0)
        settled = _fixed_tiling(plan, fixed, len(tilings))
        try:
            kernel, tiling, recorded = plan.first_fit(settled)
        except DoesNotFit as error:
            if plan.fallback is None or settled:
                raise _too_large(plan, error, "the tiles given" if settled else "the smallest tiles it can have") from error
            left[:0] = plan.fallback()
            continue
        kernels.append(kernel)
        if plan.tiled:
            tilings.append(_check_accesses(plan, tiling, numbers.on(tiling, recorded)))
    if len(tilings) < len(fixed):
        raise CompileError(
            f"{plans[0].node.source if plans else 'a node'}: the node has {len(fixed)} tilings, but becomes {len(tilings)} kernels; "
            "give one for each."
        )
    return Emitted(tuple(kernels), tuple(tilings))


def _fixed_tiling(plan: Plan, fixed: Sequence[Tiling], number: int) -> Sequence[Tiling]:
    """The fixed tiling of kernel `number`, if there are fixed tilings."""
    if not plan.tiled or not fixed:
        return ()
    if number == len(fixed):
        raise CompileError(f"{plan.node.source}: the node has {len(fixed)} tilings, but becomes more kernels; give one for each.")
    return fixed[number : number + 1]


def _check_accesses(plan: Plan, given: Tiling, found: Tiling) -> Tiling:
    """`found`, the tiling with its accesses; an error if `given` states other accesses."""
    inputs = len(plan.node.inputs)
    names = [*(f"operand {i}" for i in range(inputs)), *(f"result {i}" for i in range(len(plan.node.results)))]
    for word, said, true in (("reads", given.reads, found.reads), ("writes", given.writes, found.writes)):
        if said and said != true:
            texts = (", ".join(access.text(names, found.sizes) for access in side) for side in (said, true))
            raise CompileError(
                "{}: the text says that a kernel {word}s {}, but it {word}s {}; correct it, or leave out what it {word}s.".format(
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


def _double_buffered_first(tilings: Iterable[Tiling], *, last_resort: bool) -> Iterator[tuple[Tiling, bool]]:
    """(tiling, single_buffered): every tiling double-buffered, then, as a last resort, every one single-buffered."""
    tried = []
    for tiling in tilings:
        tried.append(tiling)
        yield tiling, False
    if last_resort:
        yield from ((tiling, True) for tiling in tried)


def _distinct(tilings: Iterable[Tiling]) -> Iterator[Tiling]:
    """The tilings without repetitions."""
    tried: set[Tiling] = set()
    for tiling in tilings:
        if tiling not in tried:
            tried.add(tiling)
            yield tiling
