"""A step of YOLOv5s at 640x640, batch 2, in each precision on several chips: modelled time and memory, as docs/yolov5_estimates.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

import tpuflow
from bench.step_estimates import Page, Step, main
from models.yolov5 import yolov5
from tpuflow.estimating.estimating import Estimate
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


def estimate(chip: str, policy: str) -> Estimate:
    """The modelled cost of the step on a chip in a precision."""
    data = shapes(BATCH, SIZE, BOXES)
    return tpuflow.estimate_training(yolov5("yolov5s", CLASSES), data, policy=policy, chip=chip, **options(SIZE, BATCH))


PAGE = Page(
    "yolov5_estimates.md",
    "bench.yolov5_estimates",
    "What a step of YOLOv5s costs",
    (
        "One step of `python -m train yolov5 --img 640 --batch-size 2` with 80",
        f"classes and room for {BOXES} boxes a picture: forward, loss, backward, and the update with average and gathered gradients.",
    ),
    ("chip", "precision"),
)

if __name__ == "__main__":
    main(PAGE, [Step((chip, policy), partial(estimate, chip, policy)) for chip in CHIPS for policy in POLICIES])
