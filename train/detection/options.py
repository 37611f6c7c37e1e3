"""The options that YOLOv5's commands share, under the names of its scripts."""

from __future__ import annotations

from dataclasses import dataclass

from models.yolov5_config import STRIDES
from tpuflow.amp import get_policy
from tpuflow.chips import get_chip
from tpuflow.errors import ConfigError
from train.options import DeviceOptions, option
from train.ranges import check_positive, check_shares, dashed

STRIDE = STRIDES[2]
"""Of every network; those with a fourth map have twice that, which shows when the network is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(DeviceOptions):
    """The size of pictures, the folder of a run in --project, which each command has a default of its own for, and the precision."""

    imgsz: int = option(640, "pictures", "longer side of the network's pictures in pixels", int, also=("--img", "--img-size"))
    name: str = option("exp", "output", "folder of this run in --project; a number is added where it exists")
    exist_ok: bool = option(False, "output", "use the folder though it exists", flag="--exist-ok")
    policy: str = option("fp32", "device", "precision, such as fp32, mixed, mixed_bf16, fp16 or bf16")

    def check_device(self) -> None:
        """That chip and precision are known, before data are read and a folder is made.

        Raises:
          ConfigError: one is not.
        """
        get_chip(self.chip)
        get_policy(self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindOptions(RunOptions):
    """What finding objects in pictures has besides; the defaults are those of detect.py."""

    conf_thres: float = option(0.25, "detections", "least score", float)
    iou_thres: float = option(0.45, "detections", "boxes of a class that overlap more than this are one", float)
    max_det: int = option(1000, "detections", "the most of a picture", int)
    save_txt: bool = option(False, "output", "write labels/NAME.txt for each picture", flag="--save-txt")
    save_conf: bool = option(False, "output", "scores in these files", flag="--save-conf")

    def check(self) -> None:
        """That numbers are in their ranges.

        Raises:
          ConfigError: one is not.
        """
        self.check_device()
        check_size(self.imgsz, STRIDE)
        check_shares(self, ("conf_thres", "iou_thres"), dashed)
        check_positive(self, ("max_det",), dashed)


def check_size(size: int, stride: int, least: int | None = None) -> None:
    """That the side of frames is a multiple of a stride, from `least` (else the stride) on.

    Raises:
      ConfigError: it is not.
    """
    bound = stride if least is None else least
    if size < bound or size % stride:
        near, from_on = max(bound, round(size / stride) * stride), "" if least is None else f", from {least} on"
        raise ConfigError(f"--imgsz: expected a multiple of the network's stride {stride}{from_on}, got {size}; try {near}.")
