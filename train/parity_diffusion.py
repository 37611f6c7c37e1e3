"""A small text-to-image pipeline fine-tuned beside plain `jax.jit` and PyTorch: `python -m train.parity diffusion`.

Its VAE is trained first, on the same pictures. All then train the UNet from the same weights on the same batches with the same noise, with
an average of the weights, accumulation and gradient checkpointing. PyTorch's models are diffusers' and transformers' own.
"""

from __future__ import annotations

import argparse
import csv
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

import tpuflow
from models import autoencoder_kl, clip_text, unet_2d_condition
from tpuflow.amp.policy import cast_floats
from tpuflow.data import places
from tpuflow.errors import DataError
from tpuflow.numerics.report import NumericsComparison
from train import losses_beside, text_to_image
from train.diffusion import pictures
from train.diffusion.captioned import CaptionedBatches
from train.diffusion.folders import PARTS, Pipeline, load_part, load_pipeline
from train.diffusion.objective import Draws
from train.diffusion.options import TextToImageOptions
from train.diffusion.sampling import Sampler
from train.pipeline import Loader
from train.published import exit_status, judged
from train.recipe import StopAfter
from train.text.clip import encode_prompts
from train.text.tokenizing import Tokenizer, find_tokenizer
from train.torch_packages import import_package
from train.trainer.folders import write_atomically
from train.trainer.optimizers import optimizer

TORCH_BOUND = 1e-3
"""Relative difference of any loss in fp32 from PyTorch's: AdamW multiplies rounding errors of gradients near zero."""

DATA, TOKENIZER = "dreambooth-subset", "clip-bpe"
SIDE, WIDTH = 64, 64
SCHEDULE: Mapping[str, Any] = {
    "_class_name": "DDPMScheduler", "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False,
    "num_train_timesteps": 1000, "prediction_type": "epsilon", "steps_offset": 1,
}  # fmt: skip
UNET = unet_2d_condition.Config(
    sample_size=16, down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
    block_out_channels=(96, 160), layers_per_block=1, norm_num_groups=16, cross_attention_dim=WIDTH, attention_head_dim=4,
)  # fmt: skip
VAE = autoencoder_kl.Config(
    down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(32, 64, 64),
    norm_num_groups=16, sample_size=SIDE,
)  # fmt: skip
TEXT = clip_text.Config(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=2, num_attention_heads=4, projection_dim=WIDTH)
KL_WEIGHT = 1e-6
"""Of the latents' divergence from the standard normal distribution (Rombach et al., 2022, appendix G)."""
PROMPTS = ("a photo of a dog", "a photo of a backpack", "a photo of a toy", "a photo of a boot")


@dataclass(frozen=True)
class Study:
    """What everyone trains: a pipeline, how, and the batches."""

    options: TextToImageOptions
    pipeline: Pipeline

    @cached_property
    def batches(self) -> CaptionedBatches:
        """Pictures and tokens."""
        return text_to_image.batches_of(self.options, self.pipeline)

    @property
    def updates(self) -> int:
        """Updates in all."""
        return self.options.max_train_steps or 1

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.updates * self.options.gradient_accumulation_steps

    def step(self, policy: str) -> dict[str, Any]:
        """The options of `tpuflow.train` and `tpuflow.training_step` under a policy, the model among them."""
        options = replace(self.options, policy=policy)
        job = text_to_image.job_of(options, self.pipeline)
        return {
            "model": job.start.model, "policy": policy, "params": job.start.variables, "loss_fn": job.loss_fn, "ema": job.ema,
            "optimizer": optimizer(options.trainer, self.updates, None), "accumulate_steps": options.gradient_accumulation_steps,
            "seed": options.seed,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """The losses of all steps, the averaged parameters of the UNet at the end, as ours are, and how many steps made no update since a
    gradient overflowed."""

    losses: list[float]
    averaged: Any
    skipped: int = 0


def captions(folder: Path, found: Path) -> Path:
    """Write the metadata.jsonl of the data set into a folder."""
    with (found / "captions.csv").open(encoding="utf-8", newline="") as stream:
        rows = [{"file_name": str((found / "images" / row["file"]).resolve()), "text": row["caption"]} for row in csv.DictReader(stream)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def new_pipeline(tokenizer: Tokenizer, seed: int) -> Pipeline:
    """New weights, drawn from the seed."""
    configs = {"unet": UNET, "vae": VAE, "text_encoder": TEXT}
    variables = {}
    for name, config in configs.items():
        given = [jnp.zeros(one.shape, one.dtype) for one in PARTS[name].inputs(config)]
        variables[name] = jax.jit(PARTS[name].model(config).init)(jax.random.fold_in(jax.random.key(seed), len(name)), *given)
    return Pipeline(configs, variables, dict(SCHEDULE), tokenizer)


def with_trained_vae(pipeline: Pipeline, batches: CaptionedBatches, steps: int, *, progress: bool) -> Pipeline:
    """The pipeline with a VAE that was trained on the pictures, and latents scaled to a variance of 1."""

    def loss_fn(apply: Any, params: Any, batch: Any, rngs: Any) -> Any:
        mean, logarithm = apply(params, batch[0], method="encode")
        latents = mean + jnp.exp(0.5 * logarithm) * jax.random.normal(rngs["latents"], mean.shape)
        distance = jnp.mean(jnp.square(apply(params, latents, method="decode") - batch[0]))
        divergence = -0.5 * jnp.mean(jnp.sum(1 + logarithm - jnp.square(mean) - jnp.exp(logarithm), axis=(1, 2, 3)))
        return distance + KL_WEIGHT * divergence, {"distance": distance}

    result = tpuflow.train(
        pipeline.model("vae"), Loader(batches), loss_fn=loss_fn, params=pipeline.variables["vae"], optimizer=optax.adam(1e-3),
        epochs=-(-steps // len(batches)), progress=progress,
    )  # fmt: skip
    trained = jax.tree.map(np.asarray, result.variables)
    sample = np.concatenate([batches[number][0] for number in range(len(batches))])
    latents = jax.jit(lambda v, x: pipeline.model("vae").apply(v, x, method="encode").mean)(trained, sample)
    print(f"VAE: squared distance {result.history[-1]['metrics']['distance'][-1]:.4f} after {result.steps} steps", flush=True)
    config = replace(VAE, scaling_factor=round(float(1 / jnp.std(latents)), 5))
    return replace(pipeline.with_variables(vae=trained), configs={**pipeline.configs, "vae": config})


def ours(study: Study, policy: str, *, progress: bool) -> Run:
    """On the simulated device."""
    batches = study.batches
    made = study.step(policy)
    result = tpuflow.train(
        made.pop("model"), Loader(batches), **made, epochs=-(-study.steps // len(batches)), progress=progress,
        callbacks=(StopAfter(study.steps),),
    )  # fmt: skip
    print(result.report(), flush=True)
    return Run(result.losses, jax.tree.map(np.asarray, result.ema), len(result.skipped_steps))


def numerics(study: Study, policies: Sequence[str], params: Any) -> NumericsComparison:
    """What each precision does to the numbers of one update from the same parameters of the UNet, on the first batch.

    The frozen models are in fp32 whatever the precision: it is that of what is trained.
    """
    made = study.step("fp32")
    made |= {"policy": tuple(policies), "params": {**made["params"], "params": params}}
    found = tpuflow.check_numerics(data=study.batches[0], steps=study.options.gradient_accumulation_steps, **made)
    assert isinstance(found, NumericsComparison)
    return found


def plain_jax(study: Study) -> Run:
    """The same step by jax.jit, in fp32."""
    made = tpuflow.training_step(data=study.batches[0], **study.step("fp32"))
    step, state, losses = jax.jit(made.step, donate_argnums=0), made.state, []
    for number in range(study.steps):
        state, figures = step(state, study.batches[number])
        losses.append(float(figures.loss))
    return Run(losses, jax.tree.map(np.asarray, state.ema.params if state.ema else state.params))


def draws(study: Study) -> Iterator[Draws]:
    """What the device draws in each step: a step splits its key, and folds the names of streams into its own half."""
    made = study.step("fp32")
    key, shape = tpuflow.training_step(data=study.batches[0], **made).state.key, study.batches[0][0].shape
    drawn = jax.jit(lambda key: made["loss_fn"].draws({n: jax.random.fold_in(key, zlib.crc32(n.encode())) for n in Draws._fields}, shape))
    for _ in range(study.steps):
        key, own = jax.random.split(key)
        yield drawn(own)


def pytorch(study: Study, folder: Path) -> Run:
    """By diffusers, transformers and PyTorch from the pipeline in a folder, in fp32."""
    diffusers = import_package("diffusers")
    import torch
    from diffusers.training_utils import EMAModel

    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    scheduler, options = diffusers.DDPMScheduler.from_config(theirs.scheduler.config), study.options
    theirs.unet.enable_gradient_checkpointing()
    weights = list(theirs.unet.train().parameters())
    made = torch.optim.AdamW(
        weights, lr=options.learning_rate, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_epsilon,
        weight_decay=options.adam_weight_decay,
    )  # fmt: skip
    average, losses = EMAModel(weights), []

    def tensor(array: Any) -> Any:
        array = np.array(array)
        return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if array.ndim == 4 else array.astype(np.int64))

    for number, drawn in enumerate(draws(study)):
        images, tokens = (tensor(array) for array in study.batches[number])
        with torch.no_grad():
            found = theirs.vae.encode(images).latent_dist
            latents = (found.mean + found.std * tensor(drawn.latents)) * theirs.vae.config.scaling_factor
            text = theirs.text_encoder(tokens, return_dict=False)[0]
        noise, timesteps = tensor(drawn.noise), tensor(drawn.timesteps)
        predicted = theirs.unet(scheduler.add_noise(latents, noise, timesteps), timesteps, text, return_dict=False)[0]
        loss = torch.mean(torch.square(predicted - noise))
        (loss / options.gradient_accumulation_steps).backward()
        losses.append(loss.item())
        if (number + 1) % options.gradient_accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(weights, options.max_grad_norm)
            made.step()
            made.zero_grad()
            average.step(weights)
    average.copy_to(weights)
    theirs.unet.save_pretrained(folder / "pytorch")
    return Run(losses, load_part("unet", folder / "pytorch")[1]["params"])


def drawing(pipeline: Pipeline) -> Callable[[Any, Path], None]:
    """A function of the UNet's parameters and a file that draws a grid of pictures of `PROMPTS`, from the same noise each time; none of
    parameters that are no numbers any more."""
    sampler = Sampler(pipeline, pipeline.scheduler("ddim"), 20, 3.0, SIDE, SIDE)
    tokens, nothing = (encode_prompts(pipeline.tokenizer, texts, pipeline.prompt_length) for texts in (PROMPTS, ("",)))
    drawn = jax.jit(sampler.draw)

    def write(params: Any, path: Path) -> None:
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
            print(f"{path.name}: not drawn, the parameters are not finite", flush=True)
            return
        variables = cast_floats({**pipeline.variables, "unet": {"params": params}}, jnp.float32)
        made = np.asarray(drawn(variables, tokens, np.tile(nothing, (len(PROMPTS), 1)), jax.random.key(0)))
        pictures.write_png(path, pictures.grid(pictures.to_bytes(made), len(PROMPTS)))

    return write


def compare(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Differences from plain jax.jit and from PyTorch, and "failed": how many bounds do not hold; bounds are of fp32."""
    apart = losses_beside.differences({name: run.losses for name, run in runs.items()})
    for pair, row in apart.items():
        one, other = (runs[name].averaged for name in pair.split(" - "))
        row["averaged"] = max(jax.tree.leaves(jax.tree.map(_apart, one, other)))
    means = {name: float(np.mean(run.losses)) for name, run in runs.items()}
    return {"failed": losses_beside.bounds_failed(apart, TORCH_BOUND), "mean_loss": means, "differences": apart}


def _apart(one: Any, other: Any) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).max() / max(np.abs(np.asarray(other)).max(), 1e-30))


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{name:20} mean loss {value:.5f}" for name, value in figures["mean_loss"].items()]
    for pair, row in figures["differences"].items():
        lines.append(f"{losses_beside.in_words(pair, row)}, averages {row['averaged']:.1e}")
    lines += ["one update from the same parameters in each precision:", *figures["numerics"]]
    return "\n".join([*lines, f"{figures['failed']} bounds fail ({losses_beside.bounds_in_words(TORCH_BOUND)})"])


def draw(runs: Mapping[str, Run], accumulate: int, path: Path) -> None:
    """The mean losses of 20 updates of all in one picture: .png, .svg or .pdf."""
    window, curves = 20 * accumulate, {}
    for name, run in runs.items():
        means = [float(np.mean(run.losses[start : start + window])) for start in range(0, len(run.losses), window)]
        curves[name] = range(10, 20 * len(means), 20), means
    losses_beside.draw(curves, path, title="A small text-to-image pipeline", xlabel="updates", ylabel="loss, mean of 20 updates")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, write JSON and pictures; 0 if every bound holds, 1 if one fails, 2 if there are no data, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.parity diffusion", description=__doc__)
    parser.add_argument("--policies", nargs="+", default=["fp32", "mixed", "mixed_bf16"], metavar="POLICY", help="[%(default)s]")
    for name, parse, default, text in (
        ("steps", int, 300, "updates"), ("accumulate", int, 4, "steps for one update"), ("vae-steps", int, 1500, "of the VAE"),
        ("lr", float, 1e-4, "of the UNet"), ("seed", int, 0, "of everything that is drawn"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=parse, default=default, help=f"{text} [%(default)s]")
    parser.add_argument("--folder", type=Path, default=Path("parity_diffusion"), help="of the pipeline and the pictures [%(default)s]")
    parser.add_argument("--json", type=Path, default=Path("parity_diffusion.json"), metavar="FILE", help="[%(default)s]")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    given = parser.parse_args(argv)
    return exit_status(lambda: _published(given), given.json)


def _published(given: argparse.Namespace) -> int:
    study = _study(given)
    folder, parameters = given.folder, sum(leaf.size for leaf in jax.tree.leaves(dict(study.pipeline.variables)))
    write_pictures = drawing(study.pipeline)
    write_pictures(study.pipeline.variables["unet"]["params"], folder / "before.png")
    theirs = {losses_beside.TORCH: pytorch(study, folder / "pipeline"), losses_beside.JIT: plain_jax(study)}  # first what may not be there
    runs = {policy: ours(study, policy, progress=given.progress) for policy in given.policies}
    for policy, run in runs.items():
        write_pictures(run.averaged, folder / f"after-{policy}.png")
    runs |= theirs
    draw(runs, given.accumulate, folder / "losses.png")
    reports = numerics(study, given.policies, theirs[losses_beside.JIT].averaged)
    reports.to_json(folder / "numerics.json")
    figures = {
        "parameters": parameters, "steps": given.steps, "accumulate": given.accumulate, **compare(runs),
        "skipped": {policy: runs[policy].skipped for policy in given.policies},
        "numerics": reports.summary().splitlines(), "losses": {name: run.losses for name, run in runs.items()},
    }  # fmt: skip
    return judged(figures, table, given.json)


def _study(given: argparse.Namespace) -> Study:
    """The pipeline with its VAE trained, in the folder as diffusers loads it."""
    options = TextToImageOptions(
        pretrained_model_name_or_path=str(given.folder / "pipeline"), train_data_dir=captions(given.folder / "data", _found()),
        output_dir=given.folder, resolution=SIDE, center_crop=True, random_flip=True, train_batch_size=1, use_ema=True,
        gradient_accumulation_steps=given.accumulate, gradient_checkpointing=True, max_train_steps=given.steps, learning_rate=given.lr,
        lr_warmup_steps=0, seed=given.seed,
    )  # fmt: skip
    fresh = new_pipeline(find_tokenizer(TOKENIZER), given.seed)
    batches = text_to_image.batches_of(replace(options, train_batch_size=8), fresh)
    trained = with_trained_vae(fresh, batches, given.vae_steps, progress=given.progress)
    target = given.folder / "pipeline"
    write_atomically(target, trained.save)
    return Study(options, load_pipeline(str(target)))


def _found() -> Path:
    for place in places.data_dirs():
        if (place / DATA / "captions.csv").is_file():
            return place / DATA
    raise DataError(f"no {DATA} in the data folders; name their folder with TPUFLOW_DATA.")
