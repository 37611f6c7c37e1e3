"""Weights into a network of another number of classes, and a network's weights into a file under the original's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.yolov5 import TORCH_LAYERS, YOLOv5
from models.yolov5_config import Config
from tpuflow.errors import WeightsError
from tpuflow.importers import flax_params, save_state_dict, state_dict


@dataclass(frozen=True, slots=True)
class Transferred:
    """Variables of a network, and the names of the tensors that were taken from elsewhere and of those that kept their own values."""

    variables: Mapping[str, Any]
    taken: tuple[str, ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        whole = len(self.taken) + len(self.kept)
        return f"{len(self.taken)} of {whole} tensors" + (f"; not {', '.join(self.kept)}" if self.kept else "")


def initial_variables(network: YOLOv5, seed: int) -> Mapping[str, Any]:
    """New variables {"params": ..., "batch_stats": ...}, drawn from a seed."""
    return jax.jit(network.init)(jax.random.key(seed), jnp.zeros((1, 64, 64, 3), jnp.float32))


def transfer(path: Path, state: Mapping[str, np.ndarray], network: YOLOv5, variables: Mapping[str, Any]) -> Transferred:
    """The network's variables, with those tensors of a file that have one of the same name and shape in their place.

    Raises:
      WeightsError: there is none.
    """
    own = state_dict(variables, TORCH_LAYERS)
    taken = {name: state[name] for name, array in own.items() if name in state and state[name].shape == array.shape}
    if not taken:
        raise WeightsError(f"{path}: no tensor has the name and the shape of one of the network's: {_differing(state, own)}")
    made = flax_params({**own, **taken}, variables, TORCH_LAYERS)
    return Transferred(made, tuple(taken), tuple(name for name in own if name not in taken))


def save_network(path: Path, config: Config, variables: Mapping[str, Any]) -> None:
    """Write variables as a state dict that the original's code takes, anchors included.

    Raises:
      WeightsError: the kind of file is unknown, or it cannot be written.
    """
    strides = np.array(config.strides, np.float32)[:, None, None]
    anchors = {f"model.{config.architecture.last}.anchors": np.array(config.anchors, np.float32) / strides}
    save_state_dict(path, {**state_dict(variables, TORCH_LAYERS), **anchors})


def _differing(state: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]) -> str:
    common = next((name for name in own if name in state), None)
    if common is None:
        return f"the file has {', '.join(list(state)[:3])}, ..., the network {', '.join(list(own)[:3])}, ..."
    return f"{common} is {list(state[common].shape)} in the file and {list(own[common].shape)} in the network. Give another --cfg."
