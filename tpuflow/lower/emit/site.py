"""What a template is given: the region to emit, its scope, and the chip; and the search for tiles that fit on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from tpuflow.chips import Chip
from tpuflow.errors import OutOfMemoryError
from tpuflow.isa.program import GridAxis, Kernel, kernel_title
from tpuflow.lower.emit.kernel import KernelBuilder
from tpuflow.lower.emit.onchip import DoesNotFit
from tpuflow.lower.emit.region import Region
from tpuflow.lower.graph.graph import Node
from tpuflow.lower.tiling import TILE_BYTES, fill_tile, share_tile, shrinking

Kernels = tuple[Kernel, ...]
T = TypeVar("T")


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

    With `recorded`, kernels are only noted there, with the largest tiles that may be tried, for somebody else to build.
    """

    node: Node
    region: Region
    chip: Chip
    scope: str
    recorded: list[KernelBuilder] | None = None

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

    def tile_sizes(
        self,
        sizes: Sequence[int],
        element_bytes: int,
        budget_bytes: int,
        whole: Collection[int] = (),
        units: Mapping[int, int] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        """Tile sizes for a row-major space that share the work among the cores; as large as they may be where kernels are only noted."""
        rule = share_tile if self.recorded is None else fill_tile
        return rule(sizes, element_bytes, self.chip, budget_bytes, whole, units)

    def fit(self, attempt: Callable[[int], KernelBuilder]) -> Kernels:
        """The first kernel that fits on the chip, trying ever smaller tiles, given by their bytes.

        Raises:
          OutOfMemoryError: not even the smallest tiles fit.
        """
        return self.first_fitting(attempt, shrinking(TILE_BYTES))

    def first_fitting(self, attempt: Callable[[T], KernelBuilder], ways: Iterable[T]) -> Kernels:
        """The first kernel that fits on the chip, of several ways to cut it.

        Raises:
          OutOfMemoryError: none fits.
        """
        ways, reason = iter(ways), ""
        if self.recorded is not None:
            self.recorded.append(attempt(next(ways)))
            return ()
        for way in ways:
            try:
                return (attempt(way).build(),)
            except DoesNotFit as error:
                reason = str(error)
        title = kernel_title(self.scope, kernel_name(self.node))
        raise OutOfMemoryError(
            f"{self.node.source}: kernel {title!r} does not fit on the chip with the smallest tiles it can have: {reason}. "
            f"Split the operation, or choose a chip with more on-chip memory."
        )
