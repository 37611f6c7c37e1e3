"""Training steps of Stable Diffusion at 512x512: modelled time and memory, as docs/diffusion_estimates.md."""

from __future__ import annotations

import dataclasses
from functools import partial

import tpuflow
from bench.step_estimates import Page, Step, main
from tpuflow.estimating.estimating import Estimate
from tpuflow.training.config import StepConfig
from train.diffusion.steps import FIRST, LORA_RANK, step_of

WHOLE, MATRICES = "UNet", f"matrices of rank {LORA_RANK}"
KEPT, AGAIN = "kept", "computed again"
ROWS = (
    (WHOLE, 1, KEPT, "ascend910"),
    (WHOLE, 3, KEPT, "ascend910"),
    (WHOLE, 3, AGAIN, "ascend910"),
    (WHOLE, 3, AGAIN, "tpu-v4"),
    (MATRICES, 4, KEPT, "ascend910"),
    (MATRICES, 4, AGAIN, "ascend910"),
)
"""What is trained, pictures a step, what becomes of inner values, chip."""


def estimate(trained: str, pictures: int, inner: str, chip: str) -> Estimate:
    """The modelled cost of a step in `mixed`."""
    step = step_of(FIRST, pictures, lora_rank=LORA_RANK if trained == MATRICES else None, gradient_checkpointing=inner == AGAIN)
    options = {one.name: getattr(step, one.name) for one in dataclasses.fields(StepConfig) if step.is_given(one.name)}
    return tpuflow.estimate_training(**{**options, "chip": chip})


PAGE = Page(
    "diffusion_estimates.md",
    "bench.diffusion_estimates",
    "What a training step of Stable Diffusion costs",
    (
        "One step of `python -m train text_to_image",
        "--mixed_precision fp16 --resolution 512` on Stable Diffusion 1.x with AdamW: VAE, text encoder, the UNet's two passes, update.",
        "Inner values of the UNet's blocks are kept for the backward pass, or computed again (`--gradient_checkpointing`).",
    ),
    ("trained", "pictures a step", "inner values", "chip"),
)

if __name__ == "__main__":
    main(PAGE, [Step(tuple(map(str, row)), partial(estimate, *row)) for row in ROWS])
