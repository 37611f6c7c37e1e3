"""The network of PyTorch's CIFAR-10 tutorial: LeNet's layers, for colours."""

from __future__ import annotations

from models.lenet import TORCH_LAYERS, FiveLayers
from models.mlp import torch_uniform

__all__ = ["TORCH_LAYERS", "CifarNet"]


class CifarNet(FiveLayers):
    """The tutorial's network, for images [B, 32, 32, 3], initialised as PyTorch initialises `nn.Conv2d` and `nn.Linear`."""

    initializer = staticmethod(torch_uniform)
