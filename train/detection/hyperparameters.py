"""The numbers of a YOLOv5 training and of its random transforms: the files of --hyp."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tpuflow.errors import ConfigError, did_you_mean
from train.detection import augmentation

MOST = augmentation.MOST | dict.fromkeys(("lrf", "momentum", "warmup_momentum", "iou_t", "copy_paste"), 1.0)
"""The greatest values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters(augmentation.Augmentation):
    """The numbers by the names of the YOLOv5 release; the defaults are its low augmentation for training from scratch.

    lr0, lrf: the learning rate, and what is left of it in the end, as a share. warmup_*: epochs of the warm-up, momentum and rate of the
    biases at its beginning. box, obj, cls: gains of the losses; cls_pw, obj_pw: weights of positive labels. iou_t: not used, as in the
    release. anchor_t: see `train.detection.targets`. fl_gamma: of the focal loss, 0 without it. copy_paste: not used without outlines.

    Raises:
      ConfigError: a value is no number, or out of its range.
    """

    lr0: float = 0.01
    lrf: float = 0.01
    momentum: float = 0.937
    weight_decay: float = 0.0005
    warmup_epochs: float = 3.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.1
    box: float = 0.05
    cls: float = 0.5
    cls_pw: float = 1.0
    obj: float = 1.0
    obj_pw: float = 1.0
    iou_t: float = 0.20
    anchor_t: float = 4.0
    fl_gamma: float = 0.0
    copy_paste: float = 0.0

    def __post_init__(self) -> None:
        augmentation.check_ranges(self, MOST)


def read_hyperparameters(path: Path | str | None) -> Hyperparameters:
    """Those of a YAML file; what it does not name, and everything without a file, as the defaults are.

    Raises:
      ConfigError: the file cannot be read, is no mapping of names to numbers, or names what there is not.
    """
    if path is None:
        return Hyperparameters()
    given = read_yaml(Path(path), "--hyp")
    if "anchors" in given:
        raise ConfigError(
            f"--hyp {path}: anchors asks for new anchors to be fitted to the data, which is not done here: take out that line."
        )
    known = [field.name for field in dataclasses.fields(Hyperparameters)]
    for name in given:
        if name not in known:
            raise ConfigError(f"--hyp {path}: {name!r} is no hyperparameter.{did_you_mean(name, known)} There are: {', '.join(known)}.")
    try:
        return Hyperparameters(**{str(name): value for name, value in given.items()})
    except ConfigError as error:
        raise ConfigError(f"--hyp {path}: {error}") from None


def read_yaml(path: Path, what: str) -> Mapping[Any, Any]:
    """The mapping that a YAML file holds; `what` names the option in errors.

    Raises:
      ConfigError: it cannot be read, or is no mapping.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigError(f"{what} {path}: cannot be read ({reason}). Give the path of a YAML file.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {path}: no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{what} {path}: holds {type(found).__name__}, expected names and values such as 'lr0: 0.01'.")
    return found
