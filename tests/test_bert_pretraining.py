"""`python -m train bert`: text in, a pretrained BERT that transformers loads out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from models import bert as network
from tpuflow.errors import ConfigError
from train import bert
from train.__main__ import main
from train.bert import DEFAULTS
from train.text.blocks import read_lines
from train.text.masking import Masking, examples
from train.text.tokenizing import load_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps under an old tree".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MASKING = {"max_seq_length": 24, "max_predictions_per_seq": 4, "dupe_factor": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, a vocabulary, and two texts of documents in which a line is followed by one that begins with the next word."""
    made = tmp_path_factory.mktemp("bert")
    (made / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    rng = np.random.default_rng(0)
    for name, count in (("train.txt", 120), ("validation.txt", 20)):
        lines = [" ".join(rng.choice(WORDS, 8)) if i % 5 else "" for i in range(5 * count)]
        (made / name).write_text("\n".join(lines) + "\n")
    return made


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "run"
    overrides = "vocab_size=22,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,max_position_embeddings=32"
    given = [f"--{name}={value}" for name, value in MASKING.items()]
    assert main([
        "bert", "--model_name_or_path", "bert-base-uncased", "--config_overrides", overrides, "--tokenizer_name", str(folder),
        "--train_file", str(folder / "train.txt"), "--validation_file", str(folder / "validation.txt"), "--output_dir", str(out),
        "--do_train", "--do_eval", "--max_steps", "30", "--learning_rate", "5e-3", "--policy", "mixed", "--no-progress", *given,
    ]) == 0  # fmt: skip
    return out


@pytest.mark.slow
def test_a_pretraining_reports_both_of_its_tasks(trained: Path) -> None:
    results = json.loads((trained / "all_results.json").read_text())
    assert results["eval_masked_lm_loss"] < np.log(22)
    assert 0 <= results["eval_masked_lm_accuracy"] <= 1
    assert 0 <= results["eval_next_sentence_accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.torch
def test_transformers_loads_what_was_pretrained_and_measures_the_same(
    trained: Path, folder: Path, transformers: ModuleType, torch: ModuleType
) -> None:
    theirs, report = transformers.BertForPreTraining.from_pretrained(trained, output_loading_info=True)
    assert not any(report.values()), report
    data = examples(read_lines(folder / "validation.txt"), load_tokenizer(trained), Masking(**MASKING), "text")
    batch = {name: torch.from_numpy(array.astype(np.int64)) for name, array in data.items()}
    with torch.no_grad():
        found = theirs.eval()(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    words = torch.gather(found.prediction_logits, 1, batch["masked_positions"][..., None].expand(-1, -1, 22))
    masked = torch.nn.functional.cross_entropy(words.reshape(-1, 22), batch["masked_labels"].reshape(-1), ignore_index=-100).item()
    follows = torch.nn.functional.cross_entropy(found.seq_relationship_logits, batch["next_sentence_label"]).item()
    results = json.loads((trained / "all_results.json").read_text())
    assert results["eval_masked_lm_loss"] == pytest.approx(masked, rel=0.01)  # evaluated in mixed precision
    assert results["eval_next_sentence_loss"] == pytest.approx(follows, rel=0.02)


def test_places_without_a_word_to_guess_count_for_nothing() -> None:
    logits = np.zeros((2, 3, 5), np.float32), np.zeros((2, 2), np.float32)
    batch = {"masked_labels": np.array([[1, 2, -100], [3, -100, -100]]), "next_sentence_label": np.array([0, 1])}
    assert float(bert.loss(logits, batch)) == pytest.approx(np.log(5) + np.log(2), rel=1e-6)
    assert [int(value) for value in bert.masked_hits(logits, batch)] == [0, 3]


GIVEN = replace(DEFAULTS, model_name_or_path="bert-base-uncased", train_file=Path("a.txt"), output_dir=Path("out"), do_train=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_name_or_path": None}, "--model_name_or_path: give a model's folder"),
        ({"train_file": None}, "--train_file: give a text file"),
        ({"do_eval": True}, "--validation_file: give a text file"),
        ({"max_seq_length": 4}, "--max_seq_length: expected 5 or more"),
        ({"dupe_factor": 0}, "--dupe_factor: expected 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    GIVEN.check()
    with pytest.raises(ConfigError, match=message):
        replace(GIVEN, **given).check()


def test_examples_longer_than_the_model_takes_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "bert",
        "--model_name_or_path",
        "bert-base-uncased",
        "--tokenizer_name",
        str(folder),
        "--train_file",
        str(folder / "train.txt"),
    ]
    assert main([*given, "--output_dir", "out", "--do_train", "--max_seq_length", "600"]) == 2
    assert "--max_seq_length 600: the model takes at most 512 tokens" in capsys.readouterr().err
    assert network.SIZES["bert-base-uncased"].max_position_embeddings == 512
