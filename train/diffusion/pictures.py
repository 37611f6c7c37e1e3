"""Pictures as files: PNG, one by one and in a grid."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np

from tpuflow.errors import ConfigError


def to_bytes(pictures: np.ndarray) -> np.ndarray:
    """Pictures from 0 to 1 as bytes, rounded to the nearest: uint8 of the same shape."""
    return np.round(np.clip(pictures, 0, 1) * 255).astype(np.uint8)


def grid(pictures: np.ndarray, columns: int) -> np.ndarray:
    """Pictures [N, H, W, C] side by side in so many columns: [rows * H, columns * W, C]; places that stay empty are black."""
    count, height, width, channels = pictures.shape
    rows = -(-count // columns)
    places = np.zeros((rows * columns, height, width, channels), pictures.dtype)
    places[:count] = pictures
    return places.reshape(rows, columns, height, width, channels).swapaxes(1, 2).reshape(rows * height, columns * width, channels)


def write_png(path: Path, picture: np.ndarray) -> None:
    """Write a picture of bytes [H, W, 3].

    Raises:
      ConfigError: the package pillow is missing, or the file cannot be written.
    """
    try:
        pillow().fromarray(picture).save(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}).") from error


def pillow() -> ModuleType:
    """The package's module of images.

    Raises:
      ConfigError: it is missing.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("pictures need the package pillow: pip install 'tpuflow[data]'") from error
