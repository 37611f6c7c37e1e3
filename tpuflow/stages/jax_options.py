"""Options of jax.jit that mean nothing here: given as JAX's defaults they are taken, otherwise refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuflow.errors import ConfigError, shown


def check_jax_options(compiler_options: Mapping[str, Any] | None, in_shardings: Any, out_shardings: Any) -> None:
    """That nothing is asked for that XLA would do and tpuflow does not.

    Raises:
      ConfigError: there are compiler options, or shardings.
    """
    if compiler_options is not None and not (isinstance(compiler_options, Mapping) and not compiler_options):
        raise ConfigError(
            f"tpuflow.jit: compiler_options: expected none, got {shown(compiler_options)}; they are XLA's, and this is compiled by "
            "tpuflow's own passes (tpuflow.compiler.PIPELINE). Leave them out, or use jax.jit."
        )
    for name, given in (("in_shardings", in_shardings), ("out_shardings", out_shardings)):
        if given is not None:
            raise ConfigError(
                f"tpuflow.jit: {name}: expected None, got {shown(given)}; say how arrays lie on several chips inside of the function, "
                "with jax.shard_map over a mesh."
            )
