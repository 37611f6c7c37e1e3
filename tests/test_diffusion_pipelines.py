"""Pipelines in folders: read as diffusers wrote them, written as it reads them, and their pictures, all of a sampling in one Program."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

import tpuflow
from tests.diffusion_models import TEXT, TEXT_LENGTH, UNET_2, VAE, drawn_variables, write_tokenizer
from tpuflow.errors import ConfigError, TpuflowError
from tpuflow.importers import load_state_dict, save_state_dict
from train import text_to_image_sample
from train.__main__ import main
from train.diffusion import pictures
from train.diffusion.folders import PARTS, Pipeline, load_pipeline, save_part
from train.text.clip import encode_prompts
from train.text.tokenizing import load_tokenizer
from train.text_to_image_sample import SampleOptions, sampled, sampler_of

PROMPTS = ["the cat and the dog", "a dog"]
SCHEDULE = {
    "_class_name": "PNDMScheduler", "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False,
    "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "num_train_timesteps": 1000,
}  # fmt: skip
"""The file of Stable Diffusion 1.4."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A tiny pipeline of random weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    configs = {"unet": UNET_2, "vae": VAE, "text_encoder": TEXT}
    return Pipeline(configs, drawn_variables(configs), SCHEDULE, load_tokenizer(folder))


@pytest.fixture(scope="module")
def folder(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, written."""
    made = tmp_path_factory.mktemp("pipeline")
    pipeline.save(made)
    return made


@pytest.fixture(scope="module")
def original(diffusers: ModuleType, folder: Path) -> Any:
    """diffusers' pipeline of that folder."""
    made = diffusers.StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    made.set_progress_bar_config(disable=True)
    return made


def options(folder: Path, **others: Any) -> SampleOptions:
    return SampleOptions(pretrained_model_name_or_path=str(folder), prompt=PROMPTS, output_dir=folder / "pictures", **others)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("kind", "theirs"), [("ddim", "DDIMScheduler"), ("euler", "EulerDiscreteScheduler")])
def test_pictures_are_those_of_diffusers_from_the_same_latents(
    diffusers: ModuleType, torch: ModuleType, folder: Path, original: Any, kind: str, theirs: str
) -> None:
    asked = options(folder, scheduler=kind, num_inference_steps=20, guidance_scale=3.0, negative_prompt="blurred", seed=7)
    read = load_pipeline(str(folder))
    found, _ = sampled(asked, read)
    latents = jax.random.normal(jax.random.split(jax.random.key(7))[0], sampler_of(asked, read).latent_shape(2))
    original.scheduler = getattr(diffusers, theirs).from_config(SCHEDULE)
    expected = original(
        PROMPTS, negative_prompt=["blurred"] * 2, height=16, width=16, num_inference_steps=20, guidance_scale=3.0, output_type="np",
        latents=torch.from_numpy(np.array(latents).transpose(0, 3, 1, 2)),
    ).images  # fmt: skip
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.torch
def test_what_diffusers_wrote_is_read(torch: ModuleType, pipeline: Pipeline, original: Any, tmp_path: Path) -> None:
    original.save_pretrained(tmp_path)
    read = load_pipeline(str(tmp_path))
    assert read.configs == pipeline.configs
    jax.tree.map(np.testing.assert_array_equal, read.variables, pipeline.variables)
    for name, part in PARTS.items():
        tensors = load_state_dict(tmp_path / name / part.weights[0])
        (tmp_path / name / part.weights[0]).unlink()
        save_state_dict(tmp_path / name / part.weights[1], tensors)
    again = load_pipeline(str(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, again.variables, pipeline.variables)


@pytest.mark.torch
def test_prompts_are_the_tokens_of_the_originals_tokenizer(pipeline: Pipeline, original: Any) -> None:
    prompts = [*PROMPTS, "", "THE  Cat's\n90 dogs; naïve café 北京 😀", "cat " * 40, "a<|endoftext|>b"]
    expected = original.tokenizer(prompts, padding="max_length", max_length=TEXT_LENGTH, truncation=True)["input_ids"]
    with pytest.warns(UserWarning, match="is 42 tokens, of which 12 are read: 'cat cat .*cat' is cut off"):
        found = encode_prompts(pipeline.tokenizer, prompts, TEXT_LENGTH)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_sampling_is_one_loop_whatever_the_steps(pipeline: Pipeline, folder: Path) -> None:
    tokens = [jax.ShapeDtypeStruct((2, TEXT_LENGTH), np.int32)] * 2
    variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float16), pipeline.variables)
    counts = []
    for steps in (2, 20):
        sampler = sampler_of(options(folder, scheduler="ddpm", num_inference_steps=steps, policy="fp16"), pipeline)
        compiled = tpuflow.jit(sampler.draw).lower(variables, *tokens, jax.random.key(0)).compile()
        counts.append(len(tuple(compiled.executable.program.kernels())))
    assert abs(counts[0] - counts[1]) <= 2, "trips are no kernels"


def test_the_recipe_writes_pictures_and_a_grid(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = np.random.default_rng(0).random((4, 16, 16, 3), np.float32)
    monkeypatch.setattr(text_to_image_sample, "sampled", lambda options, pipeline: (made, 0.5))
    given = ["text_to_image_sample", "--pretrained_model_name_or_path", str(folder), "--prompt", *PROMPTS, "--num_images_per_prompt", "2"]
    assert main([*given, "--output_dir", str(tmp_path / "new")]) == 0
    assert "4 pictures in " in capsys.readouterr().out
    *single, grid = (np.asarray(Image.open(tmp_path / "new" / f"{name}.png")) for name in ("000", "001", "002", "003", "grid"))
    np.testing.assert_array_equal(np.stack(single), pictures.to_bytes(made))
    np.testing.assert_array_equal(grid, pictures.grid(np.stack(single), 2))


def test_a_grid_has_rows_of_pictures() -> None:
    numbers = np.arange(3)[:, None, None, None] * np.ones((3, 2, 4, 3))
    made = pictures.grid(numbers + 1, 2)
    assert made.shape == (4, 8, 3)
    assert made[::2, ::4, 0].tolist() == [[1, 2], [3, 0]]


def _rewritten(path: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / path).read_text())
        (folder / path).write_text(json.dumps({**content, **changes}))

    return change


def _renamed(folder: Path) -> None:
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_state_dict(path)
    tensors["decoder.odd"], tensors["encoder.odd"] = tensors.pop("decoder.conv_in.bias"), tensors.pop("encoder.conv_in.bias")
    save_state_dict(path, tensors)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "index": (lambda folder: (folder / "model_index.json").unlink(), "model_index.json: cannot be read"),
    "kind": (
        _rewritten("model_index.json", _class_name="StableDiffusionXLPipeline"),
        "_class_name is 'StableDiffusionXLPipeline', expected",
    ),
    "json": (lambda folder: (folder / "unet" / "config.json").write_text("[]"), "config.json: holds a list"),
    "unet": (_rewritten("unet/config.json", encoder_hid_dim=7), "unet/config.json: .*encoder_hid_dim is 7, only None is computed"),
    "other": (
        _rewritten("vae/config.json", _class_name="VQModel"),
        "vae/config.json: .*_class_name is 'VQModel', expected 'AutoencoderKL'",
    ),
    "schedule": (_rewritten("scheduler/scheduler_config.json", thresholding=True), "thresholding is True, only False is computed"),
    "weights": (lambda folder: (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink(), "unet: no weights; expected diffusion_"),
    "tensors": (_renamed, "(?s)vae/.*needs decoder.conv_in.bias, which is missing.*needs encoder.conv_in.bias.*decoder.odd.*encoder.odd"),
    "tokenizer": (lambda folder: shutil.rmtree(folder / "tokenizer"), "tokenizer: no tokenizer"),
    "width": (_rewritten("unet/config.json", in_channels=5), "conv_in.*becomes"),
}
"""What may be wrong with a folder -> how it comes about, what is said."""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_not_right_says_what_is_wrong(folder: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(TpuflowError, match=message):
        load_pipeline(str(tmp_path / "copy")).scheduler("ddim")


def test_parts_of_different_pipelines_are_refused(pipeline: Pipeline, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "text_encoder" / "config.json").unlink()
    (tmp_path / "copy" / "text_encoder" / "model.safetensors").unlink()
    other = dataclasses.replace(TEXT, hidden_size=28, vocab_size=599)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), PARTS["text_encoder"].variables_like(other))
    save_part("text_encoder", other, zeros, tmp_path / "copy" / "text_encoder")
    with pytest.raises(ConfigError, match="cross_attention_dim is 24 and text_encoder's hidden_size 28.*the tokenizer has 600 tokens"):
        load_pipeline(str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": None}, "--prompt: give what is to be seen"),
        ({"pretrained_model_name_or_path": None}, "--pretrained_model_name_or_path: give a pipeline's folder"),
        ({"num_inference_steps": 0}, "--num_inference_steps: expected 1 or more, got 0"),
        ({"eta": 0.5, "scheduler": "euler"}, "--eta 0.5: euler has no such share"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    asked = {"pretrained_model_name_or_path": "x", "prompt": PROMPTS, "output_dir": Path("x"), **given}
    with pytest.raises(ConfigError, match=message):
        SampleOptions(**asked).check()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (("--height", "17"), "pictures of 17x16: expected multiples of 4 pixels"),
        (("--num_inference_steps", "1001"), "1001 steps of sampling: expected 1 to"),
        (("--policy", "fp17"), "fp17"),
        (("--pretrained_model_name_or_path", "nowhere"), "nowhere: no such file or folder"),
    ],
)
def test_what_the_pipeline_cannot_do_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], others: tuple[str, ...], message: str
) -> None:
    given = [
        "text_to_image_sample",
        "--pretrained_model_name_or_path",
        str(folder),
        "--prompt",
        "a",
        "--output_dir",
        str(tmp_path),
        *others,
    ]
    assert main(given) == 2
    assert message in capsys.readouterr().err
