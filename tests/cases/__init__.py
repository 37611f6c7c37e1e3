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


def over_rows(chosen: Sequence[Case]) -> pytest.MarkDecorator:
    """A test's parameter `case`: the rows chosen, and all others in slow tests."""
    slow = [pytest.param(row, marks=pytest.mark.slow) for row in ROWS if row not in chosen]
    return pytest.mark.parametrize("case", [*chosen, *slow], ids=lambda case: case.name)


def sample(stride: int) -> tuple[Case, ...]:
    """One row of so many, without long ones: each takes as long as many others together."""
    return tuple(row for row in ROWS[::stride] if not any(name in row.name for name in LONG))


__all__ = ["CASES", "GRADIENTS", "ROWS", "Case", "assert_close", "over_rows", "sample", "words"]
