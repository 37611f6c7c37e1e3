"""YOLOv5s at 320x320, batch 8: tpuflow's sink beside plain jax.jit and PyTorch on the CPU, interleaved in one run."""

from __future__ import annotations

from typing import Any

import numpy as np

import tpuflow
from bench.contest import Run, Workload, main
from models.yolov5 import yolov5
from train.detection.hyperparameters import Hyperparameters
from train.detection.loss import DetectionLoss, detection_loss, pixels
from train.detection.optimizer import make_optimizer
from train.detection.schedules import NOMINAL_BATCH, Plan
from train.yolov5 import EMA

SIZE, BATCH, BOXES, CLASSES = 320, 8, 80, 80
HYP = Hyperparameters()
LOSS = DetectionLoss(yolov5("yolov5s", CLASSES).config, HYP, SIZE)

PLAN = Plan(HYP, 100, 100, NOMINAL_BATCH)
"""With an update in every step, since PyTorch's loop has one too."""


def samples(count: int, size: int = SIZE, boxes_each: int = BOXES) -> dict[str, np.ndarray]:
    """Random pictures with up to so many boxes each, as mosaics have them; a quarter of the rows are filled."""
    rng = np.random.default_rng(0)
    boxes = rng.uniform(0.05, 0.95, (count, boxes_each, 4)).astype(np.float32)
    boxes[..., 2:] = rng.uniform(0.02, 0.4, (count, boxes_each, 2))
    return {
        "images": rng.integers(0, 256, (count, size, size, 3)).astype(np.uint8),
        "boxes": boxes,
        "classes": rng.integers(0, CLASSES, (count, boxes_each)).astype(np.int32),
        "valid": rng.random((count, boxes_each)) < 0.25,
    }


def step(policy: str, batch: Any) -> Any:
    """The recipe's step."""
    return tpuflow.training_step(
        yolov5("yolov5s", CLASSES),
        batch,
        policy=policy,
        optimizer=make_optimizer("SGD", PLAN),
        loss_fn=detection_loss(LOSS),
        inputs=pixels,
        ema=EMA,
    )


def torch_run(data: Any) -> Run:
    """PyTorch's loop over the same batches."""
    from train.torch_yolov5 import Network, train

    network = Network(LOSS.config).train()
    batches = [{name: array[i : i + BATCH] for name, array in data.items()} for i in range(0, len(data["images"]), BATCH)]
    return lambda: train(network, batches, LOSS, PLAN, EMA).losses


WORKLOAD = Workload(
    "yolov5", lambda: yolov5("yolov5s", CLASSES), None, (SIZE, SIZE, 3), batch=BATCH, steps=2, rounds=5, lr=HYP.lr0, momentum=HYP.momentum,
    policies=("fp32", "mixed"),
    limits={("tpuflow fp32", "jax_jit fp32"): 1.0, ("tpuflow fp32", "torch fp32"): 1.2, ("tpuflow mixed", "tpuflow fp32"): 1.15},
    peer="jax_jit", peak_limit=1.1, cold_limit=1.5, samples=samples, step=step, torch=torch_run,
)  # fmt: skip

if __name__ == "__main__":
    main(WORKLOAD, __doc__)
