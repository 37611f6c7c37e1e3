"""CIFAR-10 as bytes: read from the binary files, which are found on disk, built from JPEGs, or downloaded; every file checked.

A record is one label byte, then 1024 red, 1024 green and 1024 blue bytes, row by row; a file has 10,000 records.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from rich.console import Console
from rich.progress import track

from tpuflow.data import places
from tpuflow.errors import DataError
from tpuflow.examples.data import ImageData, read_published
from tpuflow.examples.download import UnreachableError, fetch

CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Names of the classes, as PyTorch's tutorial prints them."""

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
FOLDERS = ("cifar-10-batches-bin", "cifar10", "cifar-10", ".")
"""Usual names of the folder; the files may lie in its folders train/ and test/."""

SIDE = 32
RECORD_BYTES = 1 + 3 * SIDE * SIDE

ORIGINAL = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
"""sha256 of the published files (Krizhevsky, Nair, Hinton)."""

ARCHIVE_URLS = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

JPEG_ARCHIVE, JPEG_INDEX = "cifar10-jpeg.tar.gz", "index.csv.gz"
JPEG_SOURCES = {
    JPEG_ARCHIVE: "3bbe1c7bb1f4d0f16ffc731fef42db32cbf0762aa39b3f49195f83e020218599",
    JPEG_INDEX: "b412de82f5355ac6276b5ac745bd4a0c13e95f4e8e8c979cfa74587a9d154f2d",
}
"""All 60,000 images as JPEG files, and the place of each: bin_file,record,label,member. Pixels differ a little from the published ones."""

SUMS = "SHA256SUMS"
"""Beside binary files that are not the published ones: their sums, as `sha256sum *.bin` writes them."""

ADVICE = f"Replace it with an intact copy, or delete it. If it is meant to differ, put its sum beside it: sha256sum *.bin > {SUMS}"


def load(data_dir: str | os.PathLike[str] | None = None) -> ImageData:
    """CIFAR-10: images uint8 [N, 32, 32, 3], labels int32 [N], 50,000 for training and 10,000 for testing, in the files' order.

    From `data_dir` alone if given; else from $TPUFLOW_DATA, the user's cache, or a download into it. Of JPEGs, binary files are made once,
    in the user's cache. `ImageData.origin` names what was read, and whether its pixels are the published ones.
    Raises DataError for a missing file or one whose sha256 is not the expected one.
    """
    for place in _places(data_dir):
        if folder := _binaries(place):
            return _read(folder)
        if folder := _jpegs(place):
            return _read(built_from_jpegs(folder))
    if data_dir is not None:
        raise DataError(
            f"{data_dir}: no CIFAR-10 here; expected {', '.join(ORIGINAL)}, or {' and '.join(JPEG_SOURCES)}, in it or in cifar10/."
        )
    return _read(_download())


def built_from_jpegs(folder: Path) -> Path:
    """The folder with the binary files of the JPEGs in `folder`, made with pillow if they are not in the user's cache yet."""
    target = places.cache_dir() / "cifar10-from-jpeg"
    if _binaries(target) and (target / SUMS).is_file():
        return target
    content = {file: read_published(folder / file, (sha256,), ADVICE) for file, sha256 in JPEG_SOURCES.items()}
    files = _decode(content[JPEG_ARCHIVE], content[JPEG_INDEX])
    target.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        _write_whole(target / name, records)
    sums = [f"{hashlib.sha256(records).hexdigest()}  {name}\n" for name, records in files.items()]
    _write_whole(target / SUMS, "".join(sums).encode())  # last: without it the folder does not count
    return target


def _places(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    return places.data_dirs() if data_dir is None else [Path(data_dir)]


def _candidates(place: Path) -> Iterator[Path]:
    return (place / folder for folder in FOLDERS)


def _binaries(place: Path) -> Path | None:
    return next((folder for folder in _candidates(place) if all(_locate(folder, name) for name in ORIGINAL)), None)


def _jpegs(place: Path) -> Path | None:
    return next((folder for folder in _candidates(place) if all((folder / name).is_file() for name in JPEG_SOURCES)), None)


def _locate(folder: Path, name: str) -> Path | None:
    """A binary file in the folder itself, or in train/ or test/ of it, as MindSpore's guide sorts them."""
    sorted_into = "test" if name in TEST_FILES else "train"
    return next((path for path in (folder / name, folder / sorted_into / name) if path.is_file()), None)


def _download() -> Path:
    """The published binary files in the user's cache; the archive is removed once they are out of it."""
    cache = places.cache_dir()
    target, archive = cache / "cifar10", cache / "cifar-10-binary.tar.gz"
    try:
        fetch(ARCHIVE_URLS, archive, [ARCHIVE_SHA256])
    except UnreachableError as error:
        raise DataError(
            f"CIFAR-10: {error}\nPut {', '.join(ORIGINAL)} into a folder cifar10/ and name its parent with --data-dir or TPUFLOW_DATA, "
            f"or into {target}."
        ) from None  # its message is in this one
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as members:
        for name in ORIGINAL:
            member = members.extractfile(f"cifar-10-batches-bin/{name}")
            assert member is not None, "the archive's checksum was right"
            _write_whole(target / name, member.read())
    archive.unlink()
    return target


def _read(folder: Path) -> ImageData:
    sums, origin = _expected(folder)
    records = {name: _records(_locate(folder, name) or folder / name, sums) for name in ORIGINAL}
    return ImageData("cifar10", f"{folder} ({origin})", _to_arrays(records, TRAIN_FILES), _to_arrays(records, TEST_FILES))


def _expected(folder: Path) -> tuple[Mapping[str, str], str]:
    """The sums that the files must have: those beside them, else the published ones."""
    path = folder / SUMS
    if not path.is_file():
        return ORIGINAL, "as published"
    rows = (line.split() for line in path.read_text().splitlines())
    sums = {row[1].lstrip("*").rpartition("/")[2]: row[0] for row in rows if len(row) == 2}
    if missing := [name for name in ORIGINAL if name not in sums]:
        raise DataError(f"{path}: no sum of {', '.join(missing)}; delete it, or write it anew with sha256sum *.bin > {SUMS}.")
    return sums, "as published" if all(sums[name] == ORIGINAL[name] for name in ORIGINAL) else "not the published pixels"


def _records(path: Path, sums: Mapping[str, str]) -> np.ndarray:
    """uint8 [records, 3073]."""
    content = read_published(path, (sums[path.name],), ADVICE)
    if len(content) % RECORD_BYTES or not content:
        raise DataError(f"{path}: {len(content)} bytes are no whole number of records of {RECORD_BYTES}.")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    if records[:, 0].max() >= len(CLASSES):
        raise DataError(f"{path}: holds the label {records[:, 0].max()}; labels are 0 to {len(CLASSES) - 1}.")
    return records


def _to_arrays(records: Mapping[str, np.ndarray], files: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    joined = np.concatenate([records[name] for name in files])
    images = joined[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)  # [N, 3, H, W] -> [N, H, W, 3]
    return np.ascontiguousarray(images), joined[:, 0].astype(np.int32)


def _decode(archive: bytes, index: bytes) -> dict[str, bytes]:
    """Binary file -> its records, from the JPEGs."""
    image_module = _pillow()
    rows = {row["member"]: row for row in csv.DictReader(io.StringIO(gzip.decompress(index).decode()))}
    sizes = {name: sum(row["bin_file"] == name for row in rows.values()) for name in ORIGINAL}
    files = {name: np.zeros((size, RECORD_BYTES), np.uint8) for name, size in sizes.items()}
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in track(members, "decoding CIFAR-10, once", len(rows), console=Console(stderr=True), transient=True):
            if (stream := members.extractfile(member)) is None:
                continue
            row = rows.pop(member.name)
            with image_module.open(stream) as image:
                pixels = np.asarray(image.convert("RGB"))
            record = files[row["bin_file"]][int(row["record"])]
            record[0] = int(row["label"])
            record[1:] = pixels.transpose(2, 0, 1).reshape(-1)  # [H, W, 3] -> [3, H, W]
    if rows:
        raise DataError(f"{JPEG_ARCHIVE}: lacks {len(rows)} of the images that {JPEG_INDEX} names, {next(iter(rows))} among them.")
    return {name: records.tobytes() for name, records in files.items()}


def _pillow() -> ModuleType:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError("CIFAR-10 is here as JPEGs only, and decoding them needs the package pillow: pip install pillow") from error


def _write_whole(path: Path, content: bytes) -> None:
    """The file appears under its name only when it is whole."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
