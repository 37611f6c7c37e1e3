"""`python -m train clm`: text files in, a model that transformers loads out; killed or stopped, it goes on bit for bit."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import tpuflow
from models import gpt2
from tests.killed_recipe import kill_training
from tpuflow.errors import ConfigError, WeightsError
from tpuflow.importers import load_state_dict, save_state_dict
from train import clm
from train.__main__ import main
from train.clm import ClmOptions
from train.pretrained_folders import CAUSAL, load_pretrained, overridden
from train.text.tokenizing import train_tokenizer
from train.trainer.folders import beginning
from train.trainer.lines import length
from train.trainer.optimizers import optimizer, rates
from train.trainer.options import TrainerOptions

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps".split()
SIZES = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 lines of a few words each."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "train.txt"
    path.write_text("".join(" ".join(rng.choice(WORDS, 6)) + "\n" for _ in range(600)))
    return path


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: a configuration and a tokenizer of the text."""
    made = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(text.read_text().splitlines(keepends=True), 300)
    tokenizer.save(made)
    (made / "config.json").write_text(json.dumps(gpt2.Config(vocab_size=len(tokenizer), **SIZES).to_json()))
    return made


def arguments(folder: Path, text: Path, out: Path, *others: str) -> list[str]:
    return [
        "clm", "--config_name", str(folder), "--tokenizer_name", str(folder), "--train_file", str(text), "--output_dir", str(out),
        "--do_train", "--max_steps", "12", "--save_steps", "6", "--logging_steps", "4", "--learning_rate", "1e-2", "--no-progress", *others,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of twelve updates and an evaluation."""
    out = tmp_path_factory.mktemp("out") / "run"
    assert main(arguments(folder, text, out, "--do_eval", "--save_total_limit", "1")) == 0
    return out


@pytest.mark.slow
def test_the_output_folder_holds_the_model_its_results_and_the_newest_checkpoint(trained: Path) -> None:
    assert {path.name for path in trained.iterdir() if not path.name.startswith(".")} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "trainer_state.json", "train_results.json",
        "eval_results.json", "all_results.json", "checkpoint-12", "checkpoints",
    }  # fmt: skip
    results = json.loads((trained / "all_results.json").read_text())
    assert results["perplexity"] == pytest.approx(np.exp(results["eval_loss"]))
    assert results["eval_loss"] < results["train_loss"] < np.log(300)
    log = json.loads((trained / "trainer_state.json").read_text())["log_history"]
    assert [(line["step"], line["learning_rate"]) for line in log] == [
        (4, pytest.approx(1e-2 * 8 / 12)),
        (8, pytest.approx(1e-2 * 4 / 12)),
        (12, 0),
    ]
    assert same_weights(trained, trained / "checkpoint-12")


@pytest.mark.slow
@pytest.mark.torch
def test_transformers_loads_what_was_trained_and_measures_the_same(
    trained: Path, text: Path, transformers: ModuleType, torch: ModuleType
) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(trained).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    lines = text.read_text().splitlines(keepends=True)[:30]
    tokens = np.concatenate([tokenizer(line)["input_ids"] for line in lines])
    batch = torch.from_numpy(tokens[: len(tokens) // 16 * 16].reshape(-1, 16))
    with torch.no_grad():
        found = network(batch, labels=batch).loss.item()
    results = json.loads((trained / "all_results.json").read_text())
    assert results["eval_samples"] == len(batch)
    assert results["eval_loss"] == pytest.approx(found, rel=1e-6)


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_state_dict(place / "model.safetensors") for place in (one, other))
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


PARTED = ("--gradient_accumulation_steps", "2", "--sink_size", "5", "--lr_scheduler_type", "constant")


@pytest.fixture(scope="module")
def whole(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a training that nothing stopped, whose sinks do not end with its updates."""
    out = tmp_path_factory.mktemp("out") / "whole"
    assert main(arguments(folder, text, out, *PARTED)) == 0
    return out


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_bit_for_bit(folder: Path, text: Path, whole: Path, tmp_path: Path) -> None:
    given = arguments(folder, text, tmp_path / "parts", *PARTED)
    assert main([*given, "--max_steps", "6"]) == 0
    assert main(given) == 2  # a training lies there
    assert main([*given, "--resume_from_checkpoint", "checkpoint-6"]) == 0
    assert same_weights(whole, tmp_path / "parts")


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_bit_for_bit(folder: Path, text: Path, whole: Path, tmp_path: Path) -> None:
    given = arguments(folder, text, tmp_path / "killed", *PARTED)
    kill_training(given)
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    (first,) = (tmp_path / "killed").glob("checkpoint-*")
    shutil.rmtree(first)  # as if it had been killed between the checkpoint and the folder that is written from it
    assert main([*given, "--resume_from_checkpoint", "latest"]) == 0
    assert first.is_dir() and same_weights(whole, tmp_path / "killed")


@pytest.mark.slow
def test_training_goes_on_from_the_weights_of_a_folder(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = ["clm", "--model_name_or_path", str(trained), "--train_file", str(text), "--do_eval", "--no-progress"]
    assert main(evaluation) == 0
    assert f"the weights in {trained / 'model.safetensors'}" in capsys.readouterr().out
    results = json.loads((trained / "eval_results.json").read_text())
    assert main([*evaluation, "--output_dir", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] == results["eval_loss"]


def test_the_token_after_the_last_of_a_block_counts_for_nothing() -> None:
    tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert clm.samples(tokens)[1].tolist() == [[1, 2, -100], [4, 5, -100]]
    logits = np.zeros((2, 3, 7), np.float32)
    logits[:, 2] = 1e38
    assert float(clm.next_token_loss(logits, clm.samples(tokens)[1])) == pytest.approx(np.log(7), rel=1e-6)
    hits, counted = clm.hits(logits, clm.samples(tokens)[1])
    assert (int(hits), int(counted)) == (0, 4)


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (1e4, None)])
def test_a_perplexity_is_a_number_or_nothing(loss: float, expected: float | None) -> None:
    assert clm.with_perplexity({"eval_loss": loss}) == {"eval_loss": loss, "perplexity": expected}


@pytest.mark.torch
@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_rates_are_those_of_transformers(transformers: ModuleType, torch: ModuleType, name: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = transformers.get_scheduler(name, optimizer, warmup, 10)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    found = rates(TrainerOptions(learning_rate=0.5, lr_scheduler_type=name, warmup_steps=warmup), 10)
    np.testing.assert_allclose(found[:10], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "samples", "expected"),
    [
        ({}, 100, (13, 39)),
        ({"gradient_accumulation_steps": 4}, 100, (13, 10)),
        ({"max_steps": 7}, 100, (13, 7)),
        ({"num_train_epochs": 0.5}, 100, (13, 7)),
    ],
)
def test_a_training_is_as_long_as_its_epochs_or_its_steps(options: dict[str, Any], samples: int, expected: tuple[int, int]) -> None:
    found = length(TrainerOptions(**options), samples)
    assert (found.steps_per_epoch, found.updates) == expected


GIVEN = ClmOptions(model_name_or_path="gpt2", train_file=Path("a.txt"), output_dir=Path("out"), do_train=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_train": False}, "nothing to do: give --do_train, --do_eval or both"),
        ({"output_dir": None}, "--output_dir: give a folder"),
        ({"train_file": None}, "--train_file: give a text file"),
        ({"model_name_or_path": None}, "--model_name_or_path: give a model's folder"),
        ({"fp16": True, "policy": "fp32"}, "give one of them"),
        ({"max_steps": 0}, "--max_steps: expected 1 or more, or -1"),
        ({"num_train_epochs": 0.0}, "--num_train_epochs: expected more than 0"),
        ({"logging_steps": 0}, "--logging_steps: expected 1 or more, got 0"),
        ({"weight_decay": -0.1}, "--weight_decay: expected 0 or more"),
        ({"block_size": 0}, "--block_size: expected 1 or more"),
        ({"validation_split_percentage": 100.0}, "--validation_split_percentage: expected more than 0 and less than 100"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    GIVEN.check()
    with pytest.raises(ConfigError, match=message):
        replace(GIVEN, **given).check()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("n_emb=3", r"'n_emb=3': expected FIELD=VALUE with a field of config.json. Did you mean .n_embd.\?"),
        ("n_embd", "'n_embd': expected FIELD=VALUE"),
        ("n_embd=wide", "--config_overrides: .*n_embd is 'wide', expected int"),
        ("n_embd=7,n_head=2", "--config_overrides: .*n_embd is 7, expected a multiple of n_head"),
    ],
)
def test_overrides_that_fit_no_configuration_are_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overridden(gpt2.Config(), overrides)


def test_overrides_are_read_as_the_fields_values() -> None:
    found = overridden(gpt2.Config(), "n_embd=12, n_inner=None,resid_pdrop=0.5,activation_function=relu,tie_word_embeddings=False")
    assert (found.n_embd, found.n_inner, found.resid_pdrop, found.activation_function, found.tie_word_embeddings) == (
        12,
        None,
        0.5,
        "relu",
        False,
    )


def test_weights_in_parts_are_put_together(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((trained / "config.json").read_bytes())
    state = load_state_dict(trained / "model.safetensors")
    names = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(state)}
    for part in set(names.values()):
        save_state_dict(tmp_path / part, {name: state[name] for name, of in names.items() if of == part})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    whole, parts = (load_pretrained(CAUSAL, str(folder)).variables for folder in (trained, tmp_path))
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, parts))


def test_beginning_anew_forgets_the_training_that_was_there(trained: Path, folder: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(trained / "checkpoint-12", tmp_path / "run" / "checkpoint-24")
    options = ClmOptions(output_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="a training lies there"):
        beginning(options)
    assert beginning(replace(options, overwrite_output_dir=True)) is None
    assert not any(path.is_dir() for path in (tmp_path / "run").iterdir())


def test_weights_that_do_not_fit_are_named_one_by_one(trained: Path, tmp_path: Path) -> None:
    state = load_state_dict(trained / "model.safetensors")
    wrong = {name: array for name, array in state.items() if not name.endswith("ln_f.bias")} | {
        "extra.weight": np.zeros((2, 2), np.float32)
    }
    (tmp_path / "config.json").write_bytes((trained / "config.json").read_bytes())
    save_state_dict(tmp_path / "model.safetensors", wrong)
    with pytest.raises(WeightsError) as error:
        load_pretrained(CAUSAL, str(tmp_path))
    assert all(text in str(error.value) for text in ("model.safetensors", "ln_f.bias", "extra.weight"))


@pytest.mark.parametrize(
    ("change", "others", "message"),
    [
        ({"config.json": None}, (), "config.json: cannot be read"),
        ({"config.json": b"{"}, (), "config.json: cannot be read"),
        ({"config.json": b'{"model_type": "t5"}'}, (), "model_type is 't5', expected gpt2 or llama or mixtral"),
        ({"model.safetensors": None}, (), "no weights; expected model.safetensors or pytorch_model.bin. For new weights"),
        ({"model.safetensors": b"abc"}, (), "damaged, or not a .safetensors file"),
        ({"tokenizer.json": None}, (), "no tokenizer"),
        ({}, ("--block_size", "17"), "--block_size 17: the model takes at most 16 tokens"),
        ({}, ("--config_overrides", "n_embd=32"), r"wte.weight .* becomes"),
        ({}, ("--validation_file", "absent.txt"), "absent.txt: cannot be read"),
        ({}, ("--resume_from_checkpoint", "checkpoint-3"), "no such checkpoint in .*; there are: none"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_and_nothing_is_written(
    trained: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, bytes | None],
    others: tuple[str, ...],
    message: str,
) -> None:
    for path in trained.iterdir():
        content = change.get(path.name, path.read_bytes() if path.is_file() else None)
        if content is not None:
            (tmp_path / path.name).write_bytes(content)
    out = tmp_path / "out"
    given = [
        "clm",
        "--model_name_or_path",
        str(tmp_path),
        "--train_file",
        str(text),
        "--output_dir",
        str(out),
        "--do_train",
        "--no-progress",
    ]
    assert main([*given, *others]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists() or not any(out.iterdir())


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    folder: Path, trained: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["clm", "--config_name", str(folder), "--config_overrides", "vocab_size=10", "--tokenizer_name", str(folder)]
    assert main([*given, "--train_file", str(text), "--do_eval", "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert "tokens, the model vocab_size 10" in error
    assert "--config_overrides vocab_size=" in error


def test_an_unknown_model_names_the_known_ones(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clm", "--model_name_or_path", "gpt-2", "--train_file", str(text), "--do_eval"]) == 2
    error = capsys.readouterr().err
    assert "gpt2-xl" in error
    assert "Did you mean 'gpt2'?" in error


def test_a_text_shorter_than_a_block_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("the fox\n")
    short = str(tmp_path / "short.txt")
    given = ["clm", "--config_name", str(folder), "--tokenizer_name", str(folder), "--train_file", short, "--validation_file", short]
    assert main([*given, "--do_eval"]) == 2
    assert "make no block of 16; give more text, or a smaller --block_size" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "mixed", "fp16", "bf16"])
def test_a_sink_of_steps_and_one_of_evaluations_compile(policy: str) -> None:
    """A width at which joined kernels would read what another makes later, and overwrite in one part of a batch what another reads."""
    config = replace(gpt2.SIZES["gpt2"], **gpt2.NO_DROPOUT, n_embd=384, n_layer=1, n_head=6, vocab_size=512)
    tokens = np.arange(24 * 128, dtype=np.int32).reshape(24, 128) % 512
    rule = optimizer(ClmOptions(max_steps=3, learning_rate=5e-4, warmup_steps=1, weight_decay=0.1), 3)
    made = tpuflow.training_step(gpt2.GPT2(config), clm.samples(tokens[:8]), policy, rule, clm.next_token_loss)
    several = jax.tree.map(lambda x: x.reshape(3, 8, 128), clm.samples(tokens))

    def evaluation(state: Any, batches: Any) -> jax.Array:
        return jax.lax.map(lambda one: clm.next_token_loss(made.outputs(state, one), one[1]), batches)

    loss = tpuflow.jit(evaluation)(made.state, several)[0]
    with tpuflow.sink(made.step, clm.samples(tokens), 3, state=made.state, batch_size=8) as sink:
        losses = next(sink).metrics.loss
    np.testing.assert_allclose(losses[0], loss, rtol=2e-3)
    np.testing.assert_allclose(loss, math.log(512), rtol=0.05)
