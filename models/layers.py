"""Layers in a row, as the language models share them: written out or in a scan, kept or computed again; and the words that go in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from jax import numpy as jnp

from .attention import Context
from .configs import JsonConfig

STREAMS: Mapping[Any, bool] = {"params": True, "dropout": True}
"""Each layer of a scan draws its own initial weights and dropout."""
AXES: Any = (nn.broadcast, 0)
"""The context is the same for all layers of a scan, the cache's leading axis is theirs."""


def run_layers(
    layer: type[nn.Module], config: JsonConfig, count: int, name: str, x: jax.Array, context: Context, cache: Any, *, train: bool
) -> tuple[jax.Array, Any, Any]:
    """Call so many layers in a row, in a module's compact method: (x, their caches, what each noted, stacked).

    `layer(config, train)` is a module that maps (x, context, its cache) to (x, (its cache, any arrays)). Written out, layers are called
    name_0, name_1, ..., and caches are in a tuple; in a scan they are one module of that name, whose parameters and caches have a leading
    axis for the layers.
    """
    kind = nn.remat(layer, prevent_cse=not config.scan) if config.remat else layer
    if config.scan:
        scan = nn.scan(kind, {"params": 0}, split_rngs=STREAMS, in_axes=AXES, length=count)
        x, (kept, noted) = scan(config, train, name=name)(x, context, cache)
        return x, kept, noted
    results: list[tuple[Any, Any]] = []
    for index in range(count):
        x, result = kind(config, train, name=f"{name}_{index}")(x, context, None if cache is None else cache[index])
        results.append(result)
    kept, noted = zip(*results, strict=True)
    return x, kept, jax.tree.map(lambda *arrays: jnp.stack(arrays), *noted)


def words(count: int, width: int, padding: int | None, deviation: float, name: str) -> nn.Embed:
    """The embedding of so many words; that of the padding, if there is one, starts with zeros."""
    normal = nn.initializers.normal(deviation)

    def initial(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        drawn = normal(key, shape, dtype)
        return drawn if padding is None else drawn.at[padding].set(0)

    return nn.Embed(count, width, embedding_init=initial, name=name)


def embedded(embed: nn.Embed, tokens: jax.Array, padding: int | None) -> jax.Array:
    """[B, T] -> [B, T, D]; no gradient goes back to the embedding of the padding, as with PyTorch's `padding_idx`."""
    x = embed(tokens)
    return x if padding is None else jnp.where((tokens == padding)[..., None], jax.lax.stop_gradient(x), x)
