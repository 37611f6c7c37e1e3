"""An optimizer's update on sharded state (ZeRO's stages 1 to 3), for any Optax transformation.

The update is traced for whole arrays, so that masks and groups of parameters see shapes and names, and its jaxpr is interpreted again on
what a chip holds of each value. Elementwise operations run on shards. A reduction of all elements (a norm, whether all are finite) runs on
shards, then over the chips. Any other operation (the means of rows in adafactor) gets its operands gathered: that costs the collective, and
every chip computes the same result.
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
"""Elementwise primitives. One that is missing from the list still gives the right values: its operands are gathered."""


class Form(Enum):
    """What a chip holds of an array: all of it, as every chip does; its shard; or, of a splat, the scalar that all elements equal."""

    REPLICATED, SHARDED, SPLAT = "replicated", "sharded", "splat"


@dataclass(frozen=True, slots=True)
class Held:
    """A value of the jaxpr while it is interpreted: what a chip holds of an array of this shape."""

    value: Any
    shape: tuple[int, ...]
    form: Form


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction's collective over the chips, and its neutral element in a type, which takes the place of padding."""

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
class ShardedUpdate:
    """The interpreter of an update's jaxpr, on arrays that are sharded over a mesh axis."""

    axis: Axis

    def run(self, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Held]) -> list[Held]:
        """What a chip holds of the results of a jaxpr."""
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
        if name in ELEMENTWISE and (form := _form_of_elements(operands)) is not Form.REPLICATED:
            shape = next(o.shape for o in operands if o.shape)
            return [Held(x, shape, form) for x in bind_again(eqn, [self.held_as(o, form) for o in operands])]
        if name in REDUCTIONS and first is not None and first.form is Form.SHARDED and len(eqn.params["axes"]) == len(first.shape):
            return [Held(self._reduced(REDUCTIONS[name], eqn, first), (), Form.REPLICATED)]
        return [Held(x, jnp.shape(x), Form.REPLICATED) for x in bind_again(eqn, [self.held_as(o, Form.REPLICATED) for o in operands])]

    def held_as(self, held: Held, form: Form) -> Any:
        """The array sharded or replicated, as `form` says (SPLAT for arrays that are splats already only); scalars stay replicated."""
        if not held.shape or held.form is form:
            return held.value
        if held.form is Form.SPLAT:
            elems = self.axis.shard_shape(held.shape) if form is Form.SHARDED else held.shape
            return jnp.broadcast_to(held.value, elems)
        return self.axis.local_shard(held.value) if form is Form.SHARDED else self.axis.all_gather(held.value, held.shape)

    def _reduced(self, row: Reduction, eqn: Equation, held: Held) -> Any:
        counted = self.axis.mask_padding(held.value, held.shape, row.neutral(held.value.dtype))
        (own,) = bind_again(eqn, [counted], axes=tuple(range(counted.ndim)))
        return row.over_chips(own, self.axis.name)

    def _cond(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        """A conditional whose branches return results in the same forms. All chips take the same branch: scalars are equal on them."""
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


def call_sharded(axis: Axis, function: Callable[..., Any], arguments: Any, like: Any, sharded: Any, wanted: Callable[[Any], Any]) -> Any:
    """Call a function of whole arrays on what a chip holds of them.

    arguments: a tuple of trees. like: the shapes and types of the whole arrays. sharded: a tree of booleans, which arguments are shards.
    wanted: a function of the shapes of the result, which returns a tree of booleans: which results are to be shards.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    leaves, whole, forms = map(jax.tree.leaves, (arguments, like, sharded))
    operands = [Held(x, tuple(w.shape), Form.SHARDED if s else Form.REPLICATED) for x, w, s in zip(leaves, whole, forms, strict=True)]
    update = ShardedUpdate(axis)
    results, tree = update.run(closed, operands), jax.tree.structure(shapes)
    asked = [Form.SHARDED if s else Form.REPLICATED for s in jax.tree.leaves(wanted(shapes))]
    return jax.tree.unflatten(tree, [update.held_as(h, form) for h, form in zip(results, asked, strict=True)])


def _form_of_elements(operands: Sequence[Held]) -> Form:
    """The form in which an elementwise operation runs: on shards if an operand is sharded, on scalars if all are splats.

    Operands of different shapes (an axis of one element that is broadcast) are replicated first. Scalars have no say.
    """
    of_arrays = {o.shape: o.form for o in operands if o.shape}
    return Form.REPLICATED if len(of_arrays) != 1 else _common([o.form for o in operands if o.shape])


def _common(forms: Sequence[Form]) -> Form:
    return next(form for form in (Form.SHARDED, Form.REPLICATED, Form.SPLAT) if form in forms)


def _constant(atom: Any, value: Any) -> Held:
    array = array_of(atom, value)
    return Held(array, jnp.shape(array), Form.REPLICATED)
