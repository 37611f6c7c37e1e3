"""YOLOv5 in PyTorch, written from its configuration file and the papers, modules named as in its checkpoints; and a loop that trains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jax import numpy as jnp
from torch import nn
from torch.nn import functional as F

from models.yolov5_config import Config
from tpuflow import EMA
from train.detection.loss import BALANCE, DetectionLoss
from train.detection.optimizer import LARGEST_NORM
from train.detection.schedules import Plan


class Conv(nn.Module):
    """Convolution, batch normalisation, SiLU."""

    def __init__(self, inputs: int, outputs: int, window: int = 1, stride: int = 1, padding: int | None = None):
        super().__init__()
        around = window // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, window, stride, around, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, outputs, H / stride, W / stride]."""
        return F.silu(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    """1x1 and 3x3."""

    def __init__(self, width: int, shortcut: bool):
        super().__init__()
        self.cv1, self.cv2, self.shortcut = Conv(width, width), Conv(width, width, 3), shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The shape stays."""
        y = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Two branches."""

    def __init__(self, inputs: int, outputs: int, blocks: int, shortcut: bool = True):
        super().__init__()
        half = outputs // 2
        self.cv1, self.cv2, self.cv3 = Conv(inputs, half), Conv(inputs, half), Conv(2 * half, outputs)
        self.m = nn.Sequential(*(Bottleneck(half, shortcut) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, outputs, H, W]."""
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class SPPF(nn.Module):
    """Maxima of maxima of maxima."""

    def __init__(self, inputs: int, outputs: int, window: int):
        super().__init__()
        self.cv1, self.cv2 = Conv(inputs, inputs // 2), Conv(inputs // 2 * 4, outputs)
        self.m = nn.MaxPool2d(window, 1, window // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, outputs, H, W]."""
        one = self.cv1(x)
        two = self.m(one)
        three = self.m(two)
        return self.cv2(torch.cat((one, two, three, self.m(three)), 1))


class Concat(nn.Module):
    """Along the channels."""

    def forward(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, C, H, W] each -> [B, sum of C, H, W]."""
        return torch.cat(tuple(xs), 1)


class Detect(nn.Module):
    """The raw maps."""

    def __init__(self, config: Config, inputs: Sequence[int]):
        super().__init__()
        self.boxes, self.outputs = len(config.anchors[0]), config.outputs
        strides = torch.tensor(config.strides, dtype=torch.float32)
        self.register_buffer("anchors", torch.tensor(config.anchors, dtype=torch.float32) / strides[:, None, None])
        self.m = nn.ModuleList(nn.Conv2d(width, self.boxes * self.outputs, 1) for width in inputs)

    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[B, C, H, W] each -> [B, A, H, W, 5 + classes] each."""
        maps = [conv(x) for conv, x in zip(self.m, xs, strict=True)]
        return [x.unflatten(1, (self.boxes, self.outputs)).permute(0, 1, 3, 4, 2) for x in maps]


class Network(nn.Module):
    """All layers under `model`, as the checkpoints name them."""

    def __init__(self, config: Config):
        super().__init__()
        self.rows = config.architecture.rows
        widths: list[int] = [3]
        layers: list[nn.Module] = []
        for row in self.rows:
            inputs = [widths[source if source < 0 else source + 1] for source in row.sources]
            layer, width = _layer(config, row.kind, row.blocks, row.options, inputs)
            layers.append(layer)
            widths.append(width)
        self.model = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Images [B, 3, H, W] -> the raw maps [B, A, H, W, 5 + classes]."""
        results: list[Any] = [x]
        for layer, row in zip(self.model, self.rows, strict=True):
            given = [results[source if source < 0 else source + 1] for source in row.sources]
            results.append(layer(given if row.kind in ("Concat", "Detect") else given[0]))
        return results[-1]


def _layer(config: Config, kind: str, blocks: int, options: tuple[Any, ...], inputs: list[int]) -> tuple[nn.Module, int]:
    """(the layer, channels that it gives)."""
    if kind == "nn.Upsample":
        return nn.Upsample(scale_factor=2, mode="nearest"), inputs[0]
    if kind == "Concat":
        return Concat(), sum(inputs)
    if kind == "Detect":
        return Detect(config, inputs), 0
    outputs = math.ceil(options[0] * config.width_multiple / 8) * 8
    if kind == "C3":
        return C3(inputs[0], outputs, max(round(blocks * config.depth_multiple), 1), *options[1:]), outputs
    return {"Conv": Conv, "SPPF": SPPF}[kind](inputs[0], outputs, *options[1:]), outputs


def complete_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """CIoU (arXiv:1911.08287) of boxes [N, 4] by centre, width and height: [N]."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a.unbind(-1), b.unbind(-1)
    left, right = torch.maximum(ax - aw / 2, bx - bw / 2), torch.minimum(ax + aw / 2, bx + bw / 2)
    top, bottom = torch.maximum(ay - ah / 2, by - bh / 2), torch.minimum(ay + ah / 2, by + bh / 2)
    common = (right - left).clamp(min=0) * (bottom - top).clamp(min=0)
    overlap = common / (aw * ah + bw * bh - common + 1e-7)
    across = torch.maximum(ax + aw / 2, bx + bw / 2) - torch.minimum(ax - aw / 2, bx - bw / 2)
    down = torch.maximum(ay + ah / 2, by + bh / 2) - torch.minimum(ay - ah / 2, by - bh / 2)
    distance = ((ax - bx) ** 2 + (ay - by) ** 2) / (across**2 + down**2 + 1e-7)
    aspect = 4 / math.pi**2 * (torch.atan(bw / bh) - torch.atan(aw / ah)) ** 2
    with torch.no_grad():
        alpha = aspect / (1 - overlap + aspect + 1e-7)
    return overlap - distance - alpha * aspect


def entropy(logits: torch.Tensor, labels: torch.Tensor, weight: float, gamma: float) -> torch.Tensor:
    """Mean binary cross-entropy, focal if gamma is above 0."""
    found = F.binary_cross_entropy_with_logits(logits, labels, reduction="none", pos_weight=torch.tensor(weight, dtype=logits.dtype))
    if gamma:
        chance = logits.sigmoid()
        right = labels * chance + (1 - labels) * (1 - chance)
        found = found * (labels * 0.25 + (1 - labels) * 0.75) * (1 - right) ** gamma
    return found.mean()


Targets = tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor]
"""(image, anchor, row and column), boxes [N, 4], anchors [N, 2], classes [N]."""


def targets(boxes: torch.Tensor, anchors: torch.Tensor, height: int, width: int, threshold: float) -> Targets:
    """Those of boxes [N, 6], rows of (image, class, centre x, centre y, width, height), 0 to 1; anchors [A, 2] in cells."""
    size = torch.tensor([width, height], dtype=torch.float32)
    ratio = boxes[None, :, 4:] * size / anchors[:, None]
    anchor, row = torch.nonzero(torch.maximum(ratio, 1 / ratio).amax(2) < threshold, as_tuple=True)
    found = boxes[row]
    centres = found[:, 2:4] * size
    left, above = ((centres % 1 < 0.5) & (centres > 1)).unbind(1)
    right, below = (((size - centres) % 1 < 0.5) & (size - centres > 1)).unbind(1)
    direction, row = torch.nonzero(torch.stack([torch.ones_like(left), left, above, right, below]), as_tuple=True)
    moves = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5], [-0.5, 0.0], [0.0, -0.5]])
    cells = (centres[row] - moves[direction]).long().clamp(min=torch.zeros(2).long(), max=size.long() - 1)
    place = (found[row, 0].long(), anchor[row], cells[:, 1], cells[:, 0])
    return place, torch.cat((centres[row] - cells, found[row, 4:] * size), 1), anchors[anchor[row]], found[row, 1].long()


def loss_of(maps: Sequence[torch.Tensor], boxes: torch.Tensor, config: Config, gains: Sequence[float], threshold: float) -> torch.Tensor:
    """The sum of the three losses times the images: maps [B, A, H, W, 5 + classes], boxes as for `targets`, gains of the three."""
    box = obj = cls = maps[0].new_zeros(())
    for x, anchors, stride, balance in zip(maps, config.anchors, config.strides, BALANCE[len(maps)], strict=True):
        place, wanted, sizes, classes = targets(boxes, torch.tensor(anchors) / stride, x.shape[2], x.shape[3], threshold)
        objects = torch.zeros(x.shape[:4])
        if len(wanted):
            rows = x[place]
            said = torch.cat((rows[:, :2].sigmoid() * 2 - 0.5, (rows[:, 2:4].sigmoid() * 2) ** 2 * sizes), 1)
            overlap = complete_iou(said, wanted)
            objects[place] = overlap.detach().clamp(min=0)
            box = box + (1 - overlap).mean()
            if config.classes > 1:
                cls = cls + entropy(rows[:, 5:], F.one_hot(classes, config.classes).float(), 1.0, 0.0)
        obj = obj + balance * entropy(x[..., 4], objects, 1.0, 0.0)
    return (gains[0] * box + gains[1] * obj + gains[2] * cls) * len(maps[0])


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss of every step, a sum over its pictures, and the averaged tensors under the network's names."""

    losses: list[float]
    average: dict[str, torch.Tensor]


def train(network: Network, batches: Iterable[Mapping[str, np.ndarray]], loss: DetectionLoss, plan: Plan, ema: EMA) -> Trained:
    """The recipe's loop with SGD: gradients add up to an update, are clipped, and kernels, scales and biases move as groups."""
    optimizer = torch.optim.SGD(_groups(network, plan), lr=0.0, momentum=plan.hyp.momentum, nesterov=True)
    update_at = {int(step): update for update, step in enumerate(plan.updates)}
    rates, of_biases, momenta = plan.rates(), plan.rates(plan.hyp.warmup_bias_lr), plan.momenta()
    average = {name: tensor.clone() for name, tensor in network.state_dict().items() if tensor.dtype.is_floating_point}
    losses = []
    for step, batch in enumerate(batches):
        images = torch.from_numpy(batch["images"]).permute(0, 3, 1, 2).float() / 255
        rows = [(b, batch["classes"][b, m], *batch["boxes"][b, m]) for b, m in zip(*np.nonzero(batch["valid"]), strict=True)]
        boxes = torch.tensor(np.array(rows, np.float32).reshape(-1, 6))
        value = loss_of(network(images), boxes, loss.config, loss.gains, loss.hyp.anchor_t)
        value.backward()
        losses.append(value.item())
        if (update := update_at.get(step)) is None:
            continue
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = float((of_biases if group["biases"] else rates)[update]), float(momenta[update])
        torch.nn.utils.clip_grad_norm_(network.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        _follow(average, network, float(ema.decay_after(jnp.int32(update + 1))))
    return Trained(losses, average)


def _groups(network: Network, plan: Plan) -> list[dict[str, Any]]:
    """Kernels, which decay; scales; biases, which begin with a rate of their own."""
    named = dict(network.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    kernels = [p for name, p in named.items() if name.endswith("weight") and p.ndim > 1]
    scales = [p for name, p in named.items() if name.endswith("weight") and p.ndim == 1]
    return [
        {"params": kernels, "weight_decay": plan.weight_decay, "biases": False},
        {"params": scales, "biases": False},
        {"params": biases, "biases": True},
    ]


@torch.no_grad()
def _follow(average: Mapping[str, torch.Tensor], network: Network, decay: float) -> None:
    """Move the average of every tensor, statistics included."""
    for name, tensor in network.state_dict().items():
        if name in average:
            average[name].lerp_(tensor, 1.0 - decay)
