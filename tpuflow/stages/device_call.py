"""A call to the device as a JAX primitive, so that it can be differentiated, batched, and used inside plain JAX programs.

Every rule makes a new jaxpr from the called one and binds the primitive again with it, so the work stays on the device. The jvp rule
binds it twice: once for the values and what the tangents need of them, once for the tangents, which are linear; the transpose rule
turns the second into the call of the backward pass. Under `tpuflow.jit` the compiler inlines it; under plain `jax.jit` the host calls
the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.jaxprs.checks import checks_within
from tpuflow.jaxprs.compat import (
    ClosedJaxpr,
    Primitive,
    Tracer,
    ad,
    as_keys,
    at_host,
    axes_of,
    axis_name,
    batching,
    calls_host,
    io_callback,
    is_at_host,
    is_key,
    is_token,
    jaxpr_as_fun,
    mlir,
)
from tpuflow.jaxprs.shardings import specs_of
from tpuflow.jaxprs.versions import linearize
from tpuflow.lower.importers.jaxpr.importer import check_axes
from tpuflow.stages.staging import Target, run_jaxpr

CACHED = 512

device_call_p = Primitive("device_call")
device_call_p.multiple_results = True


def device_call(arguments: Sequence[Any], jaxpr: ClosedJaxpr, name: str, target: Target) -> list[Any]:
    """Call the device with a jaxpr, through whatever JAX transformations are under way. Tracers among its constants become arguments.

    Raises:
      UnsupportedPrimitiveError: it takes or gives tokens.
    """
    if any(map(is_token, (*jaxpr.in_avals, *jaxpr.out_avals))):
        raise UnsupportedPrimitiveError(
            f"{name}: it takes or gives tokens, and is called under jax.jit, grad, vmap or another transformation, where only arrays cross "
            "to the device. Make tokens (jax.lax.create_token) within the function, or call it outside."
        )
    if any(isinstance(c, Tracer) for c in jaxpr.consts):
        return device_call([*jaxpr.consts, *arguments], _with_constants_as_inputs(jaxpr), name, target)
    return device_call_p.bind(*arguments, jaxpr=jaxpr, name=name, target=target)


@device_call_p.def_impl
def _run(*arguments: Any, jaxpr: ClosedJaxpr, name: str, target: Target) -> list[Any]:
    return run_jaxpr(jaxpr, name, target, arguments)


@device_call_p.def_effectful_abstract_eval
def _types(*avals: Any, jaxpr: ClosedJaxpr, name: str, target: Target) -> tuple[list[Any], Any]:
    return list(jaxpr.out_avals), jaxpr.effects


checks_within(device_call_p, device_call)


# --- forward mode -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Linearized:
    """`forward`: inputs -> outputs and residuals. `tangent`: residuals and active tangents -> tangents of the inexact outputs."""

    forward: ClosedJaxpr
    tangent: ClosedJaxpr


@functools.lru_cache(CACHED)
def _linearize(jaxpr: ClosedJaxpr, active: tuple[bool, ...]) -> _Linearized:
    call = jaxpr_as_fun(jaxpr)
    trees: list[Any] = []

    def forward(*primals: Any) -> tuple[list[Any], list[Any]]:
        kept = [p for p, a in zip(primals, active, strict=True) if not a]

        def of_active(*moving: Any) -> list[Any]:
            return call(*_merge(active, moving, kept))

        outputs, linear = linearize(of_active, *(p for p, a in zip(primals, active, strict=True) if a))
        residuals, tree = jax.tree.flatten(linear)
        trees.append(tree)
        return outputs, residuals

    forward_jaxpr = jax.make_jaxpr(forward)(*specs_of(jaxpr.in_avals))
    residuals = specs_of(forward_jaxpr.out_avals[len(jaxpr.out_avals) :])

    def tangent(residuals: list[Any], tangents: list[Any]) -> list[Any]:
        results = jax.tree.unflatten(trees[0], residuals)(*tangents)
        return [t for t, aval in zip(results, jaxpr.out_avals, strict=True) if _is_inexact(aval)]

    moving = [s for s, a in zip(specs_of(jaxpr.in_avals), active, strict=True) if a]
    return _Linearized(forward_jaxpr, jax.make_jaxpr(tangent)(residuals, moving))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, name: str, target: Target) -> tuple[list[Any], list[Any]]:
    active = tuple(type(t) is not ad.Zero for t in tangents)
    rule = _linearize(jaxpr, active)
    results = device_call(primals, rule.forward, name, target)
    outputs, residuals = results[: len(jaxpr.out_avals)], results[len(jaxpr.out_avals) :]
    moving = [t for t, a in zip(tangents, active, strict=True) if a]
    moved = iter(device_call([*residuals, *moving], rule.tangent, f"{name}_tangent", target))
    zeros = [None if _is_inexact(o) else ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outputs]
    return outputs, [next(moved) if zero is None else zero for zero in zeros]


ad.primitive_jvps[device_call_p] = _jvp


# --- reverse mode -----------------------------------------------------------------------------------------------------


@functools.lru_cache(CACHED)
def _transposed(jaxpr: ClosedJaxpr, linear: tuple[bool, ...]) -> ClosedJaxpr:
    """(inputs that are not linear, cotangents of all outputs) -> cotangents of the linear inputs."""
    call = jaxpr_as_fun(jaxpr)
    specs = specs_of(jaxpr.in_avals)
    moving = [s for s, is_linear in zip(specs, linear, strict=True) if is_linear]

    def transpose(kept: list[Any], cotangents: list[Any]) -> list[Any]:
        return list(jax.linear_transpose(lambda *moved: call(*_merge(linear, moved, kept)), *moving)(cotangents))

    kept = [s for s, is_linear in zip(specs, linear, strict=True) if not is_linear]
    return jax.make_jaxpr(transpose)(kept, specs_of(jaxpr.out_avals))


def _transpose(cotangents: Sequence[Any], *arguments: Any, jaxpr: ClosedJaxpr, name: str, target: Target) -> list[Any]:
    linear = tuple(ad.is_undefined_primal(a) for a in arguments)
    kept = [a for a in arguments if not ad.is_undefined_primal(a)]
    whole = [ad.instantiate_zeros(c) for c in cotangents]
    backward = name.removesuffix("_tangent") + "_backward"
    found = iter(device_call([*kept, *whole], _transposed(jaxpr, linear), backward, target))
    return [next(found) if is_linear else None for is_linear in linear]


ad.primitive_transposes[device_call_p] = _transpose


# --- batching and plain jit -------------------------------------------------------------------------------------------


@functools.lru_cache(CACHED)
def _batched(jaxpr: ClosedJaxpr, axes: tuple[int | None, ...], size: int, axis_name: Any) -> ClosedJaxpr:
    specs = [_with_axis(s, axis, size) for s, axis in zip(specs_of(jaxpr.in_avals), axes, strict=True)]
    return jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes, axis_size=size, axis_name=axis_name))(*specs)


def _batch(
    axis: Any, arguments: Sequence[Any], axes: Sequence[Any], *, jaxpr: ClosedJaxpr, name: str, target: Target
) -> tuple[list[Any], list[int | None]]:
    """Over an axis that may have a name; what is not mapped stays so, unless the function asks for the axis by that name."""
    plain, named = tuple(None if a is None else int(a) for a in axes), axis_name(axis)
    if all(a is None for a in plain) and named not in axes_of(jaxpr.effects):
        results = device_call(arguments, jaxpr, name, target)
        return results, [None] * len(results)
    results = device_call(arguments, _batched(jaxpr, plain, axis.size, named), name, target)
    return results, [0] * len(results)


batching.fancy_primitive_batchers[device_call_p] = _batch


def _from_host(*arguments: Any, jaxpr: ClosedJaxpr, name: str, target: Target) -> list[Any]:
    """Inside a plain jitted program: random keys cross as their words."""
    check_axes(jaxpr, name)
    inputs, outputs = jaxpr.in_avals, jaxpr.out_avals

    def host(*words: Any) -> list[np.ndarray]:
        arguments = [as_keys(w, aval) if is_key(aval) else jnp.asarray(w) for w, aval in zip(words, inputs, strict=True)]
        results = run_jaxpr(jaxpr, name, target, arguments)
        return [np.asarray(jax.random.key_data(r) if is_key(aval) else r) for r, aval in zip(results, outputs, strict=True)]

    words = [jax.random.key_data(a) if is_key(aval) else a for a, aval in zip(arguments, inputs, strict=True)]
    shapes = [jax.eval_shape(jax.random.key_data, s) if is_key(s) else s for s in specs_of(outputs)]
    call = io_callback if calls_host(jaxpr) else jax.pure_callback  # what prints must run, even if nobody uses its results
    results = call(host, shapes, *words)
    return [as_keys(r, aval) if is_key(aval) else r for r, aval in zip(results, outputs, strict=True)]


mlir.register_lowering(device_call_p, mlir.lower_fun(_from_host, multiple_results=True))


def _in_place(*arguments: Any, jaxpr: ClosedJaxpr, name: str, target: Target) -> list[Any]:
    """The lowering for TPUs, which is only printed, or partitioned and then compiled by us: the called jaxpr, inlined."""
    return jaxpr_as_fun(jaxpr)(*arguments)


mlir.register_lowering(device_call_p, mlir.lower_fun(_in_place, multiple_results=True), platform="tpu")


# --- jaxprs and types -------------------------------------------------------------------------------------------------


def _with_constants_as_inputs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with its constants as first inputs."""
    call = jaxpr_as_fun
    count = len(closed.consts)

    def with_inputs(*values: Any) -> list[Any]:
        return call(ClosedJaxpr(closed.jaxpr, values[:count]))(*values[count:])

    return jax.make_jaxpr(with_inputs)(*specs_of(list(map(jax.typeof, closed.consts))), *specs_of(closed.in_avals))


def _merge(mask: Sequence[bool], chosen: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """One list: an element of `chosen` where the mask is true, of `others` where it is not."""
    yes, no = iter(chosen), iter(others)
    return [next(yes) if m else next(no) for m in mask]


def _with_axis(spec: jax.ShapeDtypeStruct, axis: int | None, size: int) -> jax.ShapeDtypeStruct:
    if axis is None:
        return spec
    batched = jax.ShapeDtypeStruct((*spec.shape[:axis], size, *spec.shape[axis:]), spec.dtype)
    return at_host(batched) if is_at_host(spec) else batched


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
