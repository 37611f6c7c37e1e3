"""Where a run's files go: PROJECT/NAME, or the next free NAME2, NAME3, ... as YOLOv5 numbers them; and its text and JSON files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpuflow.errors import ConfigError
from train.detection.dataset import DetectionSet
from train.detection.matching import Found


def run_folder(project: Path, name: str, *, exist_ok: bool) -> Path:
    """Make the folder. exist_ok: take PROJECT/NAME even if it is there.

    Raises:
      ConfigError: it cannot be made.
    """
    for number in itertools.count(1):
        folder = project / (name if number == 1 else f"{name}{number}")
        try:
            folder.mkdir(parents=True, exist_ok=exist_ok)
        except FileExistsError:
            if exist_ok:
                raise ConfigError(f"--project {project} --name {name}: {folder} is a file; give another name.") from None
        except OSError as error:
            raise ConfigError(f"--project {project} --name {name}: {folder} cannot be made ({error.strerror}).") from error
        else:
            return folder
    raise AssertionError("numbers do not end")


def write_text(path: Path, found: Found, width: int, height: int, *, confidences: bool) -> None:
    """One line for each detection as labels have it: class, centre and size in shares of the picture; then the score, if asked for.

    Raises:
      ConfigError: the file cannot be written.
    """
    lines = []
    for (left, top, right, bottom), score, kind in zip(found.boxes.tolist(), found.scores, found.classes, strict=True):
        box = (left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height
        numbers = [int(kind), *box, *([float(score)] if confidences else [])]
        lines.append(" ".join(f"{number:g}" for number in numbers) + "\n")
    _write(path, "".join(lines))


def write_json(path: Path, data: DetectionSet, found: Mapping[int, Found], categories: Sequence[int]) -> None:
    """All detections as COCO's result files have them: image_id, category_id (by `categories` of our classes), bbox, score.

    Raises:
      ConfigError: the file cannot be written.
    """
    rows = []
    for index, one in sorted(found.items()):
        stem = data.pictures[index].path.stem
        for (left, top, right, bottom), score, kind in zip(one.boxes.tolist(), one.scores.tolist(), one.classes, strict=True):
            box = [round(side, 3) for side in (left, top, right - left, bottom - top)]
            image = int(stem) if stem.isnumeric() else stem
            rows.append({"image_id": image, "category_id": categories[kind], "bbox": box, "score": round(score, 5)})
    _write(path, json.dumps(rows))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from error
