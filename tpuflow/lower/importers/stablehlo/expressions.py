"""Canonical text of short blocks, "add(a, b)" for example, by which reducers and comparators are recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import numpy as np

from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.importers.stablehlo.module import Block, Module, Operation, Symbol
from tpuflow.lower.operations.complex import ComplexType

_COMMUTES = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
_MOST_CHARACTERS = 10_000


def expressions(module: Module, block: Block) -> tuple[str, ...]:
    """The results as functions of the arguments a, b, c, ...; operands of operations that commute in the order of their text.

    Functions that are called are written out. A result that is too long to be known, or needs a loop, is "".
    """
    if len(block.arguments) > len(ascii_lowercase):
        return ("",) * len(block.outputs)
    return _written(module, block, ascii_lowercase)


def _written(module: Module, block: Block, arguments: Sequence[str], depth: int = 0) -> tuple[str, ...]:
    env = dict.fromkeys(block.captured, "outer") | dict(zip(block.arguments, arguments, strict=False))
    for operation in block.operations:
        operands = [env[v] for v in operation.operands]
        texts = _called(module, operation, operands, depth) or (_operation(operation, operands),) * len(operation.results)
        env.update(zip(operation.results, texts, strict=True))
    return tuple(env[v] for v in block.outputs)


def _called(module: Module, operation: Operation, operands: Sequence[str], depth: int) -> tuple[str, ...]:
    callee = operation.attributes.get("callee")
    function = module.functions.get(callee.name) if isinstance(callee, Symbol) and depth < 10 else None
    return () if function is None else _written(module, function.body, operands, depth + 1)


def _operation(operation: Operation, operands: Sequence[str]) -> str:
    name = operation.name.partition(".")[2]
    if operation.blocks or not all(operands) or not all(isinstance(t, TensorType | ComplexType) and t.shape == () for t in operation.types):
        return ""
    if name in ("broadcast_in_dim", "copy"):
        return operands[0]
    words = _WORDS.get(name, lambda attributes: name)(operation.attributes)
    if name in ("convert", "bitcast_convert"):
        words = f"{name} {operation.types[0].dtype}"  # type: ignore[union-attr]
    text = joined(words, *operands) if operands else words
    return text if len(text) <= _MOST_CHARACTERS else ""


def joined(operation: str, *operands: str) -> str:
    """The text of an operation on operands given as text."""
    return f"{operation}({', '.join(sorted(operands) if operation in _COMMUTES else operands)})"


def _compare(attributes: Mapping[str, Any]) -> str:
    total = " in total order" if attributes.get("compare_type") == "TOTALORDER" else ""
    return f"{attributes['comparison_direction'].lower()}{total}"


def _constant(attributes: Mapping[str, Any]) -> str:
    return str(np.asarray(attributes["value"]).item())


_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"compare": _compare, "constant": _constant}
