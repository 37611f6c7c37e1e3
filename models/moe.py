"""A mixture of experts as DeepSpeed's `MoE` layer has it: top-1 or top-2 gating with a capacity, experts over a mesh axis by all-to-all.

GShard (Lepikhin et al., 2020), Switch Transformer (Fedus et al., 2021), and the residual form of DeepSpeed-MoE (Rajbhandari et al., 2022).
"""

from __future__ import annotations

import math

import jax
from flax import linen as nn
from jax import lax
from jax import numpy as jnp

NOISES = (None, "RSample", "Jitter")
JITTER = 1e-2
"""DeepSpeed's: inputs of the gate are multiplied by numbers within 1 - JITTER and 1 + JITTER."""


class MoE(nn.Module):
    """Dense experts [D] -> [D], each for the tokens that its gate sends there: tokens [..., D] -> [..., D].

    experts: how many. k: how many of them a token goes to, 1 or 2, weighed by the gate. A group of `group_tokens` tokens (all that there
    are if None) is gated together: an expert takes at most ceil(k * group / experts * capacity_factor) tokens of it, or `min_capacity` if
    that is more; others go to no expert. residual: a dense layer beside the experts, and a mixture of both. noise: "RSample" chooses
    the first expert by logits with Gumbel noise, "Jitter" changes the gate's inputs a little. random_tokens: which tokens an expert takes
    where there are too many is drawn at random (of the first choice, with k = 1), and so is the second expert with k = 2; else the first
    come, and the second best. Random numbers come from the stream "gate", and are drawn in training only.

    axis: a mesh axis over whose chips the experts are spread. On a mesh that has it, each chip gates its own tokens, sends each to the chip
    of its expert, and gets the results back. Elsewhere the layer is computed where it is called, with the same values if `group_tokens` are
    those of one chip. own: a chip holds the kernels of its own experts only, rather than all.

    The load-balancing loss (experts times the sum of each one's share of tokens times its mean probability) times `balance` is sown as
    "losses", which `tpuflow.train` adds.
    """

    experts: int
    k: int = 1
    capacity_factor: float = 1.0
    min_capacity: int = 4
    residual: bool = False
    noise: str | None = None
    random_tokens: bool = False
    group_tokens: int | None = None
    axis: str | None = None
    own: bool = False
    balance: float = 0.0
    train: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        self._check()
        tokens = x.reshape(-1, self.group_tokens or x.size // x.shape[-1], x.shape[-1])  # [G, S, D]
        chosen, weights = self._gated(tokens)
        sent = jnp.einsum("gsec,gsd->gecd", chosen.astype(x.dtype), tokens)
        found = self._computed(sent)
        mixed = jnp.einsum("gsec,gecd->gsd", weights.astype(x.dtype), found).reshape(x.shape)
        return self._with_residual(x, mixed) if self.residual else mixed

    def _check(self) -> None:
        if self.k not in (1, 2) or self.experts < self.k:
            raise ValueError(f"MoE: expected k of 1 or 2 and at least as many experts, got k={self.k} of {self.experts} experts.")
        if self.noise not in NOISES or (self.noise == "RSample" and self.k == 2):
            raise ValueError(f"MoE: expected noise of {NOISES}, RSample with k=1 only; got {self.noise!r} with k={self.k}.")
        if self.experts % self._chips():
            raise ValueError(f"MoE: {self.experts} experts do not divide over the {self._chips()} chips of the axis {self.axis!r}.")

    def _chips(self) -> int:
        """Chips of the axis, where there is such an axis."""
        if self.axis is None or self.is_initializing():
            return 1
        try:
            return lax.axis_size(self.axis)
        except NameError:
            return 1

    def _draws(self, *, wanted: bool) -> jax.Array | None:
        return self.make_rng("gate") if wanted and self.train and not self.is_initializing() else None

    def _gated(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(whether, with which weight) a token takes a place of an expert, [G, S, E, C] each, in fp32."""
        inputs = tokens.astype(jnp.float32)
        if (key := self._draws(wanted=self.noise == "Jitter")) is not None:
            inputs = inputs * jax.random.uniform(key, inputs.shape, minval=1 - JITTER, maxval=1 + JITTER)
        logits = nn.Dense(self.experts, use_bias=False, name="gate")(inputs)
        probabilities = nn.softmax(logits)
        noisy = logits if (key := self._draws(wanted=self.noise == "RSample")) is None else logits + jax.random.gumbel(key, logits.shape)
        first = nn.one_hot(jnp.argmax(noisy, -1), self.experts)
        self._sow_balance(first, probabilities)
        places = capacity(tokens.shape[1], self.experts, self.k * self.capacity_factor, self.min_capacity)
        if self.k == 1:
            key = self._draws(wanted=self.random_tokens)
            kept = first if key is None else _drawn(first, places, key)
            return _placed([kept], [jnp.sum(probabilities * kept, -1)], places)
        key = self._draws(wanted=self.random_tokens)
        rest = (logits if key is None else logits + jax.random.gumbel(key, logits.shape)) + jnp.where(first > 0, -jnp.inf, 0.0)
        second = nn.one_hot(jnp.argmax(rest, -1), self.experts)
        return _placed([first, second], [jnp.sum(probabilities * mask, -1) for mask in (first, second)], places)

    def _sow_balance(self, first: jax.Array, probabilities: jax.Array) -> None:
        if self.balance and not self.is_initializing():
            share, mean = first.mean(1), probabilities.mean(1)  # [G, E]
            self.sow("losses", "load_balancing", self.balance * self.experts * jnp.mean(jnp.sum(share * mean, -1)))

    def _computed(self, sent: jax.Array) -> jax.Array:
        """What each expert makes of its places: [G, E, C, D] -> the same."""
        depth, chips = sent.shape[-1], self._chips()
        held = self.experts // chips if self.own else self.experts
        kernel = self.param("kernel", nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=0), (held, depth, depth))
        bias = self.param("bias", nn.initializers.zeros_init(), (held, depth))
        if chips == 1:
            return _experts(sent, kernel, bias)
        assert self.axis is not None
        if not self.own:
            first = lax.axis_index(self.axis) * (self.experts // chips)
            kernel, bias = (lax.dynamic_slice_in_dim(w, first, self.experts // chips) for w in (kernel, bias))
        there = lax.all_to_all(sent, self.axis, 1, 0, tiled=True)  # [G, E, C, D] -> [chips * G, E / chips, C, D]
        return lax.all_to_all(_experts(there, kernel, bias), self.axis, 0, 1, tiled=True)

    def _with_residual(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        dense = nn.Dense(x.shape[-1], name="mlp")(x)
        shares = nn.softmax(nn.Dense(2, name="coefficient")(x))
        return mixed * shares[..., :1] + dense * shares[..., 1:]


def capacity(tokens: int, experts: int, factor: float, least: int) -> int:
    """Tokens that an expert takes of a group."""
    return max(math.ceil(tokens / experts * factor), least)


def _drawn(first: jax.Array, places: int, key: jax.Array) -> jax.Array:
    """At most so many tokens of each expert, drawn at random: [G, S, E] of 0 and 1 -> the same with fewer ones."""
    lots = first * jax.random.uniform(key, first.shape, minval=jnp.finfo(jnp.float32).tiny)
    least = lax.top_k(jnp.swapaxes(lots, 1, 2), min(places, first.shape[1]))[0][..., -1]  # [G, E]
    return first * (lots >= least[:, None, :])


def _placed(chosen: list[jax.Array], weights: list[jax.Array], places: int) -> tuple[jax.Array, jax.Array]:
    """chosen: for the first and the second choice, [G, S, E] of 0 and 1; weights [G, S]. Those of a token add up to 1 if it has two.

    Tokens take places in their order, second choices after all first ones.
    """
    taken, inside = jnp.zeros_like(chosen[0][:, :1]), []
    for mask in chosen:
        place = jnp.cumsum(mask, 1) - 1 + taken
        taken = taken + jnp.sum(mask, 1, keepdims=True)
        inside.append((mask * (place < places), place))
    weights = [w * jnp.sum(mask, -1) for w, (mask, _) in zip(weights, inside, strict=True)]
    if len(weights) > 1:
        total = jnp.maximum(sum(weights), jnp.finfo(jnp.float32).eps)
        weights = [w / total for w in weights]
    spots = [mask[..., None] * nn.one_hot(place.astype(jnp.int32), places) for mask, place in inside]  # [G, S, E, C]
    spread = [spot * weight[..., None, None] for spot, weight in zip(spots, weights, strict=True)]
    return lax.stop_gradient(sum(spots)), sum(spread)  # type: ignore[return-value]


def _experts(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """[G, E, C, D] of every expert by its own kernel."""
    return jnp.einsum("gecd,edf->gecf", x, kernel) + bias[:, None]
