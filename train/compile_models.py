"""The models of `python -m train compile`, one row each: the network, a batch of the kind it takes, and the loss of its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from models import bert, transformer
from models.alexnet import AlexNet
from models.cifar_net import CifarNet
from models.googlenet import GoogLeNet
from models.lenet import LeNet5
from models.mlp import MLP
from models.resnet import TORCHVISION, resnet18, resnet50, resnet101
from models.squeezenet import SqueezeNet
from models.vgg import VGG16
from models.wide_resnet import WideResNet

Batch = tuple[np.ndarray, np.ndarray]
CROSS_ENTROPY = "softmax_cross_entropy"


def first_logit(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """What the vendor's script differentiates in place of a loss: the first sample's first logit. Labels count for nothing."""
    return logits.reshape(-1)[0]


LOSSES: Mapping[str, Any] = {"cross-entropy": CROSS_ENTROPY, "first-logit": first_logit}
"""By the name of the command line."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a batch is: samples, the side of images in pixels, the words of a sequence."""

    batch: int
    image_size: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be compiled: what it is for the sizes, and a batch (inputs, labels) of random numbers.

    `image_size` and `sequence` are used where nothing else is asked for; None: its batches have no such size.
    """

    model: Callable[[Sizes], Any]
    batch: Callable[[Sizes, np.random.Generator], Batch]
    image_size: int | None = None
    sequence: int | None = None
    most_words: int | None = None
    loss: str = "cross-entropy"


def images(
    model: Callable[[], Any], side: int, classes: int, channels: int = 3, *, fixed: bool = False, loss: str = "cross-entropy"
) -> Subject:
    """A classifier of images float32 [B, side, side, channels], normally distributed; `fixed`: it takes no other side."""

    def batch(sizes: Sizes, rng: np.random.Generator) -> Batch:
        shape = (sizes.batch, *(side if fixed else sizes.image_size,) * 2, *((channels,) if channels else ()))
        return rng.standard_normal(shape).astype(np.float32), rng.integers(0, classes, sizes.batch).astype(np.int32)

    return Subject(lambda sizes: model(), batch, image_size=None if fixed else side, loss=loss)


def masked_words(config: bert.Config) -> Subject:
    """BERT's pretraining: int32 [B, 3, T] of words, kinds of sentence and masked places, and the words at 15 % of the places."""

    def masked(sizes: Sizes) -> int:
        return max(1, round(0.15 * sizes.sequence))

    def batch(sizes: Sizes, rng: np.random.Generator) -> Batch:
        shape = (sizes.batch, sizes.sequence)
        words = rng.integers(1, config.vocabulary, shape)
        kinds = np.broadcast_to(np.arange(sizes.sequence) >= sizes.sequence // 2, shape)
        places = np.argsort(rng.random(shape), axis=1)
        labels = np.take_along_axis(words, places[:, : masked(sizes)], axis=1)
        return np.stack([words, kinds, places], axis=1).astype(np.int32), labels.astype(np.int32)

    return Subject(lambda sizes: bert.MaskedWords(config, masked(sizes)), batch, sequence=min(128, config.length), most_words=config.length)


def next_words(config: transformer.Config) -> Subject:
    """A language model: int32 [B, T] of words and of those that follow."""

    def batch(sizes: Sizes, rng: np.random.Generator) -> Batch:
        words = rng.integers(0, config.vocabulary, (sizes.batch, sizes.sequence + 1)).astype(np.int32)
        return words[:, :-1], words[:, 1:]

    return Subject(lambda sizes: transformer.Transformer(config), batch, sequence=min(128, config.length), most_words=config.length)


MODELS: Mapping[str, Subject] = {
    "resnet50": images(lambda: resnet50(1000, TORCHVISION), 224, 1000, loss="first-logit"),
    "bert-large": masked_words(bert.LARGE),
    "bert-base": masked_words(bert.BASE),
    "bert-tiny": masked_words(bert.TINY),
    "gpt2": next_words(transformer.GPT2),
    "resnet18": images(lambda: resnet18(1000, TORCHVISION), 224, 1000),
    "resnet101": images(lambda: resnet101(1000, TORCHVISION), 224, 1000),
    "vgg16": images(VGG16, 224, 1000),
    "alexnet": images(AlexNet, 224, 1000),
    "squeezenet": images(SqueezeNet, 224, 1000),
    "googlenet": images(GoogLeNet, 224, 1000),
    "wide-resnet": images(WideResNet, 32, 10),
    "cifar-net": images(CifarNet, 32, 10, fixed=True),
    "lenet": images(LeNet5, 32, 10, channels=1, fixed=True),
    "mlp": images(MLP, 28, 10, channels=0, fixed=True),
}
"""The vendor's two first. resnet50 is torchvision's, on one image of 224x224 and without a loss, as the vendor's page has it."""
