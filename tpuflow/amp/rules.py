"""The tables of autocast: in which type each primitive is computed, with one rule function for each family of primitives.

The fp32 list is that of PyTorch's CUDA autocast, expressed in primitives (its `softmax`, `layer_norm`, `cross_entropy` and `norm`
are made of exponentials, logarithms, powers and sums here).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow.amp.casting import PRODUCTS, AutocastInterpreter, Operand, Rule, as_traced, avals, bind
from tpuflow.jaxprs.bind import bind_again, bind_scan, bind_shard_map, scan_parts
from tpuflow.jaxprs.calls import PLAIN_CALLS, RECOMPUTED_CALLS, called
from tpuflow.jaxprs.compat import ClosedJaxpr, Equation

SUMS = ("cumlogsumexp", "cumprod", "cumsum", "psum", "psum_invariant", "reduce_prod", "reduce_scatter", "reduce_sum", "reduce_window_sum")
FULL_PRECISION = (
    *SUMS, "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "digamma", "erf_inv", "exp", "exp2", "expm1", "igamma",
    "igammac", "integer_pow", "lgamma", "log", "log1p", "pow", "regularized_incomplete_beta", "rsqrt", "sinh", "square", "tan",
)  # fmt: skip
BROADCASTING = ("add", "add_any", "div", "max", "min", "mul", "rem", "sub")
WIDEST = (
    "abs", "all_gather", "all_gather_invariant", "all_to_all", "argmax", "argmin", "broadcast_in_dim", "cbrt", "ceil", "clamp",
    "concatenate", "copy", "cos", "cummax", "cummin", "dynamic_slice", "dynamic_update_slice", "eq", "erf", "erfc", "floor",
    "gather", "ge", "gt", "is_finite", "le", "logistic", "lt", "name", "ne", "neg", "pad", "pbroadcast", "pmax", "pmin", "ppermute",
    "pvary", "reduce_max", "reduce_min", "reshape", "rev", "round", "select_n", "sign", "sin", "slice", "split", "sqrt", "squeeze",
    "stop_gradient", "tanh", "top_k", "transpose",
)  # fmt: skip
INDEPENDENT_OPERANDS = ("debug_callback", "debug_print", "optimization_barrier", "sort")
F32 = jnp.dtype(jnp.float32)


def in_fp32(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """Operands widened to fp32; the result stays fp32."""
    return bind(eqn, [o.cast(F32) if o.is_narrow else o for o in operands])


def summed_in_fp32(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """Accumulated in fp32 and rounded once to the type it was traced with."""
    return [r.cast(aval.dtype) for r, aval in zip(in_fp32(interpreter, eqn, operands), avals(eqn.outvars), strict=True)]


def in_widest(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """Every floating operand in the widest type among those that are not weak."""
    strong = {o.value.dtype for o in operands if o.is_float and not o.weak}
    if not strong:
        return as_traced(interpreter, eqn, operands)
    widest = functools.reduce(jnp.promote_types, strong)
    return bind(eqn, [o.cast(widest) for o in operands])


def broadcasting(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """In the widest type; a smaller operand is broadcast first. A product that waits for its bias gets it here."""
    if any(o.wide is not None for o in operands):
        return _add_bias(eqn, operands)
    shape = avals(eqn.outvars)[0].shape
    return in_widest(interpreter, eqn, [_broadcast(o, shape) for o in operands])


def broadcast_in_dim(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """Broadcast through fp32 and back, which changes no value, so that the sum of its gradient runs in fp32 and is rounded once."""
    source = operands[0]
    if not source.is_narrow or source.weak:
        return in_widest(interpreter, eqn, operands)
    (result,) = bind(eqn, [source.cast(F32), *operands[1:]])
    return [result.cast(source.value.dtype)]


def independent_operands(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """Operands that are not combined with one another: each keeps its type."""
    return bind(eqn, operands)


def convert(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """A conversion the function asks for; one that changed nothing when traced changes nothing now."""
    (operand,) = operands
    if operand.is_float and avals(eqn.invars)[0].dtype == eqn.params["new_dtype"]:
        return [operand]
    return bind(eqn, operands)


def product_in_compute(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """Matrix operands in the compute type; the result too, unless the function asked for a wider one or a bias follows."""
    if not all(o.is_float for o in operands):
        return as_traced(interpreter, eqn, operands)
    narrow = [o.cast(interpreter.compute) for o in operands]
    asked = eqn.params.get("preferred_element_type")
    traced = jnp.result_type(*(aval.dtype for aval in avals(eqn.invars)))
    result = asked if asked is not None and asked != traced else interpreter.compute
    return _product(interpreter, eqn, narrow, jnp.dtype(result))


def product_as_traced(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """Matrix operands in their own types; sums in fp32, rounded once, after the bias if one follows."""
    if not all(o.is_narrow for o in operands) or operands[0].value.dtype != operands[1].value.dtype:
        return as_traced(interpreter, eqn, operands)
    return _product(interpreter, eqn, operands, avals(eqn.outvars)[0].dtype)


def _product(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand], result: Any) -> list[Operand]:
    if result.itemsize < 4 and eqn.outvars[0] in interpreter.biased:
        return [Operand(_wide_product(eqn, result)(*(o.value for o in operands)), wide=result)]
    return bind(eqn, operands, preferred_element_type=result)


def _wide_product(eqn: Equation, narrow: Any) -> Any:
    """The product with fp32 results, whose tangents (and therefore the cotangents of its operands) are rounded to `narrow`.

    A plain fp32-result product would meet fp32 cotangents in the backward pass and put fp32 operands on the matrix unit.
    """

    def multiply(a: Any, b: Any, dtype: Any) -> Any:
        return bind_again(eqn, (a, b), preferred_element_type=dtype)[0]

    @jax.custom_jvp
    def wide_product(a: Any, b: Any) -> Any:
        return multiply(a, b, F32)

    def tangent(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        (a, b), (da, db) = primals, tangents
        terms = [(da, b)] * (not _is_zero(da)) + [(a, db)] * (not _is_zero(db))
        total = sum((multiply(x, y, narrow).astype(F32) for x, y in terms[1:]), multiply(*terms[0], narrow).astype(F32))
        return wide_product(a, b), total

    wide_product.defjvp(tangent, symbolic_zeros=True)
    return wide_product


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _add_bias(eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """The bias, rounded to the result's type, is added to the fp32 sums of the product; then one rounding."""
    result = next(o.wide for o in operands if o.wide is not None)
    wide = [o if o.wide is not None else o.cast(result).cast(F32) for o in operands]
    (total,) = bind(eqn, wide)
    return [Operand(total.value.astype(result))]


def _broadcast(operand: Operand, shape: tuple[int, ...]) -> Operand:
    """A narrow operand that is a scalar, or has axes of length one where the result is longer, broadcast as `broadcast_in_dim` does it."""
    value = operand.value
    if not operand.is_narrow or operand.weak or value.shape == shape:
        return operand
    wide = jax.lax.broadcast_in_dim(value.astype(F32), shape, tuple(range(value.ndim)))
    return Operand(wide.astype(value.dtype))


def call(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """The called jaxpr, inlined."""
    return interpreter.run(called(eqn), operands)


def remat(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """The same region recomputed in the backward pass, with its casts."""
    options = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    return list(map(Operand, jax.checkpoint(_region(interpreter, called(eqn), operands), **options)(*(o.value for o in operands))))


def shard_map(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """The same program for every shard, with its casts."""
    return list(map(Operand, bind_shard_map(eqn, _region(interpreter, eqn.params["jaxpr"], operands), [o.value for o in operands])))


def _region(interpreter: AutocastInterpreter, jaxpr: Any, operands: list[Operand]) -> Callable[..., tuple[Any, ...]]:
    """A jaxpr with its casts, as a function of arrays in the place of these operands."""

    def region(*values: Any) -> tuple[Any, ...]:
        return tuple(r.value for r in interpreter.run(jaxpr, [Operand(v, o.weak) for v, o in zip(values, operands, strict=True)]))

    return region


def scan(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """The same loop; its carries keep the types they were traced with."""
    jaxpr = eqn.params["jaxpr"]
    consts, carries, stacked = scan_parts(eqn, operands)
    carry_types = jaxpr.in_avals[len(consts) :][: len(carries)]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = interpreter.run(jaxpr, [*consts, *map(Operand, carry), *map(Operand, xs)])
        return _values(results[: len(carry)], carry_types), [r.value for r in results[len(carry) :]]

    carry, ys = bind_scan(eqn, body, _values(carries, carry_types), [o.value for o in stacked])
    return list(map(Operand, [*carry, *ys]))


def while_loop(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """The same loop; its carries keep the types they were traced with.

    A condition of several elements is a batch of loops: it runs as long as one of them does, and those that are done stay as they are.
    """
    p = eqn.params
    first, last = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry_types = p["body_jaxpr"].in_avals[p["body_nconsts"] :]

    batch_axes = p["cond_jaxpr"].out_avals[0].ndim
    choose = functools.reduce(lambda f, _: jax.vmap(f), range(batch_axes), jnp.where)

    def going(carry: list[Any]) -> Any:
        return interpreter.run(p["cond_jaxpr"], [*operands[:first], *map(Operand, carry)])[0].value

    def step(carry: list[Any]) -> list[Any]:
        return _values(interpreter.run(p["body_jaxpr"], [*operands[first:last], *map(Operand, carry)]), carry_types)

    def step_of_batch(carry: list[Any]) -> list[Any]:
        flags = going(carry)
        return [choose(flags, new, old) for new, old in zip(step(carry), carry, strict=True)]

    condition, body = (lambda carry: jnp.any(going(carry)), step_of_batch) if batch_axes else (going, step)
    return list(map(Operand, jax.lax.while_loop(condition, body, _values(operands[last:], carry_types))))


def cond(interpreter: AutocastInterpreter, eqn: Equation, operands: list[Operand]) -> list[Operand]:
    """The same branches; what they return has the types it was traced with."""
    index, *rest = operands

    def branch(closed: ClosedJaxpr) -> Any:
        return lambda *values: _values(
            interpreter.run(closed, [Operand(v, o.weak) for v, o in zip(values, rest, strict=True)]), closed.out_avals
        )

    branches = [branch(closed) for closed in eqn.params["branches"]]
    return list(map(Operand, jax.lax.switch(index.value, branches, *(o.value for o in rest))))


def _values(operands: list[Operand], avals: Any) -> list[Any]:
    return [o.cast(a.dtype).value for o, a in zip(operands, avals, strict=True)]


_CONTROL: dict[str, Rule] = {
    **dict.fromkeys(PLAIN_CALLS, call),
    **dict.fromkeys(RECOMPUTED_CALLS, remat),
    "scan": scan,
    "shard_map": shard_map,
    "while": while_loop,
    "cond": cond,
}
_SHARED: dict[str, Rule] = {
    **_CONTROL,
    **dict.fromkeys(BROADCASTING, broadcasting),
    "broadcast_in_dim": broadcast_in_dim,
}
RULES: dict[str, dict[str, Rule]] = {
    "list": {
        **dict.fromkeys(WIDEST, in_widest),
        **dict.fromkeys(FULL_PRECISION, in_fp32),
        **dict.fromkeys(INDEPENDENT_OPERANDS, independent_operands),
        **dict.fromkeys(PRODUCTS, product_in_compute),
        "convert_element_type": convert,
        **_SHARED,
    },
    "all": {
        **dict.fromkeys(SUMS, summed_in_fp32),
        **dict.fromkeys(PRODUCTS, product_as_traced),
        **_SHARED,
    },
}
