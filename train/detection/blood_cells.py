"""The blood cells of the BCCD data set: downloaded as they are published, put into YOLO's layout, every byte checked."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpuflow.data import places
from tpuflow.errors import DataError
from tpuflow.examples.download import TIMEOUT_SECONDS, UnreachableError

COMMIT = "d272fb14cdff6e473fafeeeba32aba5f560e9e43"
URL = f"https://github.com/Shenggan/BCCD_Dataset/archive/{COMMIT}.tar.gz"  # MIT, copyright 2017 shenggan
SHA256 = "51296535717e76ffee43e5e7a68c566405f70f2d11e6dda6d905e8121db15176"
"""Of the lines `sha256  path` of all pictures and labels, sorted by path."""
CLASSES = ("RBC", "WBC", "Platelets")
SPLITS = ("train", "val", "test")
MOST_BYTES = 1 << 28
"""The archive has 8 MB; one of so many more is none of ours."""


def download(url: str = URL, sha256: str = SHA256) -> Path:
    """The folder `bccd` in the cache with images/SPLIT/NAME.jpg and labels/SPLIT/NAME.txt; it is there whole and right, or not at all.

    Raises:
      UnreachableError: the archive cannot be had.
      DataError: it is not the published one.
    """
    print(f"bccd: downloading {url}", file=sys.stderr, flush=True)
    members = _members(url)
    try:
        files = _as_yolo(members)
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"bccd: what {url} gave is not the published data ({error}).") from error
    if (found := digest(files)) != sha256:
        raise DataError(f"bccd: what {url} gave is damaged, or not the published data: sha256 {found} of its files, expected {sha256}.")
    folder = places.cache_dir() / "bccd"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="bccd") as made:
        for name, content in files.items():
            path = Path(made) / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(Path(made) / "set", folder)
    return folder


def digest(files: Mapping[str, bytes]) -> str:
    """The sha256 of the lines `sha256  path` of files by their paths."""
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _members(url: str) -> dict[str, bytes]:
    """The archive's files by their paths in its folder BCCD."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            content = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{url} could not be downloaded ({getattr(error, 'reason', None) or error})") from error
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            read = {member.name.partition("/BCCD/")[2]: archive.extractfile(member) for member in archive if member.isfile()}
            return {name: file.read() for name, file in read.items() if name and file is not None}
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"bccd: what {url} gave is no archive ({error}).") from error


def _as_yolo(members: Mapping[str, bytes]) -> dict[str, bytes]:
    files = {}
    for split in SPLITS:
        for name in members.get(f"ImageSets/Main/{split}.txt", b"").decode().split():
            files[f"images/{split}/{name}.jpg"] = members.get(f"JPEGImages/{name}.jpg", b"")
            files[f"labels/{split}/{name}.txt"] = _labels(members.get(f"Annotations/{name}.xml", b"<annotation/>"))
    return files


def _labels(xml: bytes) -> bytes:
    """VOC's corners cut at the picture's border, as shares of its size; boxes without area are left out."""
    root = ElementTree.fromstring(xml)
    size = [float(root.findtext(f"size/{side}") or 1) for side in ("width", "height")]
    lines = []
    for one in root.iter("object"):
        first, last = ([float(one.findtext(f"bndbox/{side}") or 0) for side in sides] for sides in (("xmin", "ymin"), ("xmax", "ymax")))
        corners = [[min(max(place, 0.0), most) for place, most in zip(corner, size, strict=True)] for corner in (first, last)]
        lines.append(_line(CLASSES.index(one.findtext("name") or ""), corners, size))
    return "".join(lines).encode()


def _line(kind: int, corners: Sequence[Sequence[float]], size: Sequence[float]) -> str:
    (left, top), (right, bottom) = corners
    if not (right > left and bottom > top):
        return ""
    shares = (left + right) / 2 / size[0], (top + bottom) / 2 / size[1], (right - left) / size[0], (bottom - top) / size[1]
    return f"{kind} {' '.join(f'{share:.6f}' for share in shares)}\n"
