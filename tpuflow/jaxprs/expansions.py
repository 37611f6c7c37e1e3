"""Decompositions of primitives into simpler ones that are JAX's own, such as those of its random generators (JAX 0.8 to 0.10)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import core, custom_derivatives
from jax._src.lax import lax, linalg, special
from jax._src.lax.control_flow import solves
from jax._src.tpu.linalg import eigh as tpu_eigh
from jax._src.tpu.linalg import svd as tpu_svd

from tpuflow.jaxprs import versions
from tpuflow.jaxprs.compat import ClosedJaxpr, as_keys


def _vmapped(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    return functools.reduce(lambda f, _: jax.vmap(f), range(times), function)


def _key_aval(aval: Any) -> Any:
    return core.physical_aval(aval)


def _expand_random_bits(keys: Any, *, bit_width: int, shape: tuple[int, ...]) -> ClosedJaxpr:
    implementation = keys.dtype._impl
    bits = _vmapped(lambda k: implementation.random_bits(k, bit_width, shape), keys.ndim)
    return jax.make_jaxpr(bits)(_key_aval(keys))


def _expand_random_split(keys: Any, *, shape: tuple[int, ...]) -> ClosedJaxpr:
    implementation = keys.dtype._impl
    return jax.make_jaxpr(_vmapped(lambda k: implementation.split(k, shape), keys.ndim))(_key_aval(keys))


def _expand_random_fold_in(keys: Any, data: Any) -> ClosedJaxpr:
    fold_in = versions.iterated_vmap_binary_bcast(keys.shape, data.shape, keys.dtype._impl.fold_in)
    return jax.make_jaxpr(fold_in)(_key_aval(keys), data)


def _expand_random_seed(seeds: Any, *, impl: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(_vmapped(impl.seed, seeds.ndim))(seeds)


def _expand_random_gamma(keys: Any, a: Any, *, log_space: bool) -> ClosedJaxpr:
    def draw(words: Any, a: Any) -> Any:
        return versions.gamma(as_keys(words, keys), a, log_space=log_space, use_vmap=True)

    return jax.make_jaxpr(draw)(_key_aval(keys), a)


def _expand_special(function: Callable[..., Any]) -> Callable[..., ClosedJaxpr]:
    """An expansion of a special function that JAX writes with arithmetic and loops, computed in f32."""

    def expand(*avals: Any, **params: Any) -> ClosedJaxpr:
        def wide(*args: Any) -> Any:
            shape = np.broadcast_shapes(*(a.shape for a in args))
            alike = [jax.numpy.broadcast_to(a, shape).astype(np.float32) for a in args]
            return function(*alike).astype(avals[-1].dtype)

        return jax.make_jaxpr(wide)(*avals)

    return expand


def _with_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, dtype=np.dtype(np.float32))


def _traced(function: Callable[..., Any]) -> Callable[..., ClosedJaxpr]:
    """An expansion that is a function of the operands, with the parameters as keywords."""
    return lambda *avals, **params: jax.make_jaxpr(functools.partial(function, **params))(*avals)


def divided_spectrum(a: Any, *, algorithm: Any, subset_by_index: Any, **params: Any) -> ClosedJaxpr | None:
    """The jaxpr of `eigh` for larger matrices, and for some of the eigenvalues; None where Jacobi's rotations take the whole matrix."""
    n = a.shape[-1]
    whole = subset_by_index is None or subset_by_index == (0, n)
    if algorithm == linalg.EighImplementation.JACOBI or (n <= _LARGEST_FOR_JACOBI and whole):
        return None
    return _traced(tpu_eigh._eigh_qdwh_impl)(a, subset_by_index=subset_by_index, **params)


_LARGEST_FOR_JACOBI = 256
"""As in `jax._src.tpu.linalg.eigh`."""


def _expand_svd(a: Any, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any, algorithm: Any) -> ClosedJaxpr:
    if 0 in a.shape[-2:]:
        return _traced(linalg._empty_svd)(a, full_matrices=full_matrices, compute_uv=compute_uv)
    return _traced(tpu_svd._svd_tpu)(a, full_matrices=full_matrices, compute_uv=compute_uv, subset_by_index=subset_by_index)


def _expand_linear_solve(*avals: Any, jaxprs: Any, const_lengths: Any) -> ClosedJaxpr:
    return _traced(solves._custom_linear_solve_impl)(*avals, jaxprs=jaxprs, const_lengths=const_lengths)


COMPLEX_EXPANSIONS: dict[str, Callable[..., ClosedJaxpr]] = {"sin": _traced(lax._sin_complex), "cos": _traced(lax._cos_complex)}
"""The decompositions of primitives whose operands are complex."""
EXPANSIONS: dict[str, Callable[..., ClosedJaxpr]] = {
    **{primitive: _traced(lowering) for primitive, lowering in versions.LOWERINGS.items()},
    "random_bits": _expand_random_bits,
    "random_split": _expand_random_split,
    "random_fold_in": _expand_random_fold_in,
    "random_seed": _expand_random_seed,
    "random_gamma": _expand_random_gamma,
    "igamma": _expand_special(_with_dtype(special.igamma_impl)),
    "igammac": _expand_special(_with_dtype(special.igammac_impl)),
    "igamma_grad_a": _expand_special(_with_dtype(special.igamma_grad_a_impl)),
    "random_gamma_grad": _expand_special(_with_dtype(special.random_gamma_grad_impl)),
    "regularized_incomplete_beta": _expand_special(_with_dtype(special.regularized_incomplete_beta_impl)),
    "bessel_i0e": _expand_special(special.bessel_i0e_impl),
    "custom_linear_solve": _expand_linear_solve,
    "linear_call": _traced(custom_derivatives._linear_call_impl),
    "ragged_dot_general": _traced(lax._ragged_dot_general_impl),
    "remat_opt": _traced(custom_derivatives._remat_opt_impl),
    "lu_pivots_to_permutation": _traced(linalg._generic_lu_pivots_to_permutation),
    "qr": _traced(linalg._qr_lowering),
    "svd": _expand_svd,
    "tridiagonal_solve": _traced(linalg._tridiagonal_solve_jax),
}
"""Primitives that JAX's own code writes in terms of others: primitive -> function of the operand types and parameters -> jaxpr.
Matrices are factored as JAX has it for TPUs.

Traced, never run: the random bits are JAX's by construction."""
