"""Pictures from prompts with a trained text-to-image pipeline: text encoder, all steps and decoder in one Program with a loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

import tpuflow
from tpuflow.amp import get_policy
from tpuflow.amp.policy import cast_floats
from tpuflow.errors import ConfigError
from train.diffusion import pictures
from train.diffusion.folders import Pipeline, load_pipeline
from train.diffusion.lora import with_lora
from train.diffusion.sampling import Sampler
from train.diffusion.schedulers import DDIM, SCHEDULERS
from train.model_files import configured
from train.options import DeviceOptions, option
from train.ranges import check_given, check_least, underlined
from train.recipe import Recipe
from train.text.clip import encode_prompts

NEEDED = {
    "pretrained_model_name_or_path": "a pipeline's folder",
    "prompt": "what is to be seen",
    "output_dir": "a folder for the pictures",
}
"""Options that have no default -> what is to be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions(DeviceOptions):
    """The arguments of diffusers' StableDiffusionPipeline under their names, and the options of the device."""

    pretrained_model_name_or_path: str | None = option(None, "pictures", "a pipeline's folder, as diffusers writes it", metavar="FOLDER")
    lora_weights: Path | None = option(
        None, "pictures", "a folder with pytorch_lora_weights.safetensors for the pipeline's UNet", Path, metavar="FOLDER"
    )
    prompt: list[str] | None = option(
        None, "pictures", "what is to be seen; several prompts make several pictures", nargs="+", metavar="TEXT"
    )
    negative_prompt: str = option("", "pictures", "what is not to be seen", metavar="TEXT")
    num_images_per_prompt: int = option(1, "pictures", "pictures of each prompt", int)
    num_inference_steps: int = option(50, "pictures", "steps of sampling", int)
    guidance_scale: float = option(7.5, "pictures", "how far to follow the prompt; 1: no guidance", float)
    height: int | None = option(None, "pictures", "pixels; else as the pipeline was trained", int, metavar="N")
    width: int | None = option(None, "pictures", "pixels; else as the pipeline was trained", int, metavar="N")
    scheduler: str = option("ddim", "pictures", "how to sample", choices=tuple(SCHEDULERS))
    eta: float = option(0.0, "pictures", "share of DDPM's noise that ddim adds", float)
    seed: int = option(0, "pictures", "of what is drawn", int)
    output_dir: Path | None = option(None, "pictures", "folder of the pictures, and of a grid of them all", Path, metavar="FOLDER")
    policy: str = option("fp32", "device", "precision of weights and arithmetic: fp32, fp16 or bf16")

    def check(self) -> None:
        """That numbers are in their ranges and what is needed is given.

        Raises:
          ConfigError: not so.
        """
        check_given(self, NEEDED, underlined)
        least = dict.fromkeys(("num_images_per_prompt", "num_inference_steps", "height", "width"), 1) | {"seed": 0, "eta": 0}
        check_least(self, least, underlined)
        if self.eta and self.scheduler != "ddim":
            raise ConfigError(f"--eta {self.eta}: {self.scheduler} has no such share; it is of --scheduler ddim.")


def run(options: SampleOptions) -> None:
    """Write the pictures, and say how long they take on the chip."""
    pipeline = load_pipeline(str(options.pretrained_model_name_or_path))
    if options.lora_weights is not None:
        pipeline = with_lora(pipeline, options.lora_weights)
    folder = _folder(options)
    found, seconds = sampled(options, pipeline)
    made = pictures.to_bytes(found)
    for number, picture in enumerate(made):
        pictures.write_png(folder / f"{number:03d}.png", picture)
    pictures.write_png(folder / "grid.png", pictures.grid(made, options.num_images_per_prompt))
    timing = f"{options.num_inference_steps} steps: {seconds:.3f} s (modelled on {options.chip}, {options.policy})"
    print(f"{len(made)} pictures in {folder}; {timing}", flush=True)


def sampled(options: SampleOptions, pipeline: Pipeline) -> tuple[np.ndarray, float]:
    """(pictures fp32 [prompts * images, H, W, C] from 0 to 1, modelled seconds of all of it).

    Raises:
      ConfigError: the pipeline cannot make such pictures, or not in so many steps.
    """
    sampler = sampler_of(options, pipeline)
    prompts = encode_prompts(pipeline.tokenizer, options.prompt or [], pipeline.prompt_length)
    prompts = np.repeat(prompts, options.num_images_per_prompt, axis=0)
    others = np.tile(encode_prompts(pipeline.tokenizer, [options.negative_prompt], pipeline.prompt_length), (len(prompts), 1))
    on_device = tpuflow.jit(sampler.draw, **options.device)
    given = cast_floats(dict(pipeline.variables), sampler.dtype), prompts, others, jax.random.key(options.seed)
    compiled = on_device.lower(*given).compile()
    return np.asarray(compiled(*given)), compiled.time().seconds


def sampler_of(options: SampleOptions, pipeline: Pipeline) -> Sampler:
    """The sampling that the options ask for; raises as `sampled`."""
    trained = (pipeline.configs["unet"].sample_size or 1) * pipeline.configs["vae"].reduction
    scheduler = pipeline.scheduler(options.scheduler)
    if isinstance(scheduler, DDIM):
        scheduler = replace(scheduler, eta=options.eta)
    make = partial(
        Sampler, pipeline, scheduler, options.num_inference_steps, options.guidance_scale,
        options.height or trained, options.width or trained, get_policy(options.policy).compute,
    )  # fmt: skip
    return configured(make, str(options.pretrained_model_name_or_path))


def _folder(options: SampleOptions) -> Path:
    """The folder of the pictures, made before anything is computed."""
    folder = options.output_dir or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot be written ({error.strerror}).") from error
    return folder


RECIPE = Recipe(
    "text_to_image_sample",
    "pictures from prompts with a trained text-to-image pipeline (Stable Diffusion 1.x, 2.x)",
    __doc__,
    SampleOptions(),
    run,
    spelling="_",
)
