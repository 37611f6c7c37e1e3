"""VGG-16 on CIFAR-10: SGD with momentum and weight decay, as its authors trained it on larger images."""

from __future__ import annotations

from typing import Any

from models.vgg import TORCH_LAYERS, VGG16
from train import cifar10
from train.data import ImageData
from train.recipe import Recipe, Task, image_task, initial_variables, run_task
from train.resnet import ResNetOptions
from train.transforms import resnet_evaluation, resnet_training

DEFAULTS = ResNetOptions(epochs=10, batch_size=32, lr=0.01, momentum=0.9, weight_decay=5e-4, schedule="steps", shuffle=-1, image_size=32)


def task(images: ImageData, options: ResNetOptions) -> Task:
    """Training on CIFAR-10; the dense layers see 7x7 means whatever the images' size."""
    model, side = VGG16(len(cifar10.CLASSES)), options.image_size
    steps = resnet_training(side) if options.augment else resnet_evaluation(side)
    variables = initial_variables(options, model, TORCH_LAYERS, (side, side, 3))
    return image_task(model, images, options, steps, resnet_evaluation(side), variables=variables)


def run(options: ResNetOptions) -> Any:
    """Train."""
    return run_task(task(cifar10.load(options.data_dir), options), options)


RECIPE = Recipe("vgg16", "VGG-16 on CIFAR-10 at 32x32", DEFAULTS, run)
