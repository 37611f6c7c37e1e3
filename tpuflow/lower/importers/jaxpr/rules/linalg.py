"""Rules of factorisations and solvers of matrices; those that JAX writes in terms of these are expanded (`tpuflow.jaxprs.expansions`)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tpuflow.jaxprs.expansions import divided_spectrum
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.importers.jaxpr.importer import inline
from tpuflow.lower.importers.jaxpr.registry import COMPLEX, RULES
from tpuflow.lower.operations.complex import Complex, Number
from tpuflow.lower.operations.linalg.cholesky import cholesky, triangular_solve
from tpuflow.lower.operations.linalg.householder import geqrf, householder_product
from tpuflow.lower.operations.linalg.jacobi import eigh
from tpuflow.lower.operations.linalg.lu import lu


def _cholesky(b: Builder, a: Number) -> Number:
    return cholesky(b, a)


def _eigh(
    b: Builder, a: Number, *, lower: bool, sort_eigenvalues: bool, subset_by_index: tuple[int, int] | None, algorithm: Any
) -> tuple[Number, ...]:
    """Whole matrices that are not too large by Jacobi's rotations, others by dividing the spectrum down to such."""
    kind = np.dtype(np.complex64) if isinstance(a, Complex) else a.dtype.numpy
    divided = divided_spectrum(
        jax.ShapeDtypeStruct(a.shape, kind), lower=lower, sort_eigenvalues=sort_eigenvalues, subset_by_index=subset_by_index,
        algorithm=algorithm,
    )  # fmt: skip
    return eigh(b, a, lower=lower, sort_eigenvalues=sort_eigenvalues) if divided is None else inline(b, divided, (a,))


for _rules in (RULES, COMPLEX):
    _rules.enter({
        "cholesky": _cholesky, "eigh": _eigh, "geqrf": geqrf, "householder_product": householder_product, "lu": lu,
        "triangular_solve": triangular_solve,
    })  # fmt: skip
