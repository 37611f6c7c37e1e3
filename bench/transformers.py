"""Published training steps of transformers over slices of TPUs (MaxText's tables), as their sources configure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.decoders import LAYER_INPUT, ExpertsLayer, Heads, Latent, Layer, MeshConfig, Stack, Transformer, UngatedLayer
from models import gpt2
from tpuflow import amp
from tpuflow.chips import CHIPS, Chip
from tpuflow.training.config import StepConfig
from tpuflow.training.partitioning import Rules

GPT3 = gpt2.Config(
    vocab_size=51200, n_positions=2048, n_embd=12288, n_layer=96, n_head=96, remat=True, scan=True, **gpt2.NO_DROPOUT
)  # fmt: skip
"""GPT-3's 175 billion parameters (Brown et al., 2020), the vocabulary a multiple of 1024."""
TOKENS, VOCABULARY, HEAD_WIDTH = 2048, 32000, 128  # of most rows
"""MaxText's base configuration: `max_target_length`, `vocab_size`, `head_dim`."""
ACTIVATIONS = amp.Policy("bf16_activations", compute_dtype="bfloat16", casts="all")
"""MaxText's `dtype` and `weight_dtype`: parameters and what the optimizer keeps in float32, all activations in bfloat16."""
WEIGHTS = replace(ACTIVATIONS, name="bf16_weights", param_dtype="bfloat16")
"""The same with `weight_dtype` bfloat16: parameters and what the optimizer keeps in bfloat16 as well."""


def offloaded(*names: str) -> Any:
    """The policy that keeps what has these names in the host's memory, and nothing else."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device", offload_dst="pinned_host"
    )


QKV = ("q_proj", "k_proj", "v_proj")
REMAT_POLICIES: Mapping[str, Any] = {
    "full": None,
    "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "qkv_proj_offloaded": offloaded(*QKV),
    "layer inputs and qkv_proj offloaded": offloaded(LAYER_INPUT, *QKV),
    "layer inputs, qkv_proj and out_proj offloaded": offloaded(LAYER_INPUT, *QKV, "o_proj"),
    "layer inputs and out_proj offloaded": offloaded(LAYER_INPUT, "o_proj"),
    "layer inputs offloaded": offloaded(LAYER_INPUT),
    "context and mlpwo offloaded": offloaded("context", "down_proj"),
    "out_proj and mlpwo kept": jax.checkpoint_policies.save_only_these_names("o_proj", "down_proj"),
}
"""MaxText's `remat_policy`: a layer is computed again in the backward pass ("full"); what products with weights give is kept ("minimal");
or what has these names of MaxText's is kept in the host's memory ("custom", in its configurations)."""


@dataclass(frozen=True, slots=True)
class Published:
    """A row: the model's sizes, sequences of a chip, the chips of a slice along the axes of its own mesh, how many slices, what is kept.

    `model` chips share every product (tensor parallelism); `data` of them a batch, and the parameters (FSDP); slices a batch only.
    `options` are further fields of its `MeshConfig`.
    """

    name: str
    chip: str
    width: int
    heads: int
    inner: int
    layers: int
    batch: float
    data: int
    model: int = 1
    slices: int = 1
    head_width: int = HEAD_WIDTH
    key_heads: int | None = None
    tokens: int = TOKENS
    vocabulary: int = VOCABULARY
    gated: bool = True
    experts: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    remat_policy: str = "full"
    precision: amp.Policy = ACTIVATIONS
    note: str = ""

    @property
    def chips(self) -> int:
        """All of them."""
        return self.slices * self.data * self.model

    @property
    def row(self) -> Chip:
        """The chip's row with slices of this size: only within one are chips joined by links."""
        return replace(CHIPS[self.chip], link_chips=self.data * self.model)

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axes of more than one chip, and the axis of the batch."""
        sizes = {"slice": self.slices, "data": self.data, "model": self.model}
        return {name: size for name, size in sizes.items() if size > 1 or name == "data"}

    @property
    def step_flops(self) -> float:
        """Of a chip, as MaxText counted in 2024: 6 for every parameter of a product and token, scores of all pairs of tokens."""
        joint = 4 * self.width * self.heads * self.head_width + (3 if self.gated else 2) * self.width * self.inner
        products = 6 * self.tokens * (self.layers * joint + self.vocabulary * self.width)
        return self.batch * (products + 12 * self.layers * self.heads * self.head_width * self.tokens**2)

    def step(self) -> StepConfig:
        """Its training step: AdamW, bfloat16 activations, layers in a scan."""
        axes = tuple(axis for axis in ("slice", "data") if axis in self.mesh)
        lies = NamedSharding(AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh)), P(axes, None, "model" if self.model > 1 else None))
        config = MeshConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.inner, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.key_heads, head_dim=self.head_width, scan=True, lies=lies,
            experts=self.experts, **self.options,
        )  # fmt: skip
        tokens = jax.ShapeDtypeStruct((int(self.batch * self.chips), self.tokens), jnp.int32)
        module = Transformer(config, layer=self._layer(), policy=REMAT_POLICIES[self.remat_policy])
        return StepConfig(module, (tokens, tokens), self.precision, optax.adamw(3e-5), mesh=self.mesh, sharding=self._rules())

    def _layer(self) -> Any:
        layer = ExpertsLayer if self.experts else Layer if self.gated else UngatedLayer
        return nn.remat(layer, policy=REMAT_POLICIES[self.remat_policy], prevent_cse=False)

    def _rules(self) -> Rules:
        """Widths are cut over `data`, heads, the inner width and the vocabulary over `model`."""
        model = "model" if self.model > 1 else None
        layers = _layer_rules("layers", 1, model, gated=not self.experts, experts=bool(self.experts))
        if stacks := self.options.get("stacks"):
            layers = {pattern: spec for stack in stacks for pattern, spec in _stack_rules(stack, model, self.options).items()}
        head = {} if self.options.get("tie_word_embeddings") else {"lm_head/kernel": P("data", model)}
        return {"embed_tokens/embedding": P(model, "data"), **layers, **head}


def _stack_rules(stack: Stack, model: str | None, options: Mapping[str, Any]) -> Rules:
    """Of the layers of a stack: kernels are [blocks, in, out], or [blocks, layers, in, out] of several in a run."""
    gated, rules = not stack.experts or "shared_width" in options, {}
    for index, (count, _) in enumerate(stack.runs):
        rules |= _layer_rules(f"{stack.name}/run_{index}", 1 + (count > 1), model, gated=gated, experts=stack.experts)
    return rules


def _layer_rules(where: str, stacked: int, model: str | None, *, gated: bool, experts: bool) -> Rules:
    """Of layers with so many axes before those of their kernels, gated ones or experts or both."""
    before = (None,) * stacked
    into, out = P(*before, "data", model), P(*before, model, "data")
    return {
        f"{where}/self_attn/o_proj/kernel": out,
        **({f"{where}/*/down_proj/kernel": out} if gated else {}),
        **({f"{where}/experts/w2": P(None, *out), f"{where}/experts/w?": P(None, *into)} if experts else {}),
        f"{where}/*/*/kernel": into,
    }


def _scaled(chip: str, scale: int, batch: int, data: int) -> Published:
    """MaxText's `global_parameter_scale`, a power of 2: heads and inner width, width, layers are doubled in turn."""
    each, left = divmod(scale.bit_length() - 1, 3)
    heads, width = each + (left > 0), each + (left > 1)
    return Published(f"{scale}B", chip, 2048 << width, 16 << heads, 7168 << heads, 16 << each, batch, data)


def _v5e(scale: int, batch: int, slices: int) -> Published:
    return replace(_scaled("tpu-v5e", scale, batch, 256), slices=slices)


def _v5e_offloaded(slices: int) -> Published:
    return replace(_scaled("tpu-v5e", 128, 1, 16), model=16, slices=slices, remat_policy="qkv_proj_offloaded")


def _v5p(scale: int, batch: int, data: int, model: int, *, slices: int = 2, remat_policy: str = "full") -> Published:
    return replace(_scaled("tpu-v5p", scale, batch, data), model=model, slices=slices, remat_policy=remat_policy)


def _v6e(model: Published, chips: int, batch: int) -> Published:
    return replace(model, data=chips, batch=batch)


_INFERRED = "heads of 256 and no gate, which its sizes and its name leave"
_22B = Published("22B", "tpu-v4", 6144, 24, 24576, 48, 13, 64, slices=2, head_width=256, gated=False, note=_INFERRED)
_52B = Published("52B", "tpu-v4", 12288, 32, 49152, 32, 7, 192, slices=2, head_width=256, gated=False, note=_INFERRED)

_ALL = "layer inputs, qkv_proj and out_proj offloaded"
_LLAMA2_70B = Published("Llama 2 70B", "tpu-v6e", 8192, 64, 28672, 80, 2, 256, key_heads=8, tokens=4096, remat_policy="qkv_proj_offloaded")
_LLAMA3_70B = replace(_LLAMA2_70B, name="Llama 3.1 70B", tokens=8192, vocabulary=128256, remat_policy="layer inputs and qkv_proj offloaded")
_LLAMA3_8B = replace(_LLAMA3_70B, name="Llama 3.1 8B", width=4096, heads=32, inner=14336, layers=32, remat_policy=_ALL)
_MISTRAL = replace(_LLAMA3_8B, name="Mistral 7B", vocabulary=VOCABULARY)
_MIXTRAL = replace(_MISTRAL, name="Mixtral 8x7B", experts=8, tokens=4096, note="tokens beyond 1.25 times an expert's share are dropped")

_OFFLOADED = "context and mlpwo offloaded"
_LLAMA3_405B = replace(
    _LLAMA3_70B, name="Llama 3.1 405B", chip="tpu-v5p", width=16384, heads=128, inner=53248, layers=126, data=512, remat_policy=_OFFLOADED
)  # fmt: skip

_EVEN = "experts have places for their even share, and tokens beyond are dropped"
_QWEN3 = Published(
    "Qwen3 235B-A22B", "tpu-v7x", 4096, 64, 1536, 94, 32, 256, key_heads=4, tokens=4096, vocabulary=151936, experts=128,
    options={
        "experts_per_token": 8, "capacity_factor": 1.0, "stacks": (Stack("layers", 94, ((1, Heads(4, 128, theta=5e6)),), experts=True),),
    },
    remat_policy="layer inputs offloaded", note=f"a chip's two devices as one; {_EVEN}",
)  # fmt: skip


def _deepseek(dense: int, layers: int, latent: Latent, **options: Any) -> Mapping[str, Any]:
    """So many layers without experts, then so many with them, whose weights are a softmax (DeepSeek-V3's are sigmoids, as quickly made)."""
    stacks = (Stack("dense_layers", dense, ((1, latent),)), Stack("moe_layers", layers, ((1, latent),), experts=True))
    return {"capacity_factor": 1.0, "stacks": stacks, **options}


_DEEPSEEK2_16B = Published(
    "DeepSeek-V2 16B", "tpu-v5p", 2048, 16, 10944, 27, 24, 4, vocabulary=102400, experts=64, note=_EVEN,
    options=_deepseek(1, 26, Latent(None, 512), experts_per_token=6, expert_width=1408, shared_width=2 * 1408),
)  # fmt: skip
_DEEPSEEK3 = Published(
    "DeepSeek-V3 671B", "tpu-v5p", 7168, 128, 18432, 61, 6, 512, tokens=8192, vocabulary=129280, experts=256, note=_EVEN,
    options=_deepseek(3, 58, Latent(1536, 512), experts_per_token=8, expert_width=2048, shared_width=2048),
    remat_policy="layer inputs and out_proj offloaded",
)  # fmt: skip


def _gemma(blocks: int, near: Heads, far: Heads, **options: Any) -> Mapping[str, Any]:
    """Blocks of five layers whose tokens see a window and one whose tokens see all before them."""
    stacks = (Stack("layers", blocks, ((5, near), (1, far)), experts="shared_width" in options),)
    return {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "post_norms": True, "stacks": stacks, **options}


_GEMMA3_12B = Published(
    "Gemma 3 12B", "tpu-v6e", 3840, 16, 15360, 48, 1, 256, head_width=256, tokens=32768, vocabulary=262144,
    options=_gemma(8, Heads(8, 256, window=1024), Heads(8, 256, theta=1e6)),
)  # fmt: skip
_GEMMA4_31B = Published(
    "Gemma 4 31B", "tpu-v7x", 5376, 32, 21504, 60, 8, 64, head_width=256, tokens=8192, vocabulary=262144,
    options=_gemma(10, Heads(16, 256, window=1024), Heads(4, 512, theta=1e6, turned=0.25, keys_are_values=True)),
    remat_policy="out_proj and mlpwo kept", note="a chip's two devices as one",
)  # fmt: skip
_GEMMA4_26B = Published(
    "Gemma 4 26B-A4B", "tpu-v7x", 2816, 16, 2112, 30, 32, 64, head_width=256, tokens=4096, vocabulary=262144, experts=128,
    options=_gemma(
        5, Heads(8, 256, window=1024), Heads(2, 512, theta=1e6, turned=0.25, keys_are_values=True),
        experts_per_token=8, capacity_factor=1.0, expert_width=704, shared_width=2112,
    ),
    note=f"a chip's two devices as one; {_EVEN}",
)  # fmt: skip

PUBLISHED: Mapping[str, Published] = {
    "M315": _22B,
    "M317": replace(_22B, slices=8),
    "M319": _52B,
    **{f"M{320 + i + at}": _v5e(scale, batch, slices) for at, slices in ((0, 1), (8, 4), (16, 16))
       for i, (scale, batch) in enumerate(((16, 6), (32, 4), (64, 2)))},
    "M323": _v5e_offloaded(1),
    "M331": _v5e_offloaded(4),
    "M339": _v5e_offloaded(16),
    "M345": _v5p(32, 6, 16, 4, remat_policy="minimal"),
    "M347": _v5p(64, 3, 16, 4, remat_policy="minimal"),
    "M349": _v5p(128, 1, 16, 8, remat_policy="minimal"),
    "M351": _v5p(128, 1, 32, 8, remat_policy="minimal"),
    "M353": _v5p(256, 1, 64, 8, remat_policy="minimal"),
    "M354": _v5p(512, 2, 64, 8, slices=1),
    "M357": _v5p(1024, 2, 64, 16),
    "M359": _v5p(1024, 2, 128, 16),
    "M366": _DEEPSEEK2_16B,
    "M384": _GEMMA3_12B,
    "M386": replace(_GEMMA3_12B, slices=4),
    "M387": _LLAMA2_70B,
    "M389": replace(_v6e(_LLAMA3_70B, 32, 2), precision=WEIGHTS, note="parameters and moments in bfloat16"),
    "M391": _v6e(_LLAMA3_70B, 128, 4),
    "M393": _v6e(_LLAMA3_8B, 8, 3),
    "M395": _v6e(_LLAMA3_8B, 32, 3),
    "M397": _v6e(_LLAMA3_8B, 128, 4),
    "M399": _v6e(_MISTRAL, 8, 6),
    "M401": _v6e(_MIXTRAL, 256, 12),
    "M403": _DEEPSEEK3,
    "M404": _LLAMA3_405B,
    "M413": _GEMMA4_26B,
    "M415": _GEMMA4_31B,
    "M426": _QWEN3,
}  # fmt: skip
"""Rows of bench/measured_steps.csv by their number."""


def gpt3_175b(batch: int) -> StepConfig:
    """A step of GPT-3 on 1,024 chips, everything in shares: `tpuflow estimate bench.transformers:gpt3_175b --batch 1024 --chip tpu-v5p`."""
    tokens = jax.ShapeDtypeStruct((batch, TOKENS), jnp.int32)
    return StepConfig(gpt2.GPT2(GPT3), (tokens, tokens), "mixed_bf16", optax.adamw(1e-4), mesh={"data": 1024}, sharding="zero3")
