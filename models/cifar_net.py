"""The network of PyTorch's CIFAR-10 tutorial: LeNet's layers, for colours."""

from __future__ import annotations

import jax
from flax import linen as nn

from .lenet import TORCH_LAYERS, FiveLayers
from .mlp import torch_uniform
from .moe import MoE

__all__ = ["TORCH_LAYERS", "CifarExperts", "CifarNet"]


class CifarNet(FiveLayers):
    """The tutorial's network, for images [B, 32, 32, 3], initialised as PyTorch initialises `nn.Conv2d` and `nn.Linear`."""

    initializer = staticmethod(torch_uniform)


class CifarExperts(CifarNet):
    """DeepSpeed's form of it: mixtures of experts, each expert a dense layer of 84, before a last layer. See `models.moe.MoE`.

    experts: their number in each mixture.
    """

    experts: tuple[int, ...] = (4,)
    k: int = 1
    min_capacity: int = 0
    residual: bool = False
    noise: str | None = None
    axis: str | None = None
    group_tokens: int | None = None

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, 32, 32, 3]."""
        x = self._features(images)
        for number, count in enumerate(self.experts):
            x = MoE(
                count, self.k, min_capacity=self.min_capacity, residual=self.residual, noise=self.noise, random_tokens=True,
                group_tokens=self.group_tokens, axis=self.axis, train=train, name=f"moe{number + 1}",
            )(x)  # fmt: skip
        return self._dense(x, self.classes, "fc4")
