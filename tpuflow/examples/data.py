"""Fashion-MNIST and MNIST: found on disk, else downloaded, else a small embedded set; every file checked against its sha256."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpuflow.data import places
from tpuflow.errors import DataError
from tpuflow.examples.download import UnreachableError, fetch

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"

EMBEDDED = Path(__file__).parent / "embedded" / "fashion_mnist_768.npz"
EMBEDDED_SHA256 = "57f8e1e73d85aa2a6bf8400b6de0a2d551c9299e2ab8f7ddb5d55d3f5af09f53"

AGAIN = "Delete it (it is then found elsewhere or downloaded again) or replace it with an intact copy."


@dataclass(frozen=True, slots=True)
class Source:
    """Where one data set comes from: its mirrors, its folder's usual names, and the sha256 that each of its files may have."""

    folders: tuple[str, ...]
    mirrors: tuple[str, ...]
    sha256: Mapping[str, tuple[str, ...]]


SOURCES: Mapping[str, Source] = {
    # MIT, copyright 2017 Zalando SE.
    "fashion-mnist": Source(
        folders=("fashion-mnist", "FashionMNIST/raw", "."),
        mirrors=(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        sha256={
            TRAIN_IMAGES: ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",),
            TRAIN_LABELS: ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",),
            TEST_IMAGES: ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",),
            TEST_LABELS: ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",),
        },
    ),
    # LeCun, Cortes, Burges. The second sum of each file is of a copy with the same content in a newer gzip wrapper.
    "mnist": Source(
        folders=("mnist", "MNIST/raw", "."),
        mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        sha256={
            TRAIN_IMAGES: (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "0b367032e93c5d0cea0925647cfdb18614af8ee15f83e6f2fc2ad904a6835971",
            ),
            TRAIN_LABELS: (
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "1787548bbe0bff1ec2ecdc0ef292b02df999e2d1a6002d27500982c652b17203",
            ),
            TEST_IMAGES: (
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "1a1a05eab793c14bb050b398624a11b0ffd1a2953baed553b1b9bd079e2a20be",
            ),
            TEST_LABELS: (
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                "b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
            ),
        },
    ),
}


@dataclass(frozen=True, slots=True)
class ImageData:
    """Images and labels for training and for testing, in the order of the published files; labels int32 [N].

    Images are float32 [N, H, W] in 0..1, or the published bytes, uint8 [N, H, W, channels], for pipelines that transform them.
    """

    name: str
    origin: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def load(
    name: str = "fashion-mnist", data_dir: str | os.PathLike[str] | None = None, *, embedded: bool = True, pixels: bool = False
) -> ImageData:
    """Load one of SOURCES: from `data_dir` alone if given; else from $TPUFLOW_DATA, the user's cache, or a download into it.

    With `pixels` the images are bytes, uint8 [N, 28, 28, 1].

    Where nothing can be had, 768 embedded Fashion-MNIST images are used and a notice says so on stderr, unless `embedded` is False.
    Raises DataError for an unknown name, a missing file, or a file whose sha256 is not the expected one.
    """
    source = _source(name)
    folder = _find(name, source, data_dir)
    if folder is not None:
        return _read(name, source, folder, pixels=pixels)
    try:
        return _read(name, source, _download(name, source), pixels=pixels)
    except UnreachableError as error:
        if not embedded or name != "fashion-mnist":
            raise DataError(f"{name}: {error}\n{_where_to_put(name)}") from None  # its message is in this one
        _announce_embedded(str(error))
        return load_embedded(pixels=pixels)


def load_embedded(*, pixels: bool = False) -> ImageData:
    """The first 512 training and 256 test images of Fashion-MNIST, which come with the repository (MIT, copyright 2017 Zalando SE)."""
    with np.load(io.BytesIO(read_published(EMBEDDED, (EMBEDDED_SHA256,))), allow_pickle=False) as arrays:
        train = _converted(arrays["train_images"], arrays["train_labels"], pixels=pixels)
        test = _converted(arrays["test_images"], arrays["test_labels"], pixels=pixels)
    return ImageData("fashion-mnist", "embedded (768 images)", train, test)


def find(name: str = "fashion-mnist", data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder on this machine that holds the data set's four files, or None; nothing is downloaded or read."""
    return _find(name, _source(name), data_dir)


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise DataError(f"unknown data set {name!r}; there are: {', '.join(SOURCES)}")
    return SOURCES[name]


def _find(name: str, source: Source, data_dir: str | os.PathLike[str] | None) -> Path | None:
    """An explicit data_dir is the only place looked at, so that a typing error in it cannot pass unseen."""
    if data_dir is not None:
        folder = _complete_folder(Path(data_dir), source)
        if folder is None:
            raise DataError(f"{data_dir}: no {name} here; expected {', '.join(source.sha256)} in it or in its folder {source.folders[0]}/")
        return folder
    return next((found for place in places.data_dirs() if (found := _complete_folder(place, source))), None)


def _complete_folder(place: Path, source: Source) -> Path | None:
    folders = (place / folder for folder in source.folders)
    return next((folder for folder in folders if all((folder / file).is_file() for file in source.sha256)), None)


def _download(name: str, source: Source) -> Path:
    folder = places.cache_dir() / name
    for file, sums in source.sha256.items():
        if not (folder / file).is_file():
            fetch([mirror + file for mirror in source.mirrors], folder / file, sums)
    return folder


def _read(name: str, source: Source, folder: Path, *, pixels: bool) -> ImageData:
    content = {file: _unpacked(folder / file, sums) for file, sums in source.sha256.items()}
    train = _converted(_images(content[TRAIN_IMAGES]), _labels(content[TRAIN_LABELS]), pixels=pixels)
    test = _converted(_images(content[TEST_IMAGES]), _labels(content[TEST_LABELS]), pixels=pixels)
    return ImageData(name, str(folder), train, test)


def _unpacked(path: Path, sums: tuple[str, ...]) -> bytes:
    return gzip.decompress(read_published(path, sums))


def read_published(path: Path, sums: tuple[str, ...], advice: str = AGAIN) -> bytes:
    """The bytes of a file.

    Raises:
      DataError: it cannot be read, or its sha256 is none of `sums`, and then `advice` is given.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    found = hashlib.sha256(content).hexdigest()
    if found not in sums:
        raise DataError(
            f"{path}: damaged, or not the published file: {len(content)} bytes with sha256 {found}, expected {' or '.join(sums)}. {advice}"
        )
    return content


def _images(idx: bytes) -> np.ndarray:
    """idx images: big-endian 2051, count, rows, columns, then a byte per pixel, row by row."""
    _, count, rows, columns = np.frombuffer(idx, ">u4", 4)
    return np.frombuffer(idx, np.uint8, offset=16).reshape(count, rows, columns)


def _labels(idx: bytes) -> np.ndarray:
    """idx labels: big-endian 2049, count, then a byte per label."""
    return np.frombuffer(idx, np.uint8, offset=8)


def _converted(images: np.ndarray, labels: np.ndarray, *, pixels: bool) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, H, W] -> float32 in 0..1, divided in float32 as torchvision's ToTensor does, or bytes [N, H, W, 1]; labels -> int32."""
    return images[..., None] if pixels else images.astype(np.float32) / np.float32(255), labels.astype(np.int32)


def _where_to_put(name: str) -> str:
    files = ", ".join(SOURCES[name].sha256)
    return f"Put {files} into a folder {name}/ and name its parent with --data-dir or TPUFLOW_DATA, or into {places.cache_dir() / name}."


def _announce_embedded(reason: str) -> None:
    rule = "!" * 100
    print(
        f"{rule}\nNO FASHION-MNIST: {reason}\nTraining on 512 embedded images instead of 60000, testing on 256 instead of 10000.\n"
        f"Accuracies and losses will NOT be those of the documentation.\n{_where_to_put('fashion-mnist')}\n{rule}",
        file=sys.stderr,
        flush=True,
    )
