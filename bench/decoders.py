"""Decoder layers over a mesh, as MaxText has them: attention in windows or through a latent, experts by masks or by sorting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from models import llama
from models.attention import Context, attend
from models.causal import Inputs
from models.layers import STREAMS

LAYER_INPUT = "layer_input"
"""The name of a layer's input for policies of `jax.checkpoint`."""


@dataclass(frozen=True)
class Heads:
    """Attention of heads that are normalised before they are turned: how many of keys and values there are, how wide all are, how many keys
    up to its own a query sees (None: all before it), the base and the share of a head's width that positions turn, and whether one
    projection makes both keys and values."""

    key_heads: int
    width: int
    window: int | None = None
    theta: float = 10000.0
    turned: float = 1.0
    keys_are_values: bool = False


@dataclass(frozen=True)
class Latent:
    """Attention through latents (DeepSeek's MLA): the widths of that of queries (None: there is none) and that of keys and values, and of a
    head the widths of what positions leave and of what they turn, and of values."""

    query_rank: int | None
    key_rank: int
    plain: int = 128
    turned: int = 64
    value: int = 128


@dataclass(frozen=True)
class Stack:
    """So many blocks in a scan, each of runs of layers that are alike: how many, in a scan if they are several, and their attention; with
    experts, or without."""

    name: str
    blocks: int
    runs: tuple[tuple[int, Heads | Latent], ...]
    experts: bool = False


@dataclass(frozen=True)
class MeshConfig(llama.Config):
    """Llama's, how activations [B, T, D] lie between layers, and for a mixture of experts how many there are, how many a token goes
    to, how many times its even share of a sequence's tokens an expert has place for, its inner width (None: that of other layers), and
    the inner width of the layer beside them through which all tokens go.

    `stacks` are layers other than Llama's; `post_norms`: what they add is normalised, too (Gemma's).
    """

    lies: NamedSharding | None = None
    experts: int | None = None
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    expert_width: int | None = None
    shared_width: int | None = None
    stacks: tuple[Stack, ...] = ()
    post_norms: bool = False


class Layer(llama.Layer):
    """A layer whose input and output lie as the configuration says."""

    config: Any

    def __call__(self, x: jax.Array, context: Any, cache: Any) -> tuple[jax.Array, Any]:
        """As llama's."""
        x = checkpoint_name(lax.with_sharding_constraint(x, self.config.lies), LAYER_INPUT)
        x, kept = super().__call__(x, context, cache)
        return lax.with_sharding_constraint(x, self.config.lies), kept


class Ungated(nn.Module):
    """down(relu(up(x))): MaxText's feedforward layer before it had a gate, [..., D] -> [..., D]."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last layer's outputs."""
        config = self.config
        wide = nn.relu(llama.dense(config, config.intermediate_size, "up_proj", bias=False)(x))
        return llama.dense(config, config.hidden_size, "down_proj", bias=False)(wide)


class UngatedLayer(Layer):
    """The same with an ungated feedforward layer."""

    def feedforward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """As llama's, without the gate."""
        return Ungated(self.config, name="mlp")(x), None


class Experts(nn.Module):
    """A mixture of gated experts, [B, T, D] -> [B, T, D]: each takes so many tokens of a sequence, in their order, and those beyond are
    dropped. How tokens come to the experts and back, the subclasses say."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the mixture."""
        config = self.config
        logits = llama.dense(config, config.experts, "gate", bias=False)(x)
        largest, chosen = lax.top_k(logits, config.experts_per_token)
        places = int(x.shape[1] * config.experts_per_token / config.experts * config.capacity_factor)
        return self.mixed(x, chosen, nn.softmax(largest.astype(jnp.float32)), places)

    def mixed(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, places: int) -> jax.Array:
        """What the experts `chosen` [B, T, K] make of x, by their weights; each has so many places for a sequence."""
        raise NotImplementedError(f"{type(self).__name__}.mixed")

    def computed(self, sent: jax.Array) -> jax.Array:
        """What each expert makes of its tokens: [E, B, C, D] -> [E, B, C, D]."""
        config, width = self.config, sent.shape[-1]
        inner = config.expert_width or config.intermediate_size
        gate, up = (jnp.einsum("ebcd,edf->ebcf", sent, self._kernel(name, width, inner)) for name in ("w1", "w3"))
        return jnp.einsum("ebcf,efd->ebcd", config.activation(gate) * up, self._kernel("w2", inner, width))

    def _kernel(self, name: str, depth: int, width: int) -> jax.Array:
        """The kernels [E, depth, width] of all experts."""
        return self.param(name, nn.initializers.normal(self.config.initializer_range), (self.config.experts, depth, width))


class DroppingExperts(Experts):
    """As MaxText has them without `sparse_matmul` and `megablox`: products with masks of tokens and places [B, T, E, C] send tokens to the
    experts and add up what comes back."""

    def mixed(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, places: int) -> jax.Array:
        """As `Experts.mixed`."""
        mask = nn.one_hot(chosen, self.config.experts, dtype=jnp.int32)  # [B, T, K, E]
        count = jnp.cumsum(mask.reshape(x.shape[0], -1, self.config.experts), 1).reshape(mask.shape)
        held = mask * (count <= places)
        weight = (weights[..., None] * held).sum(2).astype(x.dtype)  # [B, T, E]
        combine = weight[..., None] * nn.one_hot((held * count).sum(2) - 1, places, dtype=x.dtype)
        sent = jnp.einsum("btd,btec->ebcd", x, (combine != 0).astype(x.dtype))
        return jnp.einsum("ebcd,btec->btd", self.computed(sent), combine)


class SortedExperts(Experts):
    """As MaxText has them with `sparse_matmul` and `megablox`, but for places of a fixed number: a token's copies, one for each of its
    experts, are sorted by expert and are moved to the experts' places and back, gradients too (`use_custom_sort_vjp`)."""

    def mixed(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, places: int) -> jax.Array:
        """As `Experts.mixed`."""
        (batch, _, width), count, experts = x.shape, chosen.shape[-1], self.config.experts
        expert = chosen.reshape(batch, -1)  # of each copy: [B, T * K]
        order = jnp.argsort(expert, axis=1, stable=True)
        begins = (expert[:, :, None] < jnp.arange(experts + 1)).sum(1, dtype=jnp.int32)  # in that order, of each expert: [B, E + 1]
        rank = jnp.argsort(order, axis=1) - jnp.take_along_axis(begins, expert, 1)
        place = jnp.where(rank < places, expert * places + rank, experts * places)  # beyond the last: none
        at = begins[:, :-1, None] + jnp.arange(places)
        copy = jnp.take_along_axis(order, at.reshape(batch, -1), 1, mode="clip")
        copy = jnp.where((at < begins[:, 1:, None]).reshape(batch, -1), copy, order.shape[1])
        sent = _moved(jnp.repeat(x, count, 1), copy, place).reshape(batch, experts, places, width)
        back = self.computed(sent.swapaxes(0, 1)).swapaxes(0, 1).reshape(batch, -1, width)
        parts = _moved(back, place, copy).reshape(*chosen.shape, width).astype(jnp.float32)
        return (parts * weights[..., None]).sum(2).astype(x.dtype)


@jax.custom_vjp
def _moved(x: jax.Array, source: jax.Array, place: jax.Array) -> jax.Array:
    """The rows `source` [B, N] of x [B, M, D], zeros for those that x has not: [B, N, D]. Its row m comes to the place `place` [B, M], so
    that gradients are moved back as rows are."""
    return jnp.take_along_axis(x, source[..., None], 1, mode="fill", fill_value=0)


def _moved_forward(x: jax.Array, source: jax.Array, place: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _moved(x, source, place), (source, place)


def _moved_backward(known: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    source, place = known
    return _moved(gradient, place, source), None, None


_moved.defvjp(_moved_forward, _moved_backward)


class ExpertsLayer(Layer):
    """The same with a mixture of experts."""

    def feedforward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """As llama's, by the experts that a token is sent to."""
        return DroppingExperts(self.config, name="experts")(x), None


def attend_near(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """As `attend` where each token sees the last `window` up to itself: q [B, T, H, D]; k, v [B, T, K, D] -> [B, T, H * D].

    So many queries at once see their own keys and those of as many tokens before them.
    """
    batch, length = q.shape[:2]
    blocks = length // window

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(batch, blocks, window, *x.shape[2:])

    def doubled(x: jax.Array) -> jax.Array:
        own = cut(x)
        before = jnp.pad(own[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
        return jnp.concatenate([before, own], 2).reshape(batch * blocks, 2 * window, *x.shape[2:])

    apart = jnp.arange(window)[:, None] - jnp.arange(-window, window)
    there = (jnp.arange(-window, window) >= 0) | (jnp.arange(blocks) > 0)[:, None, None, None]  # no block is before the first
    seen = jnp.tile((apart >= 0) & (apart < window) & there, (batch, 1, 1, 1))  # [B * blocks, 1, W, 2 W]
    return attend(q.reshape(-1, window, *q.shape[2:]), doubled(k), doubled(v), seen).reshape(batch, length, -1)


class HeadsAttention(nn.Module):
    """Causal self-attention of `Heads`: [B, T, D] -> [B, T, D]."""

    config: MeshConfig
    heads: Heads

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Return each position's mixture of those that it sees."""
        config, heads = self.config, self.heads
        q, k = (self._projected(x, count, name) for name, count in (("q_proj", config.num_attention_heads), ("k_proj", heads.key_heads)))
        v = k if heads.keys_are_values else self._projected(x, heads.key_heads, "v_proj")
        q, k = (self._turned(llama.RMSNorm(config.rms_norm_eps, name=f"{name}_norm")(x)) for name, x in (("q", q), ("k", k)))
        window = heads.window or x.shape[1]
        mixed = attend_near(q, k, v, window) if window < x.shape[1] else attend(q, k, v, context.visible)
        return checkpoint_name(llama.dense(config, config.hidden_size, "o_proj", bias=False)(mixed), "o_proj")

    def _projected(self, x: jax.Array, count: int, name: str) -> jax.Array:
        """[B, T, D] -> [B, T, count, width]."""
        width = self.heads.width
        return llama.dense(self.config, count * width, name, bias=False)(x).reshape(*x.shape[:2], count, width)

    def _turned(self, x: jax.Array) -> jax.Array:
        """[B, T, H, width], of which the first share is turned by the position."""
        turned = int(self.heads.width * self.heads.turned)
        rotation = llama.rotation(jnp.arange(x.shape[1])[None], turned, self.heads.theta)
        first = llama.rotated(x[..., :turned], *rotation)
        return first if turned == self.heads.width else jnp.concatenate([first, x[..., turned:]], -1)


class LatentAttention(nn.Module):
    """Causal self-attention of `Latent`: [B, T, D] -> [B, T, D]. All heads share the part of their keys that positions turn."""

    config: MeshConfig
    latent: Latent

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Return each position's mixture of itself and those before it."""
        config, latent, heads = self.config, self.latent, self.config.num_attention_heads
        low = x if latent.query_rank is None else self._normal("q_a", self._dense("q_a_proj", latent.query_rank)(x))
        q = self._dense("q_b_proj", heads * (latent.plain + latent.turned))(low).reshape(*x.shape[:2], heads, -1)
        low, turned = jnp.split(self._dense("kv_a_proj", latent.key_rank + latent.turned)(x), [latent.key_rank], -1)
        kv = self._dense("kv_b_proj", heads * (latent.plain + latent.value))(self._normal("kv_a", low))
        k, v = jnp.split(kv.reshape(*x.shape[:2], heads, -1), [latent.plain], -1)
        rotation = llama.rotation(jnp.arange(x.shape[1])[None], latent.turned, config.rope_theta)
        q = jnp.concatenate([q[..., : latent.plain], llama.rotated(q[..., latent.plain :], *rotation)], -1)
        turned = jnp.broadcast_to(llama.rotated(turned[:, :, None], *rotation), (*x.shape[:2], heads, latent.turned))
        mixed = attend(q, jnp.concatenate([k, turned], -1), v, context.visible)
        return checkpoint_name(self._dense("o_proj", config.hidden_size)(mixed), "o_proj")

    def _dense(self, name: str, width: int) -> nn.Dense:
        return llama.dense(self.config, width, name, bias=False)

    def _normal(self, name: str, x: jax.Array) -> jax.Array:
        return llama.RMSNorm(self.config.rms_norm_eps, name=f"{name}_norm")(x)


ATTENTION: Mapping[type, type[nn.Module]] = {Heads: HeadsAttention, Latent: LatentAttention}


class DecoderLayer(nn.Module):
    """Attention of a kind, and a gated layer or experts with one beside them: [B, T, D] -> [B, T, D]."""

    config: MeshConfig
    attention: Heads | Latent
    experts: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, None]:
        """Return x + attention(norm(x)), with what follows it added in the same way."""
        config = self.config
        x = checkpoint_name(lax.with_sharding_constraint(x, config.lies), LAYER_INPUT)
        attention = ATTENTION[type(self.attention)](config, self.attention, name="self_attn")
        x = x + self._after("attention", attention(self._normal("input_layernorm", x), context))
        added = self._after("feedforward", self._feedforward(self._normal("post_attention_layernorm", x)))
        return lax.with_sharding_constraint(x + added, config.lies), None

    def _feedforward(self, x: jax.Array) -> jax.Array:
        config = self.config
        if not self.experts:
            return llama.Feedforward(config, name="mlp")(x)
        mixed = SortedExperts(config, name="experts")(x)
        if config.shared_width is None:
            return mixed
        shared = llama.Feedforward(replace(config, intermediate_size=config.shared_width), name="shared")(x)
        return self._after("experts", mixed) + self._after("shared", shared)

    def _after(self, name: str, x: jax.Array) -> jax.Array:
        return self._normal(f"after_{name}", x) if self.config.post_norms else x

    def _normal(self, name: str, x: jax.Array) -> jax.Array:
        return llama.RMSNorm(self.config.rms_norm_eps, name=name)(x)


class Block(nn.Module):
    """A block of a stack, each of its layers computed again in the backward pass but for what the policy keeps."""

    config: MeshConfig
    stack: Stack
    policy: Any

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, None]:
        """[B, T, D] -> [B, T, D]."""
        layer = nn.remat(DecoderLayer, policy=self.policy, prevent_cse=False)
        for index, (count, attention) in enumerate(self.stack.runs):
            run = scanned(layer, count) if count > 1 else layer
            x, _ = run(self.config, attention, self.stack.experts, name=f"run_{index}")(x, context)
        return x, None


def scanned(module: Any, count: int) -> Any:
    """So many of a kind of module (x, context) -> (x, None) in a scan."""
    same: Any = nn.broadcast
    return nn.scan(module, {"params": 0}, split_rngs=STREAMS, in_axes=same, length=count)


class Transformer(llama.Llama):
    """Llama with layers that lie on a mesh, or with its configuration's stacks of them; `policy` says what the backward pass keeps of
    these."""

    config: MeshConfig
    layer: Any = Layer
    policy: Any = None

    def run_layers(self, x: jax.Array, context: Context, inputs: Inputs) -> tuple[jax.Array, Any, Any]:
        """As llama's, or those of the configuration's stacks."""
        for stack in self.config.stacks:
            x, _ = scanned(Block, stack.blocks)(self.config, stack, self.policy, name=stack.name)(x, context)
        return (x, None, None) if self.config.stacks else super().run_layers(x, context, inputs)
