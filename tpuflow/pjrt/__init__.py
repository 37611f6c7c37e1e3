"""The simulated device as a backend of stock JAX: `JAX_PLATFORMS=tpusim python train.py`, `jax.devices("tpusim")` (docs/pjrt.md)."""

from __future__ import annotations

PLATFORM = "tpusim"
BELOW_CPU = -10
"""Priority among JAX's backends: whoever does not ask for the simulated device gets what they would get without it."""


def initialize() -> None:
    """Register the backend; what JAX calls of each entry point `jax_plugins`. The compiler is loaded when something is compiled."""
    from tpuflow.pjrt.plugin import register

    register(PLATFORM, BELOW_CPU)
