"""Device numbers <-> positions along the named axes of a mesh, and the sub-axes that a sharding or a group needs; without JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

Sizes = Mapping[str, int]
"""The axes of a mesh, major first, with the number of devices along each. Devices are numbered row-major, the last axis fastest."""


def places(sizes: Sizes, names: Sequence[str]) -> np.ndarray:
    """s64[devices]: each device's position along the axes `names`, as one number, row-major in the order of `names`."""
    grid = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    along = dict(zip(sizes, grid, strict=True))
    found = np.zeros(math.prod(sizes.values()), np.int64)
    for name in names:
        found = found * sizes[name] + along[name]
    return found


def axes_numbered(numbers: np.ndarray, sizes: Sizes) -> tuple[str, ...] | None:
    """The axes, major first, along which `places` gives `numbers` (one for each device); None if there are no such axes."""
    grid = numbers.reshape(tuple(sizes.values()))
    origin = (0,) * grid.ndim
    steps = {}
    for axis, (name, size) in enumerate(sizes.items()):
        if size > 1:
            steps[name] = int(grid[(*origin[:axis], 1, *origin[axis + 1 :])] - grid[origin])
    names = tuple(sorted((n for n, step in steps.items() if step), key=lambda n: -steps[n]))
    return names if (numbers == places(sizes, names)).all() else None


def axes_grouped(groups: np.ndarray, sizes: Sizes) -> tuple[str, ...] | None:
    """The axes, major first, along which the members of each group [groups, members] differ; None if the groups are no product of axes."""
    if sorted(groups.ravel().tolist()) != list(range(math.prod(sizes.values()))):
        return None
    numbers = np.empty(groups.size, np.int64)
    numbers[groups] = np.arange(groups.shape[1])
    names = axes_numbered(numbers, sizes)
    if names is None:
        return None
    others = places(sizes, [name for name in sizes if name not in names])
    return names if (others[groups] == others[groups[:, :1]]).all() else None


def axes_ordered(groups: np.ndarray, sizes: Sizes) -> tuple[tuple[str, ...], np.ndarray] | None:
    """As `axes_grouped`, for members in any order: (the axes, the groups with their members in the order of the axes); None if the groups
    are no product of axes."""
    for ordered in (groups, np.sort(groups, 1)):
        if (names := axes_grouped(ordered, sizes)) is not None:
            return names, ordered
    return None


Parts = Mapping[str, tuple[str, ...]]
"""Axis of a mesh -> the sub-axes into which it is divided, major first: the axis itself if it is not."""


def divided(sizes: Sizes, fits: Callable[[Sizes], bool]) -> tuple[Sizes, Parts] | None:
    """The mesh with axes divided into as few sub-axes as `fits` needs: (the mesh of sub-axes, the sub-axes of each axis). None if no
    division fits. `fits` must be monotonic: true of a mesh, it must be true of its subdivisions. Sub-axis i of axis x is named "x.i"."""
    if fits(sizes):
        return sizes, {name: (name,) for name in sizes}
    for finest in _divisions(list(sizes.values())):
        if fits(_parts_named(sizes, finest)[0]):
            return _parts_named(sizes, _joined(sizes, finest, fits))
    return None


def _divisions(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The axes divided into sub-axes of prime sizes, in every order of the primes."""
    if not sizes:
        yield ()
        return
    for rest in _divisions(sizes[1:]):
        yield from ((parts, *rest) for parts in _primes(sizes[0]))


def _primes(size: int) -> Iterator[tuple[int, ...]]:
    """The prime factors of a number in every order."""
    if size == 1:
        yield ()
    for n in range(2, size + 1):
        if size % n == 0 and all(n % m for m in range(2, math.isqrt(n) + 1)):
            yield from ((n, *rest) for rest in _primes(size // n))


def _joined(sizes: Sizes, parts: tuple[tuple[int, ...], ...], fits: Callable[[Sizes], bool]) -> tuple[tuple[int, ...], ...]:
    """The division with neighbouring sub-axes joined where it still fits."""
    for axis, own in enumerate(parts):
        for i in range(len(own) - 1):
            joined = (*own[:i], own[i] * own[i + 1], *own[i + 2 :])
            fewer = (*parts[:axis], joined, *parts[axis + 1 :])
            if fits(_parts_named(sizes, fewer)[0]):
                return _joined(sizes, fewer, fits)
    return parts


def _parts_named(sizes: Sizes, parts: Sequence[Sequence[int]]) -> tuple[Sizes, Parts]:
    names = {
        name: tuple(f"{name}.{i}" for i in range(len(own))) if len(own) > 1 else (name,) for name, own in zip(sizes, parts, strict=True)
    }
    flat = [(part, n) for name, own in zip(sizes, parts, strict=True) for part, n in zip(names[name], own or (1,), strict=True)]
    return dict(flat), names
