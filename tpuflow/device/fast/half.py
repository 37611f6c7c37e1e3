"""Conversions between f16 and f32 in lax: XLA's where the host has them in hardware, else in integer arithmetic.

XLA:CPU calls library functions that jaxlib lacks on hosts without F16C (or with `--xla_cpu_max_isa=SSE4_2`): every f16 conversion
fails to link there. Both ways give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Value = Any

_BIAS = np.uint32((127 - 15) << 23)
_SIGN = np.uint32(0x8000)
_INFINITY = np.uint32(0x7C00)


@functools.cache
def in_hardware() -> bool:
    """Whether XLA can compile a conversion to and from f16 on this host."""
    with jax.ensure_compile_time_eval():
        try:
            jax.jit(lambda x: lax.convert_element_type(lax.convert_element_type(x, jnp.float16), jnp.float32))(np.ones(16, np.float32))
        except jax.errors.JaxRuntimeError:
            return False
    return True


def f16_to_f32(x: Value) -> Value:
    """Exact."""
    return lax.convert_element_type(x, jnp.float32) if in_hardware() else widen_bits(x)


def f32_to_f16(x: Value) -> Value:
    """Nearest even; subnormals are kept, NaN stays one."""
    return lax.convert_element_type(x, jnp.float16) if in_hardware() else narrow_bits(x)


def widen_bits(x: Value) -> Value:
    """f16 to f32 in integer arithmetic; a NaN keeps sign and payload, and whether it signals (hardware makes it quiet)."""
    bits = lax.convert_element_type(lax.bitcast_convert_type(x, jnp.uint16), jnp.uint32)
    sign, size = (bits & _SIGN) << np.uint32(16), bits & np.uint32(0x7FFF)
    normal = (size << np.uint32(13)) + _BIAS
    special = normal + _BIAS  # infinity and NaN: the exponent goes on to f32's last
    small = lax.convert_element_type(size, jnp.float32) * np.float32(2.0**-24)  # exact: below 2^10 units
    least = lax.bitcast_convert_type(small, jnp.uint32)
    wide = jnp.where(size < np.uint32(0x400), least, jnp.where(size >= _INFINITY, special, normal))
    return lax.bitcast_convert_type(wide | sign, jnp.float32)


def narrow_bits(x: Value) -> Value:
    """f32 to f16 in integer arithmetic."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, size = (bits >> np.uint32(16)) & _SIGN, bits & np.uint32(0x7FFFFFFF)
    even = (size >> np.uint32(13)) & np.uint32(1)
    normal = (size + np.uint32(0xFFF) + even - _BIAS) >> np.uint32(13)
    half = jnp.where(size < np.uint32(113 << 23), _subnormal(size), jnp.minimum(normal, _INFINITY))
    half = jnp.where(size >= np.uint32(143 << 23), _INFINITY, half)
    half = jnp.where(size > np.uint32(255 << 23), np.uint32(0x7E00), half)
    return lax.bitcast_convert_type(lax.convert_element_type(half | sign, jnp.uint16), jnp.float16)


def narrow_moved(x: Value) -> Value:
    """f32 that are numbers of f16 as f16: nothing is rounded, and a NaN comes back as `widen_bits` was given it."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    payload = (bits >> np.uint32(13)) & np.uint32(0x3FF)
    payload = jnp.where(payload == 0, np.uint32(0x200), payload)  # one that arithmetic made, in bits that f16 has not
    nan = ((bits >> np.uint32(16)) & _SIGN) | _INFINITY | payload
    moved = lax.bitcast_convert_type(lax.convert_element_type(nan, jnp.uint16), jnp.float16)
    return lax.select(lax.ne(x, x), moved, f32_to_f16(x))


def _subnormal(size: Value) -> Value:
    """f32 bits below 2^-14, sign removed, in units of 2^-24, nearest even."""
    significand = (size & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    shift = jnp.clip(np.uint32(126) - (size >> np.uint32(23)), np.uint32(1), np.uint32(26))
    kept, one = significand >> shift, np.uint32(1)
    cut, tie = significand - (kept << shift), one << (shift - one)
    up = (cut > tie) | ((cut == tie) & ((kept & one) == one))
    return kept + lax.convert_element_type(up, jnp.uint32)
