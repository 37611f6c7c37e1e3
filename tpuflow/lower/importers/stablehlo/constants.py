"""Numbers that a region captures are its own: a loop's limit, a comparator's zero are known where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tpuflow.lower.importers.stablehlo.module import Block, Module, Operation, captured_by


def own_constants(module: Module) -> Module:
    """The module with constants of one number (or of equal ones) made again in every region that reads them from outside."""
    return replace(module, functions={name: replace(f, body=_owning(f.body, {})) for name, f in module.functions.items()})


def _owning(block: Block, outer: Mapping[int, Operation]) -> Block:
    known = {**outer, **{operation.results[0]: operation for operation in block.operations if _is_number(operation)}}
    operations = tuple(
        replace(operation, blocks=tuple(_owning(inner, known) for inner in operation.blocks)) if operation.blocks else operation
        for operation in block.operations
    )
    captured = captured_by(block.arguments, operations, block.outputs)
    own = tuple(outer[v] for v in captured if v in outer)
    return replace(block, operations=(*own, *operations), captured=tuple(v for v in captured if v not in outer))


def _is_number(operation: Operation) -> bool:
    data = operation.attributes.get("value")
    return operation.name == "stablehlo.constant" and isinstance(data, np.ndarray) and data.shape == ()
