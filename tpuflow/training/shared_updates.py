"""An optimizer's update on shares: any Optax transformation, as if every chip had all of its state, with each chip holding its share.

The update is traced for whole arrays, so that what looks at shapes and names (masks, groups of parameters) sees them, and its jaxpr is
walked with what a chip holds of each value. Elementwise operations are done on shares. A reduction of all elements (a norm, whether all
are finite) is done on shares, then over the chips. What needs more of an array than that (the means of rows in adafactor) gets it gathered:
it costs what it sends, and every chip computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.jaxprs.bind import bind_again
from tpuflow.jaxprs.calls import CALLS, called
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation, Jaxpr
from tpuflow.jaxprs.walk import array_of, walk
from tpuflow.training.shards import Axis

ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i1e", "cbrt", "ceil", "clamp",
    "clz", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "nextafter", "not", "or", "population_count", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
))  # fmt: skip
"""Primitives that make an element of the elements in the same place. One that is missing here is right, and gathers its operands."""


class Form(Enum):
    """What a chip has of an array: all of it, a share, or the one number that all elements are."""

    WHOLE, SHARE, SPLAT = "whole", "share", "splat"


@dataclass(frozen=True, slots=True)
class Held:
    """A value of the walk: what a chip has of an array of this shape."""

    value: Any
    shape: tuple[int, ...]
    form: Form


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a reduction of all elements goes on over the chips; `neutral`: the number of a type that changes no result."""

    over_chips: Callable[[Any, Any], Any]
    neutral: Callable[[np.dtype], Any]


def _of_bools(over_chips: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, axis: over_chips(x.astype(jnp.int32), axis).astype(jnp.bool_)


def _least(dtype: np.dtype) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def _greatest(dtype: np.dtype) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).max


REDUCTIONS: Mapping[str, Reduction] = {
    "reduce_sum": Reduction(lax.psum, lambda dtype: 0),
    "reduce_max": Reduction(lax.pmax, _least),
    "reduce_min": Reduction(lax.pmin, _greatest),
    "reduce_and": Reduction(_of_bools(lax.pmin), lambda dtype: True),
    "reduce_or": Reduction(_of_bools(lax.pmax), lambda dtype: False),
}


@dataclass(frozen=True, slots=True)
class SharedUpdate:
    """The walk, over a mesh axis."""

    axis: Axis

    def run(self, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Held]) -> list[Held]:
        """What a chip has of the results of a jaxpr."""
        return walk(jaxpr, operands, self.step, _constant)

    def step(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        """One equation."""
        name, (first, *_) = eqn.primitive.name, [*operands, None]
        if name in CALLS:
            return self.run(called(eqn), operands)
        if name == "cond":
            return self._cond(eqn, operands)
        if name == "broadcast_in_dim" and first is not None and not first.shape:
            return [Held(first.value, tuple(eqn.params["shape"]), Form.SPLAT)]
        if name in ELEMENTWISE and (form := _form_of_elements(operands)) is not Form.WHOLE:
            shape = next(o.shape for o in operands if o.shape)
            return [Held(x, shape, form) for x in bind_again(eqn, [self.held_as(o, form) for o in operands])]
        if name in REDUCTIONS and first is not None and first.form is Form.SHARE and len(eqn.params["axes"]) == len(first.shape):
            return [Held(self._reduced(REDUCTIONS[name], eqn, first), (), Form.WHOLE)]
        return [Held(x, jnp.shape(x), Form.WHOLE) for x in bind_again(eqn, [self.held_as(o, Form.WHOLE) for o in operands])]

    def held_as(self, held: Held, form: Form) -> Any:
        """The array in another form; scalars have one only.

        (An array is a splat only where it was made as one, so nothing becomes one.)
        """
        if not held.shape or held.form is form:
            return held.value
        if held.form is Form.SPLAT:
            elems = self.axis.share_shape(held.shape) if form is Form.SHARE else held.shape
            return jnp.broadcast_to(held.value, elems)
        return self.axis.share(held.value) if form is Form.SHARE else self.axis.whole(held.value, held.shape)

    def _reduced(self, row: Reduction, eqn: Equation, held: Held) -> Any:
        counted = self.axis.counted(held.value, held.shape, row.neutral(held.value.dtype))
        (own,) = bind_again(eqn, [counted], axes=tuple(range(counted.ndim)))
        return row.over_chips(own, self.axis.name)

    def _cond(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        """Branches whose results agree in form: all chips take the same one, since they agree in every scalar."""
        index, *rest = operands
        branches: Sequence[ClosedJaxpr] = eqn.params["branches"]

        def results(branch: ClosedJaxpr, values: Sequence[Any]) -> list[Held]:
            return self.run(branch, [Held(v, o.shape, o.form) for v, o in zip(values, rest, strict=True)])

        seen: list[list[Form]] = []
        values = [o.value for o in rest]
        for branch in branches:
            jax.eval_shape(lambda values, branch=branch: seen.append([h.form for h in results(branch, values)]), values)
        forms = [_common(forms) for forms in zip(*seen, strict=True)]

        def taken(branch: ClosedJaxpr) -> Callable[[Sequence[Any]], list[Any]]:
            return lambda values: [self.held_as(h, f) for h, f in zip(results(branch, values), forms, strict=True)]

        found = lax.switch(index.value, [taken(branch) for branch in branches], values)
        shapes = [tuple(v.aval.shape) for v in eqn.outvars]  # type: ignore[attr-defined]
        return [Held(x, shape, form) for x, shape, form in zip(found, shapes, forms, strict=True)]


def on_shares(axis: Axis, function: Callable[..., Any], arguments: Any, like: Any, shared: Any, wanted: Callable[[Any], Any]) -> Any:
    """A function of whole arrays, of what a chip holds of them.

    arguments: a tuple of trees. like: their shapes and types as whole arrays. shared: which of them are shares. wanted: the shapes of the
    function's result -> which of it are to be shares.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    leaves, whole, forms = map(jax.tree.leaves, (arguments, like, shared))
    operands = [Held(x, tuple(w.shape), Form.SHARE if s else Form.WHOLE) for x, w, s in zip(leaves, whole, forms, strict=True)]
    update = SharedUpdate(axis)
    results, tree = update.run(closed, operands), jax.tree.structure(shapes)
    asked = [Form.SHARE if s else Form.WHOLE for s in jax.tree.leaves(wanted(shapes))]
    return jax.tree.unflatten(tree, [update.held_as(h, form) for h, form in zip(results, asked, strict=True)])


def _form_of_elements(operands: Sequence[Held]) -> Form:
    """Shares if there is one, one number if there is nothing else; scalars do not count. Axes of one element may stand for longer ones:
    then it takes whole arrays."""
    of_arrays = {o.shape: o.form for o in operands if o.shape}
    return Form.WHOLE if len(of_arrays) != 1 else _common([o.form for o in operands if o.shape])


def _common(forms: Sequence[Form]) -> Form:
    return next(form for form in (Form.SHARE, Form.WHOLE, Form.SPLAT) if form in forms)


def _constant(atom: Any, value: Any) -> Held:
    array = array_of(atom, value)
    return Held(array, jnp.shape(array), Form.WHOLE)
