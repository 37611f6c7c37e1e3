"""The models of `python -m train compile`, one row each: the network, a batch of the kind it takes, and the loss of its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from models import bert, gpt2, llama, mixtral
from models.alexnet import AlexNet
from models.cifar_net import CifarNet
from models.googlenet import GoogLeNet
from models.lenet import LeNet5
from models.mlp import MLP
from models.resnet import TORCHVISION, resnet18, resnet50, resnet101
from models.squeezenet import SqueezeNet
from models.vgg import VGG16
from models.wide_resnet import WideResNet
from train.bert import loss as pretraining_loss

CROSS_ENTROPY = "softmax_cross_entropy"
"""Of integer labels, the mean over a batch; a name of `tpuflow.LOSSES`."""

OWN, FIRST_LOGIT = "cross-entropy", "first-logit"
"""What `--loss` may say."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model and its batch are made for: samples, the side of images in pixels, the words of a sequence, whether any drop out."""

    batch: int
    image_size: int
    sequence: int
    dropout: bool = True


MakesBatch = Callable[[Sizes, np.random.Generator], Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be compiled: what it is for the sizes, and a batch of random numbers.

    `image_size` and `sequence` are used where nothing else is asked for; None: its batches have no such size. `cross_entropy` is its own
    loss, as `tpuflow.train` takes one, and `loss` what `--loss` is if not given.
    """

    model: Callable[[Sizes], Any]
    batch: MakesBatch
    image_size: int | None = None
    sequence: int | None = None
    most_words: int | None = None
    cross_entropy: Any = CROSS_ENTROPY
    loss: str = OWN
    optional_dropout: bool = False

    def loss_of(self, name: str | None) -> Any:
        """The loss by its name on the command line, as `tpuflow.train` takes one."""
        return first_logit if (name or self.loss) == FIRST_LOGIT else self.cross_entropy


def first_logit(outputs: Any, labels: Any) -> jax.Array:
    """What the vendor's script differentiates in place of a loss: the first sample's first logit. Labels count for nothing."""
    return jax.tree.leaves(outputs)[0].reshape(-1)[0]


def images(model: Callable[[], Any], side: int, classes: int, channels: int = 3, *, fixed: bool = False, loss: str = OWN) -> Subject:
    """A classifier of images float32 [B, side, side, channels], normally distributed; `fixed`: it takes no other side."""

    def batch(sizes: Sizes, rng: np.random.Generator) -> Any:
        shape = (sizes.batch, *(side if fixed else sizes.image_size,) * 2, *((channels,) if channels else ()))
        return rng.standard_normal(shape).astype(np.float32), rng.integers(0, classes, sizes.batch).astype(np.int32)

    return Subject(lambda sizes: model(), batch, image_size=None if fixed else side, loss=loss)


def pretraining(config: bert.Config) -> Subject:
    """BERT's pretraining: random words [B, T], 15 % of the places of which are asked for, and whether the second half follows the first."""

    def batch(sizes: Sizes, rng: np.random.Generator) -> Any:
        shape, masked = (sizes.batch, sizes.sequence), max(1, round(0.15 * sizes.sequence))
        words, places = rng.integers(1, config.vocab_size, shape), np.argsort(rng.random(shape), axis=1)[:, :masked]
        made = {
            "input_ids": words,
            "attention_mask": np.ones(shape),
            "token_type_ids": np.broadcast_to(np.arange(sizes.sequence) >= sizes.sequence // 2, shape),
            "masked_positions": places,
            "masked_labels": np.take_along_axis(words, places, axis=1),
            "next_sentence_label": rng.integers(0, 2, sizes.batch),
        }
        return {name: array.astype(np.int32) for name, array in made.items()}

    return _of_words(bert.BertForPreTraining, config, bert.NO_DROPOUT, config.max_position_embeddings, batch, pretraining_loss)


def next_words(model: Any, config: Any, most: int, without: Mapping[str, Any] | None = None) -> Subject:
    """A language model: random words [B, T] and those that follow."""

    def batch(sizes: Sizes, rng: np.random.Generator) -> Any:
        words = rng.integers(0, config.vocab_size, (sizes.batch, sizes.sequence + 1)).astype(np.int32)
        return words[:, :-1], words[:, 1:]

    return _of_words(model, config, without, most, batch, CROSS_ENTROPY)


def _of_words(model: Any, config: Any, without: Mapping[str, Any] | None, most: int, batch: MakesBatch, loss: Any) -> Subject:
    def made(sizes: Sizes) -> Any:
        return model(config if sizes.dropout else replace(config, **(without or {})))

    return Subject(made, batch, sequence=min(128, most), most_words=most, cross_entropy=loss, optional_dropout=without is not None)


MODELS: Mapping[str, Subject] = {
    "resnet50": images(lambda: resnet50(1000, TORCHVISION), 224, 1000, loss=FIRST_LOGIT),
    "bert-large": pretraining(bert.SIZES["bert-large-uncased"]),
    "bert-base": pretraining(bert.SIZES["bert-base-uncased"]),
    "bert-tiny": pretraining(bert.TINY),
    **{name: next_words(gpt2.GPT2, config, config.n_positions, gpt2.NO_DROPOUT) for name, config in gpt2.SIZES.items()},
    "llama-tiny": next_words(llama.Llama, llama.TINY, 128),
    "mixtral-tiny": next_words(mixtral.Mixtral, mixtral.TINY, 128),
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
