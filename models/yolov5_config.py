"""Configurations of YOLOv5: sizes, anchors, and the layers as the original's configuration files list them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Anchors = tuple[tuple[tuple[float, float], ...], ...]
"""Of each map, finest first, of each of its boxes: (width, height) in pixels of the image."""

ANCHORS: Anchors = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
P6_ANCHORS: Anchors = (
    ((19, 27), (44, 40), (38, 94)),
    ((96, 68), (86, 152), (180, 137)),
    ((140, 301), (303, 264), (238, 542)),
    ((436, 615), (739, 380), (925, 792)),
)
"""For images of 1280x1280."""
STRIDES = (8, 16, 32, 64)
"""Pixels of the image to a step on each map, finest first."""
OF_A_BOX = 5
"""Numbers of a prediction before those of the classes: centre x and y, width, height, objectness."""

MULTIPLES: Mapping[str, tuple[float, float]] = {
    "yolov5n": (0.33, 0.25),
    "yolov5s": (0.33, 0.50),
    "yolov5m": (0.67, 0.75),
    "yolov5l": (1.0, 1.0),
    "yolov5x": (1.33, 1.25),
}
"""Name of a size -> (depth multiple, width multiple)."""


@dataclass(frozen=True)
class Config:
    """What an instance of the architecture is made of.

    depth_multiple, width_multiple: times the blocks of a layer and times its channels, see `repeats` and `channels`. classes: what is told
    apart. anchors: sizes of boxes that predictions are relative to, see `Anchors`: of three maps, or of four, with a layer more each way.

    Raises:
      ValueError: a number is out of its range, or there are not three anchors for each of three or four maps.
    """

    depth_multiple: float
    width_multiple: float
    classes: int = 80
    anchors: Anchors = ANCHORS

    def __post_init__(self) -> None:
        for name in ("depth_multiple", "width_multiple"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"YOLOv5: {name} is {value!r}, expected a number above 0")
        if not isinstance(self.classes, int) or isinstance(self.classes, bool) or self.classes < 1:
            raise ValueError(f"YOLOv5: the number of classes (nc) is {self.classes!r}, expected a whole number from 1 on")
        if len(self.anchors) not in ARCHITECTURES or any(len(of_map) != 3 for of_map in self.anchors):
            raise ValueError(
                f"YOLOv5: anchors for {len(self.anchors)} maps, {self.anchors!r}; expected three of each of three or four maps"
            )
        if any(not 0 < side < math.inf for of_map in self.anchors for pair in of_map for side in pair):
            raise ValueError(f"YOLOv5: anchors {self.anchors!r}, expected sides above 0, in pixels")

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels of the image to a step on each map, finest first."""
        return STRIDES[: len(self.anchors)]

    @property
    def architecture(self) -> Architecture:
        """The layers."""
        return ARCHITECTURES[len(self.anchors)]

    @property
    def outputs(self) -> int:
        """Numbers of a prediction."""
        return OF_A_BOX + self.classes

    def channels(self, full: int) -> int:
        """Channels of a layer that has `full` of them at a width of 1: a multiple of 8."""
        return math.ceil(full * self.width_multiple / 8) * 8

    def repeats(self, full: int) -> int:
        """Blocks of a layer that has `full` of them at a depth of 1."""
        return max(round(full * self.depth_multiple), 1)


@dataclass(frozen=True, slots=True)
class Row:
    """A layer: the numbers of those it gets its inputs from (-1: the one before), blocks, kind, and what else it is told."""

    sources: tuple[int, ...]
    blocks: int
    kind: str
    options: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The layers of a network, as the configuration files list them; a path aggregation network (Liu et al., arXiv:1803.01534)."""

    backbone: tuple[Row, ...]
    head: tuple[Row, ...]
    anchors: Anchors

    @property
    def rows(self) -> tuple[Row, ...]:
        """All layers."""
        return (*self.backbone, *self.head)

    @property
    def last(self) -> int:
        """The number of the layer that predicts."""
        return len(self.rows) - 1


FINE_ROWS = (
    Row((-1,), 1, "Conv", (64, 6, 2, 2)),
    Row((-1,), 1, "Conv", (128, 3, 2)),
    Row((-1,), 3, "C3", (128,)),
    Row((-1,), 1, "Conv", (256, 3, 2)),
    Row((-1,), 6, "C3", (256,)),
    Row((-1,), 1, "Conv", (512, 3, 2)),
    Row((-1,), 9, "C3", (512,)),
)
"""What the backbones begin with, up to a stride of 16."""
FINEST_ROWS = (
    Row((-1,), 1, "Conv", (256, 1, 1)),
    Row((-1,), 1, "nn.Upsample", ("None", 2, "nearest")),
    Row((-1, 4), 1, "Concat", (1,)),
    Row((-1,), 3, "C3", (256, False)),
    Row((-1,), 1, "Conv", (256, 3, 2)),
)
"""Of the heads: up to the map of stride 8, which objects are found on first, and down again."""

P5 = Architecture(
    (
        *FINE_ROWS,
        Row((-1,), 1, "Conv", (1024, 3, 2)),
        Row((-1,), 3, "C3", (1024,)),
        Row((-1,), 1, "SPPF", (1024, 5)),
    ),
    (
        Row((-1,), 1, "Conv", (512, 1, 1)),
        Row((-1,), 1, "nn.Upsample", ("None", 2, "nearest")),
        Row((-1, 6), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (512, False)),
        *FINEST_ROWS,
        Row((-1, 14), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (512, False)),
        Row((-1,), 1, "Conv", (512, 3, 2)),
        Row((-1, 10), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (1024, False)),
        Row((17, 20, 23), 1, "Detect", ("nc", "anchors")),
    ),
    ANCHORS,
)
P6 = Architecture(
    (
        *FINE_ROWS,
        Row((-1,), 1, "Conv", (768, 3, 2)),
        Row((-1,), 3, "C3", (768,)),
        Row((-1,), 1, "Conv", (1024, 3, 2)),
        Row((-1,), 3, "C3", (1024,)),
        Row((-1,), 1, "SPPF", (1024, 5)),
    ),
    (
        Row((-1,), 1, "Conv", (768, 1, 1)),
        Row((-1,), 1, "nn.Upsample", ("None", 2, "nearest")),
        Row((-1, 8), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (768, False)),
        Row((-1,), 1, "Conv", (512, 1, 1)),
        Row((-1,), 1, "nn.Upsample", ("None", 2, "nearest")),
        Row((-1, 6), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (512, False)),
        *FINEST_ROWS,
        Row((-1, 20), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (512, False)),
        Row((-1,), 1, "Conv", (512, 3, 2)),
        Row((-1, 16), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (768, False)),
        Row((-1,), 1, "Conv", (768, 3, 2)),
        Row((-1, 12), 1, "Concat", (1,)),
        Row((-1,), 3, "C3", (1024, False)),
        Row((23, 26, 29, 32), 1, "Detect", ("nc", "anchors")),
    ),
    P6_ANCHORS,
)
ARCHITECTURES: Mapping[int, Architecture] = {len(architecture.anchors): architecture for architecture in (P5, P6)}
"""Number of maps -> architecture."""

SIZES: Mapping[str, Config] = {
    **{name: Config(*multiples) for name, multiples in MULTIPLES.items()},
    **{f"{name}6": Config(*multiples, anchors=P6_ANCHORS) for name, multiples in MULTIPLES.items()},
}
"""Name -> configuration: with three maps, and with four for larger images."""


def config_of_name(name: str) -> Config:
    """The configuration of a size, with or without "yolov5" before its letter.

    Raises:
      ValueError: there is no such size.
    """
    found = SIZES.get(name) or SIZES.get(f"yolov5{name}")
    if found is None:
        raise ValueError(f"YOLOv5: no size is called {name!r}; there are {', '.join(SIZES)}")
    return found


def config_of_cfg(cfg: Mapping[str, Any]) -> Config:
    """The configuration that a file of the original's holds, as YAML gives it.

    Raises:
      ValueError: something is missing, or its layers are others than those of releases 6.2 and 7.0.
    """
    wanted = ("nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head")
    missing = [key for key in wanted if key not in cfg]
    if missing:
        raise ValueError(f"YOLOv5: the configuration has no {', '.join(missing)}; expected {', '.join(wanted)}")
    backbone, head = _rows(cfg["backbone"], "backbone"), _rows(cfg["head"], "head")
    anchors = _pairs(cfg["anchors"])
    config = Config(cfg["depth_multiple"], cfg["width_multiple"], cfg["nc"], anchors)
    given = [*backbone, *head]
    for index, (found, expected) in enumerate(
        zip([*given, *[None] * len(config.architecture.rows)], config.architecture.rows, strict=False)
    ):
        if found != expected:
            raise ValueError(f"YOLOv5: layer {index} is {_shown(found)}, expected {_shown(expected)}: {OTHER_ARCHITECTURE}")
    if len(given) > len(config.architecture.rows):
        raise ValueError(f"YOLOv5: {len(given)} layers, expected {len(config.architecture.rows)}: {OTHER_ARCHITECTURE}")
    if cfg.get("activation") not in (None, "nn.SiLU()"):
        raise ValueError(f"YOLOv5: activation is {cfg['activation']!r}, expected nn.SiLU()")
    return config


OTHER_ARCHITECTURE = f"only the detection networks of releases 6.2 and 7.0 with three and four maps ({', '.join(SIZES)}) are built here"


def _rows(listed: Any, name: str) -> list[Row | None]:
    """The rows of a list in a file; None for what is none."""
    if not isinstance(listed, list):
        raise ValueError(f"YOLOv5: {name} is {listed!r}, expected a list of [from, number, module, args]")
    return [_row(row) for row in listed]


def _row(row: Any) -> Row | None:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], list):
        return None
    sources, blocks, kind, options = row
    return Row(tuple(sources) if isinstance(sources, list) else (sources,), blocks, kind, tuple(options))


def _shown(row: Row | None) -> str:
    if row is None:
        return "missing, or no [from, number, module, args]"
    sources = row.sources[0] if len(row.sources) == 1 else list(row.sources)
    return str([sources, row.blocks, row.kind, list(row.options)])


def _pairs(anchors: Any) -> Anchors:
    """[[w, h, w, h, w, h], ...] -> pairs.

    Raises:
      ValueError: it is nothing of the kind.
    """
    listed = isinstance(anchors, list) and all(isinstance(of_map, list) for of_map in anchors)
    if not listed or any(not isinstance(side, int | float) for of_map in anchors for side in of_map) or any(len(m) % 2 for m in anchors):
        raise ValueError(f"YOLOv5: anchors are {anchors!r}, expected for each map a list of width, height, width, height, ... in pixels")
    return tuple(tuple(zip(of_map[::2], of_map[1::2], strict=True)) for of_map in anchors)
