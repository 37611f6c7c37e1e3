"""Export the seed-0 initial weights of the PyTorch networks of the documents, once, so that their recipes need no PyTorch.

    python -m train.export_torch mlp cifar

The weights are those that `torch.manual_seed(0)` and PyTorch's default initialisation give on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpuflow.examples.exported import TORCH_SEED0, WEIGHTS


def torch_mlp() -> Any:
    """The perceptron of the documented MNIST example, initialised from seed 0."""
    return _seeded(lambda twins: twins.MLP())


def torch_cifar() -> Any:
    """The network of PyTorch's CIFAR-10 tutorial, initialised from seed 0."""
    return _seeded(lambda twins: twins.SmallNet(3, conv_bias=True))


NETWORKS: Mapping[str, Callable[[], Any]] = {"mlp": torch_mlp, "cifar": torch_cifar}


def state_dict(network: Any) -> dict[str, np.ndarray]:
    """PyTorch name -> a copy of the tensor as an array."""
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}


def _seeded(make: Callable[[Any], Any]) -> Any:
    import torch  # PyTorch is optional: only exporting and comparing need it

    from train import torch_models

    torch.manual_seed(0)
    return make(torch_models)


def main() -> None:
    """Write the state dicts as float32 arrays under their PyTorch names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", choices=tuple(NETWORKS), help="which to export")
    parser.add_argument("--folder", type=Path, default=WEIGHTS, help="where to (default: %(default)s)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.networks:
        state, path = state_dict(NETWORKS[name]()), options.folder / TORCH_SEED0[name].name
        np.savez_compressed(path, allow_pickle=False, **state)
        print(f"{path}: {path.stat().st_size} bytes, {', '.join(f'{key} {array.shape}' for key, array in state.items())}")


if __name__ == "__main__":
    main()
