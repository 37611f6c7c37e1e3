"""The documented MNIST example: the perceptron of `models/mlp.py` on Fashion-MNIST in file order, SGD, cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.mlp import MLP, TORCH_LAYERS
from tpuflow.examples import data
from tpuflow.examples.exported import TORCH_SEED0
from train import logs
from train.options import Options, option
from train.recipe import Recipe, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class MnistOptions(Options):
    """One option more: which of the two data sets of this form."""

    data_set: str = option("fashion-mnist", "data and output", "the documented run uses the default", choices=tuple(data.SOURCES))


DEFAULTS = MnistOptions(policy="mixed", epochs=5, batch_size=64, lr=1e-3, chip="bm1690", init="torch-seed0")
"""The documented run."""

TRAINING = Training(
    images=lambda options: data.load(options.data_set, options.data_dir), model=lambda options: MLP(), layers=lambda model: TORCH_LAYERS,
    whole=True, exported=TORCH_SEED0["mlp"], lines=logs.MNIST,
)  # fmt: skip
"""Without any data, 768 embedded images are used, and a notice says so."""

RECIPE = Recipe("mnist", "the documented perceptron on Fashion-MNIST: five epochs in mixed precision", __doc__, DEFAULTS, TRAINING.run)


def initial_variables(init: str = "torch-seed0") -> Mapping[str, Any] | None:
    """The Flax variables that training starts from: the exported PyTorch ones, those of a file, or None for the model's own."""
    return TRAINING.variables(replace(DEFAULTS, init=init), MLP(), (28, 28))
