"""Random bits: threefry in vector operations, its bits exactly JAX's."""

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


# The same, section 3.3: philox-4x32, 10 rounds.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def rng_bits(b: Builder, state: Value, shape: Sequence[int], dtype: DType) -> tuple[Value, Value]:
    """The next state, u32[4], and random bits of a shape in an unsigned type: XLA's for philox, its default (xla/hlo/builder/lib/prng.cc).

    Of the state the first two words are the key, the others the lower half of a counter of 128 bits; its upper half is the key again.
    """
    count = math.prod(shape)
    words = [b.reshape(b.slice_axis(state, 0, i, i + 1), ()) for i in range(4)]
    counter = (words[2], words[3], words[0], words[1])
    places = TensorType(U32, (-(-count // 4),))
    found = philox4x32(b, _counted(b, counter, b.iota(places, 0)), [b.splat(word, places.shape) for word in words[:2]])
    drawn = b.reshape(b.concatenate([b.reshape(x, (*places.shape, 1)) for x in found], 1), (4 * places.elems,))
    after = _counted(b, counter, b.scalar(places.elems, U32))
    following = b.concatenate([b.reshape(x, (1,)) for x in (*words[:2], *after[:2])], 0)
    return following, b.convert(b.reshape(b.slice_axis(drawn, 0, 0, count), shape), dtype)


def _counted(b: Builder, counter: Sequence[Value], more: Value) -> list[Value]:
    """A 128-bit counter in four words, lowest first, plus `more`."""
    result, carry = [], more
    for word in counter:
        word = b.splat(word, more.shape)
        result.append(b.add(word, carry))
        carry = b.convert(b.lt(result[-1], word), U32)
    return result


def philox4x32(b: Builder, counter: Sequence[Value], key: Sequence[Value]) -> tuple[Value, ...]:
    """Four words of random bits, u32, for each four words of a counter under the two words of a key."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = b.full_like(x0, _MULTIPLIERS[0]), b.full_like(x2, _MULTIPLIERS[1])
        high0, low0, high1, low1 = b.mulhi(x0, first), b.mul(x0, first), b.mulhi(x2, second), b.mul(x2, second)
        x0, x1, x2, x3 = b.xor(b.xor(high1, x1), k0), low1, b.xor(b.xor(high0, x3), k1), low0
        k0, k1 = b.add(k0, _WEYL[0]), b.add(k1, _WEYL[1])
    return x0, x1, x2, x3


def iota_2x32(b: Builder, *, shape: Sequence[int]) -> tuple[Value, Value]:
    """The row-major position of every element as a high and a low word."""
    if math.prod(shape) > 1 << 32:
        raise UnsupportedForm("more than 2^32 random words at once")
    whole = TensorType(U32, tuple(shape))
    low = b.full(whole, 0)
    for axis, size in enumerate(shape):
        if size > 1:
            low = b.add(low, b.mul(b.iota(whole, axis), math.prod(shape[axis + 1 :])))
    return b.full(whole, 0), low
