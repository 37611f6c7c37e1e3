"""PyTorch models not our own, in small random configurations: transformers, diffusers, torchvision. Each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from train.torch_packages import import_package

Batch = tuple[torch.Tensor, ...]
VOCABULARY, LENGTH, SIDE = 128, 16, 64
SMALL_RATE = 1e-3
"""Where batches of few pictures are normalised, rounding alone decides where larger steps lead."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo: `model()` makes it, `batch()` what goes in, `loss(model, batch)` is a scalar, `rate` that of SGD."""

    package: str
    name: str
    model: Callable[[], torch.nn.Module]
    batch: Callable[[], dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], torch.Tensor]
    rate: float = 1e-2


def tokens(low: int = 3, length: int = LENGTH, size: int = VOCABULARY) -> torch.Tensor:
    """Random tokens [2, length]."""
    return torch.randint(low, size, (2, length))


def images(count: int = 4, side: int = SIDE) -> torch.Tensor:
    """Random images [count, 3, side, side]."""
    return torch.randn(count, 3, side, side)


def own_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss that a model of transformers computes itself, from its labels."""
    return model(**batch).loss


def mean_square(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The mean square of what a model gives, whatever that is called."""
    outputs = model(**batch)
    first = outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))
    return first.square().mean()


def classified(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Cross-entropy of ten classes."""
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def _labelled(low: int = 3) -> dict[str, Any]:
    ids = tokens(low)
    return {"input_ids": ids, "labels": ids.clone()}


def _transformers(
    name: str, config: str, batch: Callable[[], dict[str, Any]], loss: Any = own_loss, rate: float = 1e-2, **options: Any
) -> Entry:
    def make() -> torch.nn.Module:
        library = import_package("transformers")
        return getattr(library, name)(getattr(library, config)(**options))

    return Entry("transformers", name, make, batch, loss, rate)


def _vision(name: str) -> Entry:
    def make() -> torch.nn.Module:
        return getattr(import_package("torchvision").models, name)(num_classes=10)

    return Entry("torchvision", name, make, lambda: {"x": images(), "labels": torch.randint(0, 10, (4,))}, classified, SMALL_RATE)


DECODER = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def _pictures(side: int = 32) -> dict[str, Any]:
    return {"pixel_values": images(2, side), "labels": torch.randint(0, 2, (2,))}


def _unet() -> torch.nn.Module:
    return import_package("diffusers").UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
    )  # fmt: skip


def _unet_batch() -> dict[str, Any]:
    return {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([7, 431]), "encoder_hidden_states": torch.randn(2, 5, 32)}


def _vae() -> torch.nn.Module:
    return import_package("diffusers").AutoencoderKL(
        block_out_channels=(16, 32), latent_channels=4, norm_num_groups=8, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


ZOO = (
    _transformers("GPT2LMHeadModel", "GPT2Config", _labelled, vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    _transformers("BertForMaskedLM", "BertConfig", _labelled, **DECODER),
    _transformers("LlamaForCausalLM", "LlamaConfig", _labelled, **DECODER, num_key_value_heads=2),
    _transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", _labelled, **DECODER),
    _transformers("MistralForCausalLM", "MistralConfig", _labelled, **DECODER, num_key_value_heads=2, sliding_window=8),
    _transformers("MixtralForCausalLM", "MixtralConfig", _labelled, **DECODER, num_key_value_heads=2, num_local_experts=4),
    _transformers("Qwen2ForCausalLM", "Qwen2Config", _labelled, **DECODER, num_key_value_heads=2),
    _transformers("RobertaForSequenceClassification", "RobertaConfig",
                  lambda: {"input_ids": tokens(), "labels": torch.randint(0, 2, (2,))}, **DECODER),
    _transformers("DistilBertForSequenceClassification", "DistilBertConfig",
                  lambda: {"input_ids": tokens(), "labels": torch.randint(0, 2, (2,))},
                  vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    _transformers("T5ForConditionalGeneration", "T5Config", _labelled,
                  vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    _transformers("BartForConditionalGeneration", "BartConfig", _labelled,
                  vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                  decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64),
    _transformers("ViTForImageClassification", "ViTConfig", _pictures, **VIT),
    _transformers("CLIPTextModelWithProjection", "CLIPTextConfig", lambda: {"input_ids": tokens()}, mean_square,
                  **DECODER, max_position_embeddings=32, projection_dim=16, eos_token_id=2),
    _transformers("WhisperForConditionalGeneration", "WhisperConfig",
                  lambda: {"input_features": torch.randn(2, 16, 64), "labels": tokens()},
                  vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                  decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=32,
                  max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    _transformers("ResNetForImageClassification", "ResNetConfig",
                  lambda: {"pixel_values": images(8), "labels": torch.randint(0, 2, (8,))},
                  rate=SMALL_RATE, embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], layer_type="basic"),
    _transformers("ConvNextForImageClassification", "ConvNextConfig", _pictures, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1]),
    _transformers("SegformerForSemanticSegmentation", "SegformerConfig",
                  lambda: {"pixel_values": images(2), "labels": torch.randint(0, 2, (2, SIDE, SIDE))},
                  hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32),
    _transformers("MambaForCausalLM", "MambaConfig", _labelled, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
    Entry("diffusers", "UNet2DConditionModel", _unet, _unet_batch, mean_square),
    Entry("diffusers", "AutoencoderKL", _vae, lambda: {"sample": images(2, 32)}, mean_square),
    *map(_vision, ("resnet18", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "vgg11", "convnext_tiny", "shufflenet_v2_x0_5",
                   "efficientnet_b0", "densenet121", "swin_t", "alexnet")),
)  # fmt: skip
"""Every model that the page lists, in its order."""
