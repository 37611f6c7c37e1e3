"""The graph: immutable nodes in program order, each with typed results, attributes and nested regions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tpuflow.dtypes import DType
from tpuflow.lower.graph.tiling import Tiling


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and static shape."""

    dtype: DType
    shape: tuple[int, ...] = ()
    elems: int = field(init=False, repr=False, compare=False)
    """Number of elements: kept, since passes ask for it half a million times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "elems", math.prod(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor of the graph; compared by identity, defined once (a graph input or a node result)."""

    type: TensorType
    name: str = ""

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Static shape."""
        return self.type.shape


NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Node:
    """One operation. `attrs` holds plain hashable data (ints, tuples, strings, NumPy arrays for `constant`); `regions` nested graphs.

    `source` is the user's line ("model.py:12 (__call__)") and `scope` the Flax module path, when known. `tilings`: prescribed tilings of
    the kernels that the node becomes, in order; empty if they are yet to be chosen.
    """

    op: str
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)
    regions: tuple[Graph, ...] = ()
    source: str = ""
    scope: str = ""
    tilings: tuple[Tiling, ...] = ()

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    def on(self, inputs: tuple[Value, ...], results: tuple[Value, ...]) -> Node:
        """The same operation on other operands; equal to `dataclasses.replace`, but twice as fast."""
        return Node(self.op, inputs, results, self.attrs, self.regions, self.source, self.scope, self.tilings)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Inputs, nodes in an order in which every value is defined before its use, outputs. A region sees only its own inputs."""

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    input_names: tuple[str, ...] = field(default=())
    output_names: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        from tpuflow.lower.graph.text import to_text

        return to_text(self)

    def walk(self) -> Iterator[Node]:
        """Every node, depth first."""
        for node in self.nodes:
            yield node
            for region in node.regions:
                yield from region.walk()
