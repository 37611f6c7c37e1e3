"""Cases of complex numbers and Fourier transforms; their arguments and results are real and imaginary parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.fft as scipy_fft
import jax.scipy.linalg as scipy_linalg
import jax.scipy.signal as scipy_signal
import numpy as np
from jax import lax

from tests.cases.case import F32, Arg, Case


def _parts(results: Any) -> Any:
    return jax.tree.map(lambda x: (x.real, x.imag) if jnp.iscomplexobj(x) else x, results)


def _of(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of a complex array as one of its parts."""
    return lambda x, y: _parts(fn(lax.complex(x, y)))


def _case(
    name: str,
    fn: Callable[[Any], Any],
    shape: tuple[int, ...] = (7, 9),
    *,
    grad: bool = True,
    domain: str = "normal",
    platform: str = "tpu",
) -> Case:
    """Lowered as for TPUs: for CPUs JAX makes three convolutions of a complex one."""
    return Case(f"complex-{name}", _of(fn), (Arg(shape, F32, domain),) * 2, grad, "composed", platform)


def _transform(name: str, fn: Callable[[Any], Any], *shape: int, grad: bool = False) -> Case:
    return Case(f"fft-{name}", _of(fn), (Arg(shape),) * 2, grad, "composed")


def _real_transform(name: str, fn: Callable[[Any], Any], *shape: int, grad: bool = False) -> Case:
    return Case(f"fft-{name}", lambda x: _parts(fn(x)), (Arg(shape),), grad, "composed")


def _recurrence(z: Any) -> Any:
    return lax.scan(lambda h, row: (h * row / (1 + jnp.abs(row)) + 1j, h), z[0], z)


def _join(x: Any, y: Any) -> Any:
    """Associative, with 0 as identity."""
    return x + y + x * y


def _by_function(z: Any) -> Any:
    """Reductions of everything that is no sum, whole and windowed, of one array and of two."""
    zero, one = np.complex64(0), np.complex64(1)
    return (
        lax.reduce(z, zero, _join, (0,)),
        lax.reduce(z, np.complex64(2j), lambda x, y: x + y, (1,)),
        lax.reduce((z, z.real), (zero, np.float32(0)), lambda x, y: (_join(x[0], y[0]), x[1] + y[1]), (0, 1)),
        lax.reduce_window(z, zero, _join, (2, 3), (1, 2), "SAME"),
        lax.reduce_window(z, one, lax.mul, (2, 2), (1, 1), "VALID"),
        lax.reduce_window(z, np.complex64(1 - 1j), lambda x, y: x + y, (3, 1), (1, 1), "VALID", window_dilation=(1, 2)),
    )


def _greatest(z: Any) -> Any:
    """The greatest and the least by real part, then imaginary part: of windows, and where entries are written more than once."""
    z, rows, infinite = jnp.round(z), jnp.array([0, 2, 2]), complex(np.inf, np.inf)
    return (
        z.at[rows].max(z[:3]),
        z.at[rows].min(z[:3]),
        lax.reduce_window(z, np.complex64(-infinite), lax.max, (1, 3), (1, 1), "VALID"),
        lax.reduce_window(z, np.complex64(infinite), lax.min, (2, 3), (1, 2), "SAME"),
    )


def _triangular_systems(z: Any) -> Any:
    """In every form, of a matrix that is far from singular, whose other triangle is not read."""
    forms = itertools.product((False, True), (False, True), ((False, False), (True, False), (True, True)), (False, True))
    a = jnp.where(jnp.eye(7, dtype=bool), 3 + z, z / 7)
    return [
        lax.linalg.triangular_solve(a, z, left_side=left, lower=lower, transpose_a=t, conjugate_a=c, unit_diagonal=unit)
        for left, lower, (t, c), unit in forms
    ]


def _adjoint(z: Any) -> Any:
    return jnp.conj(jnp.swapaxes(z, -1, -2))


def _definite(z: Any) -> Any:
    return z @ _adjoint(z) + z.shape[-1] * jnp.eye(z.shape[-1])


def _of_hermitian(z: Any) -> Any:
    """Eigenvalues, and what does not depend on the angles of the eigenvectors."""
    values, vectors = jnp.linalg.eigh((z + _adjoint(z)) / z.shape[-1], symmetrize_input=False)
    return values, (vectors * values[..., None, :]) @ _adjoint(vectors), _adjoint(vectors) @ vectors


def _of_singular(z: Any) -> Any:
    u, s, v = jnp.linalg.svd(z, full_matrices=False)
    return s, (u * s[..., None, :]) @ v, _adjoint(u) @ u, v @ _adjoint(v)


def _until_large(z: Any) -> Any:
    return lax.while_loop(lambda w: jnp.abs(w).max() < 50, lambda w: w * (1 + 1j), z)


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": jnp.abs, "angle": jnp.angle, "conj": jnp.conj, "exp": jnp.exp, "log": jnp.log, "log1p": jnp.log1p, "expm1": jnp.expm1,
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt, "sign": jnp.sign, "square": jnp.square, "logistic": jax.nn.sigmoid, "reciprocal": jnp.reciprocal,
    "arcsin": jnp.arcsin, "arccos": jnp.arccos, "arctan": jnp.arctan, "arcsinh": jnp.arcsinh, "arccosh": jnp.arccosh,
    "arctanh": jnp.arctanh,
}  # fmt: skip
_FAR = np.array([-100, 100, 30, -30, 1e-4, -1e-4, 0.2, 0, 2], np.float32)
"""Where exponentials overflow, and where adding one loses what matters."""


def _far(z: Any) -> Any:
    """Functions where their plainest formulas have no digits, or none that are finite."""
    across, along = lax.complex(z.real, 0 * z.real + _FAR), lax.complex(0 * z.real + _FAR, z.imag)
    return jnp.tan(across), jax.nn.sigmoid(along), jnp.log1p(lax.complex(z.real * 1e-4, z.imag * 1e-4)) * 1e4


_ARITHMETIC = [
    *(_case(name, fn) for name, fn in _FUNCTIONS.items()),
    _case("arithmetic", lambda z: (z * z[::-1] + 1j) / (z.T.reshape(z.shape) + 4) - 2),
    _case("by-parts", lambda z: (z.real * 2, z.imag + z.real)),
    _case("powers", lambda z: (z**3, z**-2, z**2.5, (z + 3) ** z)),
    _case("matmul", lambda z: z @ z.T),
    _case("matmul-with-real", lambda z: jnp.arange(21.0, dtype=F32).reshape(3, 7) @ z),
    _case("sums", lambda z: (z.sum(0), z.mean(), jnp.cumsum(z, 1))),
    _case("products", lambda z: (jnp.prod(z, 1), jnp.cumprod(z, 0)), (4, 5)),
    _case("comparisons", lambda z: (z == z.conj(), z != z[0], jnp.isfinite(z), jnp.isnan(z), z.astype(bool)), grad=False, domain="edges"),
    _case("extremes", lambda z: (jnp.maximum(z, 1j), lax.min(z, z[::-1]), z.max(1), jnp.min(jnp.round(z), 0)), grad=False),
    _case("running-extremes", lambda z: (lax.cummax(z, 0), lax.cummin(jnp.round(z), 1, reverse=True)), grad=False),
    _case("far-and-near", _far, (3, 9), grad=False),
    _case("angle-of-two", lambda z: lax.atan2(z, z[::-1] + 2), grad=False),
    _case("extremes-of-lanes", lambda z: jax.vmap(lambda r: (lax.pmax(r, "i"), lax.pmin(r, "i")), axis_name="i")(z), grad=False),
    _case("bitcast", lambda z: lax.bitcast_convert_type(z, jnp.complex64) * 1, grad=False),
    _case("moves", lambda z: jnp.concatenate((jnp.pad(z[::-1, 1:], 1).T[:3], jnp.where(z.real > 0, z, 1j)[:3]), 1)),
    _case("indices", lambda z: (z[jnp.array([0, 2, 9])], z.at[1].set(2j), z.at[jnp.array([1, 1])].add(1j), z[jnp.arange(2) - 1, 3])),
    _case("reductions-by-a-function", _by_function, (4, 6), grad=False),
    _case("greatest-and-least", _greatest, (4, 6), grad=False),
    _case("power-of-two", jnp.exp2),
    _case("changed-entries", lambda z: (z.at[1].apply(jnp.exp), z.at[jnp.array([0, 2, 0]), 1].apply(lambda w: w * w + 1j)), grad=False),
    _case("sorted", lambda z: (jnp.sort(z, 0), jnp.argsort(jnp.round(z), 1), lax.sort((z.real > 0, z), num_keys=2)), grad=False),
    _case("triangular-systems", _triangular_systems, (7, 7), grad=False),
    _case("multiplied-entries", lambda z: z.at[jnp.array([1, 3, 1])].multiply(z[:3]), grad=False),
    _case("multiplied-slice", lambda z: (z.at[:, 1:4].multiply(2j), z.at[2].multiply(z[0])), grad=False),
    _case("convolution", lambda z: jnp.convolve(z[0], z[1, :4])),
    _case("scan", _recurrence),
    _case("while", _until_large, grad=False),
    _case("cond", lambda z: lax.cond(z.real.sum() > 0, lambda w: w * 1j, lambda w: w - 1, z)),
    _case("barrier", lambda z: lax.optimization_barrier(z) * 2),
    _case("checkpoint", jax.checkpoint(lambda z: jnp.exp(jnp.sin(z)))),
    _case("constant", lambda z: z * np.exp(1j * np.arange(9)).astype(np.complex64)),
]
_MATRICES = [
    _case("cholesky", lambda z: jnp.linalg.cholesky(_definite(z)), (2, 7, 7)),
    _case("cholesky-upper", lambda z: jnp.linalg.cholesky(_definite(z), upper=True), (7, 7), grad=False),
    _case("cholesky-blocks", lambda z: jnp.linalg.cholesky(_definite(z)), (140, 140), grad=False),
    _case(
        "cholesky-not-definite", lambda z: jnp.linalg.cholesky(_definite(z) * jnp.array([1.0, -1.0])[:, None, None]), (2, 4, 4), grad=False
    ),
    _case("cholesky-lapack", lambda z: jnp.linalg.cholesky(_definite(z)), (6, 6), grad=False, platform="cpu"),
    _case("triangular-systems-lapack", _triangular_systems, (7, 7), grad=False, platform="cpu"),
    _case(
        "triangular-blocks",
        lambda z: lax.linalg.triangular_solve(_definite(z), z[:, :3], left_side=True, lower=True),
        (139, 139),
        grad=False,
    ),
    _case("lu", lax.linalg.lu, (7, 5)),
    _case("lu-wide", lax.linalg.lu, (2, 4, 9), grad=False),
    _case("lu-blocks", lambda z: lax.linalg.lu(z * 0.1 + jnp.eye(140, 133, -9) * 3j), (140, 133), grad=False),
    _case("lu-lapack", lax.linalg.lu, (6, 6), grad=False, platform="cpu"),
    _case("solve", lambda z: jnp.linalg.solve(_definite(z), z[:, :2]), (6, 6)),
    _case("solve-lapack", lambda z: jnp.linalg.solve(_definite(z), z[:, :2]), (6, 6), grad=False, platform="cpu"),
    _case("inverse", lambda z: (jnp.linalg.inv(_definite(z)), jnp.linalg.det(z), jnp.linalg.slogdet(z)), (3, 4, 4), grad=False),
    _case("qr", jnp.linalg.qr, (2, 7, 5)),
    _case("qr-wide", jnp.linalg.qr, (4, 6), grad=False),
    _case("qr-complete", lambda z: jnp.linalg.qr(z, mode="complete"), (7, 3), grad=False),
    _case("qr-blocks", lambda z: jnp.linalg.qr(z, mode="r"), (150, 141), grad=False),
    _case("qr-of-one", jnp.linalg.qr, (1, 1), grad=False),
    _case("qr-lapack", jnp.linalg.qr, (5, 5), grad=False, platform="cpu"),
    _case("eigh", _of_hermitian, (2, 5, 5), grad=False),
    _case("eigh-even", _of_hermitian, (12, 12), grad=False),
    _case("eigh-of-one", _of_hermitian, (1, 1), grad=False),
    _case("eigh-of-two", _of_hermitian, (2, 2), grad=False),
    _case("eigh-lapack", _of_hermitian, (6, 6), grad=False, platform="cpu"),
    _case("eigvalsh", lambda z: jnp.linalg.eigvalsh(_definite(z)), (4, 4)),
    _case("svd", _of_singular, (7, 5), grad=False),
    _case("svd-wide", _of_singular, (2, 3, 6), grad=False),
    _case("svd-values", lambda z: jnp.linalg.svd(z, compute_uv=False), (5, 5), grad=False),
    _case("matrix-functions", lambda z: (jnp.linalg.pinv(z[:, :3]), jnp.linalg.norm(z, 2), scipy_linalg.polar(z)[1]), (4, 4), grad=False),
]
_TRANSFORMS = [
    *(_transform(f"{n}", lambda z: (jnp.fft.fft(z), jnp.fft.ifft(z)), 3, n) for n in (1, 2, 5, 128, 130, 131, 256, 262)),
    *(_real_transform(f"real-{n}", lambda x, n=n: (jnp.fft.rfft(x), jnp.fft.irfft(jnp.fft.rfft(x), n=n)), 3, n) for n in (1, 7, 8, 144)),
    _transform("of-three-factors", lambda z: jnp.fft.fft(z, norm="ortho"), 1, 13**3),
    _transform("gradient", lambda z: jnp.fft.ifft(jnp.fft.fft(z) * 2), 3, 6, grad=True),
    _real_transform("real-gradient", jnp.fft.rfft, 3, 6, grad=True),
    _transform("of-two-axes", lambda z: (jnp.fft.fft2(z), jnp.fft.ifft2(z), jnp.fft.irfft2(z)), 2, 6, 4),
    _real_transform("real-of-two-axes", jnp.fft.rfft2, 5, 6, grad=True),
    _real_transform("of-three-axes", jnp.fft.rfftn, 3, 4, 5),
    _transform("of-a-front-axis", lambda z: jnp.fft.fftshift(jnp.fft.fft(z, axis=0)), 6, 5),
    _transform("hermitian", jnp.fft.hfft, 5),
    _transform("padded", lambda z: jnp.fft.fft(z, n=12), 9),
    _real_transform("cosine", scipy_fft.dct, 3, 8),
    _real_transform("convolution", lambda x: scipy_signal.fftconvolve(x, x[:5]), 40, grad=True),
    _real_transform("welch", lambda x: scipy_signal.welch(x, nperseg=16)[1], 64),
    _real_transform("spectrogram", lambda x: scipy_signal.stft(x, nperseg=16)[2], 64),
]
CASES = [*_ARITHMETIC, *_MATRICES, *_TRANSFORMS]
