"""ResNet-50 and ResNet-101 on CIFAR-10 as MindSpore's mixed-precision guide trains them: O0 or O3, poly schedule, crops and flips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models import resnet
from train import cifar10
from train.data import ImageData
from train.logs import GuideLines
from train.options import Options, option
from train.recipe import Recipe, Task, image_task, initial_variables, run_task
from train.transforms import resnet_evaluation, resnet_training


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetOptions(Options):
    """Two options more: how images come."""

    image_size: int = option(224, "training", "side that images are resized to; 32 leaves them as they are", int)
    augment: bool = option(True, "training", "no random crops and flips", flag="--no-augment")


DEFAULTS = ResNetOptions(
    policy="fp32", epochs=10, batch_size=32, lr=0.1, lr_init=0.01, lr_end=1e-5, schedule="poly", warmup_epochs=5, momentum=0.9, shuffle=-1
)


def task(make: Callable[..., resnet.ResNet], images: ImageData, options: ResNetOptions) -> Task:
    """The guide's training on CIFAR-10."""
    model, side = make(classes=len(cifar10.CLASSES)), options.image_size
    steps = resnet_training(side) if options.augment else resnet_evaluation(side)
    variables = initial_variables(options, model, resnet.torch_layers(model), (side, side, 3))
    return image_task(
        model, images, options, steps, resnet_evaluation(side), variables=variables, callbacks=(GuideLines(),), finish=_accuracy
    )


def run(make: Callable[..., resnet.ResNet], options: ResNetOptions) -> Any:
    """Train and print the guide's lines."""
    return run_task(task(make, cifar10.load(options.data_dir), options), options)


def _accuracy(result: Any) -> None:
    if "accuracy" in result.history[-1]:
        print(f"Accuracy: {{'acc': {result.history[-1]['accuracy'] / 100}}}", flush=True)


RECIPE_50 = Recipe("resnet50", "ResNet-50 on CIFAR-10 at 224x224, with the schedule of the guide", DEFAULTS, partial(run, resnet.resnet50))
RECIPE_101 = Recipe("resnet101", "ResNet-101 likewise", replace(DEFAULTS), partial(run, resnet.resnet101))
