"""Boxes of a dense buffer in different reshapes of it, rewritten as boxes in one common reshape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Part = tuple[tuple[int, ...], tuple[range, ...]]
"""Dimensions, and a range of positions (one at least) of each."""
MOST_PARTS = 2**12  # of which a verification that takes milliseconds can be made


def split_alike(parts: Sequence[Part]) -> list[Part] | None:
    """The parts rewritten with common dimensions, the coarsest that refine the dimensions of every part; None if there are none, or it
    takes too many parts."""
    inner = sorted({math.prod(dims[i:]) for dims, _ in parts for i in range(len(dims) + 1)})
    if any(n % m for m, n in itertools.pairwise(inner)):
        return None
    sizes = {m: n // m for m, n in itertools.pairwise(inner)}
    made: list[Part] = []
    for dims, ranges in parts:
        splits = []
        for i, r in enumerate(ranges):
            least, most = math.prod(dims[i + 1 :]), math.prod(dims[i:])
            found = _split(r, [n for m, n in sizes.items() if least <= m < most])
            if found is None:
                return None
            splits.append(found)
        if len(made) + math.prod(map(len, splits)) > MOST_PARTS:
            return None
        made += [(tuple(reversed(sizes.values())), tuple(itertools.chain(*found))) for found in itertools.product(*splits)]
    return made


def _split(r: range, sizes: Sequence[int]) -> list[tuple[range, ...]] | None:
    """A range over a dimension as parts over the dimensions that it is made of, whose sizes are given from the innermost on."""
    if len(sizes) < 2:
        return [(r,) * len(sizes)]
    rows = _rows(r, sizes[0])
    found: list[tuple[range, ...]] = []
    for outer, columns in rows or ():
        outers = _split(outer, sizes[1:])
        if outers is None:
            return None
        found += [(*ranges, columns) for ranges in outers]
    return found if rows is not None else None


def _rows(r: range, n: int) -> list[tuple[range, range]] | None:
    """A range as (rows, columns) of rows of `n`: the first row, whole ones, the last; None if rows differ in their columns."""
    if len(r) == 1 or r.step % n == 0:
        return [(range(r[0] // n, r[-1] // n + 1, max(1, r.step // n)), range(r[0] % n, r[0] % n + 1))]
    if n % r.step:
        return None
    first, last, phase = r[0] // n, r[-1] // n, r[0] % r.step
    if first == last:
        return [(range(first, first + 1), range(r[0] % n, r[-1] % n + 1, r.step))]
    ends = [(range(first, first + 1), range(r[0] % n, n, r.step)), (range(last, last + 1), range(phase, r[-1] % n + 1, r.step))]
    return ends + ([(range(first + 1, last), range(phase, n, r.step))] if last > first + 1 else [])


def stretches(size: int, ranges: Sequence[range]) -> tuple[range, ...]:
    """Representative positions of a dimension: between two places where a range starts or ends, one period of the ranges' steps."""
    edges = sorted({0, size, *itertools.chain.from_iterable((r[0], r[-1] + 1) for r in ranges)})
    period = math.lcm(*(r.step for r in ranges))
    return tuple(range(low, min(high, low + period)) for low, high in itertools.pairwise(edges))
