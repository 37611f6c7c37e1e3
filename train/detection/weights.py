"""A trained YOLOv5 out of a file of weights: its sizes, anchors and number of classes are read off the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.yolov5 import TORCH_LAYERS, YOLOv5
from models.yolov5_config import ARCHITECTURES, OF_A_BOX, STRIDES, Anchors, Architecture, Config
from tpuflow.errors import ConfigError, WeightsError
from tpuflow.importers import flax_params, load_state_dict

STEM, DEEPEST = "model.0.conv.weight", "model.6.m."
FULL_STEM, FULL_DEEPEST = 64, 9
"""Channels of the first layer and blocks of layer 6 where both multiples are 1."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A network, its variables ({"params": ..., "batch_stats": ...}) and the names of its classes."""

    network: YOLOv5
    variables: Mapping[str, Any]
    names: tuple[str, ...]


def load_network(path: Path | str | None, names: Sequence[str] | None = None) -> Trained:
    """The network in a file that `tpuflow.importers.load_state_dict` reads, with the original's names of tensors.

    names: of its classes; without, they are called by their numbers.

    Raises:
      WeightsError: the file is missing, damaged, or of another network.
      ConfigError: there are not as many names as the network has classes.
    """
    if path is None:
        raise ConfigError("--weights: give a file of trained weights.")
    state = load_state_dict(path)
    config = config_of(Path(path), state)
    if names is not None and len(names) != config.classes:
        raise ConfigError(
            f"--weights {path}: a network of {config.classes} classes, but the data set names {len(names)}: give the data set that it was "
            "trained on, or train it on this one."
        )
    network = YOLOv5(config)
    like = jax.eval_shape(network.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32))
    try:
        variables = flax_params(state, like, TORCH_LAYERS)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    return Trained(network, variables, tuple(names or map(str, range(config.classes))))


def config_of(path: Path, state: Mapping[str, np.ndarray]) -> Config:
    """The configuration of the network whose tensors these are.

    Raises:
      WeightsError: it is no YOLOv5.
    """
    heads = {_head(architecture): architecture for architecture in ARCHITECTURES.values()}
    found = next((name for name in heads if name in state), None)
    if STEM not in state or found is None:
        missing = STEM if STEM not in state else " or ".join(heads)
        raise WeightsError(f"{path}: no YOLOv5 of release 6.2 or 7.0: there is no {missing}; it has {', '.join(list(state)[:3])}, ...")
    blocks = {name.removeprefix(DEEPEST).partition(".")[0] for name in state if name.startswith(DEEPEST)}
    anchors = _anchors(state, heads[found])
    outputs = len(state[found]) // len(anchors[0])
    try:
        return Config(len(blocks) / FULL_DEEPEST, len(state[STEM]) / FULL_STEM, outputs - OF_A_BOX, anchors)
    except ValueError as error:
        raise WeightsError(f"{path}: no YOLOv5 of release 6.2 or 7.0 ({error}).") from error


def _head(architecture: Architecture) -> str:
    """A tensor of the layer that predicts, which no other architecture has."""
    return f"model.{architecture.last}.m.0.bias"


def _anchors(state: Mapping[str, np.ndarray], architecture: Architecture) -> Anchors:
    """In pixels; a file has them in cells of their map, [maps, 3, 2]."""
    cells = state.get(f"model.{architecture.last}.anchors")
    if cells is None:
        return architecture.anchors
    return tuple(
        tuple((float(width) * stride, float(height) * stride) for width, height in of_map)
        for of_map, stride in zip(cells, STRIDES, strict=False)
    )
