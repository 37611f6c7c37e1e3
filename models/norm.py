"""Batch normalisation with PyTorch's and MindSpore's running variance."""

from __future__ import annotations

import jax
from flax import linen as nn
from jax import numpy as jnp


class BatchNorm(nn.Module):
    """Normalise each channel by mean and variance, of the batch in training, of past batches in evaluation: [..., C] -> [..., C].

    Differs from `flax.linen.BatchNorm` so that statistics and gradients can be compared with other frameworks: the running variance takes
    the unbiased variance of the batch (n - 1 in the denominator). Statistics are in fp32 at least, taken in one pass over the batch, and
    the gradient is the closed form that accelerators' libraries have: two sums over the batch, and then one value an element.

    axis_name: a named axis, as of a mesh; the batch is that of all chips along it, which exchange statistics and the gradient's sums.
    """

    epsilon: float = 1e-5
    momentum: float = 0.9
    axis_name: str | None = None
    scale_init: nn.initializers.Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return x [..., C] normalised; with `train` the running statistics become momentum * old + (1 - momentum) * batch's."""
        channels = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        if not train:
            return _scaled(x, running_mean.value, jax.lax.rsqrt(running_var.value + self.epsilon), scale, bias)
        axis = None if self.is_initializing() else self.axis_name
        y, mean, var = _normalised((self.epsilon, axis), x, scale, bias, jax.lax.stop_gradient(running_mean.value))
        if not self.is_initializing():
            samples = x.size // x.shape[-1] * _chips(axis)
            running_mean.value = self._moved(running_mean.value, mean)
            running_var.value = self._moved(running_var.value, var * (samples / max(samples - 1, 1)))
        return y

    def _moved(self, old: jax.Array, new: jax.Array) -> jax.Array:
        return self.momentum * old + (1.0 - self.momentum) * new


def _scaled(x: jax.Array, mean: jax.Array, deviation: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """(x - mean) * deviation * scale + bias in the statistics' type, returned in that of x and the parameters; `deviation` is 1 / sigma."""
    return ((x - mean) * (deviation * scale) + bias).astype(jnp.result_type(x, scale, bias))


def _chips(axis: str | None) -> int:
    return 1 if axis is None else jax.lax.axis_size(axis)


def _over_chips(axis: str | None, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Means over the chips along an axis."""
    return sums if axis is None else jax.lax.pmean(sums, axis)


Settings = tuple[float, str | None]
"""Epsilon, and the axis over whose chips the batch goes."""


def _with_statistics(
    settings: Settings, x: jax.Array, scale: jax.Array, bias: jax.Array, near: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The batch x [..., C] normalised by its own statistics, with them: y [..., C], mean [C], biased variance [C]. See `_moments`."""
    return _forward(settings, x, scale, bias, near)[0]


def _forward(
    settings: Settings, x: jax.Array, scale: jax.Array, bias: jax.Array, near: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """What `_with_statistics` returns, and what its gradient needs."""
    epsilon, axis = settings
    mean, var = _moments(x, near, axis)
    deviation = jax.lax.rsqrt(var + epsilon)
    return (_scaled(x, mean, deviation, scale, bias), mean, var), (x, scale, bias, mean, deviation)


def _backward(
    settings: Settings, kept: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cotangents of x, scale, bias and, all zero, of `near`: the statistics do not depend on it.

    With d = x - mean over n samples: dx = scale / sigma * (dy - sum(dy) / n - d * sum(dy * d) / (n * sigma^2)), and what the statistics
    themselves are asked for, dmean / n + dvar * 2 d / n. The samples are those of all chips along the axis; scale and bias have the sums of
    this chip's.
    """
    _, axis = settings
    (x, scale, bias, mean, deviation), (dy, dmean, dvar) = kept, cotangents
    axes, share = tuple(range(x.ndim - 1)), x.shape[-1] / x.size
    dy, distance = dy.astype(mean.dtype), x - mean
    total, along = dy.sum(axes), (dy * distance).sum(axes)
    gain = deviation * scale
    slope, offset = _over_chips(axis, (2.0 * dvar - gain * jnp.square(deviation) * along, dmean - gain * total))
    dx = dy * gain + (distance * (share * slope) + share * offset)
    return dx.astype(x.dtype), (along * deviation).astype(scale.dtype), total.astype(bias.dtype), jnp.zeros_like(mean)


_normalised = jax.custom_vjp(_with_statistics, nondiff_argnums=(0,))
_normalised.defvjp(_forward, _backward)


def _moments(x: jax.Array, near: jax.Array, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of every channel over the chips along the axis, in fp32 at least and in one pass: [..., C] -> two of [C].

    Differences are taken from `near` [C], the running mean: once that is within some deviations of the batch's, the difference of the two
    means does not cancel, however far both are from zero. Before, this is the difference of plain squares that `flax.linen.BatchNorm`
    takes by default. Nothing of the batch has to be there before its sums, which can so be made where the batch is.
    """
    axes, wide = tuple(range(x.ndim - 1)), jnp.promote_types(x.dtype, jnp.float32)
    distance = x.astype(wide) - near.astype(wide)
    mean, square = _over_chips(axis, (distance.mean(axes), jnp.square(distance).mean(axes)))
    return near + mean, jnp.maximum(square - jnp.square(mean), 0.0)
