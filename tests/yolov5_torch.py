"""YOLOv5's targets and loss in PyTorch, box by box, written for the tests from the papers and the release's description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from models.yolov5_config import Config
from train.detection.loss import BALANCE
from train.torch_yolov5 import complete_iou, entropy


class Candidate(NamedTuple):
    """One prediction that answers for a box; in cells."""

    image: int
    anchor: int
    row: int
    column: int
    box: torch.Tensor
    anchor_size: torch.Tensor
    label: int


def candidates(boxes: torch.Tensor, anchors: torch.Tensor, height: int, width: int, threshold: float) -> list[Candidate]:
    """Box by box: boxes [N, 6] are (image, class, centre x, centre y, width, height), 0 to 1; anchors [A, 2] in cells."""
    found = []
    for direction in range(5):
        for anchor, size in enumerate(anchors):
            for box in boxes:
                x, y, w, h = (box[2:] * torch.tensor([width, height, width, height])).unbind()
                ratios = [w / size[0], h / size[1]]
                if max(max(r, 1 / r) for r in ratios) >= threshold:
                    continue
                move = _move(direction, x, y, width, height)
                if move is None:
                    continue
                column = min(max(int(x - move[0]), 0), width - 1)
                row = min(max(int(y - move[1]), 0), height - 1)
                relative = torch.stack([x - column, y - row, w, h])
                found.append(Candidate(int(box[0]), anchor, row, column, relative, size, int(box[1])))
    return found


def _move(direction: int, x: torch.Tensor, y: torch.Tensor, width: int, height: int) -> tuple[float, float] | None:
    """What is taken off the centre to come into the cell itself, the left, upper, right or lower one; None if that one is too far."""
    if direction == 0:
        return 0.0, 0.0
    distance = [x, y, width - x, height - y][direction - 1]
    if not (distance % 1 < 0.5 and distance > 1):
        return None
    return [(0.5, 0.0), (0.0, 0.5), (-0.5, 0.0), (0.0, -0.5)][direction - 1]


def losses(
    maps: Sequence[torch.Tensor], boxes: torch.Tensor, config: Config, hyp: Any, size: int, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(box, objectness, class): maps [B, A, H, W, 5 + classes], boxes [N, 6], see `candidates`."""
    kind = maps[0].dtype
    box, obj, cls = (torch.zeros((), dtype=kind) for _ in range(3))
    for x, anchors, stride, balance in zip(maps, config.anchors, config.strides, BALANCE[len(maps)], strict=True):
        found = candidates(boxes, torch.tensor(anchors) / stride, x.shape[2], x.shape[3], hyp.anchor_t)
        wanted = torch.zeros(x.shape[:4], dtype=kind)
        if found:
            rows = torch.stack([x[c.image, c.anchor, c.row, c.column] for c in found])
            sizes = torch.stack([c.anchor_size for c in found]).to(kind)
            said = torch.cat((rows[:, :2].sigmoid() * 2 - 0.5, (rows[:, 2:4].sigmoid() * 2) ** 2 * sizes), 1)
            overlap = complete_iou(said, torch.stack([c.box for c in found]).to(kind))
            box = box + (1 - overlap).mean()
            for c, value in zip(found, overlap.detach().clamp(min=0), strict=True):
                wanted[c.image, c.anchor, c.row, c.column] = value
            if config.classes > 1:
                labels = torch.full_like(rows[:, 5:], smoothing / 2)
                labels[torch.arange(len(found)), torch.tensor([c.label for c in found])] = 1 - smoothing / 2
                cls = cls + entropy(rows[:, 5:], labels, hyp.cls_pw, hyp.fl_gamma)
        obj = obj + balance * entropy(x[..., 4], wanted, hyp.obj_pw, hyp.fl_gamma)
    scale, share = (size / 640) ** 2, 3 / len(maps)
    return hyp.box * share * box, hyp.obj * scale * share * obj, hyp.cls * config.classes / 80 * share * cls
