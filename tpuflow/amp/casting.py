"""The jaxpr interpreter behind `autocast`, and the operands that it passes to the rules."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow.jaxprs.bind import bind_again
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr, Literal, Var, opened
from tpuflow.jaxprs.walk import array_of, walk

PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True, slots=True)
class Operand:
    """A value of the jaxpr while it is interpreted. `weak`: computed from literals only, so that it does not widen an operation.

    `wide` is set for a matrix product that is still in fp32 because its bias has not been added: the type to round to afterwards.
    """

    value: Any
    weak: bool = False
    wide: Any = None

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return _is_floating(self.value.dtype)

    @property
    def is_narrow(self) -> bool:
        """Whether the elements are floating-point numbers of less than 32 bits."""
        return self.is_float and self.value.dtype.itemsize < 4

    def cast(self, dtype: Any) -> Operand:
        """The same number in another floating type; anything that is not a float, or is to become something else, stays as it is."""
        if not self.is_float or self.value.dtype == dtype or not _is_floating(dtype):
            return self
        return replace(self, value=jax.lax.convert_element_type(self.value, dtype))


@functools.lru_cache(maxsize=256)
def _is_floating(dtype: Any) -> bool:
    """Whether an element type is a floating-point one; asked several times of every operand, of which JAX's own answer is slow."""
    return jnp.issubdtype(dtype, jnp.floating)


Rule = Callable[["AutocastInterpreter", Equation, list[Operand]], list[Operand]]


@dataclass(frozen=True, slots=True)
class AutocastInterpreter:
    """Interprets a jaxpr by a policy's rules. `biased`: the matrix products of this jaxpr whose only use is the addition of a bias."""

    rules: Mapping[str, Rule]
    compute: Any
    biased: frozenset[Var] = field(default=frozenset())

    def run(self, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Operand]) -> list[Operand]:
        """The results of a jaxpr for `operands`; `biased` is found for it anew."""
        inside = replace(self, biased=biased_products(opened(jaxpr)[0]))
        return walk(jaxpr, operands, inside.step, _constant)

    def step(self, eqn: Equation, operands: list[Operand]) -> list[Operand]:
        """One equation by its rule."""
        return self.rules.get(eqn.primitive.name, as_traced)(self, eqn, operands)


def bind(eqn: Equation, operands: Sequence[Operand], **overrides: Any) -> list[Operand]:
    """Bind the primitive of `eqn` to `operands` as they are; the results are weak if every floating operand was."""
    floats = [o for o in operands if o.is_float]
    weak = bool(floats) and all(o.weak for o in floats)
    return [Operand(r, weak) for r in bind_again(eqn, [o.value for o in operands], **overrides)]


def avals(atoms: Sequence[Any]) -> list[Any]:
    """The types that variables or literals were traced with."""
    return [atom.aval for atom in atoms]


def as_traced(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """In the types that the equation was traced with."""
    return bind(eqn, [o.cast(aval.dtype) if hasattr(aval, "dtype") else o for o, aval in zip(operands, avals(eqn.invars), strict=True)])


def biased_products(jaxpr: Jaxpr) -> frozenset[Var]:
    """The matrix products of a jaxpr whose only use is one addition of a smaller or broadcast operand."""
    uses: Counter[Any] = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var))
    uses.update(v for v in jaxpr.outvars if isinstance(v, Var))
    maker: dict[Any, Equation] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "add":
            continue
        for product, bias in (eqn.invars, eqn.invars[::-1]):
            made_by = None if isinstance(product, Literal) else maker.get(product)
            is_product = made_by is not None and made_by.primitive.name in PRODUCTS
            if is_product and uses[product] == 1 and _is_smaller(bias, product, maker):
                found.add(product)
                break
    return frozenset(found)


def _is_smaller(bias: Any, product: Any, maker: Mapping[Var, Equation]) -> bool:
    """Whether `bias` has fewer elements than `product`, by its shape or before an explicit broadcast."""
    if bias.aval.size < product.aval.size:
        return True
    made_by = None if isinstance(bias, Literal) else maker.get(bias)
    return made_by is not None and made_by.primitive.name == "broadcast_in_dim" and avals(made_by.invars)[0].size < product.aval.size


def _constant(atom: Any, value: Any) -> Operand:
    array = array_of(atom, value)
    return Operand(array, weak=isinstance(atom, Literal) and array.ndim == 0)
