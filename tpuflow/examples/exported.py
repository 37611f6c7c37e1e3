"""Initial weights of the documented networks, exported once from PyTorch's seed 0 (`python -m train.export_torch` in the repository)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"

TORCH_SEED0: Mapping[str, Path] = {name: WEIGHTS / f"{name}_torch_seed0.npz" for name in ("mlp", "cifar")}
"""Network -> its exported file."""
