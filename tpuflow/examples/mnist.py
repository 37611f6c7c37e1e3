"""The documented MNIST example: where its perceptron starts from, and its training step for `tpuflow check` and `tpuflow estimate`.

tpuflow check tpuflow.examples.mnist:step --batch 64 --chip bm1690
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from tpuflow.examples.data import load_embedded
from tpuflow.examples.exported import TORCH_SEED0
from tpuflow.examples.models.mlp import MLP, TORCH_LAYERS  # pyright: ignore[reportMissingImports]  # is elsewhere in a checkout
from tpuflow.importers import flax_params
from tpuflow.importers.files import load_state_dict
from tpuflow.training.config import StepConfig

LEARNING_RATE = 1e-3


def initial_variables() -> Any:
    """The variables of the network that PyTorch's seed 0 gives: what the documented run starts from."""
    like = jax.eval_shape(MLP().init, jax.random.key(0), jax.ShapeDtypeStruct((1, 28, 28), np.float32))
    return flax_params(load_state_dict(TORCH_SEED0["mlp"]), like, TORCH_LAYERS)


def step(batch: int) -> StepConfig:
    """The documented training in mixed precision on the first images of Fashion-MNIST, repeated where `batch` is larger than the set."""
    images, labels = load_embedded().train
    rows = np.arange(batch) % len(images)
    return StepConfig(
        MLP(), (images[rows], labels[rows]), "mixed", optax.sgd(LEARNING_RATE), "softmax_cross_entropy", params=initial_variables()
    )
