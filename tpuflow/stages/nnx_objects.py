"""Which values are nnx objects, told without loading `flax.nnx`, which takes a third of a second: who has an object has loaded it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

from tpuflow.stages.compiling import jit as jit_arrays


def loaded_nnx() -> ModuleType | None:
    """The module `flax.nnx`, or None if this process has not loaded it, and so has no nnx objects."""
    return sys.modules.get("flax.nnx")


def is_object(value: Any) -> bool:
    """Whether a value is an nnx object: it has an identity, and what is changed in it stays changed."""
    nnx = loaded_nnx()
    return nnx is not None and (isinstance(value, nnx.Variable) or nnx.graphlib.is_graph_node(value))


def is_module(value: Any) -> bool:
    """Whether a value is an nnx module."""
    nnx = loaded_nnx()
    return nnx is not None and isinstance(value, nnx.Module)


def jit_of(arguments: Any) -> Callable[..., Any]:
    """The `jit` that these arguments need: `tpuflow.nnx.jit` if there are nnx objects among them, else `tpuflow.jit`."""
    objects = any(map(is_object, jax.tree.leaves(arguments, is_leaf=is_object)))
    return importlib.import_module("tpuflow.nnx").jit if objects else jit_arrays
