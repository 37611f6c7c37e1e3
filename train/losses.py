"""Losses of MindSpore's guides that `tpuflow.LOSSES` does not have: for `tpuflow.train(loss=...)`."""

from __future__ import annotations

import jax
from jax import numpy as jnp


def dense_softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-sum(labels * log softmax(logits)): logits and labels [..., C], labels being shares of the classes -> [...].

    SoftmaxCrossEntropyWithLogits(sparse=False) of MindSpore. Labels need not add up to one: all zeros give a loss of zero, and not of -0.
    """
    return jnp.sum(labels.astype(logits.dtype) * -jax.nn.log_softmax(logits), axis=-1)
