"""Models of every library behind one face."""

from tpuflow.training.adapters.choosing import get_model
from tpuflow.training.adapters.model import Model

__all__ = ["Model", "get_model"]
