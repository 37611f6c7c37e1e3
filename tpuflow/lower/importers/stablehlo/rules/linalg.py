"""Rules of factorisations and solvers of matrices: StableHLO's, the custom calls that TPUs have, and LAPACK's, which JAX has for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.importers.registry import Results
from tpuflow.lower.importers.stablehlo.walk import COMPLEX, RULES
from tpuflow.lower.operations.complex import Number
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.linalg.cholesky import cholesky, triangular_solve
from tpuflow.lower.operations.linalg.householder import geqrf, householder_product
from tpuflow.lower.operations.linalg.jacobi import eigh
from tpuflow.lower.operations.linalg.lu import lu


def _triangular_solve(b: Builder, a: Number, y: Number, *, left_side: bool, lower: bool, unit_diagonal: bool, transpose_a: str) -> Number:
    return triangular_solve(
        b, a, y, left_side=left_side, lower=lower, transpose_a=transpose_a in ("TRANSPOSE", "ADJOINT"),
        conjugate_a=transpose_a == "ADJOINT", unit_diagonal=unit_diagonal,
    )  # fmt: skip


def _eigh(b: Builder, a: Number, *, backend_config: str) -> tuple[Number, Value]:
    """backend_config: "lower,sort_eigenvalues,max_sweeps,tolerance", such as "1,1,100,1e-6"."""
    try:
        lower, is_sorted, sweeps, tolerance = backend_config.split(",")
        found = int(lower), int(is_sorted), int(sweeps), float(tolerance)
    except ValueError:
        raise UnsupportedForm(f"its backend_config is {backend_config!r}; expected four numbers such as '1,1,100,1e-6'") from None
    return eigh(b, a, lower=bool(found[0]), sort_eigenvalues=bool(found[1]), max_sweeps=found[2], tolerance=found[3])


for _rules in (RULES, COMPLEX):
    _rules.enter({
        "stablehlo.cholesky": cholesky, "stablehlo.triangular_solve": _triangular_solve, "custom_call Eigh": _eigh,
        "custom_call Qr": geqrf, "custom_call ProductOfElementaryHouseholderReflectors": householder_product,
        "custom_call LuDecomposition": lu,
    })  # fmt: skip

# --- LAPACK: letters are given as their codes, and each routine says whether it found something wrong --------------------

Config = Mapping[str, int]


def _is(config: Config, name: str, letter: str) -> bool:
    return config.get(name) == ord(letter)


def _potrf(b: Builder, a: Number, *, config: Config) -> tuple[Number, Value]:
    factor = cholesky(b, a, lower=_is(config, "uplo", "L"))
    return factor, _nothing_wrong(b, a)


def _trsm(b: Builder, a: Number, y: Number, *, config: Config) -> Number:
    return triangular_solve(
        b, a, y, left_side=_is(config, "side", "L"), lower=_is(config, "uplo", "L"), transpose_a=not _is(config, "trans_x", "N"),
        conjugate_a=_is(config, "trans_x", "C"), unit_diagonal=_is(config, "diag", "U"),
    )  # fmt: skip


def _getrf(b: Builder, a: Number) -> tuple[Number, Value, Value]:
    """Rows are counted from 1."""
    factors, pivots, _ = lu(b, a)
    return factors, b.add(pivots, 1), _nothing_wrong(b, a)


def _evd(b: Builder, a: Number, *, config: Config) -> tuple[Number, Value, Value]:
    return (*eigh(b, a, lower=_is(config, "uplo", "L")), _nothing_wrong(b, a))


def _nothing_wrong(b: Builder, a: Number) -> Value:
    """LAPACK's `info`, always 0, one per matrix: failures show as NaN in the results."""
    return b.full(TensorType(S32, a.shape[:-2]), 0)


_LAPACK: Mapping[str, Callable[..., Results]] = {
    "sgetrf": _getrf, "cgetrf": _getrf, "sgeqrf": geqrf, "cgeqrf": geqrf, "sorgqr": householder_product, "cungqr": householder_product,
}  # fmt: skip
_CONFIGURED: Mapping[str, Callable[..., Results]] = {
    "spotrf": _potrf, "cpotrf": _potrf, "strsm": _trsm, "ctrsm": _trsm, "ssyevd": _evd, "cheevd": _evd,
}  # fmt: skip
_TABLES = {"s": RULES, "c": COMPLEX}
"""The tables of rules for real and complex matrices, by the first letter of LAPACK's names."""
for _name, _rule in _LAPACK.items():
    _TABLES[_name[0]].enter({f"custom_call lapack_{_name}_ffi": _rule})
for _name, _rule in _CONFIGURED.items():
    _TABLES[_name[0]].enter({f"custom_call lapack_{_name}_ffi": _rule}, **{"mhlo.backend_config": "config"})
