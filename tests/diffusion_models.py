"""The models of text-to-image diffusion beside diffusers' and transformers' own with the same random weights: what tests of both share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from models import autoencoder_kl, clip_text, unet_2d_condition
from tests.language_models import state_of
from tpuflow.importers import flax_params
from train.diffusion.folders import PARTS

TEXT_LENGTH = 12
VAE = autoencoder_kl.Config(
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(8, 16), norm_num_groups=4,
    sample_size=16,
)  # fmt: skip
TEXT = dataclasses.replace(clip_text.TINY, vocab_size=600, bos_token_id=598, eos_token_id=599, max_position_embeddings=TEXT_LENGTH)
UNET = unet_2d_condition.TINY
UNET_2 = dataclasses.replace(UNET, use_linear_projection=True, attention_head_dim=(2, 4), upcast_attention=True)
"""As Stable Diffusion 2 has it."""


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def to_torch(torch: ModuleType, array: np.ndarray) -> Any:
    """Images to [B, C, H, W], integers to 64 bits."""
    array = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int64) if array.dtype == np.int32 else array))


def to_numpy(tensor: Any) -> np.ndarray:
    """The inverse of `to_torch`."""
    array = tensor.detach().numpy()
    return array.transpose(0, 2, 3, 1) if array.ndim == 4 else array


def _called(network: Any, *inputs: Any) -> Any:
    return network(*inputs)[0]


def _encoded_and_decoded(network: Any, images: Any, noise: Any) -> Any:
    latents = network.encode(images).latent_dist
    return network.decode(latents.mean + latents.std * noise).sample


@dataclass(frozen=True)
class Pair:
    """A model by its name in `PARTS`, its configuration and inputs, and how the original is called."""

    part: str
    config: Any
    inputs: tuple[np.ndarray, ...]
    call: Callable[..., Any] = _called

    def twin(self, diffusers: ModuleType, transformers: ModuleType, torch: ModuleType) -> Any:
        """The original from our configuration's `to_json`; every parameter random, since zeros and ones would hide mistakes."""
        torch.manual_seed(0)
        json_config = self.config.to_json()
        if PARTS[self.part].library == "diffusers":
            network = getattr(diffusers, self.config.ARCHITECTURE).from_config(json_config)
        else:
            network = transformers.CLIPTextModel(transformers.CLIPTextConfig(**json_config))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3 if parameter.ndim == 1 else parameter[0].numel() ** -0.5)
        return network.eval()

    def variables(self, tensors: Mapping[str, np.ndarray]) -> Any:
        """Our variables from tensors under the original's names."""
        part = PARTS[self.part]
        like = part.variables_like(self.config)
        return flax_params(tensors, like, part.names(self.config, like))

    def loss(self, variables: Any, target: jax.Array, *inputs: Any) -> tuple[jax.Array, jax.Array]:
        """(the mean squared distance from a target, what the model makes)."""
        outputs = PARTS[self.part].model(self.config).apply(variables, *inputs)
        return jnp.mean(jnp.square(outputs - target)), outputs

    def theirs(self, torch: ModuleType, network: Any, target: np.ndarray) -> tuple[float, np.ndarray, Any]:
        """(loss, outputs, gradients as our variables) of the original."""
        outputs = self.call(network, *(to_torch(torch, array) for array in self.inputs))
        loss = torch.mean(torch.square(outputs - to_torch(torch, target)))
        loss.backward()
        found = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
        return float(loss), to_numpy(outputs), self.variables(found)


def unet_inputs(config: unet_2d_condition.Config) -> tuple[np.ndarray, ...]:
    """Two latents, their timesteps, and texts."""
    return normal(2, 8, 8, config.in_channels), np.array([999, 7], np.int32), normal(2, TEXT_LENGTH, config.cross_attention_dim)


PAIRS: Mapping[str, Pair] = {
    "unet-1": Pair("unet", UNET, unet_inputs(UNET)),
    "unet-2": Pair("unet", UNET_2, unet_inputs(UNET_2)),
    "vae": Pair("vae", VAE, (normal(2, 16, 16, 3), normal(2, 8, 8, 4)), _encoded_and_decoded),
    "text-1": Pair("text_encoder", TEXT, (np.random.default_rng(1).integers(0, 600, (2, TEXT_LENGTH)).astype(np.int32),)),
}


def drawn_variables(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Random weights of a pipeline's parts, by the parts' names."""
    rng = np.random.default_rng(0)

    def drawn(path: Any, leaf: Any) -> np.ndarray:
        wide = leaf.ndim > 1
        return rng.normal(0.0 if wide else 0.5, leaf.shape[-2] ** -0.5 if wide else 0.2, leaf.shape).astype(np.float32)

    return {name: jax.tree_util.tree_map_with_path(drawn, PARTS[name].variables_like(config)) for name, config in configs.items()}


def write_tokenizer(folder: Path) -> None:
    """CLIP's kind of tokenizer with bytes and a few pairs, as diffusers' pipelines keep it."""
    letters = [chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))] + [chr(256 + i) for i in range(68)]
    pairs = [("a", "n"), ("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g</w>")]
    words = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in pairs)]
    vocabulary = {word: number for number, word in enumerate([*words, *(f"unused{i}" for i in range(598 - len(words)))])}
    vocabulary |= {"<|startoftext|>": 598, "<|endoftext|>": 599}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in pairs)]) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": TEXT_LENGTH}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "!"}))


__all__ = ["PAIRS", "TEXT", "TEXT_LENGTH", "UNET", "UNET_2", "VAE", "Pair", "normal", "state_of", "to_numpy", "to_torch", "write_tokenizer"]
