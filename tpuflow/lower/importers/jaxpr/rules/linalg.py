"""Rules of factorisations and solvers of matrices; those that JAX writes in terms of these are expanded (`tpuflow.jaxprs.expansions`)."""

from __future__ import annotations

from typing import Any

import jax

from tpuflow.jaxprs.expansions import divided_spectrum
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.importer import inline
from tpuflow.lower.importers.jaxpr.registry import enter, lowers
from tpuflow.lower.operations.complex import Number
from tpuflow.lower.operations.linalg.cholesky import cholesky, triangular_solve
from tpuflow.lower.operations.linalg.householder import geqrf, householder_product
from tpuflow.lower.operations.linalg.jacobi import eigh
from tpuflow.lower.operations.linalg.lu import lu

enter({"geqrf": geqrf, "householder_product": householder_product, "lu": lu, "triangular_solve": triangular_solve})


@lowers("cholesky")
def _cholesky(b: Builder, a: Value) -> Value:
    return cholesky(b, a)


@lowers("eigh")
def _eigh(
    b: Builder, a: Value, *, lower: bool, sort_eigenvalues: bool, subset_by_index: tuple[int, int] | None, algorithm: Any
) -> tuple[Number, ...]:
    """Whole matrices that are not too large by Jacobi's rotations, others by dividing the spectrum down to such."""
    divided = divided_spectrum(
        jax.ShapeDtypeStruct(a.shape, a.dtype.numpy), lower=lower, sort_eigenvalues=sort_eigenvalues, subset_by_index=subset_by_index,
        algorithm=algorithm,
    )  # fmt: skip
    return eigh(b, a, lower=lower, sort_eigenvalues=sort_eigenvalues) if divided is None else inline(b, divided, (a,))
