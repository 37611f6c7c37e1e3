"""Pictures of the same prompts again and again while a pipeline is trained, from the same noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tpuflow
from tpuflow.amp.policy import cast_floats
from train.diffusion import pictures
from train.diffusion.sampling import Sampler
from train.diffusion.tuning import Tuning
from train.text.clip import encode_prompts

STEPS, GUIDANCE = 20, 7.5
"""As diffusers' script samples."""


class Validation(tpuflow.Callback):
    """After every so many steps a grid of pictures, one of each prompt: `validation-N.png` after N updates; of the average, if any."""

    def __init__(
        self,
        tuning: Tuning,
        prompts: Sequence[str],
        resolution: int,
        folder: Path,
        every_steps: int,
        accumulate: int,
        seed: int,
        device: Mapping[str, Any],
    ):
        """Raise ValueError if there are no such pictures. device: options of `tpuflow.jit`."""
        self.every_steps = every_steps
        self._tuning, self._prompts, self._folder, self._accumulate, self._seed = tuning, tuple(prompts), folder, accumulate, seed
        scheduler = tuning.pipeline.scheduler("ddim")
        sampler = Sampler(tuning.pipeline, scheduler, STEPS, GUIDANCE, resolution, resolution, tuning.dtype)
        self._draw = tpuflow.jit(sampler.draw, **device)

    def on_sink_end(self, run: tpuflow.Run) -> None:
        """Draw them if they are due."""
        if self.every_steps and run.steps % self.every_steps == 0:
            found = self.drawn(self._tuning.with_trained(run.eval_params()))
            target = self._folder / f"validation-{run.steps // self._accumulate}.png"
            pictures.write_png(target, pictures.grid(pictures.to_bytes(found), len(self._prompts)))
            print(f"pictures of {len(self._prompts)} prompts: {target}", flush=True)

    def drawn(self, pipeline: Any) -> np.ndarray:
        """A picture of each prompt, fp32 [prompts, H, W, C] from 0 to 1."""
        tokens, nothing = (encode_prompts(pipeline.tokenizer, texts, pipeline.prompt_length) for texts in (self._prompts, [""]))
        variables = cast_floats(dict(pipeline.variables), self._tuning.dtype)
        return np.asarray(self._draw(variables, tokens, np.tile(nothing, (len(tokens), 1)), jax.random.key(self._seed)))
