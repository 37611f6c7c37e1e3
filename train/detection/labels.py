"""Labels of one picture: read from YOLO's text or from VOC's XML, every line checked."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

COLUMNS = "class centre-x centre-y width height"


@dataclass(frozen=True, slots=True)
class Labels:
    """Classes int32 [N] and boxes float32 [N, 4]: centre-x, centre-y, width, height as shares of the picture's width and height."""

    classes: np.ndarray
    boxes: np.ndarray

    def __len__(self) -> int:
        """How many."""
        return len(self.classes)


Row = tuple[int, tuple[float, float, float, float]]
NO_LABELS = Labels(np.zeros(0, np.int32), np.zeros((0, 4), np.float32))


class _Skipped(Exception):
    """One label is none; says why."""


def read_labels(path: Path, names: Sequence[str]) -> tuple[Labels, list[str]]:
    """(the good labels of a file, what is wrong with the others, each with file and line)."""
    read = _xml_rows if path.suffix == ".xml" else _text_rows
    problems: list[str] = []
    found: dict[Row, None] = {}
    try:
        for where, make in read(path, names):
            try:
                row = make()
                if row in found:
                    raise _Skipped("the same label again")
                found[row] = None
            except _Skipped as problem:
                problems.append(f"{where}: {problem}")
    except (OSError, UnicodeDecodeError, ElementTree.ParseError) as error:
        return NO_LABELS, [f"{path}: cannot be read ({error})"]
    if not found:
        return NO_LABELS, problems
    classes, boxes = zip(*found, strict=True)
    return Labels(np.array(classes, np.int32), np.array(boxes, np.float32)), problems


def _text_rows(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Callable[[], Row]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", lambda line=line: _text_row(line.split(), names)


def _text_row(words: Sequence[str], names: Sequence[str]) -> Row:
    """Of five columns, or of a polygon's corners after the class, whose box it becomes."""
    polygon = len(words) > 6 and len(words) % 2 == 1
    if len(words) != 5 and not polygon:
        raise _Skipped(f"expected 5 columns ({COLUMNS}), got {len(words)}")
    numbers = [_number(word) for word in words]
    _check_class(numbers[0], words[0], names)
    for word, number in zip(words[1:], numbers[1:], strict=True):
        if not 0 <= number <= 1:
            raise _Skipped(f"{word} is no share of the picture; expected 0 to 1: divide pixels by its width and height")
    box = _around(numbers[1:]) if polygon else (numbers[1], numbers[2], numbers[3], numbers[4])
    if not (box[2] > 0 and box[3] > 0):
        raise _Skipped(f"a box of no area: width {box[2]:g}, height {box[3]:g}")
    return int(numbers[0]), box


def _number(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise _Skipped(f"{word!r} is not a number; expected {COLUMNS}") from None
    if not math.isfinite(number):
        raise _Skipped(f"{word!r} is not a finite number")
    return number


def _check_class(number: float, word: str, names: Sequence[str]) -> None:
    if number != int(number) or not 0 <= number < len(names):
        raise _Skipped(f"there is no class {word}; expected 0 to {len(names) - 1}, as the data set names {len(names)}")


def _around(corners: Sequence[float]) -> tuple[float, float, float, float]:
    left, right, top, bottom = min(corners[::2]), max(corners[::2]), min(corners[1::2]), max(corners[1::2])
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def _xml_rows(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Callable[[], Row]]]:
    """VOC's objects but for those marked difficult, as its evaluation and YOLOv5's conversion leave them out."""
    root = ElementTree.fromstring(path.read_bytes())
    width, height = (float(root.findtext(f"size/{side}") or "nan") for side in ("width", "height"))
    for number, one in enumerate(root.iter("object"), 1):
        if (one.findtext("difficult") or "0").strip() != "1":
            yield f"{path}: object {number}", lambda one=one: _xml_row(one, width, height, names)


def _xml_row(one: ElementTree.Element, width: float, height: float, names: Sequence[str]) -> Row:
    """Pixels are counted from 1 in VOC; what lies beyond the picture is cut off."""
    name = (one.findtext("name") or "").strip()
    if name not in names:
        raise _Skipped(f"there is no class {name!r}; expected one of {', '.join(names)}")
    if not (width > 0 and height > 0):
        raise _Skipped(f"the file gives no size of the picture (width {width:g}, height {height:g})")
    left, top, right, bottom = (_number((one.findtext(f"bndbox/{side}") or "").strip()) for side in ("xmin", "ymin", "xmax", "ymax"))
    left, right = (min(max(x - 1, 0), width) for x in (left, right))
    top, bottom = (min(max(y - 1, 0), height) for y in (top, bottom))
    if not (right > left and bottom > top):
        raise _Skipped(f"a box of no area: x {left:g} to {right:g}, y {top:g} to {bottom:g}")
    return names.index(name), ((left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height)
