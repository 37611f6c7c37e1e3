"""The blocking of floating-point sums. It depends on shapes alone, neither on chip nor on cores, so the bits of a sum do not either.

The elements of a block are added at once (in a halving tree by the vector unit, with one rounding by the matrix unit), and blocks one after
the other. Tiles consist of whole blocks, in order: under every tiling and after every pass the same numbers are added in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from tpuflow.dtypes import DType
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.matrix import MOST_BLOCKS

LONGEST_SUM = 1024  # elements of a block of a vector sum at most: within a block the error grows with the logarithm of its length
LONGEST_BESIDE = 64  # the same where kept axes are minor to the summed ones: an element takes a row of lanes, and a product yields 64 rows
GRAIN = 8  # a block that does not divide its axis is a multiple of this: the sublanes of most chips
WORTH_BLOCKS = 8  # a sum is done in two stages where its blocks would be more than this factor shorter than they could be

DEPTH = 512  # contracted elements of a block of a long contraction: four times the side of most matrix arrays
WHOLE_DEPTH = 2 * DEPTH  # a contraction of at most this length is a single block
PATCH_DEPTH = 4 * DEPTH  # limit of a block that contains a convolution's whole kernel
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
    """Block sizes, one per axis, with a product of at most `limit`: from the minor axis up whole axes, then one part of an axis (a
    multiple of `multiple`), then 1.

    The axes `first` are made whole before the others, if that leaves room for `multiple` elements (or all) of the minor axis.
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
    """Whether a reduction's result depends on the order of its combinations: floating-point sums and products."""
    return dtype.is_float and op in ("add", "mul")


def sum_block(shape: Sequence[int], axes: Collection[int]) -> int:
    """Elements of a block of a sum over `axes`, which are contiguous in the row-major order of the summed axes.

    A block has whole axes from the minor one up, and a part of the next: a divisor of that axis, so that no block crosses its end and the
    axes may still merge; of the outermost axis any even part.
    """
    summed = [shape[axis] for axis in sorted(axes) if shape[axis] != 1]
    room, block = _longest(shape, axes), 1
    while summed:
        n = summed.pop()
        if n > room:
            return block * (_divisor(n, room) if summed else even_blocks(n, room, GRAIN))
        block, room = block * n, room // max(n, 1)
    return block


def axes_reduced_first(shape: Sequence[int], axes: Collection[int]) -> tuple[int, ...]:
    """The minor ones of `axes` to be summed by a reduction of their own first, where a block of all axes would be too short; else ()."""
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


def block_shape(sizes: Sequence[int], block: int) -> tuple[int, ...]:
    """The shape of a block of contiguous row-major elements in a space of `sizes`: whole minor axes, a part of one, 1 along the rest."""
    box = [1] * len(sizes)
    for axis in reversed(range(len(sizes))):
        box[axis] = min(sizes[axis], block)
        if block < sizes[axis]:
            break
        block //= max(sizes[axis], 1)
    return tuple(box)


# --- contractions of the matrix unit ----------------------------------------------------------------------------------


def depth_block(whole: Contraction, sizes: Mapping[int, int]) -> dict[int, int]:
    """The shape of a block of a contraction, by contracted label: the elements that a product sums with one rounding.

    A short contraction is one block; a longer one is cut into blocks of a convolution's whole kernel and some channels, or of contiguous
    elements.
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
    """The labels of a convolution's kernel positions: of the two labels of each sliding axis, the shorter one."""
    pairs = ((outer, s.label) for outer, s in whole.outer.items())
    return {min(pair, key=sizes.__getitem__) for pair in pairs if 1 not in map(sizes.__getitem__, pair)}


def unmergeable(whole: Contraction, sizes: Mapping[int, int], block: Mapping[int, int]) -> tuple[int, ...]:
    """Contracted labels that must not merge with the one before: blocks do not divide them, and would cross the end of a merged axis."""
    contracted = [label for label in whole.contracted if sizes[label] != 1]
    return tuple(label for label in contracted[1:] if sizes[label] % block[label])


def is_one_step(whole: Contraction, sizes: Mapping[int, int]) -> bool:
    """Whether one instruction can do a whole contraction."""
    return has_few_blocks(whole.contracted, sizes, depth_block(whole, sizes), whole.placed)


def has_few_blocks(contracted: Sequence[int], sizes: Mapping[int, int], block: Mapping[int, int], placed: Collection[int]) -> bool:
    """Whether one instruction can do a contraction in blocks: a single one, or a few along the last label, if that is not among those
    `placed`, which slide or have a bound.
    """
    cut = [x for x in contracted if block[x] < sizes[x]]
    return not cut or (cut == [contracted[-1]] and cut[0] not in placed and ceil_div(sizes[cut[0]], block[cut[0]]) <= MOST_BLOCKS)
