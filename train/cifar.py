"""The CIFAR-10 network of PyTorch's tutorial, from PyTorch's own initial weights, in the files' order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.cifar_net import TORCH_LAYERS, CifarNet
from train import cifar10
from train.data import ImageData
from train.export_torch import TORCH_SEED0
from train.logs import TutorialLines, tutorial_accuracies
from train.options import Options
from train.pipeline import Loader
from train.recipe import Recipe, Task, batches, classification_loss, first_samples, initial_variables, run_task, transformed
from train.transforms import TUTORIAL

DEFAULTS = Options(epochs=2, batch_size=4, lr=0.001, momentum=0.9, init="torch-seed0")


METRICS = ("accuracy", "class_accuracy", "loss")


def task(images: ImageData, options: Options) -> Task:
    """The tutorial's training; the files' order stands for the tutorial's random one, so that PyTorch can be followed step by step."""
    train, test = (transformed(part, TUTORIAL) for part in first_samples(images, options))
    model = CifarNet()
    walked = batches(train, options, drop_remainder=False)
    variables = initial_variables(options, model, TORCH_LAYERS, (32, 32, 3), TORCH_SEED0["cifar"])

    def finish(result: Any) -> None:
        if options.test_samples != 0:
            print(tutorial_accuracies(hits_of(result.history[-1]["class_accuracy"], test[1])), flush=True)

    source, lines = Loader(walked) if options.shuffle else train, (TutorialLines(),)
    return Task(model, source, test, len(walked), variables, classification_loss(options), lines, METRICS, finish)


def hits_of(percent: Sequence[float], labels: np.ndarray) -> dict[str, tuple[int, int]]:
    """Class name -> (test images of it that were found to be of it, test images of it)."""
    counts = np.bincount(labels, minlength=len(cifar10.CLASSES)).tolist()
    shares = zip(cifar10.CLASSES, percent, counts, strict=True)
    return {name: (round(share * count / 100) if count else 0, count) for name, share, count in shares}


def run(options: Options) -> Any:
    """Train and print the tutorial's lines."""
    return run_task(task(cifar10.load(options.data_dir), options), options)


RECIPE = Recipe("cifar", "the CIFAR-10 network of PyTorch's tutorial: two epochs, batch 4", DEFAULTS, run)
