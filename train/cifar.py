"""The CIFAR-10 network of PyTorch's tutorial, from PyTorch's own initial weights, in the files' order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.cifar_net import TORCH_LAYERS, CifarNet
from tpuflow.examples.exported import TORCH_SEED0
from train import cifar10, logs, transforms
from train.options import Options
from train.recipe import Recipe, Training

DEFAULTS = Options(epochs=2, batch_size=4, lr=0.001, momentum=0.9, init="torch-seed0")


def hits_of(percent: Sequence[float], labels: np.ndarray) -> dict[str, tuple[int, int]]:
    """Class name -> (test images of it that were found to be of it, test images of it)."""
    counts = np.bincount(labels, minlength=len(cifar10.CLASSES)).tolist()
    shares = zip(cifar10.CLASSES, percent, counts, strict=True)
    return {name: (round(share * count / 100) if count else 0, count) for name, share, count in shares}


TRAINING = Training(
    images=lambda options: cifar10.load(options.data_dir), model=lambda options: CifarNet(), layers=lambda model: TORCH_LAYERS,
    transforms=lambda options: (transforms.TUTORIAL, transforms.TUTORIAL), whole=True, exported=TORCH_SEED0["cifar"],
    metrics=("accuracy", "class_accuracy", "loss"), lines=logs.TUTORIAL,
    last=lambda figures, labels: logs.tutorial_accuracies(hits_of(figures["class_accuracy"], labels)),
)  # fmt: skip
"""The files' order stands for the tutorial's random one, so that PyTorch can be followed step by step."""

RECIPE = Recipe("cifar", "the CIFAR-10 network of PyTorch's tutorial: two epochs, batch 4", __doc__, DEFAULTS, TRAINING.run)
