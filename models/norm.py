"""Batch normalisation with PyTorch's and MindSpore's running variance."""

from __future__ import annotations

import jax
from flax import linen as nn
from jax import numpy as jnp


class BatchNorm(nn.Module):
    """Normalise each channel by mean and variance, of the batch in training, of past batches in evaluation: [..., C] -> [..., C].

    Differs from `flax.linen.BatchNorm` in two ways, so that statistics and gradients can be compared with other frameworks:
    the running variance takes the unbiased variance of the batch (n - 1 in the denominator), and a variance is the mean of squared
    differences rather than a difference of two means, which cancels. Statistics are in fp32 at least.
    """

    epsilon: float = 1e-5
    momentum: float = 0.9
    scale_init: nn.initializers.Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return x [..., C] normalised; with `train` the running statistics become momentum * old + (1 - momentum) * batch's."""
        channels = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        mean, var = _moments(x) if train else (running_mean.value, running_var.value)
        if train and not self.is_initializing():
            samples = x.size // x.shape[-1]
            running_mean.value = self._moved(running_mean.value, mean)
            running_var.value = self._moved(running_var.value, var * (samples / max(samples - 1, 1)))
        y = (x - mean) * (jax.lax.rsqrt(var + self.epsilon) * scale) + bias
        return y.astype(jnp.result_type(x, scale, bias))

    def _moved(self, old: jax.Array, new: jax.Array) -> jax.Array:
        return self.momentum * old + (1.0 - self.momentum) * new


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of every channel, in fp32 at least: [..., C] -> two of [C]."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    return mean, jnp.square(x - mean).mean(axes)
