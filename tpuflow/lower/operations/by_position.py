"""Integers that depend only on a chip's position in the mesh, such as the start of its shard, evaluated for every chip at compile time.

XLA's partitioner looks them up in a table by partition id; here they become affine functions of the positions along the mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Node, Value

Sizes = Mapping[str, int]
Maker = Callable[[Value], Node | None]
Made = Callable[..., np.ndarray | None]
_MOST_STEPS = 16
"""The depth of operations to which a value is traced back."""


def by_position(maker: Maker, sizes: Sizes, x: Value, steps: int = _MOST_STEPS) -> np.ndarray | None:
    """s64[chips]: the value of the one-element integer x on every chip, row-major over the mesh axes; None if it depends on other data."""
    node = maker(x) if x.type.elems == 1 and not x.dtype.is_float else None
    if node is None or node.op not in _NUMBERS or not steps:
        return None
    if node.op == "dynamic_slice":
        return _looked_up(maker, sizes, node, steps - 1)
    operands = [by_position(maker, sizes, v, steps - 1) for v in node.inputs]
    return None if any(operand is None for operand in operands) else _NUMBERS[node.op](node, sizes, *operands)


def _looked_up(maker: Maker, sizes: Sizes, node: Node, steps: int) -> np.ndarray | None:
    """The value of a dynamic slice of a constant table."""
    table, *starts = node.inputs
    made = maker(table)
    places = [by_position(maker, sizes, start, steps) for start in starts]
    if made is None or made.op != "constant" or any(place is None for place in places):
        return None
    return made.attrs["data"].astype(np.int64)[tuple(place for place in places if place is not None)]


def _position(node: Node, sizes: Sizes) -> np.ndarray:
    axis = list(sizes).index(node.attrs["axis"])
    return np.indices(tuple(sizes.values()))[axis].ravel()


def _same(node: Node, sizes: Sizes) -> np.ndarray:
    value = node.attrs["value"] if node.op == "full" else node.attrs["data"].ravel()[0]
    return np.full(int(np.prod(tuple(sizes.values()))), int(value))


def _moved(node: Node, sizes: Sizes, x: np.ndarray) -> np.ndarray:
    return x


_COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_NUMBERS: Mapping[str, Made] = {
    "position": _position, "full": _same, "constant": _same, "reshape": _moved, "broadcast": _moved, "convert": _moved,
    "dynamic_slice": _moved,
    "add": lambda node, sizes, x, y: x + y,
    "sub": lambda node, sizes, x, y: x - y,
    "mul": lambda node, sizes, x, y: x * y,
    "max": lambda node, sizes, x, y: np.maximum(x, y),
    "min": lambda node, sizes, x, y: np.minimum(x, y),
    "compare": lambda node, sizes, x, y: _COMPARED[node.attrs["direction"]](x, y),
    "select": lambda node, sizes, which, x, y: np.where(which, x, y),
}  # fmt: skip


def summed(b: Builder, numbers: np.ndarray) -> Value | None:
    """s32[]: `numbers` (one per chip of the builder's mesh) as an affine function of the chip's positions; None if they are not affine."""
    grid = numbers.reshape(tuple(b.mesh.values()))
    steps = {name: _step(grid, axis) for axis, name in enumerate(b.mesh)}
    sums = np.full(grid.shape, grid.flat[0])
    for axis, step in enumerate(steps.values()):
        sums += np.indices(grid.shape)[axis] * step
    if (sums != grid).any() or np.abs(numbers).max() > np.iinfo(np.int32).max:
        return None
    total = b.scalar(int(grid.flat[0]), S32)
    for name, step in steps.items():
        if step:
            total = b.add(total, b.mul(b.emit("position", (), {"axis": name}).result, step))
    b.ranges[total] = (int(numbers.min()), int(numbers.max()))
    return total


def _step(grid: np.ndarray, axis: int) -> int:
    """The coefficient of the position along an axis."""
    at = [0] * grid.ndim
    at[axis] = min(1, grid.shape[axis] - 1)
    return int(grid[tuple(at)] - grid.flat[0])
