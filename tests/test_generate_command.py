"""`python -m train generate`: a prompt in, text out, from a model's folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from models import gpt2
from tpuflow.errors import ConfigError
from tpuflow.importers import save_state_dict, state_dict
from train.__main__ import main
from train.generate import GenerateOptions
from train.text.tokenizing import train_tokenizer

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 with random weights, and a tokenizer."""
    made = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([f"{PROMPT} jumps over the lazy dog\n"] * 20, 280)
    config = gpt2.Config(vocab_size=len(tokenizer), n_positions=48, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    config = replace(config, initializer_range=0.5)
    variables = jax.jit(gpt2.GPT2(config).init)(jax.random.key(0), np.zeros((1, 4), np.int32))
    (made / "config.json").write_text(json.dumps(config.to_json()))
    save_state_dict(made / "model.safetensors", state_dict(variables, gpt2.torch_layers(config)))
    tokenizer.save(made)
    return made


@pytest.mark.slow
@pytest.mark.torch
def test_the_likeliest_text_is_that_of_transformers(
    folder: Path, transformers: ModuleType, torch: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model_name_or_path", str(folder), "--prompt", PROMPT, "--length", "12", "--temperature", "0"]) == 0
    text, timing = capsys.readouterr().out.rsplit("\n", 2)[:2]
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    tokens = network.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)[0]
    assert text == PROMPT + tokenizer.decode(tokens[prompt.shape[1] :], skip_special_tokens=True)
    assert timing.startswith("12 tokens: ")
    assert timing.endswith(" ms (modelled on generic, fp32)")


@pytest.mark.slow
def test_texts_that_are_drawn_differ_and_are_the_same_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "generate",
        "--model_name_or_path",
        str(folder),
        "--prompt",
        PROMPT,
        "--length",
        "8",
        "--k",
        "40",
        "--num_return_sequences",
        "2",
    ]
    outputs = []
    for _ in range(2):
        assert main(given) == 0
        outputs.append(capsys.readouterr().out)
    first, second = outputs[0].split("=== 2 ===")
    assert outputs[0] == outputs[1]
    assert first.removeprefix("=== 1 ===").strip() != second.rsplit("\n", 2)[0].strip()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_name_or_path": None}, "--model_name_or_path: give a model's folder"),
        ({"prompt": ""}, "--prompt: give the text"),
        ({"length": 0}, "--length: expected 1 or more, got 0"),
        ({"temperature": -1.0}, "--temperature: expected 0 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(GenerateOptions(model_name_or_path="gpt2", prompt=PROMPT), **given).check()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (("--length", "46"), "is more than the 48 that the model takes"),
        (("--policy", "fp17"), "fp17"),
        (("--chip", "tpu-v99"), "tpu-v99"),
    ],
)
def test_what_the_model_or_the_device_cannot_do_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], others: tuple[str, ...], message: str
) -> None:
    assert main(["generate", "--model_name_or_path", str(folder), "--prompt", PROMPT, *others]) == 2
    assert message in capsys.readouterr().err


def test_a_size_without_weights_makes_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model_name_or_path", "gpt2", "--tokenizer_name", "gpt2-bpe", "--prompt", PROMPT]) == 2
    assert "--model_name_or_path gpt2: text needs trained weights" in capsys.readouterr().err
