"""Continue a prompt with a causal language model: one Program with a loop over the tokens and a cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import tpuflow
from models.generate import Sampling, generate
from tpuflow.amp import get_policy
from tpuflow.errors import ConfigError
from train.options import DeviceOptions, option
from train.pretrained_folders import CAUSAL, Pretrained, load_pretrained, tokenizer_of
from train.ranges import check_least, underlined
from train.recipe import Recipe
from train.text.tokenizing import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(DeviceOptions):
    """The options of transformers' run_generation script that mean something here, and those of the device."""

    model_name_or_path: str | None = option(None, "text", "a folder with config.json, weights and tokenizer", metavar="FOLDER")
    tokenizer_name: str | None = option(None, "text", "a folder with a tokenizer; else the model's", metavar="FOLDER")
    prompt: str = option("", "text", "what the text begins with", metavar="TEXT")
    length: int = option(20, "text", "tokens to add", int)
    temperature: float = option(1.0, "text", "draw by probabilities of logits divided by this; 0: always the likeliest token", float)
    k: int = option(0, "text", "draw among the N likeliest tokens only; 0: among all", int, metavar="N")
    num_return_sequences: int = option(1, "text", "texts to make", int)
    seed: int = option(42, "text", "of what is drawn", int)
    policy: str = option("fp32", "device", "precision of weights and cache: fp32, fp16 or bf16")

    def check(self) -> None:
        """That numbers are in their ranges and a model is given.

        Raises:
          ConfigError: not so.
        """
        if self.model_name_or_path is None:
            raise ConfigError("--model_name_or_path: give a model's folder.")
        check_least(self, {"length": 1, "temperature": 0, "k": 0, "num_return_sequences": 1, "seed": 0}, underlined)
        if not self.prompt:
            raise ConfigError("--prompt: give the text to begin with.")


def run(options: GenerateOptions) -> None:
    """Print the texts and how long a token takes on the chip."""
    name = str(options.model_name_or_path)
    pretrained = load_pretrained(CAUSAL, name)
    if pretrained.variables is None:
        raise ConfigError(f"--model_name_or_path {name}: text needs trained weights; give a model's folder.")
    tokenizer = tokenizer_of(name, options.tokenizer_name, pretrained)
    found, seconds = continued(options, pretrained, tokenizer.encode(options.prompt))
    for number, tokens in enumerate(found, 1):
        if len(found) > 1:
            print(f"=== {number} ===")
        print(options.prompt + _decoded(tokenizer, tokens, pretrained.config.eos_token_id))
    print(f"{options.length} tokens: {1e3 * seconds:.3f} ms (modelled on {options.chip}, {options.policy})", flush=True)


def continued(options: GenerateOptions, pretrained: Pretrained, prompt: np.ndarray) -> tuple[np.ndarray, float]:
    """(new tokens int32 [texts, length], modelled seconds of all of it) of a prompt [T].

    Raises:
      ConfigError: the prompt and what is to be added are longer than the model takes.
    """
    if len(prompt) + options.length > pretrained.max_length:
        raise ConfigError(
            f"--length {options.length}: with the prompt of {len(prompt)} tokens that is more than the {pretrained.max_length} that the "
            "model takes."
        )
    policy = get_policy(options.policy)
    drawn = Sampling(options.temperature, options.k or None) if options.temperature else None
    text = partial(
        generate,
        pretrained.model,
        new_tokens=options.length,
        sampling=drawn,
        end=pretrained.config.eos_token_id,
        dtype=policy.compute_dtype,
    )
    on_device = tpuflow.jit(lambda variables, tokens, key: text(variables, tokens, key=key), **options.device)
    tokens = np.tile(prompt, (options.num_return_sequences, 1))
    variables = jax.tree.map(lambda leaf: leaf.astype(policy.compute_dtype), pretrained.variables)
    compiled = on_device.lower(variables, tokens, jax.random.key(options.seed)).compile()
    return np.asarray(compiled(variables, tokens, jax.random.key(options.seed))), compiled.time().seconds


def _decoded(tokenizer: Tokenizer, tokens: np.ndarray, end: Any) -> str:
    """The text up to the end that the model has found, if it has."""
    ends = () if end is None else np.atleast_1d(end)
    over = np.flatnonzero(np.isin(tokens, ends))
    return tokenizer.decode(tokens[: over[0]] if len(over) else tokens)


RECIPE = Recipe("generate", "text from a trained language model, from a prompt", __doc__, GenerateOptions(), run, spelling="_")
