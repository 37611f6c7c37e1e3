"""Mixtral (Jiang et al., 2024) under the names of transformers' MixtralForCausalLM: Llama's layers with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from flax import linen as nn
from jax import numpy as jnp

from .llama import Llama, RotaryConfig, RotaryLayer, dense, layers_of, shared_torch_layers


@dataclass(frozen=True)
class Config(RotaryConfig):
    """Mixtral's `config.json`. `output_router_logits`: the load-balancing loss is part of the training, with `router_aux_loss_coef`."""

    MODEL_TYPE: ClassVar[str] = "mixtral"
    ARCHITECTURE: ClassVar[str] = "MixtralForCausalLM"
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType({"sliding_window": None, "router_jitter_noise": 0.0})
    OURS: ClassVar[tuple[str, ...]] = (*RotaryConfig.OURS, "attention_bias")

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096 * 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def conflicts(self) -> list[str]:
        """A token goes to some of the experts."""
        found = super().conflicts()
        if self.num_experts_per_tok > self.num_local_experts:
            found.append(f"num_experts_per_tok is {self.num_experts_per_tok}, expected at most num_local_experts, {self.num_local_experts}")
        return found


SIZES: Mapping[str, Config] = {
    "mistralai/Mixtral-8x7B-v0.1": Config(max_position_embeddings=32768),
    "mistralai/Mixtral-8x22B-v0.1": Config(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, max_position_embeddings=65536
    ),
}
"""transformers' name -> configuration."""

TINY = Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    output_router_logits=True,
    router_aux_loss_coef=0.02,
    eos_token_id=None,
)
"""For tests."""


class Experts(nn.Module):
    """The experts that a router chooses for each token, mixed by its probabilities: [B, T, D] -> [B, T, D].

    All experts compute all tokens, and those that were not chosen get the weight 0: exact, in products of fixed shapes, at the price of
    num_local_experts / num_experts_per_tok times the work.
    """

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Return the mixture, and for each token and expert whether it was chosen and how probable it was, both [B, T, E]."""
        config, width, experts = self.config, x.shape[-1], self.config.num_local_experts
        logits = dense(config, experts, "gate", bias=False)(x)
        probabilities = nn.softmax(logits.astype(jnp.float32))
        chosen = _among_largest(probabilities, config.num_experts_per_tok)
        weights = probabilities * chosen
        weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype)
        gate, up = (jnp.einsum("btd,edf->btef", x, self._kernels(name, width, config.intermediate_size)) for name in ("w1", "w3"))
        inner = config.activation(gate) * up * weights[..., None]  # [B, T, E, F]
        return jnp.einsum("btef,efd->btd", inner, self._kernels("w2", config.intermediate_size, width)), (chosen, probabilities)

    def _kernels(self, name: str, depth: int, width: int) -> jax.Array:
        """The kernels [E, depth, width] of all experts."""
        shape = (self.config.num_local_experts, depth, width)
        return _Kernels(shape, self.config.initializer_range, name=name)()


class _Kernels(nn.Module):
    """Kernels of the same layer of several experts, [E, in, out]."""

    shape: tuple[int, int, int]
    deviation: float

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", nn.initializers.normal(self.deviation), self.shape)


class Layer(RotaryLayer):
    """Attention and experts, each normalised before and added to what it came from: [B, T, D] -> [B, T, D]."""

    config: Config

    def feedforward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """The experts, and what the router chose."""
        return Experts(self.config, name="mlp")(x)


class Mixtral(Llama):
    """A language model: tokens [B, T] of integers -> logits [B, T, vocabulary] of each next token.

    Where the configuration asks for it, the load-balancing loss, times its coefficient, is sown as "losses", which `tpuflow.train` adds.
    """

    config: Config

    layer = Layer

    def note(self, noted: Any, attention_mask: jax.Array | None) -> None:
        """Sow the load-balancing loss of what the routers of all layers chose."""
        if self.config.output_router_logits and not self.is_initializing():
            chosen, probabilities = noted
            loss = load_balancing(chosen, probabilities, attention_mask)
            self.sow("losses", "load_balancing", self.config.router_aux_loss_coef * loss)


def load_balancing(chosen: jax.Array, probabilities: jax.Array, attention_mask: jax.Array | None) -> jax.Array:
    """E times the sum over E experts of the share of tokens that chose it times its mean probability, over all layers: [L, B, T, E] -> [].

    (Switch Transformer, Fedus et al., 2021, equations 4 to 6.) attention_mask: [B, T], 0 where a token does not count.
    """
    if attention_mask is None:
        return probabilities.shape[-1] * jnp.sum(chosen.mean((0, 1, 2)) * probabilities.mean((0, 1, 2)))
    counted = attention_mask.astype(jnp.float32)[:, :, None]
    rows = probabilities.shape[0] * counted.sum()
    share, mean = ((array * counted).sum((0, 1, 2)) / rows for array in (chosen, probabilities))
    return probabilities.shape[-1] * jnp.sum(share * mean)


def _among_largest(x: jax.Array, count: int) -> jax.Array:
    """1.0 where an element is among the `count` largest of the last axis, else 0.0."""
    places = jax.lax.top_k(jax.lax.stop_gradient(x), count)[1]
    return nn.one_hot(places, x.shape[-1], dtype=x.dtype).sum(-2)


def torch_layers(config: Config) -> dict[str, str | None]:
    """Names in transformers' state dict -> places in the Flax parameters, as `tpuflow.importers.flax_params` and `state_dict` take them.

    They are those of files. In memory, transformers 5 keeps the experts of a layer in one tensor.
    """
    mlp = f"{layers_of(config)}/mlp"
    moe = "[model.]layers.*.block_sparse_moe"
    experts = {f"{moe}.experts.*.{name}": f"{mlp}/{name}" for name in ("w1", "w2", "w3")}
    return {**shared_torch_layers(config), f"{moe}.gate": f"{mlp}/gate", **experts}
