"""Initial parameters from a tree, a checkpoint, an Orbax directory or a PyTorch file, checked against the model's tree."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuflow.checking import check_path
from tpuflow.errors import CheckpointError, WeightsError, listed, nothing_at
from tpuflow.importers import Place, flax_params, load_state_dict
from tpuflow.stages.flattening import flat, leaf_names
from tpuflow.training.adapters.model import initial_params
from tpuflow.training.checkpoints import orbax_files


def load_params(
    path: str | os.PathLike[str],
    like: Any,
    *,
    mapping: Mapping[str, Place] | None = None,
    skip_mismatched: bool = False,
    average: bool = False,
) -> Any:
    """Read parameters from a file or directory into the tree, shapes and types of `like`.

    path: a directory of `tpuflow.ModelCheckpoint` (its newest good checkpoint is read), one checkpoint in it, such as `run/best`, any
    other Orbax checkpoint of a tree, or a PyTorch state dict as `tpuflow.importers.load_state_dict` reads it (.pt, .npz, .safetensors).
    like: the model's variables ({"params": ..., "batch_stats": ...}) or its parameters alone; arrays or shapes.
    mapping: for PyTorch files, see `tpuflow.importers.flax_params`.
    skip_mismatched: keep `like`'s own arrays where the file has none or one of another shape, and say which; for fine-tuning with a new
    last layer. `like` must then hold arrays.
    average: of a checkpoint, the average that was kept of the parameters (and of carried variables) in their place, see `tpuflow.EMA`.

    Raises:
      WeightsError: the file is missing or damaged, has no average, or its arrays do not fit: each is named with both shapes.
      CheckpointError: the checkpoint is damaged.
    """
    check_path("load_params", path)
    path = Path(path)
    if not path.exists():
        raise WeightsError(f"{nothing_at(path)} Give a checkpoint, a directory of them, or a file of weights.")
    if average and not path.is_dir():
        raise WeightsError(f"{path}: average=True asks for the average in a checkpoint, and this is a file of weights.")
    if not path.is_dir():
        return flax_params(load_state_dict(path), like, mapping, skip_mismatched=skip_mismatched)
    return _fitted(path, dict(flat(_arrays(path, like, average=average))), like, skip_mismatched=skip_mismatched)


def starting_variables(given: Any, params: Any, carried: Any) -> tuple[Any, Any]:
    """(parameters, carried variables) from the option `params`, a tree or a path, checked against the model's; carried is None if not
    given.

    Raises:
      ConfigError, WeightsError, CheckpointError: they cannot be read or do not fit.
    """
    if isinstance(given, (str, os.PathLike)):
        given = load_params(given, _variables(params, carried))
    if isinstance(given, Mapping) and "params" in given and len(given) > 1 and isinstance(carried, Mapping):
        rest = {name: child for name, child in given.items() if name != "params"}
        return initial_params(given["params"], params), initial_params(rest, carried)
    return initial_params(given, params), None


def _variables(params: Any, carried: Any) -> Any:
    return {"params": params, **carried} if isinstance(carried, Mapping) and isinstance(params, Mapping) else params


def _arrays(path: Path, like: Any, *, average: bool) -> Mapping[str, Any]:
    """The variables in a directory, as nested dicts that begin where `like` begins."""
    checkpoints = orbax_files()
    if checkpoints.is_checkpoint(path) or checkpoints.saved_steps(path):
        state = checkpoints.read_newest(path).arrays
        kept = state.get("ema", {}) if average else state
        if "params" not in kept:
            raise WeightsError(f"{path}: no average of the parameters was kept; train with ema=tpuflow.EMA(...), or leave average out.")
        found = {"params": kept["params"], **kept.get("carried", state.get("carried", {}))}
    elif average:
        raise WeightsError(f"{path}: average=True asks for the average in a checkpoint of tpuflow.ModelCheckpoint, and this is none.")
    else:
        found = _orbax(checkpoints, path)
    whole = isinstance(like, Mapping) and "params" in like
    return found if whole else found.get("params", found)


def _orbax(checkpoints: Any, path: Path) -> Mapping[str, Any]:
    try:
        return checkpoints.read_state(path)
    except CheckpointError as error:
        holds = listed(sorted(entry.name for entry in path.iterdir())) if any(path.iterdir()) else "nothing"
        raise WeightsError(
            f"{path}: neither a checkpoint, nor a directory of checkpoints, nor one that Orbax reads; it holds {holds}. "
            "Give a directory that tpuflow.ModelCheckpoint wrote in, or one checkpoint in it."
        ) from error


def _fitted(path: Path, found: Mapping[str, Any], like: Any, *, skip_mismatched: bool) -> Any:
    leaves, tree = jax.tree.flatten(like)
    names = leaf_names(like)
    problems = [text for name, leaf in zip(names, leaves, strict=True) if (text := _problem(found.get(name), name, leaf))]
    left_over = [f"{name} {list(array.shape)} has no place in the model" for name, array in found.items() if name not in names]
    if (problems or left_over) and not skip_mismatched:
        raise WeightsError(
            f"{path} does not fit the model:\n  "
            + "\n  ".join(problems + left_over)
            + "\nFor a model with other layers, such as a new last "
            "one: params=tpuflow.load_params(path, like=variables, skip_mismatched=True)."
        )
    chosen = [_leaf(found.get(name), name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    if problems:
        warnings.warn(f"{path}: the model keeps its own arrays: {'; '.join(problems)}", RuntimeWarning, stacklevel=3)
    return jax.tree.unflatten(tree, chosen)


def _problem(array: Any, name: str, like: Any) -> str | None:
    if array is None:
        return f"{name} {list(like.shape)} is not in the file"
    return (
        None if tuple(array.shape) == tuple(like.shape) else f"{name} is {list(array.shape)} in the file, {list(like.shape)} in the model"
    )


def _leaf(array: Any, name: str, like: Any) -> Any:
    if array is not None and tuple(array.shape) == tuple(like.shape):
        return np.asarray(array, like.dtype)
    if isinstance(like, jax.ShapeDtypeStruct):
        raise WeightsError(f"{name} {list(like.shape)}: the file has no array for it, and `like` only its shape; give initial variables.")
    return like
