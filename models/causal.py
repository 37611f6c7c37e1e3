"""Language models whose tokens see those before them: all tokens at once, or one after the other with a cache."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax import numpy as jnp

from .attention import Cache, Context, admit, causal, empty_cache


class Inputs(NamedTuple):
    """What a forward pass is given: tokens [B, T], what each may see, and for decoding the layers' caches.

    positions: [B, T], None for 0, 1, ... attention_mask: [B, T], 0 where a token is padding. `last`: the logits of the last token alone
    are wanted, [B, 1, vocabulary].
    """

    tokens: jax.Array
    context: Context
    positions: jax.Array | None = None
    cache: Any = None
    attention_mask: jax.Array | None = None
    train: bool = False
    last: bool = False


class CausalModel(nn.Module, abc.ABC):
    """A language model whose tokens see those before them; a subclass has the layers, in `run`, and says the shape of their cache."""

    config: Any

    def __call__(self, tokens: jax.Array, attention_mask: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Return the logits [B, T, vocabulary] of the token after each of tokens [B, T]; they see those at and before their place.

        attention_mask: [B, T], 0 where a token is not to be seen. `train` turns on dropout, from the stream "dropout".
        """
        self._check_length("tokens", tokens.shape[1])
        context = Context(causal(tokens.shape[1], attention_mask))
        return self.run(Inputs(tokens, context, attention_mask=attention_mask, train=train))[0]

    def decode(self, tokens: jax.Array, cache: Cache, attention_mask: jax.Array | None = None) -> tuple[jax.Array, Cache]:
        """Return the logits [B, vocabulary] of the token after the last of tokens [B, T], which follow those in the cache, and the cache.

        attention_mask: [B, T], 0 where a token is padding. The cache must have room for T more.
        """
        cache, positions, context = admit(cache, tokens, attention_mask)
        logits, kept = self.run(Inputs(tokens, context, positions, cache.layers, attention_mask, last=True))
        return logits[:, 0], cache._replace(layers=kept)

    def empty_cache(self, batch: int, slots: int, dtype: Any = jnp.float32) -> Cache:
        """A cache for `decode` of so many sequences and tokens each."""
        self._check_length("slots", slots)
        layers, heads, width = self.config.cache_shape
        return empty_cache(layers, (batch, slots, heads, width), dtype, scan=self.config.scan)

    @abc.abstractmethod
    def run(self, inputs: Inputs) -> tuple[jax.Array, Any]:
        """(logits [B, T or 1, vocabulary], the layers' caches)."""

    def _check_length(self, what: str, length: int) -> None:
        limit = self.config.position_limit
        if limit is not None and length > limit:
            raise ValueError(f"{type(self).__module__}: {what}: {length} in a row, expected at most {limit}, for which there are positions")
