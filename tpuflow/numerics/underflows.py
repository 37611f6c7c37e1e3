"""Which results are zero only because their type is too small: one rule for each primitive that can do that.

Sums and differences are not among them: with subnormals they are exact where they are small. Where operands tell (a product of two
numbers that are not zero is not zero), they are looked at; a matrix product or convolution in a 16-bit type that has zeros is computed a
second time with an fp32 result from the same operands. In fp32 the device has no wider type to compare with, so its matrix products have
no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tpuflow.numerics.measures import is_bad, is_zero

Again = Callable[..., Sequence[Any]]
"""The results of the same operation on the same operands, with some parameters replaced by these keywords."""
Rule = Callable[[Sequence[Any], Again], Any]
"""The operands -> where the result ought not to be zero."""


def _product(operands: Sequence[Any], again: Again) -> Any:
    return ~(is_zero(operands[0]) | is_zero(operands[1]))


def _quotient(operands: Sequence[Any], again: Again) -> Any:
    return ~(is_zero(operands[0]) | is_bad(operands[1]))


def _same(operands: Sequence[Any], again: Again) -> Any:
    """A function that is zero only at zero."""
    return ~is_zero(operands[0])


def _power(operands: Sequence[Any], again: Again) -> Any:
    return ~(is_zero(operands[0]) | is_bad(operands[0]))


def _never(operands: Sequence[Any], again: Again) -> Any:
    """A function that is zero nowhere but at infinity."""
    return ~is_bad(operands[0])


def _shadow(operands: Sequence[Any], again: Again) -> Any:
    (wide,) = again(preferred_element_type=jnp.dtype(jnp.float32))
    return ~is_zero(wide)


RULES: dict[str, Rule] = {
    "convert_element_type": _same,
    "conv_general_dilated": _shadow,
    "div": _quotient,
    "dot_general": _shadow,
    "erfc": _never,
    "exp": _never,
    "exp2": _never,
    "integer_pow": _power,
    "logistic": _never,
    "mul": _product,
    "pow": _power,
    "square": _power,
}


def nonzero_rule(primitive: str, operands: Sequence[Any], result: Any) -> Rule | None:
    """What tells where the exact result of a primitive is not zero; None if nothing does."""
    rule = RULES.get(primitive)
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    return None if not floats or (rule is _shadow and result.dtype == jnp.float32) else rule
