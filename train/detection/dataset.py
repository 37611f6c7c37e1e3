"""The pictures of one split with their labels, checked: what is damaged is named and left out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpuflow.errors import ConfigError, DataError
from train.detection.description import Description
from train.detection.labels import NO_LABELS, Labels, read_labels

LEAST_SIDE_PIXELS = 10
SHOWN_PROBLEMS = 10
THREADS = 8
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values for which width and height change places."""
JPEG_END = b"\xff\xd9"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture's file, its width and height in pixels, upright, and its labels; `labelled` is False where it has no file of them."""

    path: Path
    width: int
    height: int
    labels: Labels
    labelled: bool


@dataclass(frozen=True, slots=True)
class DetectionSet:
    """The good pictures of a split, the names of their classes, and what was left out: one line for each with file and place."""

    split: str
    names: tuple[str, ...]
    pictures: tuple[Picture, ...]
    problems: tuple[str, ...]

    @property
    def boxes(self) -> int:
        """How many boxes there are in all."""
        return sum(len(picture.labels) for picture in self.pictures)

    @property
    def most_boxes(self) -> int:
        """Those of the picture that has the most."""
        return max(len(picture.labels) for picture in self.pictures)

    def summary(self) -> str:
        """One line; where something was left out, more, with the first ten such things."""
        empty = sum(not len(picture.labels) for picture in self.pictures)
        without = sum(not picture.labelled for picture in self.pictures)
        line = f"{self.split}: {len(self.pictures)} pictures, {self.boxes} boxes"
        line += f"; {empty} without boxes, {without} of them without a file of labels" if empty else ""
        if not self.problems:
            return line
        shown = [f"  {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        rest = len(self.problems) - len(shown)
        return "\n".join([f"{line}; {len(self.problems)} left out:", *shown, *([f"  and {rest} more"] if rest else [])])


def one_class(data: DetectionSet) -> DetectionSet:
    """The set with all its boxes in one class; where there are several, it is called "item"."""
    kept = [replace(picture, labels=replace(picture.labels, classes=np.zeros_like(picture.labels.classes))) for picture in data.pictures]
    return replace(data, names=data.names if len(data.names) == 1 else ("item",), pictures=tuple(kept))


def read_set(description: Description, split: str) -> DetectionSet:
    """Check every picture and label of a split.

    Raises:
      DataError: the split is not there, no picture of it is good, or it has no label at all.
      ConfigError: Pillow, which reads the sizes of pictures, is missing.
    """
    library = _library()
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(partial(_checked, library, names=description.names), description.pictures(split)))
    pictures = tuple(picture for picture, _ in results if picture is not None)
    problems = tuple(problem for _, found in results for problem in found)
    made = DetectionSet(split, description.names, pictures, problems)
    if not pictures:
        raise DataError(f"{description.file}: {split}: none of {len(results)} pictures is good; {_first(problems)}")
    if not made.boxes:
        where = (
            f"looked for such as {label_file(pictures[0].path)}: labels lie in a folder labels/ beside images/, one .txt for each picture."
        )
        raise DataError(f"{description.file}: {split}: {len(pictures)} pictures and not one good label; {_first(problems) or where}")
    return made


def label_file(picture: Path) -> Path:
    """Where its labels lie: images/ becomes labels/ and .txt the ending; in VOC's layout JPEGImages/ becomes Annotations/ and .xml."""
    parts = list(picture.with_suffix(".txt").parts)
    for folder, other, suffix in (("images", "labels", ".txt"), ("JPEGImages", "Annotations", ".xml")):
        if folder in parts[:-1]:
            place = len(parts) - 2 - parts[-2::-1].index(folder)
            text = Path(*parts[:place], other, *parts[place + 1 :]).with_suffix(suffix)
            xml = text.with_suffix(".xml")
            return xml if not text.is_file() and xml.is_file() else text
    return picture.with_suffix(".txt")


def _checked(library: Any, path: Path, names: Sequence[str]) -> tuple[Picture | None, list[str]]:
    """(the picture, or None if it is damaged, what was left out)."""
    try:
        width, height = _size(library, path)
    except Exception as error:  # what decoders raise for damaged bytes has no end: struct.error, SyntaxError, TypeError, ...
        missing = isinstance(error, OSError) and error.strerror
        return None, [f"{path}: {missing or f'damaged, or no picture ({error})'}"]
    if min(width, height) < LEAST_SIDE_PIXELS:
        return None, [f"{path}: {width} x {height} pixels; expected at least {LEAST_SIDE_PIXELS} a side"]
    file = label_file(path)
    if not file.is_file():
        return Picture(path, width, height, NO_LABELS, labelled=False), []
    labels, problems = read_labels(file, names)
    return Picture(path, width, height, labels, labelled=True), problems


def _size(library: Any, path: Path) -> tuple[int, int]:
    """Width and height of the upright picture. To see whether it is whole it is decoded, but for JPEGs that end as they should."""
    with library.open(path) as picture:
        if picture.format != "JPEG" or not _ends_well(path):
            picture.load()
        size, turned = picture.size, picture.getexif().get(ORIENTATION) in TURNED
    return (size[1], size[0]) if turned else size


def _ends_well(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-len(JPEG_END), 2)
        return file.read() == JPEG_END


def _first(problems: Sequence[str]) -> str:
    return f"the first problem is {problems[0]}" if problems else ""


def _library() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"object detection reads the sizes of pictures with Pillow ({error}): pip install 'tpuflow[detection]'."
        ) from error
    return Image
