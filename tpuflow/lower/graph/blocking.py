"""How sums are cut into blocks: a fact of the graph, which knows neither chip nor cores, so that bits depend on neither.

A block's elements are added in one go (a halving tree on the vector unit, one rounding on the matrix unit), blocks one after the other.
Tilings may only take whole blocks, in order; whatever they and the passes do then, the same numbers are added in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from tpuflow.dtypes import DType
from tpuflow.isa.contraction import Contraction

LONGEST_SUM = 1024  # elements of a vector sum's block: of sums of up to that many the error grows with the logarithm of their number
LONGEST_BESIDE = 64  # where what is kept lies behind what is summed: each element takes a row of lanes, and a product's results wait for 64
GRAIN = 8  # blocks of an uneven length are multiples of it: the sublanes of most chips
WORTH_BLOCKS = 8  # blocks may be so many times shorter than they could be before the sum is taken apart

DEPTH = 512  # of a contraction that is cut: four times the side of most matrix arrays
WHOLE_DEPTH = 2 * DEPTH  # of a contraction that is one block
PATCH_DEPTH = 4 * DEPTH  # of a block that takes in a convolution's whole kernel
ARRAY = 128  # side of most matrix arrays


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up."""
    return -(-n // d)


def even_blocks(extent: int, limit: int, multiple: int = 1) -> int:
    """The block size that cuts `extent` into the fewest pieces of at most `limit`, as equal as multiples of `multiple` allow."""
    if extent <= limit:
        return extent
    unit = multiple if limit >= multiple else 1
    whole = limit - limit % unit
    pieces = ceil_div(extent, whole)
    return min(whole, ceil_div(ceil_div(extent, pieces), unit) * unit)


def fill_product(sizes: Sequence[int], limit: int, multiple: int = 1, first: Collection[int] = ()) -> tuple[int, ...]:
    """Block sizes with a product of at most `limit`: whole axes from the minor one up, one cut to a multiple, the rest 1.

    The axes `first` are whole before all others if that leaves room for `multiple` (or all) of the minor one.
    """
    taken = math.prod(sizes[axis] for axis in first)
    if not first or taken * min(multiple, sizes[-1]) > limit:
        first, taken = (), 1
    block = [n if axis in first else 1 for axis, n in enumerate(sizes)]
    room = whole = limit // taken
    for axis in reversed(range(len(sizes))):
        if axis in first:
            continue
        block[axis] = even_blocks(sizes[axis], max(room, 1), multiple if room == whole else 1)
        if block[axis] < sizes[axis]:
            break
        room //= max(block[axis], 1)
    return tuple(block)


# --- sums of the vector unit ------------------------------------------------------------------------------------------


def is_ordered(op: str, dtype: DType) -> bool:
    """Whether the order in which a reduction combines can be seen in its result."""
    return dtype.is_float and op in ("add", "mul")


def sum_block(shape: Sequence[int], axes: Collection[int]) -> int:
    """Elements of a block of a sum over `axes`: so many neighbours of what is summed, row-major.

    Whole axes from the minor one up, and of the next a part: an even one of the major axis, else a divisor, so that every block lies
    within it and axes that are walked alike may merge into one.
    """
    summed = [shape[axis] for axis in sorted(axes) if shape[axis] != 1]
    room, block = _longest(shape, axes), 1
    while summed:
        n = summed.pop()
        if n > room:
            return block * (_divisor(n, room) if summed else even_blocks(n, room, GRAIN))
        block, room = block * n, room // max(n, 1)
    return block


def apart(shape: Sequence[int], axes: Collection[int]) -> tuple[int, ...]:
    """The minor ones of `axes` that are to be summed first, by a sum of their own, since blocks of them all would be short; else none."""
    longest, n, inner = _longest(shape, axes), math.prod(shape[axis] for axis in axes), sorted(axes)
    if sum_block(shape, axes) * WORTH_BLOCKS >= min(longest, n):
        return ()
    cut = next(i for i in reversed(range(len(inner))) if math.prod(shape[axis] for axis in inner[i:]) > longest)
    return tuple(inner[cut:])


def _longest(shape: Sequence[int], axes: Collection[int]) -> int:
    behind = shape[max(axes) + 1 :] if axes else ()
    return LONGEST_SUM if math.prod(behind) == 1 else LONGEST_BESIDE


def _divisor(n: int, limit: int) -> int:
    return next(d for d in range(limit, 0, -1) if n % d == 0)


def units(sizes: Sequence[int], block: int) -> tuple[int, ...]:
    """The box that a block of neighbours, row-major, is in a space of `sizes`: whole minor axes, a part of one, 1 of the rest."""
    box = [1] * len(sizes)
    for axis in reversed(range(len(sizes))):
        box[axis] = min(sizes[axis], block)
        if block < sizes[axis]:
            break
        block //= max(sizes[axis], 1)
    return tuple(box)


# --- contractions of the matrix unit ----------------------------------------------------------------------------------


def depth_block(whole: Contraction, sizes: Mapping[int, int]) -> dict[int, int]:
    """Length along every contracted label of what a product sums with one rounding.

    All of a short contraction; of a longer one, a convolution's whole kernel and some channels, or some neighbours.
    """
    contracted = [label for label in whole.contracted if sizes[label] != 1]
    lengths = [sizes[label] for label in contracted]
    kernel = [i for i, label in enumerate(contracted) if label in _kernel(whole, sizes)]
    return dict.fromkeys(whole.contracted, 1) | dict(zip(contracted, _depth(lengths, kernel), strict=True))


def _depth(lengths: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    if math.prod(lengths) <= WHOLE_DEPTH:
        return tuple(lengths)
    patch = math.prod(lengths[i] for i in kernel) * min(ARRAY, lengths[-1])
    if kernel and patch <= PATCH_DEPTH:
        return fill_product(lengths, max(DEPTH, patch), ARRAY, kernel)
    return fill_product(lengths, DEPTH, ARRAY)


def _kernel(whole: Contraction, sizes: Mapping[int, int]) -> set[int]:
    """Labels of a kernel: of two that address one axis, the shorter."""
    pairs = ((outer, s.label) for outer, s in whole.outer.items())
    return {min(pair, key=sizes.__getitem__) for pair in pairs if 1 not in map(sizes.__getitem__, pair)}


def unmergeable(whole: Contraction, sizes: Mapping[int, int], block: Mapping[int, int]) -> tuple[int, ...]:
    """Contracted labels that must not merge with the one before them: blocks of them end unevenly, in the middle of what would be one."""
    contracted = [label for label in whole.contracted if sizes[label] != 1]
    return tuple(label for label in contracted[1:] if sizes[label] % block[label])
