"""Small graphs, for tests of passes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tpuflow.dtypes import DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.passes.simplify import Simplify


def T(dtype: DType, *shape: int) -> TensorType:
    """A type."""
    return TensorType(dtype, shape)


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of an array, all NaNs alike."""
    if x.dtype.kind in "biu":
        return x
    return np.where(np.isnan(x), 0, np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") + 1)


def ops(graph: Graph) -> Counter[str]:
    """How many nodes there are of each operation, those of regions included."""
    return Counter(node.op for node in graph.walk())


def kinds(graph: Graph) -> list[str]:
    """The kind of every kernel, and the operation of every other node."""
    return [node.attrs["kind"] if node.op == "fused" else node.op for node in graph.nodes]


def simplified(b: Builder, *outputs: Value) -> Graph:
    """The graph with these outputs after Simplify, verified."""
    graph = Simplify()(b.finish(outputs))
    return verify(graph)
