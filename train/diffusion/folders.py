"""Text-to-image pipelines in folders, as diffusers writes and reads them: models, scheduler and tokenizer, and what belongs together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax import numpy as jnp

from models import autoencoder_kl, clip_text, diffusers_configs, unet_2d_condition
from tpuflow.errors import ConfigError, nothing_at
from tpuflow.importers import save_state_dict, state_dict
from train.diffusion.schedulers import SCHEDULERS, Scheduler
from train.model_files import configured, fitted, read_json, read_weights
from train.text import clip
from train.text.tokenizing import Tokenizer, load_tokenizer

INDEX = "model_index.json"
PIPELINE = "StableDiffusionPipeline"
CONFIG = "config.json"
SCHEDULER = "scheduler/scheduler_config.json"
DIFFUSERS_WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
TRANSFORMERS_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def _unet_inputs(config: unet_2d_condition.Config) -> tuple[Any, ...]:
    side = config.reduction
    latents, text = (1, side, side, config.in_channels), (1, 1, config.cross_attention_dim)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (latents, (), text))


def _vae_inputs(config: autoencoder_kl.Config) -> tuple[Any, ...]:
    return (jax.ShapeDtypeStruct((1, config.reduction, config.reduction, config.in_channels), jnp.float32),)


def _text_inputs(config: clip_text.Config) -> tuple[Any, ...]:
    return (jax.ShapeDtypeStruct((1, 1), jnp.int32),)


@dataclass(frozen=True, slots=True)
class Part:
    """A model of a pipeline: its module in models/ by configuration, class and names, what it is called with, and where its weights are."""

    library: str
    config: Any
    model: Callable[[Any], Any]
    inputs: Callable[[Any], tuple[Any, ...]]
    names: Callable[[Any, Any], Mapping[str, str | None]]
    weights: tuple[str, ...]

    def variables_like(self, config: Any) -> Any:
        """The shapes of its variables."""
        return jax.eval_shape(self.model(config).init, jax.random.key(0), *self.inputs(config))


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "unet": Part(
            "diffusers", unet_2d_condition.Config, unet_2d_condition.UNet2DConditionModel, _unet_inputs,
            lambda config, variables: diffusers_configs.torch_layers(variables), DIFFUSERS_WEIGHTS,
        ),
        "vae": Part(
            "diffusers", autoencoder_kl.Config, autoencoder_kl.AutoencoderKL, _vae_inputs,
            lambda config, variables: autoencoder_kl.torch_layers(variables), DIFFUSERS_WEIGHTS,
        ),
        "text_encoder": Part(
            "transformers", clip_text.Config, clip_text.CLIPTextModel, _text_inputs,
            lambda config, variables: clip_text.torch_layers(config), TRANSFORMERS_WEIGHTS,
        ),
    }
)  # fmt: skip
"""Folder in a pipeline -> the model in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A text-to-image pipeline: configurations and variables by the names of `PARTS`, the noise that it was trained with, its tokenizer.

    `schedule` is what scheduler_config.json says, whose class any of ours may stand in for.
    """

    configs: Mapping[str, Any]
    variables: Mapping[str, Any]
    schedule: Mapping[str, Any]
    tokenizer: Tokenizer

    def model(self, part: str) -> Any:
        """The Flax module of a part."""
        return PARTS[part].model(self.configs[part])

    def scheduler(self, kind: str) -> Scheduler:
        """The scheduler of a short name with the pipeline's own noise.

        Raises:
          ConfigError: it asks for something that is not computed here.
        """
        return configured(partial(SCHEDULERS[kind].from_json, self.schedule), f"{SCHEDULER} of the pipeline")

    @property
    def prompt_length(self) -> int:
        """The tokens of a prompt."""
        return self.configs["text_encoder"].max_position_embeddings

    def with_variables(self, **variables: Any) -> Pipeline:
        """The pipeline with other variables for some parts."""
        return replace(self, variables={**self.variables, **variables})

    def save(self, folder: Path) -> None:
        """Write all of it into an existing folder, as diffusers' StableDiffusionPipeline loads it."""
        (folder / INDEX).write_text(json.dumps(self._index(), indent=2) + "\n")
        for name in PARTS:
            (folder / name).mkdir()
            save_part(name, self.configs[name], self.variables[name], folder / name)
        (folder / "tokenizer").mkdir()
        clip.save(self.tokenizer, folder / "tokenizer", self.prompt_length)
        (folder / SCHEDULER).parent.mkdir()
        (folder / SCHEDULER).write_text(json.dumps(dict(self.schedule), indent=2) + "\n")

    def _index(self) -> dict[str, Any]:
        models = {name: [part.library, part.config.ARCHITECTURE] for name, part in PARTS.items()}
        absent = {name: [None, None] for name in ("feature_extractor", "image_encoder", "safety_checker")}
        others = {"scheduler": ["diffusers", self.schedule["_class_name"]], "tokenizer": ["transformers", "CLIPTokenizer"]}
        return {"_class_name": PIPELINE, "requires_safety_checker": False, **absent, **models, **others}


def load_pipeline(name: str) -> Pipeline:
    """The pipeline in a folder.

    Raises:
      ConfigError: there is no such folder, it is of another kind, or a part is not one that is computed here.
      WeightsError: weights are missing, damaged or do not fit: every tensor is named.
      DataError: the tokenizer is missing or damaged.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"--pretrained_model_name_or_path {nothing_at(folder)} Give the folder of a pipeline, which has {INDEX}.")
    kind = read_json(folder / INDEX, "a pipeline's folder").get("_class_name")
    if kind != PIPELINE:
        raise ConfigError(f"{folder / INDEX}: _class_name is {kind!r}, expected {PIPELINE!r}.")
    parts = {part: load_part(part, folder / part) for part in PARTS}
    schedule = read_json(folder / SCHEDULER, "a pipeline's folder")
    made = Pipeline(
        {part: config for part, (config, _) in parts.items()}, {part: variables for part, (_, variables) in parts.items()},
        schedule, load_tokenizer(folder / "tokenizer"),
    )  # fmt: skip
    _check_together(made, folder)
    return made


def load_part(name: str, folder: Path) -> tuple[Any, Any]:
    """(configuration, variables) of a part, from its own folder; raises as `load_pipeline`."""
    part = PARTS[name]
    config = configured(partial(part.config.from_json, read_json(folder / CONFIG, "a model's folder")), str(folder / CONFIG))
    like = part.variables_like(config)
    weights, file = read_weights(folder, part.weights)
    return config, fitted(weights, file, like, part.names(config, like))


def save_part(name: str, config: Any, variables: Any, folder: Path) -> None:
    """Write a part's config.json and weights (safetensors) into its own folder."""
    part = PARTS[name]
    (folder / CONFIG).write_text(json.dumps(config.to_json(), indent=2) + "\n")
    save_state_dict(folder / part.weights[0], state_dict(variables, part.names(config, variables)))


def _check_together(pipeline: Pipeline, folder: Path) -> None:
    """Raise ConfigError naming everything in which the parts do not belong together."""
    unet, vae, text = (pipeline.configs[name] for name in PARTS)
    pairs = (
        ("unet's in_channels", unet.in_channels, "vae's latent_channels", vae.latent_channels),
        ("unet's cross_attention_dim", unet.cross_attention_dim, "text_encoder's hidden_size", text.hidden_size),
    )
    found = [f"{one} is {first} and {other} {second}, expected the same" for one, first, other, second in pairs if first != second]
    if len(pipeline.tokenizer) > text.vocab_size:
        found.append(f"the tokenizer has {len(pipeline.tokenizer)} tokens, text_encoder's vocab_size is {text.vocab_size}")
    if found:
        raise ConfigError(f"{folder}: {'; '.join(found)}. Take the parts of one pipeline.")
