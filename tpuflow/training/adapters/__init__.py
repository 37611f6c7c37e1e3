"""Adapters: models of Flax (linen and nnx), Haiku and Equinox, and plain functions, as one type, `Model`."""

from tpuflow.training.adapters.choosing import get_model
from tpuflow.training.adapters.model import Model

__all__ = ["Model", "get_model"]
