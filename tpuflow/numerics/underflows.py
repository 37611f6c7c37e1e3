"""Which results are zero only because their type is too small: one rule for each primitive that can do that.

Sums and differences are not among them: with subnormals they are exact where they are small. Where operands tell (a product of two
numbers that are not zero is not zero), they are looked at; a matrix product or convolution in a 16-bit type is computed a second time
with an fp32 result from the same operands. In fp32 the device has no wider type to compare with, so its matrix products have no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tpuflow.jaxprs.bind import bind_again
from tpuflow.jaxprs.compat import Equation
from tpuflow.numerics.measures import is_bad, is_zero

Rule = Callable[[Equation, Sequence[Any]], Any]
"""The equation and its operands -> where the result ought not to be zero."""


def _product(equation: Equation, operands: Sequence[Any]) -> Any:
    return ~(is_zero(operands[0]) | is_zero(operands[1]))


def _quotient(equation: Equation, operands: Sequence[Any]) -> Any:
    return ~(is_zero(operands[0]) | is_bad(operands[1]))


def _same(equation: Equation, operands: Sequence[Any]) -> Any:
    """A function that is zero only at zero."""
    return ~is_zero(operands[0])


def _power(equation: Equation, operands: Sequence[Any]) -> Any:
    return ~(is_zero(operands[0]) | is_bad(operands[0]))


def _never(equation: Equation, operands: Sequence[Any]) -> Any:
    """A function that is zero nowhere but at infinity."""
    return ~is_bad(operands[0])


def _shadow(equation: Equation, operands: Sequence[Any]) -> Any:
    (wide,) = bind_again(equation, operands, preferred_element_type=jnp.dtype(jnp.float32))
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


def ought_not_be_zero(equation: Equation, operands: Sequence[Any], result: Any) -> Any:
    """Where the exact result is not zero; None if no rule tells."""
    rule = RULES.get(equation.primitive.name)
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    if rule is None or not floats or (rule is _shadow and result.dtype == jnp.float32):
        return None
    return rule(equation, operands)
