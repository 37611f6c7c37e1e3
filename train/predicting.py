"""What a trained network says of images, computed on the simulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import tpuflow
from tpuflow.amp import get_policy
from train.options import Options

BATCH = 250


def classes_of(model: Any, variables: Any, images: np.ndarray, options: Options) -> np.ndarray:
    """The most probable class of every image: [N, H, W, C] -> int32 [N], under the options' policy, in batches of 250."""
    policy = get_policy(options.policy)

    def classify(variables: Any, batch: jax.Array) -> jax.Array:
        return jnp.argmax(model.apply(variables, policy.cast_inputs(batch)), axis=-1).astype(jnp.int32)

    on_device = tpuflow.jit(classify, policy=policy, chip=options.chip, engine=options.engine, fidelity=options.fidelity)
    return np.concatenate([np.asarray(on_device(variables, images[i : i + BATCH])) for i in range(0, len(images), BATCH)])


def per_class(found: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Class name -> (images of it that were found to be of it, images of it)."""
    return {name: (int(np.sum((labels == i) & (found == i))), int(np.sum(labels == i))) for i, name in enumerate(names)}
