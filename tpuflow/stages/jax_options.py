"""Options of jax.jit that mean nothing here: given as JAX's defaults they are taken, otherwise refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuflow.errors import ConfigError, shown


def check_jax_options(compiler_options: Mapping[str, Any] | None) -> None:
    """That nothing is asked for that XLA would do and tpuflow does not.

    Raises:
      ConfigError: there are compiler options.
    """
    if compiler_options is not None and not (isinstance(compiler_options, Mapping) and not compiler_options):
        raise ConfigError(
            f"tpuflow.jit: compiler_options: expected none, got {shown(compiler_options)}; they are XLA's, and this is compiled by "
            "tpuflow's own passes (tpuflow.compiler.PIPELINE). Leave them out, or use jax.jit."
        )
