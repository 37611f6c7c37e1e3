"""Rules of factorisations and solvers of matrices: StableHLO's, the custom calls that TPUs have, and LAPACK's, which JAX has for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.importers.registry import Results
from tpuflow.lower.importers.stablehlo.walk import RULES
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.linalg.cholesky import cholesky, triangular_solve
from tpuflow.lower.operations.linalg.householder import geqrf, householder_product
from tpuflow.lower.operations.linalg.jacobi import eigh
from tpuflow.lower.operations.linalg.lu import lu

RULES.enter({"stablehlo.cholesky": cholesky})
RULES.enter({
    "custom_call Qr": geqrf, "custom_call ProductOfElementaryHouseholderReflectors": householder_product,
    "custom_call LuDecomposition": lu,
})  # fmt: skip


@RULES.lowers("stablehlo.triangular_solve")
def _triangular_solve(b: Builder, a: Value, y: Value, *, left_side: bool, lower: bool, unit_diagonal: bool, transpose_a: str) -> Value:
    """To conjugate what is real changes nothing."""
    transposes = transpose_a in ("TRANSPOSE", "ADJOINT")
    return triangular_solve(b, a, y, left_side=left_side, lower=lower, transpose_a=transposes, unit_diagonal=unit_diagonal)


@RULES.lowers("custom_call Eigh")
def _eigh(b: Builder, a: Value, *, backend_config: str) -> tuple[Value, Value]:
    """Of which triangle, whether sorted, at most how many sweeps, how exact: "1,1,100,1e-6"."""
    try:
        lower, is_sorted, sweeps, tolerance = backend_config.split(",")
        found = int(lower), int(is_sorted), int(sweeps), float(tolerance)
    except ValueError:
        raise UnsupportedForm(f"its backend_config is {backend_config!r}; expected four numbers such as '1,1,100,1e-6'") from None
    return eigh(b, a, lower=bool(found[0]), sort_eigenvalues=bool(found[1]), max_sweeps=found[2], tolerance=found[3])


# --- LAPACK: letters are given as their codes, and each routine says whether it found something wrong --------------------

Config = Mapping[str, int]


def _is(config: Config, name: str, letter: str) -> bool:
    return config.get(name) == ord(letter)


def _potrf(b: Builder, a: Value, *, config: Config) -> tuple[Value, Value]:
    factor = cholesky(b, a, lower=_is(config, "uplo", "L"))
    return factor, _nothing_wrong(b, a)


def _trsm(b: Builder, a: Value, y: Value, *, config: Config) -> Value:
    return triangular_solve(
        b, a, y, left_side=_is(config, "side", "L"), lower=_is(config, "uplo", "L"), transpose_a=not _is(config, "trans_x", "N"),
        unit_diagonal=_is(config, "diag", "U"),
    )  # fmt: skip


def _getrf(b: Builder, a: Value) -> tuple[Value, Value, Value]:
    """Rows are counted from 1."""
    factors, pivots, _ = lu(b, a)
    return factors, b.add(pivots, 1), _nothing_wrong(b, a)


def _syevd(b: Builder, a: Value, *, config: Config) -> tuple[Value, Value, Value]:
    return (*eigh(b, a, lower=_is(config, "uplo", "L")), _nothing_wrong(b, a))


def _nothing_wrong(b: Builder, a: Value) -> Value:
    """What went wrong, one number for each matrix: results that say so themselves are NaN."""
    return b.full(TensorType(S32, a.shape[:-2]), 0)


_LAPACK: Mapping[str, Callable[..., Results]] = {"getrf": _getrf, "geqrf": geqrf, "orgqr": householder_product}
_CONFIGURED: Mapping[str, Callable[..., Results]] = {"potrf": _potrf, "trsm": _trsm, "syevd": _syevd}
RULES.enter({f"custom_call lapack_s{name}_ffi": rule for name, rule in _LAPACK.items()})
RULES.enter({f"custom_call lapack_s{name}_ffi": rule for name, rule in _CONFIGURED.items()}, **{"mhlo.backend_config": "config"})
