"""Plainer machine code for tests of what is computed, not of how XLA's machine code does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from tpuflow.device.fast.engine import COMPILER_OPTIONS

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, "xla_cpu_use_fusion_emitters": False}
"""Without LLVM's optimisations and fusions emitted through MLIR, which take two thirds of XLA's time. No bit-exact value depends on them,
which tests of operations, arithmetic, bits and meshes show with all of them; native ones do, so processes whose bits are compared must be
compiled alike. XLA's plainer code makes NaN of numbers below the least of an fp8 without -0."""

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
"""The same for XLA_FLAGS of another process."""


@contextmanager
def quickly_compiled() -> Iterator[None]:
    """What the fast engine and `jax.jit` compile meanwhile is compiled so."""
    with pytest.MonkeyPatch.context() as patch:
        for option, value in QUICK.items():
            patch.setitem(COMPILER_OPTIONS, option, value)
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
