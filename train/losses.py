"""Losses of MindSpore's guides that `tpuflow.LOSSES` does not have: for `tpuflow.train(loss=...)`."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import numpy as jnp

from tpuflow.errors import ConfigError


def dense_softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-sum(labels * log softmax(logits)): logits and labels [..., C], labels being shares of the classes -> [...].

    SoftmaxCrossEntropyWithLogits(sparse=False) of MindSpore. Labels need not add up to one: all zeros give a loss of zero, and not of -0.
    """
    return jnp.sum(labels.astype(logits.dtype) * -jax.nn.log_softmax(logits), axis=-1)


def smoothed_cross_entropy(smooth_factor: float = 0.0, num_classes: int | None = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Cross-entropy with smoothed labels: logits [..., C], integer labels [...] -> [...].

    The label's class gets 1 - smooth_factor, every other class smooth_factor / (num_classes - 1). `num_classes` is the logits' C if not
    given; the guide's default is 1001 whatever the network has.
    """
    if not 0.0 <= smooth_factor < 1.0:
        raise ConfigError(f"smooth_factor: expected a number from 0 to below 1, got {smooth_factor!r}.")

    def smoothed_softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
        on, off = 1.0 - smooth_factor, smooth_factor / max((num_classes or logits.shape[-1]) - 1, 1)
        classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        shares = jnp.where(classes == labels[..., None].astype(jnp.int32), on, off).astype(logits.dtype)
        return dense_softmax_cross_entropy(logits, shares)

    return smoothed_softmax_cross_entropy
