"""Clone captured scalar constants into the regions that use them, so that a loop's limit or a comparator's zero is known there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tpuflow.lower.importers.stablehlo.module import Block, Module, Operation, captured_by


def clone_captured_constants(module: Module) -> Module:
    """The module with every scalar constant that a region captures defined again inside of that region."""
    return replace(module, functions={name: replace(f, body=_with_clones(f.body, {})) for name, f in module.functions.items()})


def _with_clones(block: Block, outer: Mapping[int, Operation]) -> Block:
    known = {**outer, **{operation.results[0]: operation for operation in block.operations if _is_scalar_constant(operation)}}
    operations = tuple(
        replace(operation, blocks=tuple(_with_clones(inner, known) for inner in operation.blocks)) if operation.blocks else operation
        for operation in block.operations
    )
    captured = captured_by(block.arguments, operations, block.outputs)
    own = tuple(outer[v] for v in captured if v in outer)
    return replace(block, operations=(*own, *operations), captured=tuple(v for v in captured if v not in outer))


def _is_scalar_constant(operation: Operation) -> bool:
    data = operation.attributes.get("value")
    return operation.name == "stablehlo.constant" and isinstance(data, np.ndarray) and data.shape == ()
