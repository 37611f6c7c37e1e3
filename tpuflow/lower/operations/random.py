"""Random bits, exactly JAX's: threefry in vector operations, Philox by the device's instruction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpuflow.dtypes import U32, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.elementwise import aligned
from tpuflow.lower.operations.forms import UnsupportedForm

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.2: threefry-2x32, 20 rounds.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(b: Builder, key0: Value, key1: Value, x0: Value, x1: Value) -> tuple[Value, Value]:
    """Two words of random bits, u32, for each pair of counters x0, x1 under the two words of a key."""
    key0, key1, x0, x1 = aligned(b, key0, key1, x0, x1)
    keys = (key0, key1, b.xor(b.xor(key0, key1), _PARITY))
    x0, x1 = b.add(x0, keys[0]), b.add(x1, keys[1])
    for i in range(5):
        for amount in _ROTATIONS[i % 2]:
            x0 = b.add(x0, x1)
            x1 = b.xor(x0, _rotated_left(b, x1, amount))
        x0, x1 = b.add(x0, keys[(i + 1) % 3]), b.add(b.add(x1, keys[(i + 2) % 3]), i + 1)
    return x0, x1


def _rotated_left(b: Builder, x: Value, amount: int) -> Value:
    return b.or_(b.shl(x, amount), b.shr_logical(x, 32 - amount))


def rng_bits(b: Builder, state: Value, shape: Sequence[int], dtype: DType) -> tuple[Value, Value]:
    """The next state, u32[4], and random bits of a shape in an unsigned type: XLA's for philox, its default (xla/hlo/builder/lib/prng.cc).

    Of the state the first two words are the key, the others the lower half of a counter of 128 bits, which goes up by 1 for four words.
    """
    _require_counted(shape)
    return _counted_on(b, state, -(-math.prod(shape) // 4)), b.convert(b.random(state, shape), dtype)


def threefry_bits(b: Builder, state: Value, shape: Sequence[int], dtype: DType) -> tuple[Value, Value]:
    """What `rng_bits` gives, by threefry-2x32: XLA's for THREE_FRY.

    Of the state the first two words are the key, the others a counter, which goes up by 1 for two words. These lie side by side along the
    first axis of even length, else along the longest, whose last word is then left out.
    """
    _require_counted(shape)
    lengths = tuple(shape) or (1,)
    axis = next((axis for axis, n in enumerate(lengths) if n % 2 == 0), lengths.index(max(lengths)))
    half = (*lengths[:axis], -(-lengths[axis] // 2), *lengths[axis + 1 :])
    key0, key1, *counter = (b.reshape(b.slice_axis(state, 0, n, n + 1), ()) for n in range(4))
    place, low, high = aligned(b, iota_2x32(b, shape=half)[1], *counter)
    count = b.add(place, low)
    pair = threefry2x32(b, key0, key1, count, b.add(b.convert(b.lt(count, low), U32), high))
    apart = [b.reshape(words, (*half[: axis + 1], 1, *half[axis + 1 :])) for words in pair]
    words = b.reshape(b.concatenate(apart, axis + 1), (*half[:axis], 2 * half[axis], *half[axis + 1 :]))
    bits = b.reshape(b.slice_axis(words, axis, 0, lengths[axis]), tuple(shape))
    return _counted_on(b, state, math.prod(half)), b.convert(bits, dtype)


def _counted_on(b: Builder, state: Value, counts: int) -> Value:
    """The state u32[4] with the lower half of its counter so much higher."""
    key, low, high = (b.slice_axis(state, 0, *at) for at in ((0, 2), (2, 3), (3, 4)))
    after = b.add(low, counts)
    return b.concatenate([key, after, b.add(high, b.convert(b.lt(after, low), U32))], 0)


def iota_2x32(b: Builder, *, shape: Sequence[int]) -> tuple[Value, Value]:
    """The row-major position of every element as a high and a low word."""
    _require_counted(shape)
    whole = TensorType(U32, tuple(shape))
    low = b.full(whole, 0)
    for axis, size in enumerate(shape):
        if size > 1:
            low = b.add(low, b.mul(b.iota(whole, axis), math.prod(shape[axis + 1 :])))
    return b.full(whole, 0), low


def _require_counted(shape: Sequence[int]) -> None:
    if math.prod(shape) > 1 << 32:
        raise UnsupportedForm("more than 2^32 random words at once")
