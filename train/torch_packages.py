"""Packages of PyTorch models, which comparisons build from configurations: transformers, diffusers, torchvision."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

from tpuflow.errors import ConfigError

OPERATORS = ("nms", "qnms")
"""What torchvision asks for when it is imported, which transformers and diffusers do; no model here calls them."""

_declared: list[Any] = []  # a declaration ends with the library object that made it


def import_package(name: str) -> ModuleType:
    """transformers, diffusers or torchvision, offline.

    Raises:
      ConfigError: the package or PyTorch is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    missing = [package for package in ("torch", name) if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"this needs {' and '.join(missing)}, which is not installed: pip install -e '.[torch,torch-models]'.")
    if importlib.util.find_spec("torchvision") and not _declared:
        _have_torchvision()
    return importlib.import_module(name)


def _have_torchvision() -> None:
    """Import torchvision. Its compiled operators do not load beside another build of PyTorch: what it asks for by name is declared then."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = importlib.import_module("torch").library.Library("torchvision", "FRAGMENT")
        for operator in OPERATORS:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
