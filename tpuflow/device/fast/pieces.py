"""Where long straight code is cut into pieces that are executables of their own: they are compiled side by side, and each runs as soon as
it and those before it are there.

XLA compiles kernels of one form once in an executable, so that a cut between two layers of a network would have most of both sides
compiled twice. Between forward and backward pass it has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from tpuflow.isa.program import Block, Kernel, Program, walk

LEAST = 4_000
"""The instructions that a piece has at least. XLA takes about a second for those of a transformer's layers."""
TWICE = 1 / 20
"""The share of what there is to compile that a cut may have compiled twice."""


def pieces(blocks: Sequence[Block], program: Program) -> list[Sequence[Block]]:
    """Consecutive blocks, in pieces."""
    forms = program.forms_by_id()
    found = [[k for _, k in walk((block,)) if isinstance(k, Kernel)] for block in blocks]
    sizes = {forms[id(k)].number: len(k.instructions) for kernels in found for k in kernels}
    cuts = _cuts([[forms[id(k)].number for k in kernels] for kernels in found], sizes)
    edges = [0, *cuts, len(blocks)]
    return [blocks[start:end] for start, end in pairwise(edges)]


def _cuts(blocks: Sequence[Sequence[int]], sizes: dict[int, int], first: int = 0) -> Iterator[int]:
    """The numbers of the blocks before which to cut, the first being number `first`; of each block the forms of its kernels."""
    before = [0, *accumulate(sum(sizes[form] for form in forms) for forms in blocks)]
    if before[-1] < 2 * LEAST:
        return
    twice = _compiled_twice(blocks, sizes)
    most = TWICE * sum(sizes[form] for form in {form for forms in blocks for form in forms})
    places = [i for i, done in enumerate(before) if LEAST <= done <= before[-1] - LEAST and twice[i] <= most]
    if places:
        place = min(places, key=lambda i: abs(2 * before[i] - before[-1]))
        yield from _cuts(blocks[:place], sizes, first)
        yield first + place
        yield from _cuts(blocks[place:], sizes, first + place)


def _compiled_twice(blocks: Sequence[Sequence[int]], sizes: dict[int, int]) -> list[int]:
    """The sizes of the forms that are on both sides of a cut before each block, and after the last one."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, forms in enumerate(blocks):
        for form in forms:
            first.setdefault(form, number)
            last[form] = number
    change = [0] * (len(blocks) + 1)
    for form, size in sizes.items():
        if form in first:
            change[first[form] + 1] += size
            change[last[form] + 1] -= size
    return list(accumulate(change))
