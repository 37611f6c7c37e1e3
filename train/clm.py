"""Fine-tune or train a causal language model on text files, with the options of transformers' run_clm script."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpuflow
from tpuflow.errors import ConfigError
from train.options import option
from train.pretrained_folders import CAUSAL, Pretrained, WithTokenizer, load_pretrained, tokenizer_of
from train.ranges import check_positive, underlined
from train.recipe import Recipe
from train.text.blocks import blocks, read_lines, split
from train.text.masking import IGNORED
from train.text.tokenizing import Tokenizer
from train.trainer.options import TrainerOptions
from train.trainer.running import Job, run_job

LARGEST_CHOSEN_BLOCK = 1024
LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClmOptions(TrainerOptions):
    """What a model is and which text it learns."""

    model_name_or_path: str | None = option(
        None,
        "model and text",
        "a folder with config.json, weights and tokenizer, or a size such as gpt2 for new weights",
        metavar="FOLDER|NAME",
    )
    config_name: str | None = option(None, "model and text", "a folder whose config.json a model with new weights has", metavar="FOLDER")
    config_overrides: str | None = option(None, "model and text", "other sizes, such as n_embd=128,n_layer=4", metavar="FIELD=VALUE,...")
    tokenizer_name: str | None = option(
        None, "model and text", "a folder with a tokenizer, also of that name in the data folder; else the model's", metavar="FOLDER"
    )
    train_file: Path | None = option(None, "model and text", "UTF-8 text to train on", Path, metavar="FILE")
    validation_file: Path | None = option(None, "model and text", "UTF-8 text to evaluate on", Path, metavar="FILE")
    validation_split_percentage: float = option(
        5, "model and text", "without --validation_file, the first part of the training text", float, metavar="PERCENT"
    )
    block_size: int | None = option(None, "model and text", "tokens of a sample; else what the model takes, up to 1024", int, metavar="N")
    max_train_samples: int | None = option(None, "model and text", "use the first N blocks only", int, metavar="N")
    max_eval_samples: int | None = option(None, "model and text", "use the first N blocks only", int, metavar="N")

    def check(self) -> None:
        """That files are given for what is asked for."""
        TrainerOptions.check(self)
        if not (self.model_name_or_path or self.config_name):
            raise ConfigError("--model_name_or_path: give a model's folder, or a size such as gpt2.")
        if self.train_file is None and (self.do_train or self.validation_file is None):
            raise ConfigError("--train_file: give a text file.")
        if not 0 < self.validation_split_percentage < 100:
            raise ConfigError(
                f"--validation_split_percentage: expected more than 0 and less than 100, got {self.validation_split_percentage}."
            )
        check_positive(self, ("block_size", "max_train_samples", "max_eval_samples"), underlined)


@dataclass(frozen=True, slots=True)
class Text:
    """Blocks of tokens, int32 [N, T], for training and for evaluation."""

    train: np.ndarray | None
    validation: np.ndarray | None


def block_size(options: ClmOptions, pretrained: Pretrained, tokenizer: Tokenizer) -> int:
    """Tokens of a block: as asked for, else as many as model and tokenizer take, up to 1024.

    Raises:
      ConfigError: the model does not take so many.
    """
    most = min(pretrained.max_length, tokenizer.max_length or pretrained.max_length)
    if options.block_size is not None and options.block_size > most:
        raise ConfigError(f"--block_size {options.block_size}: the model takes at most {most} tokens.")
    return options.block_size or min(most, LARGEST_CHOSEN_BLOCK)


def read_text(options: ClmOptions, tokenizer: Tokenizer, size: int) -> Text:
    """The blocks of the files; without a file for validation it is the first part of the other one."""
    lines = read_lines(options.train_file) if options.train_file else []
    if options.validation_file:
        held_out, origin = read_lines(options.validation_file), options.validation_file
    else:
        lines, held_out = split(lines, options.validation_split_percentage)
        origin = f"{options.train_file} (its first {options.validation_split_percentage:g} %)"
    return Text(
        blocks(lines, tokenizer, size, str(options.train_file))[: options.max_train_samples] if options.do_train else None,
        blocks(held_out, tokenizer, size, str(origin))[: options.max_eval_samples] if options.do_eval or options.eval_steps else None,
    )


def samples(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, the token after each; the last of a block has none): int32 [N, T] each."""
    following = np.full_like(tokens, IGNORED)
    following[:, :-1] = tokens[:, 1:]
    return tokens, following


def next_token_loss(logits: jax.Array, following: jax.Array) -> jax.Array:
    """Mean cross-entropy of the tokens that follow: logits [B, T, V], following [B, T]."""
    counted = following != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(following, 0))
    return jnp.sum(jnp.where(counted, losses, 0.0)) / jnp.sum(counted)


def hits(logits: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tokens that were the likeliest, tokens)."""
    counted = following != IGNORED
    return jnp.sum(jnp.logical_and(jnp.argmax(logits, axis=-1) == following, counted)), jnp.sum(counted)


def losses(logits: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of the cross-entropies, tokens), so that a last batch which is smaller counts for less."""
    counted = jnp.sum(following != IGNORED)
    return next_token_loss(logits, following) * counted, counted.astype(jnp.float32)


METRICS = (tpuflow.Metric("loss", losses), tpuflow.Metric("accuracy", hits))


def run(options: ClmOptions) -> Any:
    """Train, evaluate, write results; what `tpuflow.train` returned, or None."""
    name = options.model_name_or_path or str(options.config_name)
    pretrained = load_pretrained(CAUSAL, name, config_name=options.config_name, overrides=options.config_overrides)
    tokenizer = tokenizer_of(name, options.tokenizer_name, pretrained)
    text = read_text(options, tokenizer, block_size(options, pretrained, tokenizer))
    print(f"{pretrained.origin}; {_counted(text.train)} to train on, {_counted(text.validation)} to evaluate on", flush=True)
    job = Job(
        WithTokenizer(pretrained, tokenizer), None if text.train is None else samples(text.train),
        None if text.validation is None else samples(text.validation), loss=next_token_loss, metrics=METRICS,
    )  # fmt: skip
    return run_job(options, job, summary=with_perplexity)


def with_perplexity(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation and the exponential of its loss; None where that is no number that JSON can hold."""
    loss = figures["eval_loss"]
    return {**figures, "perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else None}


def _counted(tokens: np.ndarray | None) -> str:
    return "nothing" if tokens is None else f"{len(tokens)} blocks of {tokens.shape[1]} tokens"


RECIPE = Recipe(
    "clm",
    "a causal language model (GPT-2, Llama, Mixtral) on text files, as transformers' run_clm",
    __doc__,
    ClmOptions(),
    run,
    spelling="_",
)
