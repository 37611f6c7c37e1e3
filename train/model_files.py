"""Files of models as transformers and diffusers keep them in a folder: a configuration in JSON, and weights, in parts perhaps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tpuflow.errors import ConfigError, WeightsError
from tpuflow.importers import flax_params, load_state_dict

T = TypeVar("T")


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """What a JSON file holds.

    Raises:
      ConfigError: it cannot be read, or holds no mapping; `kind` says in words what has such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {kind} has one.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}, expected names and values; {kind} has one.")
    return content


def configured(make: Callable[[], T], where: str) -> T:
    """The configuration that a function makes; a ValueError becomes a ConfigError that says where it was read."""
    try:
        return make()
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from error


def read_weights(folder: Path, names: Sequence[str], advice: str = "") -> tuple[dict[str, np.ndarray], Path]:
    """The tensors of the first of these files that a folder has, whole or in parts with an index, and the file.

    Raises:
      WeightsError: there is none, and then `advice` is given; or one is damaged.
    """
    for name in names:
        if (folder / name).is_file():
            return load_state_dict(folder / name), folder / name
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = sorted(set(read_json(index, "a model whose weights are in parts")["weight_map"].values()))
            return {key: value for part in parts for key, value in load_state_dict(folder / part).items()}, index
    raise WeightsError(f"{folder}: no weights; expected {' or '.join(names)}.{advice}")


def fitted(weights: Mapping[str, np.ndarray], file: Path, like: Any, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Flax variables from the tensors of a file.

    Raises:
      WeightsError: they do not fit; every tensor is named, and the file.
    """
    try:
        return flax_params(weights, like, mapping)
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from error
