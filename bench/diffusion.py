"""The small text-to-image pipeline of `train.parity diffusion`, accumulation 4 and checkpointing: tpuflow's sink beside plain jax.jit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import tpuflow
from bench.contest import Workload, main
from train import text_to_image
from train.diffusion.options import TextToImageOptions
from train.parity_diffusion import SIDE, TEXT, TOKENIZER, new_pipeline
from train.text.tokenizing import find_tokenizer
from train.trainer.optimizers import optimizer

ACCUMULATE, UPDATES = 4, 300
OPTIONS = TextToImageOptions(
    pretrained_model_name_or_path="", output_dir=Path(), resolution=SIDE, train_batch_size=1, use_ema=True,
    gradient_accumulation_steps=ACCUMULATE, gradient_checkpointing=True, max_train_steps=UPDATES, learning_rate=1e-4, lr_warmup_steps=0,
)  # fmt: skip


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random pictures [N, H, W, 3] from -1 to 1, and the tokens [N, T] of captions."""
    rng = np.random.default_rng(0)
    pictures = rng.uniform(-1, 1, (count, SIDE, SIDE, 3)).astype(np.float32)
    return pictures, rng.integers(0, TEXT.vocab_size, (count, TEXT.max_position_embeddings)).astype(np.int32)


@cache
def _pipeline() -> Any:
    return new_pipeline(find_tokenizer(TOKENIZER), seed=0)


def step(policy: str, batch: Any) -> Any:
    """The recipe's step."""
    options = replace(OPTIONS, policy=policy)
    tuning = text_to_image.tuning_of(options, _pipeline())
    return tpuflow.training_step(
        tuning.model, batch, policy=policy, optimizer=optimizer(options.trainer, UPDATES, None), params=tuning.variables,
        loss_fn=text_to_image.objective(options, _pipeline(), tuning.dtype), ema=tpuflow.EMA(text_to_image.diffusers_decay),
        accumulate_steps=ACCUMULATE,
    )  # fmt: skip


WORKLOAD = Workload(
    "diffusion", lambda: None, None, (SIDE, SIDE, 3), batch=1, steps=8, rounds=7, lr=1e-4, momentum=None,
    policies=("fp32", "mixed", "mixed_bf16"),
    limits={
        ("tpuflow fp32", "jax_jit fp32"): 1.0,
        ("tpuflow mixed", "tpuflow fp32"): 1.15,
        ("tpuflow mixed_bf16", "tpuflow fp32"): 1.15,
    },
    peer="jax_jit", processes=3, peak_limit=1.2, samples=samples, step=step,
)  # fmt: skip

if __name__ == "__main__":
    main(WORKLOAD, __doc__)
