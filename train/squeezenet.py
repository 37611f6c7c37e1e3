"""SqueezeNet on CIFAR-10: SGD with momentum and a linearly falling rate, as its authors trained it on larger images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.squeezenet import STEMS, SqueezeNet, torch_layers
from train import cifar10
from train.data import ImageData
from train.options import option
from train.recipe import Recipe, Task, image_task, initial_variables, run_task
from train.resnet import ResNetOptions
from train.transforms import resnet_evaluation, resnet_training


@dataclass(frozen=True, slots=True, kw_only=True)
class SqueezeNetOptions(ResNetOptions):
    """One option more."""

    version: str = option("1.1", "training", "of the network", choices=tuple(STEMS))


DEFAULTS = SqueezeNetOptions(
    epochs=10, batch_size=32, lr=0.01, momentum=0.9, weight_decay=2e-4, schedule="linear", lr_init=0.001, warmup_epochs=1, shuffle=-1,
    image_size=64,
)  # fmt: skip


def task(images: ImageData, options: SqueezeNetOptions) -> Task:
    """Training on CIFAR-10."""
    model, side = SqueezeNet(len(cifar10.CLASSES), options.version), options.image_size
    steps = resnet_training(side) if options.augment else resnet_evaluation(side)
    variables = initial_variables(options, model, torch_layers(model), (side, side, 3))
    return image_task(model, images, options, steps, resnet_evaluation(side), variables=variables)


def run(options: SqueezeNetOptions) -> Any:
    """Train."""
    return run_task(task(cifar10.load(options.data_dir), options), options)


RECIPE = Recipe("squeezenet", "SqueezeNet on CIFAR-10 at 64x64", DEFAULTS, run)
