"""Weights from elsewhere and back: PyTorch state dicts and their files, converted to Flax variables and from them."""

from tpuflow.importers.converting import flax_params, state_dict
from tpuflow.importers.files import load_state_dict, save_state_dict
from tpuflow.importers.places import Flattened, Place

__all__ = ["Flattened", "Place", "flax_params", "load_state_dict", "save_state_dict", "state_dict"]
