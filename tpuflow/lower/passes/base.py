"""The base class of passes: a frozen dataclass whose fields are its options, called with a graph."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpuflow.chips import CHIPS, Chip
from tpuflow.isa.collectives import MeshAxis
from tpuflow.lower.graph.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class Pass(ABC):
    """One rewriting of a graph. Passes never change a graph in place, and never change the bits of an output."""

    @property
    def name(self) -> str:
        """The class name in kebab case ("fuse-elementwise")."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    def on(self, chip: Chip, mesh: Sequence[MeshAxis] = ()) -> Pass:
        """This pass for a chip and a mesh of them; the pass itself if it does not depend on them."""
        return self

    def saving_memory(self) -> Pass:
        """This pass for a program that does not fit on the chip otherwise: the bytes live at the memory peak before time. The pass itself
        if it weighs them nowhere."""
        return self

    @abstractmethod
    def __call__(self, graph: Graph) -> Graph:
        """The rewritten graph; `graph` itself stays as it is."""

    def map_regions(self, node: Node) -> Node:
        """The node with this pass applied to every region of a control node (regions of `fused` are left alone)."""
        if not node.regions or node.op == "fused":
            return node
        return replace(node, regions=tuple(self(region) for region in node.regions))


@dataclass(frozen=True, slots=True)
class ChipPass(Pass):
    """A pass that depends on the chip: on its rates (cost model) or its memory sizes."""

    chip: Chip = CHIPS["generic"]

    def on(self, chip: Chip, mesh: Sequence[MeshAxis] = ()) -> ChipPass:
        """This pass for a chip, on any mesh."""
        return replace(self, chip=chip)
