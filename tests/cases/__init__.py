"""The one table of operation cases: every engine, and jax.jit, is judged on all of them."""

from tests.cases import complex, control, elementwise, indexing, linalg, linear, movement, reductions, storage
from tests.cases.case import QUICK, Case, assert_close

_MODULES = (elementwise, movement, reductions, indexing, linear, linalg, complex, control, storage)
CASES: tuple[Case, ...] = tuple(case for module in _MODULES for case in module.CASES)
GRADIENTS: tuple[Case, ...] = tuple(case.gradient() for case in CASES if case.grad)

__all__ = ["CASES", "GRADIENTS", "QUICK", "Case", "assert_close"]
