"""Which results have underflowed to zero: a rule for each primitive that can underflow says where the exact result is not zero.

Sums and differences cannot: with subnormals they are exact where they are small. For most primitives the operands decide (a product of two
numbers other than zero is not zero). A matrix product or convolution in a 16-bit type whose results contain zeros is computed again with an
fp32 result from the same operands; in fp32 the device has no wider type to compare with, so those have no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tpuflow.numerics.measures import is_nonfinite, is_zero

Recompute = Callable[..., Sequence[Any]]
"""(**parameters) -> the results of the operation on the same operands, with some of its parameters replaced."""
Rule = Callable[[Sequence[Any], Recompute], Any]
"""(operands, recompute) -> booleans: where the exact result is not zero."""


def _product(operands: Sequence[Any], recompute: Recompute) -> Any:
    return ~(is_zero(operands[0]) | is_zero(operands[1]))


def _quotient(operands: Sequence[Any], recompute: Recompute) -> Any:
    return ~(is_zero(operands[0]) | is_nonfinite(operands[1]))


def _zero_only_at_zero(operands: Sequence[Any], recompute: Recompute) -> Any:
    """A function that is zero only at zero."""
    return ~is_zero(operands[0])


def _power(operands: Sequence[Any], recompute: Recompute) -> Any:
    return ~(is_zero(operands[0]) | is_nonfinite(operands[0]))


def _zero_only_at_infinity(operands: Sequence[Any], recompute: Recompute) -> Any:
    """A function that is zero nowhere but at infinity."""
    return ~is_nonfinite(operands[0])


def _recomputed_in_fp32(operands: Sequence[Any], recompute: Recompute) -> Any:
    (wide,) = recompute(preferred_element_type=jnp.dtype(jnp.float32))
    return ~is_zero(wide)


RULES: dict[str, Rule] = {
    "convert_element_type": _zero_only_at_zero,
    "conv_general_dilated": _recomputed_in_fp32,
    "div": _quotient,
    "dot_general": _recomputed_in_fp32,
    "erfc": _zero_only_at_infinity,
    "exp": _zero_only_at_infinity,
    "exp2": _zero_only_at_infinity,
    "integer_pow": _power,
    "logistic": _zero_only_at_infinity,
    "mul": _product,
    "pow": _power,
    "square": _power,
}


def nonzero_rule(primitive: str, operands: Sequence[Any], result: Any) -> Rule | None:
    """The rule of a primitive for these operands and this result; None if it has none."""
    rule = RULES.get(primitive)
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    return None if not floats or (rule is _recomputed_in_fp32 and result.dtype == jnp.float32) else rule
