"""Fine-tune a text-to-image pipeline (Stable Diffusion 1.x, 2.x) on pictures with captions, with the options of diffusers' script."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import tpuflow
from tpuflow.amp import get_policy
from tpuflow.errors import ConfigError
from train.diffusion import lora
from train.diffusion.captioned import Captioned, CaptionedBatches, OpenPictures, read_folder
from train.diffusion.folders import Pipeline, load_pipeline
from train.diffusion.objective import Objective
from train.diffusion.options import PREDICTIONS, TextToImageOptions
from train.diffusion.tuning import Tuning
from train.diffusion.validating import Validation
from train.model_files import configured
from train.pipeline import Loader
from train.recipe import Recipe
from train.text.clip import encode_prompts
from train.trainer import folders
from train.trainer.lines import length
from train.trainer.running import Job, run_job

LARGEST_DECAY = 0.9999


def run(options: TextToImageOptions) -> Any:
    """Train and write the pipeline, or the low-rank matrices; what `tpuflow.train` returned."""
    pipeline = load_pipeline(str(options.pretrained_model_name_or_path))
    job = job_of(options, pipeline)
    print(f"the pipeline in {options.pretrained_model_name_or_path}; {job.samples} pictures to train on", flush=True)
    return run_job(options.trainer, job)


def job_of(options: TextToImageOptions, pipeline: Pipeline) -> Job:
    """The training that the options ask for.

    Raises:
      ConfigError: the pipeline cannot be trained so.
      DataError: there are no captions, or pictures that cannot be read.
    """
    tuning = tuning_of(options, pipeline)
    loss_fn = objective(options, pipeline, tuning.dtype)
    batches = batches_of(options, pipeline)
    ema = tpuflow.EMA(diffusers_decay) if options.use_ema else None
    job = Job(tuning, Loader(batches), None, loss_fn=loss_fn, ema=ema, decayed=None)
    return replace(job, callbacks=(validation(options, tuning, job.samples),)) if options.validation_prompts else job


def tuning_of(options: TextToImageOptions, pipeline: Pipeline) -> Tuning:
    """What is trained and what is frozen."""
    if options.lora_rank:
        lora.check_rank(pipeline.configs["unet"], options.lora_rank)
    dtype = get_policy(options.trainer.precision).compute
    return Tuning(pipeline, dtype, options.lora_rank, options.gradient_checkpointing, options.seed)


def objective(options: TextToImageOptions, pipeline: Pipeline, dtype: Any) -> Objective:
    """The loss.

    Raises:
      ConfigError: the pipeline's scheduler predicts what no model can be trained for here.
    """
    schedule = pipeline.scheduler("ddpm")
    schedule = replace(schedule, prediction_type=options.prediction_type or schedule.prediction_type)
    if schedule.prediction_type not in PREDICTIONS:
        raise ConfigError(
            f"{options.pretrained_model_name_or_path}: prediction_type of its scheduler is {schedule.prediction_type!r}; say what is to be "
            f"predicted: --prediction_type {' or '.join(PREDICTIONS)}."
        )
    return Objective(
        pipeline.model("vae"), pipeline.model("text_encoder"), schedule, dtype, options.snr_gamma, options.noise_offset,
        options.input_perturbation,
    )  # fmt: skip


def batches_of(options: TextToImageOptions, pipeline: Pipeline) -> CaptionedBatches:
    """The pictures, shuffled in every pass, and the tokens of their captions.

    Raises:
      ConfigError: the UNet does not take pictures of this size.
      DataError: as `read_folder`.
    """
    least = pipeline.configs["vae"].reduction * pipeline.configs["unet"].reduction
    if options.resolution % least:
        raise ConfigError(f"--resolution {options.resolution}: expected a multiple of {least} pixels, for this UNet and VAE.")
    assert options.train_data_dir is not None
    found = _some(read_folder(options.train_data_dir, options.image_column, options.caption_column), options)
    tokens = encode_prompts(pipeline.tokenizer, [text for texts in found.captions for text in texts], pipeline.prompt_length)
    captions = tuple(np.split(tokens, np.cumsum([len(texts) for texts in found.captions])[:-1]))
    opened = OpenPictures(found.files, options.resolution, center_crop=options.center_crop, random_flip=options.random_flip)
    numbers = np.arange(len(found.files))
    return CaptionedBatches(numbers, numbers, options.train_batch_size, (opened,), shuffle=True, seed=options.seed, captions=captions)


def validation(options: TextToImageOptions, tuning: Tuning, samples: int) -> Validation:
    """The pictures that are drawn on the way."""
    plan = length(options.trainer, samples)
    device = {name: getattr(options, name) for name in ("chip", "engine", "fidelity")}
    make = partial(
        Validation, tuning, options.validation_prompts or (), options.resolution, folders.output_folder(options.trainer),
        options.validation_epochs * plan.steps_per_epoch, plan.accumulate, options.seed, device,
    )  # fmt: skip
    return configured(make, str(options.pretrained_model_name_or_path))


def diffusers_decay(updates: jax.Array) -> jax.Array:
    """The decay of diffusers' EMAModel after so many updates: the first leaves nothing of what was before."""
    before = (updates - 1).astype(jnp.float32)
    return jnp.where(before > 0, jnp.minimum((1 + before) / (10 + before), LARGEST_DECAY), 0.0)


def _some(found: Captioned, options: TextToImageOptions) -> Captioned:
    """Those pictures that are asked for, drawn by the seed."""
    if options.max_train_samples is None:
        return found
    chosen = np.random.default_rng(options.seed).permutation(len(found.files))[: options.max_train_samples]
    return Captioned(tuple(found.files[i] for i in chosen), tuple(found.captions[i] for i in chosen))


RECIPE = Recipe(
    "text_to_image",
    "fine-tune a text-to-image pipeline (Stable Diffusion 1.x, 2.x) on pictures with captions, as diffusers' train_text_to_image",
    __doc__,
    TextToImageOptions(),
    run,
    spelling="_",
)
