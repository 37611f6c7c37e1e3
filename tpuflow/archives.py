"""Archives of arrays (.npz), read safely: headers come first, so that no element is decompressed before type and shape are known to fit.

A member's name is the array's name and ".npy"; its content is a header of a few hundred bytes (type, shape, order) and the elements. Files
are written under a temporary name and renamed, so that they appear whole or not at all.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from tpuflow.dtypes import BF16, DType
from tpuflow.errors import ArchiveError, LaunchError, one_line, short

if TYPE_CHECKING:
    from tpuflow.device.runtime import Executable

SUFFIX = ".npy"
HEADER_BYTES = 16 * 2**10
"""A longer header is refused; NumPy itself reads up to 10,000 bytes of one."""

ALWAYS_READ_BYTES = 256 * 2**20
MAX_INFLATION = 100
"""Where no signature says what to expect, a file that claims more than ALWAYS_READ_BYTES of arrays and more than MAX_INFLATION times its
own size is refused. Trained weights hardly compress; a zip file of zeros reaches a factor of a thousand."""

_CHUNK_BYTES = 2**20
_NAME_BYTES = 2**16 - 1 - len(SUFFIX)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1
# What zipfile, zlib and NumPy's parser of headers raise on bytes that are not what they should be.
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, ValueError, TypeError, LookupError, SyntaxError, EOFError,
    RuntimeError, OverflowError, OSError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a member; `bytes` is the length of the header itself."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    bytes: int

    @property
    def array_bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Archive:
    """An open .npz file: `names` at once, `header(name)` at the cost of a few bytes, `read(name)` for the elements.

    Raises:
      ArchiveError: it is damaged, no .npz file, has a name twice, or holds what is no plain array.
      OSError: there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file = self._path.open("rb")
        try:
            with self._reading("the list of its arrays"):
                self._zip = zipfile.ZipFile(self._file)
            self._members = self._named(self._zip.infolist())
        except ArchiveError:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()
        self._file.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays' names, in the order of the file."""
        return tuple(self._members)

    def header(self, name: str) -> Header:
        """Type and shape of an array; no element is read.

        Raises:
          ArchiveError: it is damaged, or no plain array.
        """
        info = self._members[name]
        with self._reading(f"array {name!r}"):
            if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
                raise ValueError("it is encrypted, or compressed in a way that NumPy does not write")
            with self._zip.open(info) as member:
                found = _header(member.read(HEADER_BYTES))
            if found.bytes + found.array_bytes != info.file_size:
                raise ValueError(f"{found} has {found.array_bytes} bytes, and {info.file_size - found.bytes} are there")
        return found

    def read(self, name: str) -> np.ndarray:
        """An array; exactly as many bytes are inflated as its header says.

        Raises:
          ArchiveError: it is damaged, or no plain array.
        """
        header = self.header(name)
        with self._reading(f"array {name!r}"):
            content = np.empty(header.array_bytes, np.uint8)
            with self._zip.open(self._members[name]) as member:
                _fill(member, np.empty(header.bytes, np.uint8))
                _fill(member, content)
            if header.dtype.kind == "b" and content.max(initial=0) > 1:
                raise ValueError("its truth values are not all 0 or 1")
            order = "F" if header.fortran_order else "C"
            return np.asarray(content.view(header.dtype).reshape(header.shape, order=order), order="C")

    def read_all(self) -> dict[str, np.ndarray]:
        """Every array by its name.

        Raises:
          ArchiveError: one is damaged or no plain array, or together they would take far more memory than the file has bytes.
        """
        check_inflation(str(self._path), sum(self.header(name).array_bytes for name in self.names), self._path.stat().st_size)
        return {name: self.read(name) for name in self.names}

    def _named(self, infos: Iterable[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
        members = {}
        for info in infos:
            name = info.filename.removesuffix(SUFFIX)
            if name in members:
                raise ArchiveError(f"{self._path}: holds two arrays called {short(name)}; expected each name once.")
            members[name] = info
        return members

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGED as error:
            raise ArchiveError(
                f"{self._path}: damaged, or not an .npz file of plain arrays: {what}: {one_line(error)}. Write it again."
            ) from error


def check_names(names: Iterable[str], what: str) -> None:
    """Check that arrays with these names can be members of an archive. what: the kind of array, for the message.

    Raises:
      ArchiveError: a name occurs twice, is no Unicode text, or would lie outside the folder that the archive is unpacked in.
    """
    for name, count in Counter(iter(names)).items():
        wrong = "occurs twice" if count > 1 else next((text for text, holds in _WRONG_NAMES if holds(name)), None)
        if wrong:
            raise ArchiveError(f"{what} {short(name)} cannot be written to an .npz file: its name {wrong}. Rename it.")


def storable(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as .npz files can hold them: bfloat16 arrays, a type that NumPy's format lacks, as their bits in uint16."""
    return {name: array.view(np.uint16) if array.dtype == BF16.numpy else array for name, array in arrays.items()}


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by their names, uncompressed; equal arrays give equal bytes.

    Raises:
      ArchiveError: a name cannot be that of a member.
      OSError: the file cannot be written; what was there before is still there.
    """
    check_names(arrays, "array")
    target = Path(path).resolve()
    if target.exists() and not target.is_file():  # a device or a pipe: nothing may take its place
        return _write(target, arrays)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _write(partial, arrays)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            # ZipInfo without a time of its own: equal arrays give equal bytes.
            with archive.open(zipfile.ZipInfo(f"{name}{SUFFIX}"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def check_inflation(what: str, inflated_bytes: int, stored_bytes: int) -> None:
    """Check that a file does not claim to hold far more bytes of arrays than its size allows.

    Raises:
      ArchiveError: it does.
    """
    if inflated_bytes > max(ALWAYS_READ_BYTES, MAX_INFLATION * stored_bytes):
        raise ArchiveError(
            f"{what}: its {stored_bytes} bytes claim to hold arrays of {inflated_bytes} bytes; expected at most {MAX_INFLATION} times as "
            f"many as are stored (or {ALWAYS_READ_BYTES})."
        )


def _has_surrogate(name: str) -> bool:
    return any(0xD800 <= ord(c) <= 0xDFFF for c in name)


def _leaves_folder(name: str) -> bool:
    parts = re.split(r"[/\\]", f"{name}{SUFFIX}")
    return not parts[0] or ".." in parts or re.match("[A-Za-z]:", name) is not None


_WRONG_NAMES: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("is no Unicode text (a lone surrogate)", _has_surrogate),
    ("holds a NUL character, where zip files end a name", lambda name: "\0" in name),
    ("leads out of the folder in which the file is unpacked", _leaves_folder),
    (f"has more than the {_NAME_BYTES} bytes of UTF-8 that zip files have room for", lambda name: len(name.encode()) > _NAME_BYTES),
)
"""What is wrong with a name, and whether it is; in this order, since one with a surrogate has no UTF-8."""


def _header(start: bytes) -> Header:
    """The header at the start of a member."""
    source = io.BytesIO(start)
    version = np.lib.format.read_magic(source)
    if version not in _HEADERS:
        raise ValueError(f"its format is {version[0]}.{version[1]}, which plain arrays do not need")
    with warnings.catch_warnings():  # of Python's parser, about escapes in a forged header
        warnings.simplefilter("ignore")
        shape, fortran_order, dtype = _HEADERS[version](source)
    if dtype.hasobject or dtype.itemsize == 0 or any(size < 0 for size in shape):
        raise ValueError(f"{dtype}{list(shape)} is no plain array")
    return Header(tuple(map(int, shape)), dtype, bool(fortran_order), source.tell())


def _fill(member: IO[bytes], into: np.ndarray) -> None:
    """Read exactly `len(into)` bytes of a member."""
    at = 0
    while at < len(into):
        chunk = member.read(min(_CHUNK_BYTES, len(into) - at))
        if not chunk:
            raise EOFError(f"it ends after {at} of {len(into)} bytes")
        into[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)


def read_inputs(paths: Sequence[Path], executable: Executable) -> dict[str, np.ndarray]:
    """The inputs of an executable from .npz files; elements are read after all names, shapes and types are known to fit its signature.

    bfloat16 arrays, which .npz stores as raw 2-byte items, get their type back from the signature.
    """
    with ExitStack() as stack:
        places: dict[str, tuple[Path, Archive]] = {}
        for path in paths:
            archive = stack.enter_context(Archive(path))
            if twice := next((name for name in archive.names if name in places), None):
                raise LaunchError(f"input {short(twice)} is in {places[twice][0]} and in {path}. Give each input in one file.")
            places |= dict.fromkeys(archive.names, (path, archive))
        executable.check_names(places)
        for port in executable.program.inputs:
            path, archive = places[port.name]
            header = archive.header(port.name)
            if header.shape != port.shape or not _is_stored_as(port.dtype, header.dtype):
                raise LaunchError(
                    f"{path}: input {short(port.name)}: expected {port.dtype}{list(port.shape)}, got {header}. Convert it, or "
                    "compile another Program."
                )
        return {port.name: places[port.name][1].read(port.name).view(port.dtype.numpy) for port in executable.program.inputs}


def _is_stored_as(dtype: DType, found: np.dtype) -> bool:
    return found == dtype.numpy or (dtype == BF16 and found.itemsize == dtype.bytes and found.kind in "Vu")
