"""SqueezeNet on CIFAR-10: SGD with momentum and a linearly falling rate, as its authors trained it on larger images."""

from __future__ import annotations

from dataclasses import dataclass

from models.squeezenet import STEMS, SqueezeNet, torch_layers
from train import cifar10
from train.options import option
from train.recipe import Recipe
from train.resnet import ResNetOptions, on_cifar10


@dataclass(frozen=True, slots=True, kw_only=True)
class SqueezeNetOptions(ResNetOptions):
    """One option more."""

    version: str = option("1.1", "training", "of the network", choices=tuple(STEMS))


DEFAULTS = SqueezeNetOptions(
    epochs=10, batch_size=32, lr=0.01, momentum=0.9, weight_decay=2e-4, schedule="linear", lr_init=0.001, warmup_epochs=1, shuffle=-1,
    image_size=64,
)  # fmt: skip

TRAINING = on_cifar10(lambda options: SqueezeNet(len(cifar10.CLASSES), options.version), torch_layers)

RECIPE = Recipe("squeezenet", "SqueezeNet on CIFAR-10 at 64x64", __doc__, DEFAULTS, TRAINING.run)
