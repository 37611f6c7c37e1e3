"""Serialises a graph for hashing (the compile cache): everything that its compilation can depend on, constants in full."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from tpuflow.lower.graph.graph import Graph, Node, Value


class NotDataError(Exception):
    """A value in a graph is not plain data and cannot be serialised for hashing."""


def digest(graph: Graph, *given: Any) -> bytes:
    """The bytes of a graph and of further plain data `given`. Equal bytes mean equal Programs, names and source lines included.

    Raises:
      NotDataError: a value is not plain data.
    """
    return "\n".join((*_graph(graph, {}), *map(_data, given))).encode(errors="surrogatepass")


def _graph(graph: Graph, numbers: dict[Value, int]) -> Iterator[str]:
    yield f"{graph.name!r} {graph.input_names!r} {graph.output_names!r} {_declared(graph.inputs, numbers)}"
    for node in graph.nodes:
        yield from _node(node, numbers)
    yield f"return {[numbers[value] for value in graph.outputs]}"


def _node(node: Node, numbers: dict[Value, int]) -> Iterator[str]:
    operands = [numbers[value] for value in node.inputs]
    attrs = "".join(f"{name}={_data(value)} " for name, value in sorted(node.attrs.items()))
    yield f"{node.op} {attrs}{operands} {len(node.regions)} {node.source!r} {node.scope!r} {list(map(str, node.tilings))}"
    for region in node.regions:
        yield from _graph(region, numbers)
    yield _declared(node.results, numbers)


def _declared(values: tuple[Value, ...], numbers: dict[Value, int]) -> str:
    return " ".join(f"{numbers.setdefault(value, len(numbers))}:{value.type}:{value.name!r}" for value in values)


def _data(value: Any) -> str:
    """A value with its type, so that no two of different meaning look alike."""
    kind = type(value)
    if kind in _WRITTEN:
        return _WRITTEN[kind](value)
    if dataclasses.is_dataclass(kind):
        fields = " ".join(_data(getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{kind.__module__}.{kind.__qualname__}({fields})"
    if isinstance(value, np.dtype | np.generic | enum.Enum):
        return f"{kind.__name__}:{value!r}"
    raise NotDataError(f"{kind.__module__}.{kind.__qualname__}")


def _items(mapping: Mapping[Any, Any]) -> str:
    return f"mapping({' '.join(sorted(f'{_data(name)}={_data(value)}' for name, value in mapping.items()))})"


def _sequence(values: tuple[Any, ...]) -> str:
    return f"({' '.join(map(_data, values))})"


def _typed(value: Any) -> str:
    return f"{type(value).__name__}:{value!r}"


_WRITTEN: Mapping[type, Callable[[Any], str]] = {
    **dict.fromkeys((bool, int, float, complex, str, bytes, type(None)), _typed),
    tuple: _sequence,
    frozenset: lambda values: f"set({' '.join(sorted(map(_data, values)))})",
    np.ndarray: lambda array: f"array:{array.dtype.name}{array.shape}:{np.ascontiguousarray(array).tobytes().hex()}",
    dict: _items,
    MappingProxyType: _items,
}
