"""Start from PyTorch's weights: a state dict or a file of one becomes the Flax variables of a network of models/."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpuflow.importers import Flattened, flax_params, load_state_dict

TorchLayers = Mapping[str, str | tuple[str, int, int, int]]
"""PyTorch module name -> Flax module path, or (path, channels, height, width) for a layer that follows flattening, as in models/."""


def from_torch(
    model: Any, weights: Mapping[str, np.ndarray] | str | os.PathLike[str], layers: TorchLayers, image_shape: Sequence[int]
) -> dict[str, Any]:
    """The variables of a linen model ("params", and "batch_stats" if it has some) with PyTorch's weights in them.

    `weights`: a state dict of arrays, or a file that `tpuflow.importers.load_state_dict` reads. `image_shape`: [H, W, C] of one image.
    Raises WeightsError naming every tensor that is missing, left over or of the wrong shape.
    """
    state = weights if isinstance(weights, Mapping) else load_state_dict(weights)
    like = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, *image_shape), np.float32))
    return flax_params(state, like, {name: place if isinstance(place, str) else Flattened(*place) for name, place in layers.items()})
