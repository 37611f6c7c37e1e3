"""How often the loops of XLA:TPU's products and convolutions read their operands.

Such a fusion makes its result block by block, and sums up one block before it begins the next; the window configuration says how long
blocks are, and how many iterations each loop has. The block of an operand stays in VMEM for the next iteration if that needs the same, else
it is read again. Whether features or rows of the result are the outer loop is not said: it is taken to be the one that reads less of HBM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tpuflow.comparing.hlo import Array, Module, Op, Space


def times_read(module: Module, computation: str, op: Op, inside: str) -> Mapping[int, int]:
    """How often the operands of a fusion are read, by their places; those that are not in it are read once. `inside`: what it computes."""
    product = [one for one in module.computations[inside] if one.opcode == "convolution"]
    if op.windows is None or len(product) != 1:
        return {}
    (product,) = product
    ends = [module.op(inside, name) for name in product.operands]
    arrays = [end.results[0] for end in ends]
    loops = _loops(op, arrays, product.results[0])
    if loops is None:
        return {}
    features, rows, summed = loops
    found: list[dict[int, int]] = []
    for end, array, times in zip(ends, arrays, (features, rows), strict=True):
        places = [p.number or 0 for p in _parameters(module, inside, end) if math.prod(p.results[0].lengths) == math.prod(array.lengths)]
        found.append(dict.fromkeys(places, times))
    if summed > 1:
        return {place: min(one[place] for one in found if place in one) for place in set().union(*found)}
    return min(found, key=lambda again: sum((times - 1) * _hbm_bytes(module, computation, op, place) for place, times in again.items()))


def _loops(op: Op, operands: list[Array], result: Array) -> tuple[int, int, int] | None:
    """Iterations over features and rows of the result, and over what is summed; None if the configuration says them in another way, as it
    does where an axis of the batch is one of space."""
    windows = op.windows
    space = len(windows.output) - 2 if windows else 0
    if windows is None or len(windows.iterations) != 2 * space + 3:
        return None
    features, rows, summed = windows.iterations[0], math.prod(windows.iterations[1 : space + 2]), math.prod(windows.iterations[space + 2 :])
    blocks = [_blocks(a, b) for a, b in zip((*operands, result), (windows.input, windows.kernel, windows.output), strict=True)]
    fits = blocks[0] <= rows * summed and blocks[1:] == [features * summed, features * rows]  # blocks of the input may overlap
    return (features, rows, summed) if fits else None


def _blocks(array: Array, block: tuple[int, ...]) -> int:
    """The number of blocks of an array."""
    tile = (*(1,) * (len(array.lengths) - len(array.tile)), *array.tile)
    return math.prod(-(-length // (size * one)) for length, one, size in zip(array.lengths, tile, block, strict=False))


def _parameters(module: Module, inside: str, op: Op) -> Iterator[Op]:
    """The parameters that an instruction is computed from."""
    waiting, seen = [op], {op.name}
    while waiting:
        one = waiting.pop()
        if one.opcode == "parameter":
            yield one
        more = [name for name in one.operands if name not in seen]
        seen.update(more)
        waiting += [module.op(inside, name) for name in more]


def _hbm_bytes(module: Module, computation: str, op: Op, place: int) -> int:
    return sum(a.bytes for a in module.op(computation, op.operands[place]).results if a.space is Space.HBM)
