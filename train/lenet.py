"""LeNet-5 on MNIST as MindSpore's training guide trains it: by `tpuflow.train` in sinks, or by a loop of one's own over sinks."""

from __future__ import annotations

from models.lenet import TORCH_LAYERS, LeNet5
from tpuflow.examples import data
from train import logs, transforms
from train.options import Options
from train.recipe import Recipe, Training

DEFAULTS = Options(epochs=10, batch_size=32, sink_size=1000, lr=0.01, momentum=0.9, shuffle=10000, seed=1)
"""The guide's. Its rate is constant, so the accuracy moves by half a point from sink to sink to the end; the guide names no seed."""

TRAINING = Training(
    images=lambda options: data.load("mnist", options.data_dir, pixels=True), model=lambda options: LeNet5(),
    layers=lambda model: TORCH_LAYERS, transforms=lambda options: (transforms.LENET, transforms.LENET), lines=logs.LENET,
)  # fmt: skip
"""Images at 32x32, normalised, shuffled through a buffer of 10,000; a rest smaller than a batch is dropped."""

RECIPE = Recipe("lenet", "LeNet-5 on MNIST at 32x32: ten sinks of 1000 steps", __doc__, DEFAULTS, TRAINING.run)
