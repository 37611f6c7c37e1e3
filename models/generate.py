"""Text from a language model: a prompt, and then one token after the other, in one function with a loop and a cache of fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp

from .causal import CausalModel


@dataclass(frozen=True)
class Sampling:
    """Draw tokens by their probabilities, of logits / temperature; of the `top_k` most probable ones only, if that is not None."""

    temperature: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what is no temperature or no number of tokens."""
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}, expected more than 0; without sampling, the most probable token is taken")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, expected at least 1, or None for all")


def generate(
    model: CausalModel,
    variables: Any,
    tokens: jax.Array,
    new_tokens: int,
    *,
    attention_mask: jax.Array | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    end: int | tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Continue prompts: tokens [B, T] -> the next tokens [B, new_tokens], int32.

    One function for `tpuflow.jit` (or `jax.jit`) with `model`, `new_tokens` and all but arrays bound: the prompt goes through the model at
    once, then a loop of new_tokens - 1 trips.

    attention_mask: [B, T], 0 where a prompt is padded, on the left. sampling: with a `key`; without, the most probable token is taken.
    end: tokens after which a sequence is over; the first of them is then repeated. dtype: of the cache.

    Raises:
      ValueError: no new tokens, sampling without a key, or more tokens than the model has positions for.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens is {new_tokens}, expected at least 1")
    if sampling is not None and key is None:
        raise ValueError("sampling draws tokens: give a key, such as jax.random.key(0)")
    batch, length = tokens.shape
    ends = (end,) if isinstance(end, int) else (end or ())

    def chosen(logits: jax.Array, number: jax.Array | int, over: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the next token [B], whether each sequence is over by then)."""
        token = jnp.argmax(logits, -1) if sampling is None or key is None else _sampled(logits, jax.random.fold_in(key, number), sampling)
        token = jnp.where(over, ends[0], token) if ends else token
        return token.astype(jnp.int32), over | sum((token == one for one in ends), start=over)

    def step(number: Any, state: Any) -> Any:
        found, over, cache = state
        token = jax.lax.dynamic_slice_in_dim(found, number - 1, 1, 1)  # [B, 1]
        logits, cache = model.apply(variables, token, cache, method="decode")
        token, over = chosen(logits, number, over)
        return jax.lax.dynamic_update_slice_in_dim(found, token[:, None], number, 1), over, cache

    cache = model.empty_cache(batch, length + new_tokens - 1, dtype)
    logits, cache = model.apply(variables, tokens, cache, attention_mask, method="decode")
    first, over = chosen(logits, 0, jnp.zeros((batch,), bool))
    found = jnp.zeros((batch, new_tokens), jnp.int32).at[:, 0].set(first)
    return jax.lax.fori_loop(1, new_tokens, step, (found, over, cache))[0]


def _sampled(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    logits = logits.astype(jnp.float32) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits)
