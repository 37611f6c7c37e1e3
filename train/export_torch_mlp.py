"""Export the seed-0 initial weights of the documented PyTorch network, once, so that parity needs no PyTorch.

    python -m train.export_torch_mlp

The weights are those that `torch.manual_seed(0)` and PyTorch's default initialisation of `nn.Linear` give on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

TORCH_SEED0 = Path(__file__).parent / "weights" / "mlp_torch_seed0.npz"
"""The exported file."""


def torch_mlp():
    """The network of the documented example, initialised from seed 0."""
    import torch  # PyTorch is optional: only this script needs it
    from torch import nn

    class NeuralNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten = nn.Flatten()
            self.linear_relu_stack = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

        def forward(self, x):
            return self.linear_relu_stack(self.flatten(x))

    torch.manual_seed(0)
    return NeuralNetwork()


def main() -> None:
    """Write the state dict as float32 arrays under their PyTorch names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TORCH_SEED0, help="file to write (default: %(default)s)")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.numpy() for name, tensor in torch_mlp().state_dict().items()}
    np.savez_compressed(out, allow_pickle=False, **state)
    print(f"{out}: {out.stat().st_size} bytes, {', '.join(f'{name} {array.shape}' for name, array in state.items())}")


if __name__ == "__main__":
    main()
