"""The table of recipes: `python -m train NAME`. A module of this folder that defines a `RECIPE` at its left margin is in it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from train.recipe import Recipe

_DEFINED = re.compile(r"^RECIPE\w* = Recipe\(", re.MULTILINE)


def _defined(folder: Path) -> Iterator[Recipe]:
    """The recipes of a folder, in the order of their modules' names; modules that define none are not imported."""
    for path in sorted(folder.glob("*.py")):
        if _DEFINED.search(path.read_text(encoding="utf-8")):
            module = importlib.import_module(f"{folder.name}.{path.stem}")
            yield from (value for name, value in vars(module).items() if name.startswith("RECIPE") and isinstance(value, Recipe))


RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _defined(Path(__file__).parent)}
"""Name -> recipe."""
