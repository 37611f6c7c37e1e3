"""The one table of operation cases: every engine, and jax.jit, is judged on all of them."""

from collections.abc import Sequence

import pytest

from tests.cases import complex, control, elementwise, indexing, linalg, linear, movement, reductions, storage
from tests.cases.case import Case, assert_close, words

_MODULES = (elementwise, movement, reductions, indexing, linear, linalg, complex, control, storage)
CASES: tuple[Case, ...] = tuple(case for module in _MODULES for case in module.CASES)
GRADIENTS: tuple[Case, ...] = tuple(case.gradient() for case in CASES if case.grad)
ROWS = (*CASES, *GRADIENTS)
LONG = ("svd", "matrix-functions", "pinv", "blocks")
"""What is in the names of rows in which a matrix is taken apart by singular values, or in blocks."""
PROGRAMS = tuple(row for row in ROWS if not row.name.endswith("-lapack"))
"""All rows but those that differ from another in the StableHLO alone, as JAX lowers it for CPUs: a Program is made of the jaxpr."""
_REPEATED = ("svd-", "norms", "lstsq", "pinv", "matrix-functions", "complex-inverse", "eigh-even", "qr-complete", "qr-wide", "lu-wide")

_FACTORISATIONS = ("svd", "eigh", "eigvalsh", "qr", "lu", "cholesky", "triangular-blocks")


def repeats_others(row: Case) -> bool:
    """Whether it is made of factorisations that have rows of their own, or is one of these in another shape; of complex matrices, too,
    which are taken apart as real ones are. Such a row takes XLA as long as dozens of others."""
    taken_apart = any(f"complex-{name}" in row.name for name in _FACTORISATIONS)
    return taken_apart or any(name in row.name for name in _REPEATED)


def over_rows(chosen: Sequence[Case], of: Sequence[Case] = ROWS) -> pytest.MarkDecorator:
    """A test's parameter `case`: the rows chosen, and all others of some in slow tests."""
    slow = [pytest.param(row, marks=pytest.mark.slow) for row in of if row not in chosen]
    return pytest.mark.parametrize("case", [*(row for row in chosen if row in of), *slow], ids=lambda case: case.name)


def sample(stride: int) -> tuple[Case, ...]:
    """One row of so many, without long ones: each takes as long as many others together."""
    return tuple(row for row in ROWS[::stride] if not any(name in row.name for name in LONG))


__all__ = ["CASES", "GRADIENTS", "PROGRAMS", "ROWS", "Case", "assert_close", "over_rows", "repeats_others", "sample", "words"]
