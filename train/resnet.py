"""ResNet-50 and ResNet-101 on CIFAR-10 as MindSpore's mixed-precision guide trains them: O0 or O3, poly schedule, crops and flips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models import resnet
from train import cifar10, logs
from train.options import Options, option
from train.pretrained import TorchLayers
from train.recipe import Recipe, Training
from train.transforms import Transform, resnet_evaluation, resnet_training


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetOptions(Options):
    """Two options more: how images come."""

    image_size: int = option(224, "training", "side that images are resized to; 32 leaves them as they are", int)
    augment: bool = option(True, "training", "no random crops and flips", flag="--no-augment")


DEFAULTS = ResNetOptions(
    policy="fp32", epochs=10, batch_size=32, lr=0.1, lr_init=0.01, lr_end=1e-5, schedule="poly", warmup_epochs=5, momentum=0.9, shuffle=-1
)


def on_cifar10(model: Callable[[Any], Any], layers: Callable[[Any], TorchLayers], **printed: Any) -> Training:
    """The training of a larger network on CIFAR-10, whose images are resized, cropped and flipped on the way."""
    return Training(
        images=lambda options: cifar10.load(options.data_dir), model=model, layers=layers, transforms=_transforms, streamed=True, **printed
    )


def _transforms(options: ResNetOptions) -> tuple[Sequence[Transform], Sequence[Transform]]:
    evaluation = resnet_evaluation(options.image_size)
    return resnet_training(options.image_size) if options.augment else evaluation, evaluation


def _guide(make: Callable[..., resnet.ResNet]) -> Training:
    return on_cifar10(
        lambda options: make(classes=len(cifar10.CLASSES)), resnet.torch_layers, lines=logs.RESNET,
        last=lambda figures, labels: f"Accuracy: {{'acc': {figures['accuracy'] / 100}}}",
    )  # fmt: skip


TRAINING_50, TRAINING_101 = _guide(resnet.resnet50), _guide(resnet.resnet101)
RECIPE_50 = Recipe("resnet50", "ResNet-50 on CIFAR-10 at 224x224, with the schedule of the guide", __doc__, DEFAULTS, TRAINING_50.run)
RECIPE_101 = Recipe("resnet101", "ResNet-101 likewise", __doc__, replace(DEFAULTS), TRAINING_101.run)
