"""What a data set is: `data.yaml` as YOLOv5 has it, with the names of classes and where the pictures of each split lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tpuflow.data import places
from tpuflow.errors import DataError, did_you_mean
from tpuflow.examples.download import UnreachableError
from train.detection import blood_cells
from train.detection.pictures import SUFFIXES

SPLITS = ("train", "val", "test")
SHIPPED = Path(__file__).parent / "sets"
"""Descriptions that come with the repository: `--data bccd`."""

DOWNLOADS: Mapping[str, Callable[[], Path]] = {"bccd": blood_cells.download}
"""Shipped description -> what fetches its pictures into the user's cache."""


@dataclass(frozen=True, slots=True)
class Description:
    """The file it is from, names of classes by number, the folder that paths begin at, and the paths of each split that is there."""

    file: Path
    names: tuple[str, ...]
    root: Path
    splits: Mapping[str, tuple[str, ...]]
    download: str | None = None

    def pictures(self, split: str) -> list[Path]:
        """The picture files of a split, sorted by name; of lists, in their order.

        Raises:
          DataError: the split is not there, or has no pictures.
        """
        if split not in self.splits:
            raise DataError(f"{self.file}: no {split!r}; there are: {', '.join(self.splits)}. Name the folder of its pictures there.")
        found = [picture for entry in self.splits[split] for picture in self._of(split, entry)]
        if not found:
            raise DataError(
                f"{self.file}: {split}: no pictures in {', '.join(str(self.root / entry) for entry in self.splits[split])}; expected files "
                f"that end in {', '.join(sorted(SUFFIXES))}."
            )
        return found

    def _of(self, split: str, entry: str) -> Iterator[Path]:
        """A folder's pictures, also of folders in it, or those that a text file lists."""
        # Exports of Roboflow say ../train/images where the folder lies beside the file.
        candidates = [self.root / entry, *([self.root / entry[3:]] if entry.startswith("../") else [])]
        there = next((path for path in candidates if path.exists()), None)
        if there is None:
            raise DataError(
                f"{self.file}: {split}: there is no {candidates[0]}. Mend the path there, or give the data set's folder as path:."
                + _how_to_get(self.download)
            )
        if there.is_dir():
            yield from sorted(path for path in there.rglob("*") if path.suffix.lower() in SUFFIXES)
        else:
            yield from _listed(there)


def find_description(name: str, data_dir: Path | None = None) -> Description:
    """The description in a file, or one that is shipped, by its name with or without .yaml.

    data_dir: the folder that holds the data set, or its parent; else paths that are not absolute begin at the file's folder, the current
    one, those that data are looked for in ($TPUFLOW_DATA, the user's cache). Without it, one of DOWNLOADS that is nowhere is downloaded.

    Raises:
      DataError: there is none, or it is not understood; what is wrong in it is said.
    """
    file, given = _read(name)
    names, download = _names(file, given), given.get("download")
    splits = {split: _paths(file, split, given[split]) for split in SPLITS if given.get(split)}
    if not splits:
        raise DataError(f"{file}: none of {', '.join(SPLITS)} is there; name the folders of the pictures.")
    download = download if isinstance(download, str) and download.startswith("http") else None
    return Description(file, names, _root(file, given.get("path"), data_dir, download), splits, download)


def find_names(name: str) -> tuple[str, ...]:
    """The names of classes that a description has, wherever its pictures are.

    Raises:
      DataError: as `find_description`.
    """
    return _names(*_read(name))


def _read(name: str) -> tuple[Path, Mapping[str, Any]]:
    """(the file, what it holds)."""
    file = _file(name)
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{file}: cannot be read as YAML: {error}") from error
    if not isinstance(given, dict):
        raise DataError(f"{file}: expected a mapping with train, val and names, got {type(given).__name__}.")
    return file, given


def _file(name: str) -> Path:
    shipped = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    for path in (Path(name), SHIPPED / f"{Path(name).stem}.yaml"):
        if path.is_file():
            return path
    if Path(name).is_dir():
        raise DataError(f"--data {name}: a folder; give a file such as {Path(name) / 'data.yaml'}.")
    raise DataError(
        f"--data {name}: no such file, nor a data set of that name.{did_you_mean(name, shipped)} There are: {', '.join(shipped)}."
    )


def _names(file: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    names, count = given.get("names"), given.get("nc")
    if names is None and isinstance(count, int) and count > 0:
        return tuple(f"class{number}" for number in range(count))
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise DataError(f"{file}: names: expected the numbers 0 to {len(names) - 1}, got {', '.join(map(str, names))}.")
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise DataError(f"{file}: names: expected the classes as a list or as numbers with names, got {names!r}.")
    if count is not None and count != len(names):
        raise DataError(f"{file}: nc is {count!r}, but there are {len(names)} names; make them agree, or leave nc out.")
    return tuple(str(name) for name in names)


def _paths(file: Path, split: str, given: Any) -> tuple[str, ...]:
    entries = given if isinstance(given, list) else [given]
    if not all(isinstance(entry, str) for entry in entries):
        raise DataError(f"{file}: {split}: expected a path or a list of paths, got {given!r}.")
    return tuple(entries)


def _root(file: Path, path: Any, data_dir: Path | None, download: str | None) -> Path:
    if path is not None and not isinstance(path, str):
        raise DataError(f"{file}: path: expected a folder, got {path!r}.")
    if path is None and data_dir is None:
        return file.parent
    if path is not None and Path(path).is_absolute() and data_dir is None:
        tried = [Path(path)]
    else:
        last = Path(path or file.stem).name
        tried = [data_dir / last, data_dir] if data_dir is not None else _usual(file, Path(str(path)), last)
    found = next((folder for folder in tried if folder.is_dir()), None)
    if found is not None:
        return found
    where = f"{file}: the data set's folder (path: {path}) was found at none of {', '.join(map(str, tried))}"
    if file.parent != SHIPPED or file.stem not in DOWNLOADS or data_dir is not None:
        raise DataError(f"{where}. Put it there, or name it or its parent by --data-dir.{_how_to_get(download)}")
    try:
        return DOWNLOADS[file.stem]()
    except UnreachableError as error:
        raise DataError(f"{where}, and {error}. Put it there, or name it or its parent by --data-dir.") from None


def _usual(file: Path, path: Path, last: str) -> list[Path]:
    return [*([] if file.parent == SHIPPED else [file.parent / path]), path, *(place / last for place in places.data_dirs())]


def _how_to_get(download: str | None) -> str:
    return f" It can be had from {download}; nothing is downloaded from there." if download else ""


def _listed(file: Path) -> Iterator[Path]:
    """The pictures that a text file names, from its own folder or the current one on; or by bare names, as VOC's ImageSets/Main/*.txt."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as a list of pictures: {error}") from error
    for number, line in enumerate(lines, 1):
        if not (entry := line.strip()):
            continue
        path = _entry(file, Path(entry))
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{file}:{number}: {entry} is no picture; expected a name that ends in {', '.join(sorted(SUFFIXES))}.")
        yield path


def _entry(file: Path, entry: Path) -> Path:
    if not entry.suffix:
        return file.parents[2] / "JPEGImages" / f"{entry}.jpg"
    return entry if entry.is_file() and not (file.parent / entry).is_file() else file.parent / entry
