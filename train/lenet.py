"""LeNet-5 on MNIST as MindSpore's training guide trains it: by `tpuflow.train` in sinks, or by a loop of one's own over sinks."""

from __future__ import annotations

from typing import Any

from models.lenet import TORCH_LAYERS, LeNet5
from train import data
from train.logs import SinkLines
from train.options import Options
from train.pipeline import Loader
from train.recipe import Recipe, Task, batches, classification_loss, first_samples, initial_variables, run_task, transformed
from train.transforms import LENET

DEFAULTS = Options(epochs=10, batch_size=32, sink_size=1000, lr=0.01, momentum=0.9, shuffle=10000, seed=1)
"""The guide's. Its rate is constant, so the accuracy moves by half a point from sink to sink to the end; the guide names no seed."""


def task(images: data.ImageData, options: Options) -> Task:
    """The guide's training: images at 32x32, normalised, shuffled through a buffer of 10,000; a rest smaller than a batch is dropped."""
    train, test = (transformed(part, LENET) for part in first_samples(images, options))
    model, walked = LeNet5(), batches(train, options)
    variables = initial_variables(options, model, TORCH_LAYERS, (32, 32, 1))
    return Task(model, Loader(walked), test, len(walked), variables, classification_loss(options), (SinkLines(),))


def run(options: Options) -> Any:
    """Train and print the guide's lines."""
    return run_task(task(data.load("mnist", options.data_dir, pixels=True), options), options)


RECIPE = Recipe("lenet", "LeNet-5 on MNIST at 32x32: ten sinks of 1000 steps", DEFAULTS, run)
