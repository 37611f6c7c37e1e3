"""Layers one after the other, as the language models share them: written out or in a scan, kept or computed again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from models.configs import JsonConfig

STREAMS: Mapping[Any, bool] = {"params": True, "dropout": True}
"""Each layer of a scan draws its own initial weights and dropout."""
AXES: Any = (nn.broadcast, 0)
"""The context is the same for all layers of a scan, the cache's leading axis is theirs."""


def run_layers(
    layer: type[nn.Module], config: JsonConfig, count: int, name: str, x: jax.Array, context: Any, cache: Any, *, train: bool
) -> tuple[jax.Array, Any]:
    """Call so many layers in a row: (x, what each returned beside it, in a tuple or stacked), to be used in a module's compact method.

    `layer(config, train)` is a module that maps (x, context, cache) to (x, anything). Written out, layers are called name_0, name_1, ...,
    and `cache` is a tuple of theirs, or None; in a scan they are one module of that name, whose parameters have a leading axis for the
    layers, as have the arrays of `cache`.
    """
    kind = nn.remat(layer, prevent_cse=not config.scan) if config.remat else layer
    if config.scan:
        scan = nn.scan(kind, {"params": 0}, split_rngs=STREAMS, in_axes=AXES, length=count)
        return scan(config, train, name=name)(x, context, cache)
    results = []
    for index in range(count):
        x, result = kind(config, train, name=f"{name}_{index}")(x, context, None if cache is None else cache[index])
        results.append(result)
    return x, tuple(results)
