"""The row of an operation in the table of operations (`ops.py`), and what its typing rule is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.dtypes import DType
from tpuflow.errors import GraphError
from tpuflow.lower.graph.graph import Graph, TensorType


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operation, as its typing rule sees it; `asked`: the result types that the caller declares, if any."""

    op: str
    inputs: tuple[TensorType, ...]
    attrs: Mapping[str, Any]
    regions: tuple[Graph, ...]
    asked: tuple[TensorType, ...]

    def require(self, condition: bool, message: str) -> None:
        """Raise GraphError unless `condition` holds."""
        if not condition:
            raise self.error(message)

    def error(self, message: str) -> GraphError:
        """A GraphError with the operation and its operand types in front; for messages that are costly to format."""
        return GraphError(f"{self.op}({', '.join(map(str, self.inputs))}) {dict(self.attrs)}: {message}")

    def require_kind(self, dtype: DType, kinds: Collection[str]) -> None:
        """Raise GraphError unless the element type is of one of the kinds."""
        if dtype.kind not in kinds:
            raise self.error(f"is not defined on {dtype}; it takes element types of kind {', '.join(kinds)}")

    def asked_type(self) -> TensorType:
        """The result type that the caller has to declare, because the operands do not determine it."""
        self.require(len(self.asked) == 1, "its one result type must be given")
        return self.asked[0]


Types = tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: number of operands (None: any), names of its attributes, number of regions (None: any), typing rule.

    `typing` returns the result types or raises GraphError. `effect` marks what must never be removed or reordered.
    """

    name: str
    arity: int | None
    attrs: tuple[str, ...]
    typing: Callable[[Call], Types]
    regions: int | None = 0
    elementwise: bool = False
    effect: bool = False
