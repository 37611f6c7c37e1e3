"""`python -m train text_to_image`: pictures in, a pipeline or low-rank matrices that diffusers reads out; it goes on bit for bit."""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from PIL import Image

import tpuflow
from models import autoencoder_kl, unet_2d_condition
from tests.diffusion_models import TEXT, TEXT_LENGTH, drawn_variables, to_torch, write_tokenizer
from tests.killed_recipe import kill_training
from tests.test_diffusion_models import gap
from tests.test_diffusion_pipelines import SCHEDULE
from tpuflow.amp import get_policy
from tpuflow.errors import ConfigError, WeightsError
from tpuflow.importers import flax_params, load_state_dict, save_state_dict
from tpuflow.training.application import Application
from train import text_to_image
from train.__main__ import main
from train.diffusion import lora
from train.diffusion.captioned import CaptionedBatches
from train.diffusion.folders import PARTS, Pipeline, load_pipeline
from train.diffusion.objective import Draws, Objective
from train.diffusion.options import TextToImageOptions
from train.diffusion.tuning import Tuning
from train.text.tokenizing import load_tokenizer

SIDE = 8
UNET = unet_2d_condition.Config(
    sample_size=4, down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), block_out_channels=(8,),
    layers_per_block=1, norm_num_groups=4, cross_attention_dim=8, attention_head_dim=2,
)  # fmt: skip
VAE = autoencoder_kl.Config(
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(4, 8), norm_num_groups=2,
    sample_size=SIDE,
)  # fmt: skip
CONFIGS = {
    "unet": UNET,
    "vae": VAE,
    "text_encoder": dataclasses.replace(TEXT, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of random weights."""
    tokenizer, made = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("pipeline")
    write_tokenizer(tokenizer)
    Pipeline(CONFIGS, drawn_variables(CONFIGS), SCHEDULE, load_tokenizer(tokenizer)).save(made)
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pictures of noise with captions."""
    made, rng, rows = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0), []
    for number in range(6):
        Image.fromarray(rng.integers(0, 256, (12, 10, 3), np.uint8)).save(made / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": ["the cat", "a dog"] if number else "the dog"})
    (made / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def arguments(folder: Path, pictures: Path, out: Path, *others: str) -> list[str]:
    return [
        "text_to_image", "--pretrained_model_name_or_path", str(folder), "--train_data_dir", str(pictures), "--output_dir", str(out),
        "--resolution", str(SIDE), "--random_flip", "--train_batch_size", "2", "--max_train_steps", "4", "--checkpointing_steps", "2",
        "--gradient_accumulation_steps", "2", "--learning_rate", "1e-2", "--logging_steps", "2", "--mixed_precision", "fp16", "--use_ema",
        "--no-progress", "--engine", "reference", *others,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of four updates, with pictures of prompts drawn on the way."""
    out = tmp_path_factory.mktemp("out") / "run"
    drawn = ("--validation_prompts", "the cat", "a dog", "--validation_epochs", "1")
    assert main(arguments(folder, pictures, out, "--checkpoints_total_limit", "1", *drawn)) == 0
    return out


def unet_of(folder: Path) -> dict[str, np.ndarray]:
    return load_state_dict(folder / "diffusion_pytorch_model.safetensors")


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def objective_of(pipeline: Pipeline, **others: Any) -> Objective:
    prediction = others.pop("prediction_type", "epsilon")
    schedule = replace(pipeline.scheduler("ddpm"), prediction_type=prediction)
    return Objective(pipeline.model("vae"), pipeline.model("text_encoder"), schedule, **others)


def batch_of(pipeline: Pipeline, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.uniform(-1, 1, (count, SIDE, SIDE, 3)).astype(np.float32), rng.integers(0, 600, (count, TEXT_LENGTH)).astype(np.int32)


def torch_loss(torch: ModuleType, diffusers: ModuleType, theirs: Any, objective: Objective, batch: Any, draws: Draws) -> Any:
    """The step of diffusers' script with given draws."""
    from diffusers.training_utils import compute_snr

    def tensor(array: Any) -> Any:
        return to_torch(torch, np.array(array))

    kind = objective.schedule.prediction_type
    scheduler = diffusers.DDPMScheduler.from_config(SCHEDULE, prediction_type=kind)
    with torch.no_grad():
        found = theirs.vae.encode(tensor(batch[0])).latent_dist
        latents = (found.mean + found.std * tensor(draws.latents)) * theirs.vae.config.scaling_factor
        text = theirs.text_encoder(tensor(batch[1]), return_dict=False)[0]
    noise, timesteps = tensor(draws.noise), tensor(draws.timesteps)
    if draws.offset is not None:
        noise = noise + objective.noise_offset * tensor(draws.offset)
    added = noise if draws.perturbation is None else noise + objective.input_perturbation * tensor(draws.perturbation)
    predicted = theirs.unet(scheduler.add_noise(latents, added, timesteps), timesteps, text, return_dict=False)[0]
    target = noise if kind == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
    snr = compute_snr(scheduler, timesteps)
    weights = torch.stack([snr, objective.snr_gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
    weights = weights / (snr if kind == "epsilon" else snr + 1)
    return (((predicted - target) ** 2).mean(dim=(1, 2, 3)) * weights).mean()


@pytest.mark.slow
@pytest.mark.torch
def test_a_steps_losses_and_gradients_are_those_of_the_original(torch: ModuleType, diffusers: ModuleType, folder: Path) -> None:
    pipeline = load_pipeline(str(folder))
    tuning, batch = Tuning(pipeline), batch_of(pipeline, 2)
    velocity = objective_of(pipeline, prediction_type="v_prediction", snr_gamma=5.0, noise_offset=0.1, input_perturbation=0.2)
    epsilon = objective_of(pipeline, snr_gamma=5.0)
    rngs = {name: jax.random.fold_in(jax.random.key(3), zlib.crc32(name.encode())) for name in Draws._fields}

    def loss_of(objective: Objective, params: Any, carried: Any, batch: Any, rngs: Any) -> Any:
        return objective(Application(tuning.model, get_policy("fp32"), carried, rngs, train=True), params, batch, rngs)

    def both(params: Any, *others: Any) -> Any:
        return jax.value_and_grad(lambda p: loss_of(velocity, p, *others))(params), loss_of(epsilon, params, *others)

    given = tuning.variables
    (found, slopes), other = tpuflow.jit(both)(given.pop("params"), given, batch, rngs)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    expected = torch_loss(torch, diffusers, theirs, velocity, batch, velocity.draws(rngs, batch[0].shape))
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.unet.named_parameters()}
    like = PARTS["unet"].variables_like(UNET)
    worst = gap(slopes, flax_params(gradients, like, PARTS["unet"].names(UNET, like))["params"])
    assert max(worst.values()) < 1e-3, max(worst, key=lambda path: worst[path])
    expected = torch_loss(torch, diffusers, theirs, epsilon, batch, epsilon.draws(rngs, batch[0].shape))
    assert float(other) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.torch
def test_the_average_decays_as_diffusers_does(torch: ModuleType, diffusers: ModuleType) -> None:
    from diffusers.training_utils import EMAModel

    model = EMAModel([torch.zeros(1)])
    for updates in (1, 2, 3, 10, 1000, 10**6):
        found = text_to_image.diffusers_decay(jax.numpy.int32(updates))
        assert float(found) == pytest.approx(model.get_decay(updates), rel=1e-6)


@pytest.mark.slow
def test_the_output_folder_holds_the_pipeline_its_results_and_the_newest_checkpoint(folder: Path, trained: Path) -> None:
    assert {path.name for path in trained.iterdir() if not path.name.startswith(".")} == {
        "model_index.json", "unet", "vae", "text_encoder", "tokenizer", "scheduler", "trainer_state.json", "train_results.json",
        "all_results.json", "checkpoint-4", "checkpoints", "validation-1.png", "validation-3.png",
    }  # fmt: skip
    before, after, last = (unet_of(place) for place in (folder / "unet", trained / "unet", trained / "checkpoint-4" / "unet"))
    assert same(after, unet_of(trained / "checkpoint-4" / "unet_ema"))
    assert not any(np.array_equal(after[name], last[name]) for name in ("conv_in.weight", "conv_out.weight"))
    assert not np.array_equal(before["conv_in.weight"], after["conv_in.weight"])
    assert same(*(unet_of(place / "vae") for place in (folder, trained)))
    log = json.loads((trained / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in log] == [2, 4]


@pytest.mark.slow
@pytest.mark.torch
def test_diffusers_loads_what_was_trained(diffusers: ModuleType, trained: Path) -> None:
    made = diffusers.StableDiffusionPipeline.from_pretrained(trained, local_files_only=True)
    found = {name: tensor.numpy() for name, tensor in made.unet.state_dict().items()}
    assert same(found, unet_of(trained / "unet"))
    averaged = diffusers.UNet2DConditionModel.from_pretrained(trained / "checkpoint-4", subfolder="unet_ema", local_files_only=True)
    assert same({name: tensor.numpy() for name, tensor in averaged.state_dict().items()}, found)


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_bit_for_bit(folder: Path, pictures: Path, trained: Path, tmp_path: Path) -> None:
    given = arguments(folder, pictures, tmp_path / "killed")
    cache = str(jax.config.jax_compilation_cache_dir)
    kill_training(given, {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})
    assert not (tmp_path / "killed" / "model_index.json").exists()
    assert main(given) == 2  # a training lies there
    assert main([*given, "--resume_from_checkpoint", "latest"]) == 0
    assert same(unet_of(trained / "unet"), unet_of(tmp_path / "killed" / "unet"))
    assert same(*(unet_of(place / "checkpoint-4" / "unet") for place in (trained, tmp_path / "killed")))


@pytest.fixture(scope="module")
def matrices(folder: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A training of low-rank matrices: its result, its folder, and what it began with."""
    out = tmp_path_factory.mktemp("lora") / "run"
    options = TextToImageOptions(
        pretrained_model_name_or_path=str(folder), train_data_dir=pictures, output_dir=out, resolution=SIDE, train_batch_size=2,
        max_train_steps=3, learning_rate=0.1, lora_rank=2, progress=False, lr_warmup_steps=0, engine="reference",
    )  # fmt: skip
    tuning = text_to_image.tuning_of(options, load_pipeline(str(folder)))
    return SimpleNamespace(result=text_to_image.run(options), folder=out, tuning=tuning)


@pytest.mark.slow
def test_training_matrices_changes_them_alone(matrices: SimpleNamespace) -> None:
    given = matrices.tuning.variables
    trained = given.pop("params")
    jax.tree.map(np.testing.assert_array_equal, matrices.result.carried, given)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, matrices.result.params, trained)))
    assert not (matrices.folder / "unet").exists()
    names = load_state_dict(matrices.folder / lora.WEIGHTS[0])
    assert len(names) == 2 * 4 * 2 * 4, "two matrices of four projections in two attentions of each of four transformers"
    assert names["unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0.lora.up.weight"].shape == (8, 2)
    assert names["unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_k.lora.down.weight"].shape == (2, 8)
    assert same(names, load_state_dict(matrices.folder / "checkpoint-3" / lora.WEIGHTS[0]))


@pytest.mark.slow
def test_matrices_in_the_weights_compute_what_they_do_beside_them(matrices: SimpleNamespace, folder: Path) -> None:
    pipeline, rng = load_pipeline(str(folder)), np.random.default_rng(0)
    inputs = rng.normal(size=(1, 4, 4, 4)).astype(np.float32), np.int32([5]), rng.normal(size=(1, 3, 8)).astype(np.float32)
    whole = lora.joined(matrices.result.params, matrices.result.carried["unet"])
    beside = matrices.tuning.unet.apply({"params": whole}, *inputs)
    fused = lora.with_lora(pipeline, matrices.folder)
    found = fused.model("unet").apply(fused.variables["unet"], *inputs)
    before = pipeline.model("unet").apply(pipeline.variables["unet"], *inputs)
    np.testing.assert_allclose(found, beside, rtol=0, atol=1e-5 * np.abs(beside).max())
    assert np.abs(found - before).max() > 1e-2 * np.abs(beside).max()


@pytest.mark.slow
@pytest.mark.torch
def test_the_names_of_matrices_are_those_that_diffusers_reads(diffusers: ModuleType, matrices: SimpleNamespace, folder: Path) -> None:
    from diffusers.utils import convert_unet_state_dict_to_peft

    unet = diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet", local_files_only=True)
    layers = dict(unet.named_modules())
    tensors = {name.removeprefix("unet."): tensor for name, tensor in load_state_dict(matrices.folder / lora.WEIGHTS[0]).items()}
    for name, tensor in convert_unet_state_dict_to_peft(tensors).items():
        layer, _, side = name.removesuffix(".weight").rpartition(".")
        assert tensor.shape == {"lora_A": (2, layers[layer].in_features), "lora_B": (layers[layer].out_features, 2)}[side]


@pytest.mark.slow
def test_matrices_of_another_unet_are_refused(matrices: SimpleNamespace, folder: Path, tmp_path: Path) -> None:
    tensors = load_state_dict(matrices.folder / lora.WEIGHTS[0])
    tensors["unet.odd.to_q.lora.up.weight"] = tensors.pop("unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora.up.weight")
    save_state_dict(tmp_path / lora.WEIGHTS[0], tensors)
    with pytest.raises(WeightsError, match=r"(?s)mid_block.*attn1.to_q.lora.up.weight, which is missing.*odd.to_q"):
        lora.with_lora(load_pipeline(str(folder)), tmp_path)


def stepped(tuning: Tuning, objective: Objective, data: dict[str, Any], batch: int, **others: Any) -> Any:
    """The parameters after four samples with given draws."""

    def loss_fn(apply: Any, params: Any, batch: Any, rngs: Any) -> Any:
        draws = Draws(*(batch.get(name) for name in Draws._fields))
        return objective.loss(apply, params, (batch["pictures"], batch["tokens"]), draws)

    return tpuflow.train(
        tuning.model, data, loss_fn=loss_fn, params=tuning.variables, optimizer=optax.sgd(0.1), batch_size=batch, inputs="pictures",
        progress=False, **others,
    )  # fmt: skip


def given_draws(pipeline: Pipeline, objective: Objective, count: int) -> dict[str, np.ndarray]:
    """So many samples with what is drawn for them."""
    pictures, tokens = batch_of(pipeline, count)
    rngs = {name: jax.random.fold_in(jax.random.key(0), number) for number, name in enumerate(Draws._fields)}
    drawn = {name: np.asarray(value) for name, value in objective.draws(rngs, pictures.shape)._asdict().items() if value is not None}
    return {"pictures": pictures, "tokens": tokens, **drawn}


@pytest.mark.slow
def test_accumulation_of_four_is_a_batch_of_four_and_gradient_checkpointing_changes_the_order_of_sums_alone(folder: Path) -> None:
    """Within 1e-6 of the largest element: JAX itself adds the parts of a gradient in another order where values are computed again."""
    pipeline = load_pipeline(str(folder))
    objective = objective_of(pipeline)
    data = given_draws(pipeline, objective, 4)
    whole = stepped(Tuning(pipeline), objective, data, 4)
    parts = stepped(Tuning(pipeline, gradient_checkpointing=True), objective, data, 1, accumulate_steps=4)
    assert max(gap(parts.params, whole.params).values()) < 1e-6
    assert np.mean(parts.losses) == pytest.approx(np.mean(whole.losses), rel=1e-6)


@pytest.mark.slow
def test_pictures_of_prompts_are_drawn_on_the_way_and_change_nothing_else(trained: Path) -> None:
    one, other = (np.asarray(Image.open(trained / f"validation-{number}.png")) for number in (1, 3))
    assert one.shape == (SIDE, 2 * SIDE, 3) and not np.array_equal(one, other)


def test_one_of_several_captions_is_drawn_for_each_picture() -> None:
    captions = (np.array([[1, 1]]), np.array([[2, 2], [3, 3]]))
    batches = CaptionedBatches(np.arange(2), np.arange(2), 2, shuffle=True, captions=captions)
    drawn = [batches[number] for number in range(16)]
    assert {tuple(tokens[list(numbers).index(1)]) for numbers, tokens in drawn} == {(2, 2), (3, 3)}
    assert all(tuple(tokens[list(numbers).index(0)]) == (1, 1) for numbers, tokens in drawn)
    np.testing.assert_array_equal(batches[3][1], drawn[3][1])


GIVEN = TextToImageOptions(pretrained_model_name_or_path="pipeline", train_data_dir=Path("pictures"), output_dir=Path("out"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pretrained_model_name_or_path": None}, "--pretrained_model_name_or_path: give a pipeline's folder"),
        ({"train_data_dir": None}, "--train_data_dir: give a folder of pictures"),
        ({"output_dir": None}, "--output_dir: give a folder"),
        ({"max_train_steps": 0}, "--max_train_steps: expected 1 or more, got 0"),
        ({"snr_gamma": 0.0}, "--snr_gamma: expected more than 0"),
        ({"policy": "fp32", "mixed_precision": "fp16"}, "give one of them"),
        ({"use_ema": True, "lora_rank": 4}, "--use_ema averages the weights of a UNet"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    GIVEN.check()
    with pytest.raises(ConfigError, match=message):
        replace(GIVEN, **given).check()


def test_the_rate_is_that_of_an_update_if_it_is_scaled() -> None:
    options = replace(GIVEN, scale_lr=True, learning_rate=1e-5, train_batch_size=3, gradient_accumulation_steps=4)
    assert options.trainer.learning_rate == pytest.approx(12e-5)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (("--pretrained_model_name_or_path", "nowhere"), "nowhere: no such file or folder"),
        (("--resolution", "7"), "--resolution 7: expected a multiple of 2 pixels"),
        (("--lora_rank", "9"), "--lora_rank 9: expected 1 to 8"),
        (("--caption_column", "words"), "metadata.jsonl:1: no column 'words'"),
        (("--train_data_dir", "."), "no captions"),
        (("--resume_from_checkpoint", "checkpoint-3"), "no such checkpoint in .*; there are: none"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_nothing_is_written(
    folder: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    others: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = [option for option in arguments(folder, pictures, tmp_path / "out") if option != "--use_ema"]
    assert main([*given, *others]) == 2
    error = capsys.readouterr().err
    assert message.split(".*")[0] in error and message.split(".*")[-1] in error
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_is_too_long_says_what_is_lost(folder: Path, pictures: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(str(folder))
    options = replace(GIVEN, train_data_dir=tmp_path, resolution=SIDE)
    row = {"file_name": "0.png", "text": "cat " * 40}
    Image.open(pictures / "0.png").save(tmp_path / "0.png")
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.warns(UserWarning, match="is 42 tokens, of which 12 are read: 'cat cat .*cat' is cut off"):
        text_to_image.batches_of(options, pipeline)
