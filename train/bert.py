"""Pretrain BERT on text: masked words, and whether one piece of text follows another, with examples made as the original makes them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import tpuflow
from tpuflow.errors import ConfigError
from train.options import option
from train.pretrained_folders import BERT, WithTokenizer, load_pretrained, tokenizer_of
from train.recipe import Recipe
from train.text.blocks import read_lines
from train.text.masking import IGNORED, Masking, examples
from train.trainer.options import TrainerOptions
from train.trainer.running import Job, run_job

Outputs = tuple[jax.Array, jax.Array]
"""Logits of the masked words [B, M, V] and of whether the second piece follows [B, 2]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertOptions(TrainerOptions):
    """What is pretrained on which text; examples are made by options that the original has too."""

    model_name_or_path: str | None = option(
        None,
        "model and text",
        "a folder with config.json, weights and vocab.txt, or a size such as bert-base-uncased",
        metavar="FOLDER|NAME",
    )
    config_overrides: str | None = option(None, "model and text", "other sizes, such as num_hidden_layers=4", metavar="FIELD=VALUE,...")
    tokenizer_name: str | None = option(
        None, "model and text", "a folder with vocab.txt, also of that name in the data folder; else the model's", metavar="FOLDER"
    )
    train_file: Path | None = option(
        None, "model and text", "UTF-8 text: a sentence a line, a blank line between documents", Path, metavar="FILE"
    )
    validation_file: Path | None = option(None, "model and text", "the same to evaluate on", Path, metavar="FILE")
    max_seq_length: int = option(128, "examples", "tokens of an example", int)
    max_predictions_per_seq: int = option(20, "examples", "most words to be guessed in an example", int)
    masked_lm_prob: float = option(0.15, "examples", "share of the words to be guessed", float)
    short_seq_prob: float = option(0.1, "examples", "share of examples that are shorter than they could be", float)
    dupe_factor: int = option(10, "examples", "times that the text is gone through, masked otherwise each time", int)
    random_seed: int = option(12345, "examples", "of how they are cut and masked", int)

    def check(self) -> None:
        """That files are given for what is asked for."""
        TrainerOptions.check(self)
        if self.model_name_or_path is None:
            raise ConfigError("--model_name_or_path: give a model's folder, or a size such as bert-base-uncased.")
        for wanted, name in ((self.do_train, "train_file"), (self.do_eval or self.eval_steps, "validation_file")):
            if wanted and getattr(self, name) is None:
                raise ConfigError(f"--{name}: give a text file.")
        self.masking()

    def masking(self) -> Masking:
        """How examples are made."""
        return Masking(**{one.name: getattr(self, one.name) for one in fields(Masking)})


def loss(outputs: Outputs, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of the masked words plus that of which piece follows."""
    (words, counted), (follows, pairs) = masked_loss(outputs, batch), next_sentence_loss(outputs, batch)
    return words / counted + follows / pairs


def masked_loss(outputs: Outputs, batch: dict[str, jax.Array]) -> Outputs:
    """(sum of the cross-entropies of the masked words, masked words)."""
    counted = batch["masked_labels"] != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs[0], jnp.maximum(batch["masked_labels"], 0))
    return jnp.sum(jnp.where(counted, losses, 0.0)), jnp.sum(counted).astype(jnp.float32)


def next_sentence_loss(outputs: Outputs, batch: dict[str, jax.Array]) -> Outputs:
    """(sum of the cross-entropies of which piece follows, pairs)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs[1], batch["next_sentence_label"])
    return jnp.sum(losses), jnp.float32(losses.size)


def masked_hits(outputs: Outputs, batch: dict[str, jax.Array]) -> Outputs:
    """(masked words that were found, masked words)."""
    labels = batch["masked_labels"]
    return jnp.sum(jnp.argmax(outputs[0], axis=-1) == labels), jnp.sum(labels != IGNORED)


def next_sentence_hits(outputs: Outputs, batch: dict[str, jax.Array]) -> Outputs:
    """(pairs that were told right, pairs)."""
    hits = jnp.argmax(outputs[1], axis=-1) == batch["next_sentence_label"]
    return jnp.sum(hits), jnp.int32(hits.size)


METRICS = (
    tpuflow.Metric("masked_lm_loss", masked_loss),
    tpuflow.Metric("masked_lm_accuracy", masked_hits),
    tpuflow.Metric("next_sentence_loss", next_sentence_loss),
    tpuflow.Metric("next_sentence_accuracy", next_sentence_hits),
)


def run(options: BertOptions) -> Any:
    """Train, evaluate, write results; what `tpuflow.train` returned, or None."""
    name = str(options.model_name_or_path)
    pretrained = load_pretrained(BERT, name, overrides=options.config_overrides)
    if options.max_seq_length > pretrained.max_length:
        raise ConfigError(f"--max_seq_length {options.max_seq_length}: the model takes at most {pretrained.max_length} tokens.")
    tokenizer = tokenizer_of(name, options.tokenizer_name, pretrained)

    def made(path: Path | None, *, wanted: bool) -> dict[str, Any] | None:
        return examples(read_lines(path), tokenizer, options.masking(), str(path)) if wanted and path is not None else None

    data = made(options.train_file, wanted=options.do_train)
    held_out = made(options.validation_file, wanted=options.do_eval or options.eval_steps is not None)
    counts = [0 if one is None else len(one["input_ids"]) for one in (data, held_out)]
    print(f"{pretrained.origin}; {counts[0]} examples to train on, {counts[1]} to evaluate on", flush=True)
    return run_job(options, Job(WithTokenizer(pretrained, tokenizer), data, held_out, loss=loss, metrics=METRICS))


DEFAULTS = BertOptions(weight_decay=0.01, per_device_train_batch_size=32)
RECIPE = Recipe("bert", "BERT on text: masked words and which sentence follows", __doc__, DEFAULTS, run, spelling="_")
