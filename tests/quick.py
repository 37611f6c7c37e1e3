"""Plainer machine code for tests of what is computed, not of how XLA's machine code does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jax._src import compiler

from tpuflow.device.fast.engine import COMPILER_OPTIONS

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Without LLVM's optimisations and fusions emitted through MLIR, which take two thirds of XLA's time, and in one piece, which saves a
twelfth of the rest: each of up to 32 pieces is made ready and linked for itself. No bit-exact value depends on them,
which tests of operations, arithmetic, bits and meshes show with all of them; native ones do, so processes whose bits are compared must be
compiled alike. XLA's plainer code makes NaN of numbers below the least of an fp8 without -0."""

FUSED = {"xla_cpu_use_fusion_emitters": True}
"""For `jax.jit` in tests of what XLA has in such fusions only: clamping complex numbers, and truth values."""

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
"""The same for XLA_FLAGS of another process."""


@contextmanager
def quickly_compiled() -> Iterator[None]:
    """What the fast engine and JAX compile meanwhile is compiled so: `jax.jit`, and what runs operation by operation."""
    options_of = compiler.get_compile_options

    def quick_options(*args: Any, env_options_overrides: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        return options_of(*args, env_options_overrides=QUICK | (env_options_overrides or {}), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for option, value in QUICK.items():
            patch.setitem(COMPILER_OPTIONS, option, value)
        patch.setattr(compiler, "get_compile_options", quick_options)  # JAX's own switch leaves fusions emitted through MLIR
        yield
