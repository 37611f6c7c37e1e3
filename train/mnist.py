"""The documented MNIST example: the perceptron of `models/mlp.py` on Fashion-MNIST in file order, SGD, cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.mlp import MLP, TORCH_LAYERS
from train import data, recipe
from train.data import ImageData
from train.export_torch import TORCH_SEED0
from train.logs import LogLines
from train.options import Options, option
from train.pipeline import Loader
from train.recipe import Recipe, Task, batches, classification_loss, first_samples, run_task


@dataclass(frozen=True, slots=True, kw_only=True)
class MnistOptions(Options):
    """One option more: which of the two data sets of this form."""

    data_set: str = option("fashion-mnist", "data and output", "the documented run uses the default", choices=tuple(data.SOURCES))


DEFAULTS = MnistOptions(policy="mixed", epochs=5, batch_size=64, lr=1e-3, chip="bm1690", init="torch-seed0")
"""The documented run."""


def initial_variables(init: str = "torch-seed0") -> Mapping[str, Any] | None:
    """The Flax variables that training starts from: the exported PyTorch ones, those of a file, or None for the model's own."""
    return recipe.initial_variables(replace(DEFAULTS, init=init), MLP(), TORCH_LAYERS, (28, 28), TORCH_SEED0["mlp"])


def task(images: ImageData, options: Options, *, logs: bool = True) -> Task:
    """The documented training; with `logs`, its lines."""
    train, test = first_samples(images, options)
    walked = batches(train, options, drop_remainder=False)
    lines = (LogLines(len(train[0]), options.batch_size),) if logs else ()
    source = Loader(walked) if options.shuffle else train
    return Task(MLP(), source, test, len(walked), initial_variables(options.init), classification_loss(options), lines)


def run(options: MnistOptions) -> Any:
    """Train and print the documented lines. Without any data, 768 embedded images are used, and a notice says so."""
    return run_task(task(data.load(options.data_set, options.data_dir), options), options)


RECIPE = Recipe("mnist", "the documented perceptron on Fashion-MNIST: five epochs in mixed precision", DEFAULTS, run)
