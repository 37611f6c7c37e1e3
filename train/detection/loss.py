"""YOLOv5's loss: boxes by CIoU, objectness and classes by binary cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from models.yolov5_config import OF_A_BOX, Config
from train.detection.boxes import iou
from train.detection.hyperparameters import Hyperparameters
from train.detection.targets import Targets, build_targets

BALANCE: Mapping[int, tuple[float, ...]] = {3: (4.0, 1.0, 0.4), 4: (4.0, 1.0, 0.25, 0.06)}
"""Number of maps -> weights of their objectness, finest first."""
FOCAL_ALPHA = 0.25
"""Weight of positive labels in the focal loss (Lin et al., arXiv:1708.02002, section 5.1)."""


@dataclass(frozen=True, slots=True)
class DetectionLoss:
    """The loss of raw maps, as the YOLOv5 release computes it, in f32 and in shapes that no batch changes.

    hyp: its gains as a file has them; they are scaled by maps, classes and `image_size` (pixels) here. label_smoothing: share of a label
    that is spread.
    """

    config: Config
    hyp: Hyperparameters
    image_size: int
    label_smoothing: float = 0.0

    def __call__(self, maps: Sequence[jax.Array], batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the sum of the three losses times the images of the batch, the three by name), all scalars.

        maps: f32 [B, H, W, A, 5 + classes] each. batch: `boxes`, `classes` and `valid`, see `build_targets`.
        """
        found = [self._of_map(index, jnp.asarray(x, jnp.float32), batch) for index, x in enumerate(maps)]
        box, obj, cls = (gain * jnp.sum(jnp.stack(parts)) for gain, parts in zip(self.gains, zip(*found, strict=True), strict=True))
        return (box + obj + cls) * maps[0].shape[0], {"box": box, "obj": obj, "cls": cls}

    @property
    def gains(self) -> tuple[float, float, float]:
        """Of boxes, objectness and classes, scaled to the maps, to the image and to the classes."""
        maps = 3 / len(self.config.strides)
        area = (self.image_size / 640) ** 2
        return self.hyp.box * maps, self.hyp.obj * area * maps, self.hyp.cls * self.config.classes / 80 * maps

    def _of_map(self, index: int, x: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(box, objectness, class) of one map, before their gains."""
        anchors = jnp.asarray(self.config.anchors[index], jnp.float32) / self.config.strides[index]
        grid = (x.shape[1], x.shape[2])
        targets = build_targets(batch["boxes"], batch["classes"], batch["valid"], grid, anchors, self.hyp.anchor_t)
        rows = x[targets.image, targets.row, targets.column, targets.anchor]  # [N, 5 + classes]
        overlap = iou(_boxes(rows, targets), targets.boxes, "ciou", "xywh")
        box = _mean(1.0 - overlap, targets.chosen)
        wanted = objectness(jax.lax.stop_gradient(overlap), targets, x.shape[:-1])
        obj = jnp.mean(self._entropy(x[..., OF_A_BOX - 1], wanted, self.hyp.obj_pw)) * BALANCE[len(self.config.anchors)][index]
        return box, obj, self._of_classes(rows[:, OF_A_BOX:], targets)

    def _of_classes(self, logits: jax.Array, targets: Targets) -> jax.Array:
        """Logits [N, classes]; nothing where there is but one class."""
        if self.config.classes == 1:
            return jnp.zeros((), jnp.float32)
        off, on = 0.5 * self.label_smoothing, 1.0 - 0.5 * self.label_smoothing
        of_class = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets.classes[:, None]
        entropy = self._entropy(logits, jnp.where(of_class, on, off), self.hyp.cls_pw)
        return _mean(jnp.mean(entropy, axis=-1), targets.chosen)

    def _entropy(self, logits: jax.Array, labels: jax.Array, positive_weight: float) -> jax.Array:
        """Binary cross-entropy, under the focal loss if hyp.fl_gamma is above 0; elementwise."""
        weight = (positive_weight - 1) * labels + 1
        found = (1 - labels) * logits + weight * (jnp.log1p(jnp.exp(-jnp.abs(logits))) + jnp.maximum(-logits, 0))
        if self.hyp.fl_gamma == 0:
            return found
        chance = jax.nn.sigmoid(logits)
        right = labels * chance + (1 - labels) * (1 - chance)
        alpha = labels * FOCAL_ALPHA + (1 - labels) * (1 - FOCAL_ALPHA)
        return found * alpha * (1 - right) ** self.hyp.fl_gamma


def objectness(overlap: jax.Array, targets: Targets, shape: Sequence[int]) -> jax.Array:
    """What the objectness of a map of this shape [B, H, W, A] shall be: the overlap [N] of the box that a prediction answers for, or 0.

    Of several candidates for one prediction the last counts, as with an indexed assignment in PyTorch on a CPU.
    """
    count = len(overlap)
    place = (targets.image, targets.row, targets.column, targets.anchor)
    numbers = jnp.where(targets.chosen, jnp.arange(1, count + 1, dtype=jnp.int32), 0)
    last = jnp.zeros(shape, jnp.int32).at[place].max(numbers)
    values = jnp.concatenate([jnp.zeros(1, overlap.dtype), jnp.maximum(overlap, 0)])
    return values[last]


def _boxes(rows: jax.Array, targets: Targets) -> jax.Array:
    """The boxes that predictions say, [N, 4]: centre relative to the cell, width and height in cells."""
    centres = jax.nn.sigmoid(rows[:, :2]) * 2 - 0.5
    sizes = jnp.square(jax.nn.sigmoid(rows[:, 2:4]) * 2) * targets.anchors
    return jnp.concatenate([centres, sizes], axis=-1)


def _mean(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """The mean of the chosen ones [N]; 0 if there is none."""
    return jnp.sum(jnp.where(chosen, values, 0.0)) / jnp.maximum(jnp.sum(chosen), 1)


def detection_loss(loss: DetectionLoss) -> Any:
    """The `loss_fn` of `tpuflow.train`: pixels from 0 to 255 [B, H, W, 3] under "images" become numbers from 0 to 1 on the device."""

    def yolov5_loss(apply: Any, params: Any, batch: Mapping[str, jax.Array], rngs: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(apply(params, pixels(batch)), batch)

    return yolov5_loss


def pixels(batch: Mapping[str, jax.Array]) -> jax.Array:
    """The images of a batch as the network takes them: f32 [B, H, W, 3] from 0 to 1."""
    return batch["images"].astype(jnp.float32) / 255
