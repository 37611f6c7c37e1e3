"""Low-rank matrices beside a UNet's projections of attention: apart from its weights, together with them, and in diffusers' files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models import diffusers_configs
from models.diffusion_blocks import LORA_DOWN, LORA_UP
from tpuflow.errors import ConfigError, WeightsError
from tpuflow.importers import flax_params, save_state_dict, state_dict
from train.diffusion.folders import PARTS, Pipeline
from train.model_files import read_weights

WEIGHTS = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
PREFIX = "unet."
"""What the names of tensors begin with in diffusers' files, which may hold those of other models too."""


def is_lora(path: tuple[str, ...]) -> bool:
    """Whether a leaf, by the names on the way to it, belongs to a low-rank matrix."""
    return path[-2].endswith((LORA_DOWN, LORA_UP))


def parted(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the low-rank matrices, everything else) of a UNet's parameters."""
    return _only(params, (), is_lora), _only(params, (), lambda path: not is_lora(path))


def joined(one: Any, other: Any) -> Any:
    """The tree that has the leaves of both."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one
    shared = {name: joined(one[name], other[name]) for name in one if name in other}
    return {**one, **other, **shared}


def fused(base: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a UNet without low-rank matrices that computes the same: their products are added to the kernels."""
    made: dict[str, Any] = {}
    for name, child in base.items():
        down, up = lora.get(f"{name}{LORA_DOWN}"), lora.get(f"{name}{LORA_UP}")
        if down is not None and up is not None:
            product = np.asarray(down["kernel"], np.float64) @ np.asarray(up["kernel"], np.float64)
            made[name] = {**child, "kernel": (np.asarray(child["kernel"]) + product).astype(np.float32)}
        else:
            made[name] = fused(child, lora.get(name, {})) if isinstance(child, Mapping) else child
    return made


def save(folder: Path, lora: Mapping[str, Any]) -> None:
    """Write the matrices into a folder, as diffusers' `load_lora_weights` reads them (with the package peft)."""
    tensors = state_dict({"params": lora}, _names(lora))
    save_state_dict(folder / WEIGHTS[0], {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()})


def with_lora(pipeline: Pipeline, folder: Path) -> Pipeline:
    """The pipeline whose UNet has the low-rank matrices of a folder in its weights.

    Raises:
      WeightsError: the file is missing or damaged, or its matrices do not fit this UNet: every tensor is named.
    """
    tensors, file = read_weights(folder, WEIGHTS)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    ranks = sorted({tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora.down.weight")})
    if len(ranks) != 1:
        raise WeightsError(f"{file}: matrices of ranks {ranks or 'none'}, expected one rank for all of the UNet's projections.")
    like, _ = parted(lora_like(pipeline.configs["unet"], ranks[0])["params"])
    try:
        found = flax_params(tensors, {"params": like}, _names(like))
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from error
    return pipeline.with_variables(unet={"params": fused(pipeline.variables["unet"]["params"], found["params"])})


def lora_like(config: Any, rank: int) -> Any:
    """The shapes of the variables of a UNet with matrices of that rank."""
    return PARTS["unet"].variables_like(replace(config, lora_rank=rank))


def check_rank(config: Any, rank: int) -> None:
    """That a rank is less than the projections' widths.

    Raises:
      ConfigError: it is not.
    """
    most = min(config.block_out_channels)
    if not 0 < rank <= most:
        raise ConfigError(f"--lora_rank {rank}: expected 1 to {most}, the width of the UNet's narrowest projections.")


def _names(lora: Mapping[str, Any]) -> dict[str, str]:
    rows = diffusers_configs.torch_layers({"params": lora}).items()
    return {name.replace("_lora_", ".lora.").replace(".lora_", ".lora."): place for name, place in rows}


def _only(tree: Mapping[str, Any], path: tuple[str, ...], wanted: Callable[[tuple[str, ...]], bool]) -> dict[str, Any]:
    """The leaves that are wanted, and the modules on the way to them."""

    def children() -> Iterator[tuple[str, Any]]:
        for name, child in tree.items():
            if isinstance(child, Mapping):
                if kept := _only(child, (*path, name), wanted):
                    yield name, kept
            elif wanted((*path, name)):
                yield name, child

    return dict(children())
