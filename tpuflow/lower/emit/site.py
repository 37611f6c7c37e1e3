"""What a template is given: the region to emit, its scope, and the chip; and the search for tiles that fit on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

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

    With `recorded`, kernels are only noted there, with the largest tiles that may be tried, for somebody else to build. `given` are the
    tilings that are settled beforehand, one a kernel (none: they are chosen), `tilings` those of the kernels built so far.
    """

    node: Node
    region: Region
    chip: Chip
    scope: str
    recorded: list[KernelBuilder] | None = None
    given: tuple[Tiling, ...] = ()
    tilings: list[Tiling] = field(default_factory=list)

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

    def tile_sizes(self, space: Space, element_bytes: int, budget_bytes: int) -> tuple[int, ...]:
        """Tile sizes for a row-major space that share the work among the cores; as large as they may be where kernels are only noted."""
        rule = share_tile if self.recorded is None else fill_tile
        return rule(space.sizes, element_bytes, self.chip, budget_bytes, space.whole, space.units)

    def fit(self, attempt: Callable[[Nest], KernelBuilder], space: Space, element_bytes: int) -> Kernels:
        """The first kernel over a space that fits on the chip, trying ever smaller tiles.

        Raises:
          OutOfMemoryError: not even the smallest tiles fit.
        """
        tried = (space.tiling(self.tile_sizes(space, element_bytes, budget)) for budget in shrinking(TILE_BYTES))
        return self.first_fitting(lambda tiling: attempt(cut_as(space, tiling)), tried)

    def first_fitting(self, attempt: Callable[[Tiling], KernelBuilder], tilings: Iterable[Tiling]) -> Kernels:
        """The first kernel that fits on the chip, of several ways to cut it; where the node says how it is cut, that one. Where none
        does, queues hand over what they compute in one slot: the matrix unit waits for the vector unit, and in turn.

        Raises:
          OutOfMemoryError: none fits.
          CompileError: the node says how to cut another kernel.
        """
        if self.recorded is not None:
            self.recorded.append(attempt(next(iter(tilings))))
            return ()
        reason = ""
        for tiling, cramped in _roomier_first(self._given() or _distinct(tilings)):
            try:
                kernel = attempt(tiling).build(cramped=cramped)
            except DoesNotFit as error:
                reason = str(error)
                continue
            self.tilings.append(tiling)
            return (kernel,)
        title = kernel_title(self.scope, kernel_name(self.node))
        tiles = "the tiles given" if self.given else "the smallest tiles it can have"
        raise OutOfMemoryError(
            f"{self.node.source}: kernel {title!r} does not fit on the chip with {tiles}: {reason}. "
            f"Split the operation, or choose a chip with more on-chip memory."
        )

    def _given(self) -> tuple[Tiling, ...]:
        """The tiling that is settled for the next kernel, if any is."""
        if self.given and len(self.tilings) == len(self.given):
            raise CompileError(f"{self.node.source}: the node has {len(self.given)} tilings, but becomes more kernels; give one for each.")
        return self.given[len(self.tilings) : len(self.tilings) + 1]


def _roomier_first(tilings: Iterable[Tiling]) -> Iterator[tuple[Tiling, bool]]:
    """Each tiling, and then each once more, to be built cramped."""
    tried = []
    for tiling in tilings:
        tried.append(tiling)
        yield tiling, False
    yield from ((tiling, True) for tiling in tried)


def _distinct(tilings: Iterable[Tiling]) -> Iterator[Tiling]:
    """What has not been tried before."""
    tried: set[Tiling] = set()
    for tiling in tilings:
        if tiling not in tried:
            tried.add(tiling)
            yield tiling
