"""Language models whose tokens see those before them: all tokens at once, or one after the other with a cache."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn
from jax import numpy as jnp

from models.attention import Cache, Context, admit, causal, empty_cache


class CausalModel(nn.Module):
    """A language model whose tokens see those before them; a subclass has the layers, in `run`, and says the shape of their cache."""

    config: Any

    def __call__(self, tokens: jax.Array, attention_mask: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Return the logits [B, T, vocabulary] of the token after each of tokens [B, T]; they see those at and before their place.

        attention_mask: [B, T], 0 where a token is not to be seen. `train` turns on dropout, from the stream "dropout".
        """
        self._check_length("tokens", tokens.shape[1])
        return self.run(tokens, None, Context(causal(tokens.shape[1], attention_mask)), None, attention_mask, train=train, last=False)[0]

    def decode(self, tokens: jax.Array, cache: Cache, attention_mask: jax.Array | None = None) -> tuple[jax.Array, Cache]:
        """Return the logits [B, vocabulary] of the token after the last of tokens [B, T], which follow those in the cache, and the cache.

        attention_mask: [B, T], 0 where a token is padding. The cache must have room for T more.
        """
        cache, positions, context = admit(cache, tokens, attention_mask)
        logits, kept = self.run(tokens, positions, context, cache.layers, attention_mask, train=False, last=True)
        return logits[:, 0], cache._replace(layers=kept)

    def empty_cache(self, batch: int, slots: int, dtype: Any = jnp.float32) -> Cache:
        """A cache for `decode` of so many sequences and tokens each."""
        self._check_length("slots", slots)
        layers, heads, width = self.config.cache_shape
        return empty_cache(layers, (batch, slots, heads, width), dtype, scan=self.config.scan)

    def run(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        context: Context,
        cache: Any,
        attention_mask: jax.Array | None,
        *,
        train: bool,
        last: bool,
    ) -> tuple[jax.Array, Any]:
        """(logits, the layers' caches); positions [B, T], None for 0, 1, ...; `last`: logits [B, 1, vocabulary] of the last token."""
        raise NotImplementedError

    def _check_length(self, what: str, length: int) -> None:
        limit = self.config.position_limit
        if limit is not None and length > limit:
            raise ValueError(f"{type(self).__module__}: {what}: {length} in a row, expected at most {limit}, for which there are positions")
