"""VGG-16 on CIFAR-10: SGD with momentum and weight decay, as its authors trained it on larger images."""

from __future__ import annotations

from models.vgg import TORCH_LAYERS, VGG16
from train import cifar10
from train.recipe import Recipe
from train.resnet import ResNetOptions, on_cifar10

DEFAULTS = ResNetOptions(epochs=10, batch_size=32, lr=0.01, momentum=0.9, weight_decay=5e-4, schedule="steps", shuffle=-1, image_size=32)

TRAINING = on_cifar10(lambda options: VGG16(len(cifar10.CLASSES)), lambda model: TORCH_LAYERS)
"""The dense layers see 7x7 means whatever the images' size."""

RECIPE = Recipe("vgg16", "VGG-16 on CIFAR-10 at 32x32", __doc__, DEFAULTS, TRAINING.run)
