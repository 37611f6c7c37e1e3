"""Cases of factorisations and solvers of matrices. What is unique up to signs, or up to an order, is judged by what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as scipy_linalg
from jax import lax

from tests.cases.case import F32, Arg, Case


def _solve(**form: bool) -> Callable[[Any, Any], Any]:
    return lambda a, y: lax.linalg.triangular_solve(a, y, **form)


def _transposed(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


def _from_eigenvectors(a: Any) -> Any:
    values, vectors = jnp.linalg.eigh(a)
    return values, (vectors * values[..., None, :]) @ _transposed(vectors), _transposed(vectors) @ vectors


def _from_singular_vectors(a: Any) -> Any:
    u, s, v = jnp.linalg.svd(a, full_matrices=False)
    return s, (u * s[..., None, :]) @ v, _transposed(u) @ u, v @ _transposed(v)


def _case(name: str, fn: Callable[..., Any], *args: Arg, grad: bool = False, platform: str = "tpu") -> Case:
    return Case(name, fn, args, grad, "composed", platform)


def _definite(*shape: int) -> Arg:
    return Arg(shape, F32, "definite")


_SOLVERS = [
    _case(f"triangular_solve-{'left' if left else 'right'}-{'lower' if lower else 'upper'}-{'turned' if turned else 'as-it-is'}",
          _solve(left_side=left, lower=lower, transpose_a=turned, unit_diagonal=lower == turned), _definite(5, 5),
          Arg((5, 3) if left else (3, 5)), grad=True)
    for left in (True, False) for lower in (True, False) for turned in (True, False)
] + [
    _case("triangular_solve-blocks", _solve(left_side=True, lower=True), _definite(139, 139), Arg((139, 3))),
    _case("triangular_solve-batch", _solve(left_side=True, lower=True), _definite(2, 3, 4, 4), Arg((2, 3, 4, 5))),
    _case("triangular_solve-lapack", _solve(left_side=False, lower=False, transpose_a=True), _definite(7, 7), Arg((3, 7)), platform="cpu"),
    _case("solve", jnp.linalg.solve, _definite(7, 7), Arg((7, 2)), grad=True),
    _case("solve-lapack", jnp.linalg.solve, _definite(7, 7), Arg((7, 2)), platform="cpu"),
    _case("inv", jnp.linalg.inv, _definite(3, 5, 5), grad=True),
    _case("det", lambda a: (jnp.linalg.det(a), jnp.linalg.slogdet(a)), _definite(3, 4, 4), grad=True),
    _case("cho_solve", lambda a, y: scipy_linalg.cho_solve(scipy_linalg.cho_factor(a), y), _definite(6, 6), Arg((6,)), grad=True),
    _case("custom_linear_solve", lambda a, y: jax.scipy.sparse.linalg.cg(lambda x: a @ x, y, maxiter=8)[0], _definite(5, 5), Arg((5,))),
    _case("tridiagonal_solve", lambda d, y: lax.linalg.tridiagonal_solve(d * 0.1, d, d * 0.2, y), Arg((6,), F32, "above_one"), Arg((6, 3))),
    _case("lstsq", lambda a, y: jnp.linalg.lstsq(a, y)[0], Arg((9, 4)), Arg((9, 2))),
]  # fmt: skip
_FACTORS = [
    _case("cholesky", jnp.linalg.cholesky, _definite(2, 3, 5, 5), grad=True),
    _case("cholesky-upper", lambda a: jnp.linalg.cholesky(a, upper=True), _definite(9, 9)),
    _case("cholesky-blocks", jnp.linalg.cholesky, _definite(150, 150)),
    _case("cholesky-not-definite", lambda a: jnp.linalg.cholesky(a * jnp.array([1.0, -1.0])[:, None, None]), _definite(2, 4, 4)),
    _case("cholesky-lapack", jnp.linalg.cholesky, _definite(9, 9), platform="cpu"),
    _case("cholesky-of-one", jnp.linalg.cholesky, _definite(1, 1)),
    _case("lu", lax.linalg.lu, Arg((7, 5)), grad=True),
    _case("lu-wide", lax.linalg.lu, Arg((2, 4, 9))),
    _case("lu-blocks", lambda a: lax.linalg.lu(a * 0.1 + jnp.eye(140, 133, -9) * 3), Arg((140, 133))),
    _case("lu-singular", lambda a: lax.linalg.lu(jnp.concatenate((a, a), 1)), Arg((3, 2), F32, "ties")),
    _case("lu-lapack", lax.linalg.lu, Arg((6, 6)), platform="cpu"),
    _case("qr", jnp.linalg.qr, Arg((2, 7, 5)), grad=True),
    _case("qr-wide", jnp.linalg.qr, Arg((4, 6))),
    _case("qr-complete", lambda a: jnp.linalg.qr(a, mode="complete"), Arg((7, 3))),
    _case("qr-blocks", lambda a: jnp.linalg.qr(a, mode="r"), Arg((150, 141))),
    _case("qr-lapack", jnp.linalg.qr, Arg((5, 5)), platform="cpu"),
    _case("eigh", _from_eigenvectors, _definite(2, 5, 5)),
    _case("eigh-even", _from_eigenvectors, _definite(12, 12)),
    _case("eigh-lapack", _from_eigenvectors, _definite(6, 6), platform="cpu"),
    _case("eigh-of-two", _from_eigenvectors, _definite(2, 2)),
    _case("eigvalsh-gradient", lambda a: jnp.linalg.eigvalsh(a), _definite(4, 4), grad=True),
    _case("svd", _from_singular_vectors, Arg((7, 5))),
    _case("svd-wide", _from_singular_vectors, Arg((2, 3, 6))),
    _case("svd-values", lambda a: jnp.linalg.svd(a, compute_uv=False), Arg((5, 5)), grad=True),
    _case("norms", lambda a: (jnp.linalg.norm(a, 2), jnp.linalg.norm(a, "nuc"), jnp.linalg.cond(a)), Arg((5, 4))),
    _case("pinv", jnp.linalg.pinv, Arg((6, 4))),
    _case("matrix-functions", lambda a: (scipy_linalg.expm(a / 8), scipy_linalg.polar(a)[1]), _definite(4, 4)),
]  # fmt: skip
CASES = [*_SOLVERS, *_FACTORS]
