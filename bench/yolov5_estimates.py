"""A step of YOLOv5s at 640x640, batch 2, in each precision on several chips: modelled time and memory, as docs/yolov5_estimates.md."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tpuflow
from models.yolov5 import yolov5
from tpuflow.errors import OutOfMemoryError
from train.detection.hyperparameters import Hyperparameters
from train.detection.loss import DetectionLoss, detection_loss, pixels
from train.detection.optimizer import make_optimizer
from train.detection.schedules import Plan
from train.yolov5 import EMA

CHIPS = ("bm1690", "ascend910", "tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5e")
POLICIES = ("fp32", "mixed", "fp16", "bf16")
SIZE, BATCH, BOXES, CLASSES = 640, 2, 128, 80
STEPS_PER_EPOCH, EPOCHS = 64, 3
"""Of the command that the page is about: 128 pictures, three epochs."""
PAGE = Path(__file__).parents[1] / "docs" / "yolov5_estimates.md"


def shapes(batch: int, size: int, boxes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Those of a batch: pictures [B, size, size, 3] and rows for so many boxes each."""
    return {
        "images": jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8),
        "boxes": jax.ShapeDtypeStruct((batch, boxes, 4), np.float32),
        "classes": jax.ShapeDtypeStruct((batch, boxes), np.int32),
        "valid": jax.ShapeDtypeStruct((batch, boxes), np.bool_),
    }


def options(size: int, batch: int) -> dict[str, Any]:
    """What a step of the recipe is made of, beside model, data and policy."""
    hyp = Hyperparameters()
    plan = Plan(hyp, EPOCHS, STEPS_PER_EPOCH, batch)
    loss = detection_loss(DetectionLoss(yolov5("yolov5s", CLASSES).config, hyp, size))
    return {
        "optimizer": make_optimizer("SGD", plan), "loss_fn": loss, "inputs": pixels, "ema": EMA, "accumulate_steps": plan.accumulation,
    }  # fmt: skip


def estimated(chip: str, policy: str) -> dict[str, Any]:
    """A row: modelled milliseconds, MiB by kind, kernels; or why there is none."""
    began = time.perf_counter()
    row: dict[str, Any] = {"chip": chip, "policy": policy}
    try:
        made = tpuflow.estimate_training(
            yolov5("yolov5s", CLASSES), shapes(BATCH, SIZE, BOXES), policy=policy, chip=chip, **options(SIZE, BATCH)
        )
    except OutOfMemoryError as error:
        return {**row, "error": str(error).splitlines()[0]}
    memory = made.memory
    return {
        **row, "step_ms": 1e3 * made.step_seconds, "mfu": made.time.mfu, "peak_mib": memory.peak_memory_in_bytes / 2**20,
        "arguments_mib": memory.argument_size_in_bytes / 2**20, "temporaries_mib": memory.temp_size_in_bytes / 2**20,
        "fit": made.time.calibration.fit, "compile_seconds": time.perf_counter() - began,
    }  # fmt: skip


def page(rows: Sequence[dict[str, Any]]) -> str:
    """docs/yolov5_estimates.md."""
    lines = [
        "# What a step of YOLOv5s costs",
        "",
        "Made by `python -m bench.yolov5_estimates`; do not edit. One step of `python -m train yolov5 --img 640 --batch-size 2` with 80",
        f"classes and room for {BOXES} boxes a picture: forward, loss, backward, and the update with average and gathered gradients.",
        "Times are modelled ([how](timing.md), [how far off](accuracy.md)); memory is what the compiler planned.",
        "",
        "| chip | precision | ms a step | matrix utilisation | MiB at most | of them arguments | temporaries |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['chip']} | {row['policy']} | {row['error']} | | | | |"
    memory = " | ".join(f"{row[name]:.0f}" for name in ("peak_mib", "arguments_mib", "temporaries_mib"))
    return f"| {row['chip']} | {row['policy']} | {row['step_ms']:.2f} | {row['mfu']:.1%} | {memory} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=CHIPS, help="rows of the catalogue [%(default)s]")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="precisions [%(default)s]")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    rows = []
    for chip in arguments.chips:
        for policy in arguments.policies:
            rows.append(estimated(chip, policy))
            print(_line(rows[-1]), flush=True)
    if tuple(arguments.chips) == CHIPS and tuple(arguments.policies) == POLICIES:
        PAGE.write_text(page(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
