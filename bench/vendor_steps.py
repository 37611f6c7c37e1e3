"""Training steps that are compiled by XLA:TPU as well as by us, for `bench.xla_tpu` and `bench.memory`: mixed bf16, of so many samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bench.measured import LAMB, LARGE, MOMENTUM, pretraining_loss
from bench.program_models import RecurrentLanguageModel
from models import gpt2, llama
from models.bert import NO_DROPOUT, BertForPreTraining, pretraining_batch
from models.lenet import LeNet5
from models.resnet import resnet50
from models.unet_2d_condition import SIZES, UNet2DConditionModel
from models.vgg import VGG16
from tpuflow.training.config import StepConfig
from train.diffusion.steps import FIRST

POLICY = "mixed_bf16"
ADAMW = optax.adamw(1e-4)


def _tokens(batch: int, length: int) -> tuple[Any, Any]:
    one = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return one, one


def _pictures(batch: int, side: int, channels: int = 3) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)


def gpt2_124m(batch: int, *, remat: bool = False) -> StepConfig:
    """GPT-2 with 124 million parameters."""
    config = replace(gpt2.SIZES["gpt2"], **gpt2.NO_DROPOUT, remat=remat)
    return StepConfig(gpt2.GPT2(config), _tokens(batch, 1024), POLICY, ADAMW)


def bert_large(batch: int, length: int = 512, masked: int = 76, *, remat: bool = False) -> StepConfig:
    """BERT-large's pretraining."""
    module = BertForPreTraining(replace(LARGE, hidden_act="gelu_new", **NO_DROPOUT, remat=remat))
    return StepConfig(module, pretraining_batch(batch, length, masked), POLICY, LAMB, pretraining_loss)


def bert_large_128(batch: int, *, remat: bool = False) -> StepConfig:
    """The same with sequences of 128, 20 masked words in each."""
    return bert_large(batch, 128, 20, remat=remat)


def resnet_50(batch: int, *, remat: bool = False) -> StepConfig:
    """ResNet-50 of 224x224."""
    model = resnet50(1000)
    if remat:
        model = replace(model, block=nn.remat(model.block, static_argnums=(2,)))
    return StepConfig(model, _pictures(batch, 224), POLICY, MOMENTUM)


def llama_8(batch: int) -> StepConfig:
    """Eight of TinyLlama's layers."""
    config = replace(llama.SIZES["TinyLlama/TinyLlama-1.1B-Chat-v1.0"], num_hidden_layers=8)
    return StepConfig(llama.Llama(config), _tokens(batch, 1024), POLICY, ADAMW)


def lenet(batch: int) -> StepConfig:
    """LeNet-5 of 32x32."""
    return StepConfig(LeNet5(), _pictures(batch, 32, 1), POLICY, MOMENTUM)


def vgg_16(batch: int) -> StepConfig:
    """VGG-16 of 224x224."""
    return StepConfig(VGG16(), _pictures(batch, 224), POLICY, MOMENTUM)


def unet(batch: int) -> StepConfig:
    """Stable Diffusion 1.x's UNet, of latents 64x64 and 77 vectors of text."""
    config = SIZES[FIRST]
    maps = jax.ShapeDtypeStruct((batch, config.sample_size, config.sample_size, config.in_channels), jnp.float32)
    times = jax.ShapeDtypeStruct((batch,), jnp.int32)
    text = jax.ShapeDtypeStruct((batch, 77, config.cross_attention_dim), jnp.float32)
    return StepConfig(UNet2DConditionModel(config), ((maps, times, text), maps), POLICY, ADAMW, inputs=lambda given: given[0])


def lstm(batch: int) -> StepConfig:
    """Two LSTMs of 200, one after the other, over 35 words."""
    return StepConfig(RecurrentLanguageModel(), _tokens(batch, 35), POLICY, MOMENTUM)


@dataclass(frozen=True, slots=True)
class VendorStep:
    """A step by what pages call it; `limit`: what it may move and hold of HBM, at most, of what XLA:TPU's does."""

    words: str
    make: Callable[..., StepConfig]
    batch: int
    limit: float = 1.1
    remat: bool = False

    @property
    def name(self) -> str:
        """With the batch."""
        what, _, rest = self.words.partition(",")
        return f"{what}, batch {self.batch}{',' + rest if rest else ''}{', checkpointed' if self.remat else ''}"

    @property
    def config(self) -> StepConfig:
        """Its options."""
        return self.make(self.batch, **({"remat": True} if self.remat else {}))


GPT2 = VendorStep("GPT-2 124M, sequence 1,024, AdamW", gpt2_124m, 8)
BERT_512 = VendorStep("BERT-large, sequence 512, LAMB", bert_large, 8)
BERT_128 = VendorStep("BERT-large, sequence 128, LAMB", bert_large_128, 32)
RESNET = VendorStep("ResNet-50, momentum", resnet_50, 32)
RESNET_256 = VendorStep("ResNet-50, momentum", resnet_50, 256)
LLAMA = VendorStep("TinyLlama of 8 layers, sequence 1,024, AdamW", llama_8, 4, 1.2)
STRICT = (RESNET, RESNET_256, BERT_128, BERT_512, GPT2)
STEPS = (
    *STRICT,
    VendorStep("VGG-16, momentum", vgg_16, 32, 1.2),
    VendorStep("UNet of Stable Diffusion, AdamW", unet, 1, 1.2),
    VendorStep("LSTM language model, momentum", lstm, 20, 1.2),
    VendorStep("LeNet-5, momentum", lenet, 32, 1.2),
    LLAMA,
    *(VendorStep(step.words, step.make, step.batch, step.limit, remat=True) for step in STRICT),
)
"""Those that must be close first, and at the end with layers that are computed again (`jax.checkpoint`)."""
