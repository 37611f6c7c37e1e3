"""Folders of pretrained models as transformers writes and reads them: config.json, weights, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from models import bert, gpt2, llama, mixtral
from tpuflow import load_params
from tpuflow.errors import ConfigError, did_you_mean
from tpuflow.importers import save_state_dict, state_dict
from train.model_files import configured, fitted, read_json, read_weights
from train.text.tokenizing import Tokenizer, find_tokenizer

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model: its module in models/, the class that is trained, and what that takes beside tokens."""

    module: ModuleType
    model: Callable[[Any], Any]

    def variables_like(self, config: Any) -> Any:
        """The shapes of its variables."""
        return jax.eval_shape(self.model(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))

    def max_length(self, config: Any) -> int:
        """The longest row of tokens that it takes."""
        return getattr(config, "n_positions", None) or config.max_position_embeddings


CAUSAL: Mapping[str, Family] = {
    "gpt2": Family(gpt2, gpt2.GPT2),
    "llama": Family(llama, llama.Llama),
    "mixtral": Family(mixtral, mixtral.Mixtral),
}
"""model_type in config.json -> causal language models."""

BERT: Mapping[str, Family] = {"bert": Family(bert, bert.BertForPreTraining)}
"""The same for BERT with the heads of its pretraining."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model that training begins with; `variables` None: new weights. `origin` says in words where it came from."""

    family: Family
    config: Any
    variables: Any
    origin: str

    @property
    def model(self) -> Any:
        """The Flax module."""
        return self.family.model(self.config)

    @property
    def variables_like(self) -> Any:
        """The shapes of its variables."""
        return self.family.variables_like(self.config)

    @property
    def max_length(self) -> int:
        """The longest row of tokens that it takes."""
        return self.family.max_length(self.config)

    def save(self, variables: Any, tokenizer: Tokenizer, folder: Path) -> None:
        """Write config.json, model.safetensors and the tokenizer, as transformers loads them."""
        (folder / CONFIG).write_text(json.dumps(self.config.to_json(), indent=2) + "\n")
        save_state_dict(folder / WEIGHTS[0], state_dict(variables, self.family.module.torch_layers(self.config)))
        tokenizer.save(folder)


@dataclass(frozen=True, slots=True)
class WithTokenizer:
    """A model and its tokenizer as a training begins with them (`train.trainer.running.Start`) and writes them."""

    pretrained: Pretrained
    tokenizer: Tokenizer

    @property
    def model(self) -> Any:
        """The Flax module."""
        return self.pretrained.model

    @property
    def variables(self) -> Any:
        """Its variables; None: new ones."""
        return self.pretrained.variables

    def save_checkpoint(self, checkpoint: Path, folder: Path) -> None:
        """Write what transformers loads, of a checkpoint."""
        self.pretrained.save(load_params(checkpoint, self.pretrained.variables_like), self.tokenizer, folder)

    def save_result(self, result: Any, folder: Path) -> None:
        """Write what transformers loads, of what `tpuflow.train` returned."""
        self.pretrained.save(result.variables, self.tokenizer, folder)


def load_pretrained(
    families: Mapping[str, Family], name: str, *, config_name: str | None = None, overrides: str | None = None
) -> Pretrained:
    """A model from a folder; or one with new weights, of the configuration of a folder (`config_name`) or of a size that has a name.

    overrides: "n_embd=128,n_layer=4", other values for fields of the configuration; weights of a folder must fit them.

    Raises:
      ConfigError: there is neither such a folder nor such a name, or the configuration is not one that is computed here.
      WeightsError: the weights are missing, damaged or do not fit: every tensor is named.
    """
    folder = Path(config_name or name)
    if not folder.is_dir():
        family, config = _named(families, name)
        config = overridden(config, overrides)
        return Pretrained(family, config, None, f"new weights: no folder {name}, the configuration of that name")
    family, config = _read_config(families, folder)
    config = overridden(config, overrides)
    if config_name:
        return Pretrained(family, config, None, f"new weights, the configuration in {folder}")
    weights, file = read_weights(folder, WEIGHTS, f" For new weights of its configuration: --config_name {folder}.")
    variables = fitted(weights, file, family.variables_like(config), family.module.torch_layers(config))
    return Pretrained(family, config, variables, f"the weights in {file}")


def tokenizer_of(name: str, tokenizer_name: str | None, pretrained: Pretrained) -> Tokenizer:
    """The tokenizer of the model's folder, or of one that is named.

    Raises:
      DataError: there is none.
      ConfigError: it has more tokens than the model.
    """
    tokenizer = find_tokenizer(tokenizer_name or name)
    if len(tokenizer) > pretrained.config.vocab_size:
        raise ConfigError(
            f"{tokenizer.folder}: the tokenizer has {len(tokenizer)} tokens, the model vocab_size {pretrained.config.vocab_size}; give the "
            f"tokenizer that the model was trained with, or a new model by --config_overrides vocab_size={len(tokenizer)}."
        )
    return tokenizer


def overridden(config: Any, overrides: str | None) -> Any:
    """The configuration with other values for some fields, such as "n_embd=128,n_layer=4".

    Raises:
      ConfigError: a field is unknown, or a value does not fit.
    """
    given: dict[str, Any] = {}
    for part in (overrides or "").split(","):
        field, equals, text = (word.strip() for word in part.partition("="))
        if not field and not equals:
            continue
        names = [one.name for one in fields(config)]
        if field not in names or not equals:
            raise ConfigError(
                f"--config_overrides: {part.strip()!r}: expected FIELD=VALUE with a field of {CONFIG}.{did_you_mean(field, names)}"
            )
        given[field] = _parsed(text)
    return configured(partial(replace, config, **given), "--config_overrides")


def _parsed(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text] if text in words else json.loads(text)
    except json.JSONDecodeError:
        return text


def _named(families: Mapping[str, Family], name: str) -> tuple[Family, Any]:
    sizes = {size: (family, config) for family in families.values() for size, config in family.module.SIZES.items()}
    short = name.rpartition("/")[2]
    if short not in sizes:
        raise ConfigError(
            f"--model_name_or_path {name}: no such folder, and no size that has a name ({', '.join(sizes)}).{did_you_mean(short, sizes)} "
            f"Give a folder with {CONFIG} and {' or '.join(WEIGHTS)}."
        )
    return sizes[short]


def _read_config(families: Mapping[str, Family], folder: Path) -> tuple[Family, Any]:
    path = folder / CONFIG
    content = read_json(path, "a model's folder")
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise ConfigError(f"{path}: model_type is {kind!r}, expected {' or '.join(families)}.")
    return families[kind], configured(partial(families[kind].module.Config.from_json, content), str(path))
