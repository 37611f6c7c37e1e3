"""Folders of pictures with captions, as Hugging Face's `imagefolder` reads them, cut to squares for training."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpuflow.errors import DataError, did_you_mean
from train.diffusion.pictures import pillow
from train.pipeline import Batches

METADATA = ("metadata.jsonl", "metadata.csv")
FILE_NAME = "file_name"
"""The column with a picture's path, below the folder of the metadata; the original calls what it holds "image"."""
IMAGE = "image"
SHOWN = 8
"""Files that an error names."""


@dataclass(frozen=True, slots=True)
class Captioned:
    """Paths of pictures, and for each a caption, or several of which one is drawn whenever it is read."""

    files: tuple[Path, ...]
    captions: tuple[tuple[str, ...], ...]


def read_folder(folder: Path, image_column: str = IMAGE, caption_column: str = "text") -> Captioned:
    """The pictures of a folder, and of folders in it, that its metadata.jsonl or metadata.csv files name; each can be opened.

    Raises:
      DataError: there are no such files, a line or a column is not as expected, or pictures are missing or damaged: all of them are named.
    """
    tables = [path for name in METADATA for path in sorted(folder.rglob(name))]
    if not tables:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:SHOWN]) if folder.is_dir() else "no such folder"
        raise DataError(
            f"--train_data_dir {folder}: no captions (it holds: {there or 'nothing'}); expected {' or '.join(METADATA)} with the columns "
            f"{FILE_NAME!r} and {caption_column!r}, a row for each picture."
        )
    rows = [row for table in tables for row in _rows(table, FILE_NAME if image_column == IMAGE else image_column, caption_column)]
    if not rows:
        raise DataError(f"{', '.join(map(str, tables))}: no rows; expected one for each picture.")
    _check_pictures([path for path, _ in rows])
    return Captioned(tuple(path for path, _ in rows), tuple(captions for _, captions in rows))


@dataclass(frozen=True, slots=True)
class OpenPictures:
    """The transform of `train.pipeline.Batches` that reads pictures by their numbers and cuts squares out of them.

    The shorter side becomes `resolution` pixels (Lanczos); the square is in the middle, or anywhere along the longer side; it is mirrored
    or not by chance if `random_flip` says so.
    """

    files: tuple[Path, ...]
    resolution: int
    center_crop: bool = False
    random_flip: bool = False

    def __call__(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Numbers [B] -> float32 [B, resolution, resolution, 3] from -1 to 1.

        Raises:
          DataError: a picture is damaged.
        """
        places, flipped = rng.random((len(images), 2)), rng.random(len(images)) < 0.5
        squares = np.stack([self._square(self.files[number], place) for number, place in zip(images, places, strict=True)])
        if self.random_flip:
            squares[flipped] = squares[flipped, :, ::-1]
        return squares.astype(np.float32) / np.float32(127.5) - np.float32(1)

    def _square(self, file: Path, place: np.ndarray) -> np.ndarray:
        """Bytes [resolution, resolution, 3]; place: where between the first and the last possible the square's top and left are."""
        module, side = pillow(), self.resolution
        upright = importlib.import_module("PIL.ImageOps").exif_transpose
        try:
            with module.open(file) as opened:
                picture = upright(opened).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # pillow's decoders raise any of these for damaged files
            raise DataError(f"{file}: the picture is damaged ({error}).") from error
        width, height = (side * one // min(picture.size) for one in picture.size)
        resized = np.asarray(picture.resize((width, height), module.Resampling.LANCZOS))
        top, left = (self._start(room - side, share) for room, share in zip((height, width), place, strict=True))
        return resized[top : top + side, left : left + side]

    def _start(self, room: int, share: float) -> int:
        return round(room / 2) if self.center_crop else int(share * (room + 1))


@dataclass(frozen=True, slots=True, eq=False)
class CaptionedBatches(Batches):
    """Batches (pictures, tokens of a caption each [B, T]) of pictures by their numbers; where there are several captions one is drawn.

    captions: for each picture the tokens of its captions, int32 [K, T].
    """

    captions: tuple[np.ndarray, ...] = ()

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Batches`."""
        pictures, numbers = Batches.__getitem__(self, number)
        # Four numbers in place of three: a stream that no order and no transform has.
        rng = np.random.default_rng((self.seed, number, 0, 1))
        return pictures, np.stack([rng.choice(self.captions[one]) for one in numbers])


def _rows(table: Path, image_column: str, caption_column: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    read = _json_lines if table.suffix == ".jsonl" else _csv_lines
    for number, row in read(table):
        for column in (image_column, caption_column):
            if column not in row:
                raise DataError(f"{table}:{number}: no column {column!r}, there are {', '.join(row)}.{did_you_mean(column, row)}")
        given = row[caption_column]
        captions = tuple(given) if isinstance(given, list) else (given,)
        if not captions or not all(isinstance(caption, str) for caption in captions):
            raise DataError(f"{table}:{number}: the caption is {given!r}, expected a text, or several in a list.")
        yield table.parent / str(row[image_column]), captions


def _json_lines(table: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{table}:{number}: no JSON ({error}); expected an object with a picture's columns on each line.") from error
        if not isinstance(row, dict):
            raise DataError(f"{table}:{number}: a {type(row).__name__}, expected an object with a picture's columns.")
        yield number, row


def _csv_lines(table: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with table.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            yield reader.line_num, row


def _check_pictures(files: list[Path]) -> None:
    """Open each file as far as its header, and raise DataError naming those where that fails."""
    broken: list[str] = []
    for file in files:
        try:
            with pillow().open(file):
                pass
        except (OSError, SyntaxError, ValueError):
            broken.append(f"{file}{'' if file.is_file() else ' (missing)'}")
    if broken:
        more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        raise DataError(f"{len(broken)} of {len(files)} pictures cannot be opened: {', '.join(broken[:SHOWN])}{more}.")
