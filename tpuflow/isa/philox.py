"""Philox-4x32 with 10 rounds as XLA counts it (`RngBitGenerator`): what the instruction `random` computes, and its price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.chips.chip import LANE_BYTES, Chip
from tpuflow.dtypes import U32
from tpuflow.isa.arithmetic import Arithmetic

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
OPERATIONS = 2 + 10 + 8 * ROUNDS + 5
"""Vector operations for one word by the element's own lane: its counter and its number among four words, the counter's addition with its
carries, the rounds, and the choice of the word."""


def words(ar: Arithmetic, number: Any, state: Sequence[Any]) -> Any:
    """The words with some numbers in the stream that begins at a state of four words; all are u32 of one shape.

    Four words at a time come from a counter of 128 bits. Its lower half begins as the last two words of the state, its upper half as the
    first two, which are the key as well.
    """
    k0, k1, low, high = state
    full = lambda value: ar.full(number.shape, value, U32)  # noqa: E731
    op = lambda name, a, b: ar.binary(name, a, b, U32)  # noqa: E731
    x = _counted(ar, (low, high, k0, k1), op("shr_logical", number, full(2)))
    for n in range(ROUNDS):
        (first, second), keys = map(full, _MULTIPLIERS), [op("add", k, full(n * w % 2**32)) for k, w in zip((k0, k1), _WEYL, strict=True)]
        high0, low0, high1, low1 = op("mulhi", x[0], first), op("mul", x[0], first), op("mulhi", x[2], second), op("mul", x[2], second)
        x = [op("xor", op("xor", high1, x[1]), keys[0]), low1, op("xor", op("xor", high0, x[3]), keys[1]), low0]
    odd = ar.compare("ne", op("and", number, full(1)), full(0), U32)
    late = ar.compare("ne", op("and", number, full(2)), full(0), U32)
    return ar.select(late, ar.select(odd, x[3], x[2], U32), ar.select(odd, x[1], x[0], U32), U32)


def _counted(ar: Arithmetic, counter: Sequence[Any], more: Any) -> list[Any]:
    """A counter of four words, lowest first, plus `more`."""
    one, zero = ar.full(more.shape, 1, U32), ar.full(more.shape, 0, U32)
    result, carry = [], more
    for low in counter:
        result.append(ar.binary("add", low, carry, U32))
        carry = ar.select(ar.compare("lt", result[-1], low, U32), one, zero, U32)
    return result


def operations(chip: Chip) -> int:
    """Vector operations for a word: one asks the chip's generator for a register of them, if it has one."""
    return 1 if chip.random_words else OPERATIONS


def generator_cycles(chip: Chip, shape: Sequence[int]) -> int:
    """Cycles in which a core's generator makes a tile of words, beside its vector unit; 0 if it has none."""
    return -(-chip.tile_bytes(tuple(shape), LANE_BYTES) // (LANE_BYTES * chip.random_words)) if chip.random_words else 0
