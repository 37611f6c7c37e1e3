"""The documented MNIST example: the perceptron of `models/mlp.py` on Fashion-MNIST in file order, SGD, cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import tpuflow
from models.mlp import MLP, TORCH_LAYERS
from tpuflow.errors import ConfigError
from tpuflow.importers import flax_params, load_state_dict
from train.data import ImageData
from train.export_torch_mlp import TORCH_SEED0
from train.logs import LogLines


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options of the example; the defaults are the documented ones."""

    policy: str = "mixed"
    epochs: int = 5
    batch_size: int = 64
    sink_size: int = -1
    lr: float = 1e-3
    chip: str = "bm1690"
    engine: str = "fast"
    fidelity: str = "native"
    seed: int = 0
    init: str = "torch-seed0"


INITS = ("torch-seed0", "random")


def initial_variables(init: str = "torch-seed0", seed: int = 0) -> Mapping[str, Any] | None:
    """The Flax variables that training starts from: the exported PyTorch ones, or None for the model's own, drawn from the seed."""
    if init not in INITS:
        raise ConfigError(f"unknown init {init!r}; there are: {', '.join(INITS)}")
    if init == "random":
        return None
    like = jax.eval_shape(MLP().init, jax.random.key(seed), jax.ShapeDtypeStruct((1, 28, 28), np.float32))
    return flax_params(load_state_dict(TORCH_SEED0), like, TORCH_LAYERS)


def train_mnist(
    data: ImageData, recipe: Recipe, *, callbacks: Sequence[tpuflow.Callback] = (), logs: bool = True, progress: bool = True
) -> Any:
    """Train on the simulated device and return `tpuflow.train`'s result; with `logs`, print the documented log lines."""
    lines = [LogLines(len(data.train[0]), recipe.batch_size)] if logs else []
    return tpuflow.train(
        MLP(),
        data.train,
        policy=recipe.policy,
        optimizer=optax.sgd(recipe.lr),
        loss="softmax_cross_entropy",
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        sink_size=recipe.sink_size,
        eval_data=data.test,
        chip=recipe.chip,
        seed=recipe.seed,
        params=initial_variables(recipe.init, recipe.seed),
        shuffle=False,
        callbacks=[*lines, *callbacks],
        engine=recipe.engine,
        fidelity=recipe.fidelity,
        progress=progress,
    )
