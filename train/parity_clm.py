"""GPT-2 on text beside plain `jax.jit` and PyTorch: `python -m train.parity clm` trains all from the same weights on the same batches.

PyTorch's model is transformers' GPT2LMHeadModel, its optimizer `torch.optim.AdamW`. Dropout is off, since no two of them draw alike.
Rate, warm-up and decay are those that run_clm takes unless told otherwise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import tpuflow
from models import gpt2
from tpuflow.data import places
from tpuflow.errors import DataError
from tpuflow.importers import state_dict
from train import clm, losses_beside
from train.clm import ClmOptions
from train.pretrained_folders import overridden
from train.published import exit_status, judged
from train.text.blocks import blocks, read_lines, split
from train.text.tokenizing import find_tokenizer, train_tokenizer
from train.torch_packages import import_package
from train.trainer.optimizers import optimizer, rates

TORCH_BOUND = 1e-4
"""Relative difference of any loss in fp32 from PyTorch's. AdamW magnifies what is rounded where gradients are near zero: how far plain
jax.jit itself is from PyTorch stands beside it."""

VALIDATION_BOUND = 0.02
"""Between the validation losses at the end."""

TEXT = Path("tinyshakespeare") / "input.txt"


@dataclass(frozen=True)
class Study:
    """What everyone trains: the model, blocks of tokens int32 [N, T] in order, held-out blocks, and how."""

    config: gpt2.Config
    tokens: np.ndarray
    held_out: np.ndarray
    options: ClmOptions

    @property
    def steps(self) -> int:
        """Updates."""
        return self.options.max_steps

    @property
    def batch(self) -> int:
        """Blocks a step."""
        return self.options.per_device_train_batch_size

    @cached_property
    def variables(self) -> Any:
        """The weights that everyone starts from, drawn from the seed."""
        return jax.jit(gpt2.GPT2(self.config).init)(jax.random.key(self.options.seed), self.tokens[:1])

    @cached_property
    def state_dict(self) -> dict[str, np.ndarray]:
        """The same for PyTorch."""
        return state_dict(self.variables, gpt2.torch_layers(self.config))


@dataclass(frozen=True, slots=True)
class Run:
    """The losses of all steps, and the mean loss of the held-out tokens at the end."""

    losses: list[float]
    validation: float


def ours(study: Study, policy: str, *, progress: bool) -> Run:
    """On the simulated device, in one sink."""
    device = {"policy": policy, "loss": clm.next_token_loss, "progress": progress, "batch_size": study.batch}
    model = gpt2.GPT2(study.config)
    result = tpuflow.train(
        model, clm.samples(study.tokens), optimizer=optimizer(study.options, study.steps), params=study.variables, **device
    )
    figures = result.evaluate(clm.samples(study.held_out), metrics=clm.METRICS, progress=progress)
    return Run(result.losses, figures["loss"])


def plain_jax(study: Study) -> Run:
    """By jax.jit and optax, in fp32."""
    model, made = gpt2.GPT2(study.config), optimizer(study.options, study.steps)
    logits: Callable[..., Any] = model.apply

    def loss_of(variables: Any, tokens: Any, following: Any) -> jax.Array:
        return clm.next_token_loss(logits(variables, tokens), following)

    @jax.jit
    def step(variables: Any, state: Any, tokens: Any, following: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(variables, tokens, following)
        updates, state = made.update(gradients, state, variables)
        return optax.apply_updates(variables, updates), state, loss

    variables, losses = study.variables, []
    state = made.init(variables)
    for tokens in _batches(study.tokens, study.batch):
        variables, state, loss = step(variables, state, *clm.samples(tokens))
        losses.append(float(loss))
    evaluate = jax.jit(loss_of)
    return Run(losses, _weighted(study, lambda tokens: float(evaluate(variables, *clm.samples(tokens)))))


def plain_jax_in(study: Study, policy: str) -> Run:
    """The step that `tpuflow.train` compiles in a policy, under jax.jit: what XLA:CPU makes of the same casts and the same loss scale."""
    batches = [clm.samples(tokens) for tokens in _batches(study.tokens, study.batch)]
    made = tpuflow.training_step(
        gpt2.GPT2(study.config), batches[0], policy, optimizer(study.options, study.steps), clm.next_token_loss, params=study.variables
    )
    step, evaluate = jax.jit(made.step), jax.jit(lambda state, batch: clm.next_token_loss(made.outputs(state, batch), batch[1]))
    state, losses = made.state, []
    for batch in batches:
        state, figures = step(state, batch)
        losses.append(float(figures.loss))
    return Run(losses, _weighted(study, lambda tokens: float(evaluate(state, clm.samples(tokens)))))


def pytorch(study: Study) -> Run:
    """By transformers and PyTorch, in fp32."""
    transformers = import_package("transformers")
    import torch

    config = transformers.GPT2Config(**{name: value for name, value in study.config.to_json().items() if name != "architectures"})
    config._attn_implementation = "eager"
    network = transformers.GPT2LMHeadModel(config)
    network.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in study.state_dict.items()}, strict=False)
    network.train()
    options, losses = study.options, []
    decayed = [p for name, p in network.named_parameters() if p.ndim > 1]
    others = [p for name, p in network.named_parameters() if p.ndim <= 1]
    made = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.learning_rate, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_epsilon,
    )  # fmt: skip
    for tokens, rate in zip(_batches(study.tokens, study.batch), rates(options, study.steps), strict=False):
        for group in made.param_groups:
            group["lr"] = float(rate)
        batch = torch.from_numpy(tokens.astype(np.int64))
        loss = network(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), options.max_grad_norm)
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    network.eval()

    def evaluated(tokens: np.ndarray) -> float:
        batch = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            return network(batch, labels=batch).loss.item()

    return Run(losses, _weighted(study, evaluated))


def _batches(tokens: np.ndarray, size: int) -> list[np.ndarray]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def _weighted(study: Study, loss: Any) -> float:
    """The mean loss over the held-out blocks."""
    parts = _batches(study.held_out, study.batch)
    return float(np.average([loss(part) for part in parts], weights=[len(part) for part in parts]))


def study_of(options: ClmOptions, text: Path, vocabulary: str | int) -> Study:
    """The model and blocks of text; `vocabulary`: a folder of a tokenizer, or so many tokens of one that is trained on the text."""
    lines = read_lines(text)
    train, held_out = split(lines, options.validation_split_percentage)
    tokenizer = find_tokenizer(vocabulary) if isinstance(vocabulary, str) else train_tokenizer(train, vocabulary)
    size = options.block_size or 128
    config = overridden(replace(gpt2.SIZES["gpt2"], **gpt2.NO_DROPOUT), options.config_overrides)
    config = replace(config, vocab_size=len(tokenizer)) if isinstance(vocabulary, int) else config
    tokens, rng = blocks(train, tokenizer, size, str(text)), np.random.default_rng(options.seed)
    wanted = options.max_steps * options.per_device_train_batch_size
    order = np.concatenate([rng.permutation(len(tokens)) for _ in range(math.ceil(wanted / len(tokens)))])[:wanted]
    return Study(config, tokens[order], blocks(held_out, tokenizer, size, str(text))[: options.max_eval_samples], options)


def compare(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Differences from plain jax.jit and from PyTorch, and "failed": how many bounds do not hold."""
    apart = losses_beside.differences({name: run.losses for name, run in runs.items()})
    for pair, row in apart.items():
        one, other = (runs[name].validation for name in pair.split(" - "))
        row["validation"] = abs(one - other)
    peers = tuple(f"{losses_beside.in_policy(policy)} - " for policy in runs)  # what the precision does, not we
    judged = [row["validation"] for pair, row in apart.items() if not pair.startswith(peers)]
    failed = losses_beside.bounds_failed(apart, TORCH_BOUND) + sum(not value <= VALIDATION_BOUND for value in judged)
    return {"failed": failed, "validation": {name: run.validation for name, run in runs.items()}, "differences": apart}


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{name:20} validation loss {value:.4f}" for name, value in figures["validation"].items()]
    for pair, row in figures["differences"].items():
        lines.append(f"{losses_beside.in_words(pair, row)}, validation {row['validation']:.4f}")
    return "\n".join(
        [*lines, f"{figures['failed']} bounds fail ({losses_beside.bounds_in_words(TORCH_BOUND)}, validation {VALIDATION_BOUND:g})"]
    )


def draw(runs: Mapping[str, Run], title: str, path: Path) -> None:
    """The losses of all in one picture: .png, .svg or .pdf."""
    curves = {f"{name}: validation {run.validation:.3f}": (range(1, len(run.losses) + 1), run.losses) for name, run in runs.items()}
    losses_beside.draw(curves, path, title=title, xlabel="updates", ylabel="loss")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, write JSON; 0 if every bound holds, 1 if one fails, 2 if there are no data, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.parity clm", description=__doc__)
    parser.add_argument("--config-overrides", metavar="FIELD=VALUE,...", help="other sizes than GPT-2's 124 million parameters")
    parser.add_argument("--tokens", type=int, metavar="N", help="train a tokenizer of N tokens on the text; else GPT-2's")
    parser.add_argument("--policies", nargs="+", default=["fp32", "mixed"], metavar="POLICY", help="[%(default)s]")
    usual = ClmOptions()
    for name, parse, default in (
        ("steps", int, 60),
        ("block-size", int, 128),
        ("batch-size", int, 8),
        ("lr", float, usual.learning_rate),
        ("warmup", int, usual.warmup_steps),
        ("weight-decay", float, usual.weight_decay),
    ):
        parser.add_argument(f"--{name}", type=parse, default=default, help="[%(default)s]")
    parser.add_argument("--eval-samples", type=int, default=32, help="held-out blocks [%(default)s]")
    parser.add_argument("--text", type=Path, help="UTF-8 text; else tinyshakespeare in the data folder")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses there")
    parser.add_argument("--json", type=Path, default=Path("parity_clm.json"), metavar="FILE", help="[%(default)s]")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    given = parser.parse_args(argv)
    return exit_status(lambda: _published(given), given.json)


def _published(given: argparse.Namespace) -> int:
    options = ClmOptions(
        max_steps=given.steps, block_size=given.block_size, per_device_train_batch_size=given.batch_size, learning_rate=given.lr,
        warmup_steps=given.warmup, config_overrides=given.config_overrides, max_eval_samples=given.eval_samples,
        weight_decay=given.weight_decay,
    )  # fmt: skip
    study = study_of(options, given.text or _found(), given.tokens or "gpt2-bpe")
    theirs = {"PyTorch": pytorch(study), "jax.jit": plain_jax(study)}  # first what may not be installed
    theirs |= {losses_beside.in_policy(policy): plain_jax_in(study, policy) for policy in given.policies if policy != losses_beside.EXACT}
    runs = {policy: ours(study, policy, progress=given.progress) for policy in given.policies} | theirs
    parameters = sum(leaf.size for leaf in jax.tree.leaves(study.variables))
    figures = {
        "parameters": parameters,
        "settings": {name: value for name, value in vars(given).items() if isinstance(value, (int, float, str))},
    }
    if given.plot:
        draw(runs, f"GPT-2 with {parameters / 1e6:.0f} million parameters, batch {study.batch}", given.plot)
    return judged({**figures, **compare(runs), "losses": {name: run.losses for name, run in runs.items()}}, table, given.json)


def _found() -> Path:
    for place in places.data_dirs():
        if (place / TEXT).is_file():
            return place / TEXT
    raise DataError(f"no {TEXT} in the data folders; name a text with --text, or their folder with TPUFLOW_DATA.")
