"""Training loops in PyTorch on the CPU: what parity and the benchmarks compare with. PyTorch is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Setting:
    """How PyTorch computes: element type, threads, and whether oneDNN's kernels are used; None leaves a matter as it is."""

    dtype: torch.dtype = torch.float32
    threads: int | None = None
    onednn: bool = True


@contextmanager
def applied(setting: Setting) -> Iterator[None]:
    """Threads and kernels as the setting says, and as they were afterwards."""
    before, kernels = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    torch.set_num_threads(setting.threads or before)
    torch._C._set_mkldnn_enabled(setting.onednn)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch._C._set_mkldnn_enabled(kernels)


def images_of(data: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N, H, W, C] -> [N, C, H, W]."""
    return torch.from_numpy(np.ascontiguousarray(data.transpose(0, 3, 1, 2))).to(dtype)


def losses(network: nn.Module, data: Arrays, batch: int, *, lr: float, momentum: float, setting: Setting | None = None) -> np.ndarray:
    """Train by SGD on the data in their order, once; the loss of every step, as float64 [steps]."""
    setting = setting or Setting()
    network.to(setting.dtype).train()
    x, y = images_of(data[0], setting.dtype), torch.from_numpy(data[1].astype(np.int64))
    optimizer, criterion = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum), nn.CrossEntropyLoss()
    found = []
    with applied(setting):
        for i in range(0, len(x), batch):
            optimizer.zero_grad()
            loss = criterion(network(x[i : i + batch]), y[i : i + batch])
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return np.asarray(found, np.float64)


def classes_of(network: nn.Module, images: np.ndarray, batch: int = 250) -> np.ndarray:
    """The most probable class of every image: [N, H, W, C] -> int32 [N]."""
    network.eval()
    with torch.no_grad():
        parts = [network(images_of(images[i : i + batch])).argmax(1).numpy() for i in range(0, len(images), batch)]
    return np.concatenate(parts).astype(np.int32)


def gradients(network: nn.Module) -> Mapping[str, Any]:
    """Parameter name -> its gradient, as float64."""
    return {name: p.grad.detach().numpy().astype(np.float64) for name, p in network.named_parameters() if p.grad is not None}
