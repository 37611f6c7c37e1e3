"""The operations of the graph by name, and the types of their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuflow.errors import GraphError
from tpuflow.lower.graph.array_ops import ARRAY_OPS
from tpuflow.lower.graph.control_ops import CONTROL_OPS
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.op import Call, Op, Types

FUSIBLE_MOVES = ("slice", "concatenate", "transpose", "reverse")
"""Operations that may be members of a `Kind.SEVERAL` kernel besides fused maps, reductions and rows."""
PRODUCTS = ("dot", "conv")
ENTRIES = ("broadcast", "window", "random")
"""What a kernel makes, for itself, of an operand that lies in memory in another shape."""
OPS: dict[str, Op] = {row.name: row for row in (*ARRAY_OPS, *CONTROL_OPS)}
ELEMENTWISE = frozenset(row.name for row in OPS.values() if row.elementwise)


def infer(op: str, inputs: Types, attrs: Mapping[str, Any], regions: tuple[Graph, ...] = (), asked: Types = ()) -> Types:
    """The result types of one operation.

    Raises:
      GraphError: unknown operation, wrong number of operands, attributes or regions, or types that do not fit.
    """
    call = Call(op, inputs, attrs, regions, asked)
    row = OPS.get(op)
    if row is None:
        raise GraphError(f"unknown operation {op!r}")
    if row.arity is not None and len(inputs) != row.arity:
        raise call.error(f"takes {row.arity} operands, not {len(inputs)}")
    if attrs.keys() != set(row.attrs):
        raise call.error(f"takes the attributes {row.attrs}, not {tuple(attrs)}")
    if row.regions is not None and len(regions) != row.regions:
        raise call.error(f"takes {row.regions} regions, not {len(regions)}")
    return row.typing(call)


def has_effect(op: str, regions: tuple[Graph, ...] = ()) -> bool:
    """Whether the operation, or one nested in its regions, feeds or is fed by the host; such a node is never removed. No kernel does."""
    return OPS[op].effect or (op != "fused" and any(has_effect(n.op, n.regions) for r in regions for n in r.nodes))
