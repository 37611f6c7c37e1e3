"""Numbers of devices as places on the named axes of a mesh, and back: plain arithmetic, no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

Sizes = Mapping[str, int]
"""The axes of a mesh, major first, and how many devices are along each. Devices are numbered row-major, the last axis fastest."""


def places(sizes: Sizes, names: Sequence[str]) -> np.ndarray:
    """s64[devices]: each device's number among those that differ from it only along some axes, row-major in the order of `names`."""
    grid = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    along = dict(zip(sizes, grid, strict=True))
    found = np.zeros(math.prod(sizes.values()), np.int64)
    for name in names:
        found = found * sizes[name] + along[name]
    return found


def axes_numbered(numbers: np.ndarray, sizes: Sizes) -> tuple[str, ...] | None:
    """The axes, major first, along which devices are numbered as `numbers` (one a device) says; None if it is no such numbering."""
    grid = numbers.reshape(tuple(sizes.values()))
    origin = (0,) * grid.ndim
    steps = {}
    for axis, (name, size) in enumerate(sizes.items()):
        if size > 1:
            steps[name] = int(grid[(*origin[:axis], 1, *origin[axis + 1 :])] - grid[origin])
    names = tuple(sorted((n for n, step in steps.items() if step), key=lambda n: -steps[n]))
    return names if (numbers == places(sizes, names)).all() else None


def axes_grouped(groups: np.ndarray, sizes: Sizes) -> tuple[str, ...] | None:
    """The axes, major first, over which these groups of devices [groups, members] go; None if they are no product of axes."""
    if sorted(groups.ravel().tolist()) != list(range(math.prod(sizes.values()))):
        return None
    numbers = np.empty(groups.size, np.int64)
    numbers[groups] = np.arange(groups.shape[1])
    names = axes_numbered(numbers, sizes)
    if names is None:
        return None
    others = places(sizes, [name for name in sizes if name not in names])
    return names if (others[groups] == others[groups[:, :1]]).all() else None
