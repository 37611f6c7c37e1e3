"""PyTorch's files (.pt, .pth, .bin) without PyTorch, and without running anything that is in them.

Such a file is a zip archive: `NAME/data.pkl` is a pickle that refers to the members `NAME/data/0`, `NAME/data/1`, ..., the storages of the
tensors. A pickle is a small program that may call any Python function. This unpickler allows only the functions in `_Unpickler._rows`:
tensors become a `Tensor`, a record of where the elements are; objects of any other class become a `Placeholder` with their stored state; a
pickle that calls anything else is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tpuflow.archives import check_inflation
from tpuflow.dtypes import BF16
from tpuflow.errors import ArchiveError, WeightsError, one_line

STORAGES: Mapping[str, np.dtype] = {
    "torch.DoubleStorage": np.dtype("f8"),
    "torch.FloatStorage": np.dtype("f4"),
    "torch.HalfStorage": np.dtype("f2"),
    "torch.BFloat16Storage": BF16.numpy,
    "torch.LongStorage": np.dtype("i8"),
    "torch.IntStorage": np.dtype("i4"),
    "torch.ShortStorage": np.dtype("i2"),
    "torch.CharStorage": np.dtype("i1"),
    "torch.ByteStorage": np.dtype("u1"),
    "torch.BoolStorage": np.dtype("?"),
}
"""PyTorch's name of a kind of storage -> type of its elements."""

KEPT_AS_THEY_ARE = (
    "datetime.datetime", "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy.dtype", "pathlib.Path", "pathlib.PosixPath",
    "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath", "torch.Size", "torch.device", "types.SimpleNamespace",
    "_codecs.encode",
)  # fmt: skip
"""Harmless objects beside tensors, which a pickle makes by a call: the call is recorded in a `Placeholder` and not made."""

MOST_MODULES = 1_000_000
_DAMAGED = (
    pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError, AttributeError, LookupError, OverflowError,
    NotImplementedError, RuntimeError, ImportError, ArchiveError,
)  # fmt: skip
"""What zipfile, zlib, pickle and arithmetic raise on bytes that are not what they should be."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Elements in a member of the archive."""

    key: str
    dtype: np.dtype
    elements: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, without its elements: its storage, the offset of the first element there, its shape and its strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.storage.dtype.itemsize

    def array(self, elements: np.ndarray) -> np.ndarray:
        """A copy of the elements, in rows.

        Raises:
          ValueError: some lie outside of the storage.
        """
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and not 0 <= last < len(elements):
            raise ValueError(f"a tensor of shape {list(self.shape)} reaches beyond its storage of {len(elements)} elements")
        if 0 in self.shape:
            return np.zeros(self.shape, elements.dtype)
        steps = [step * elements.itemsize for step in self.strides]
        return np.array(np.lib.stride_tricks.as_strided(elements[self.offset :], self.shape, steps))


class _Named(type):
    """The metaclass of stand-ins for the globals that a pickle names; calling one is recorded or refused."""

    asked: str

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if cls.asked not in KEPT_AS_THEY_ARE:
            raise _Refused(cls.asked)
        make: Any = cls.__new__
        return make(cls, *given, **named)


class Placeholder(metaclass=_Named):
    """A stand-in for an object: `asked` is the name of its class, `given` the arguments of its constructor, `state` its stored state."""

    asked = ""
    given: tuple[Any, ...]
    state: Any

    def __new__(cls, *given: Any, **named: Any) -> Any:
        made = object.__new__(cls)
        made.given, made.state = (*given, *named.values()), None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.given = (*self.given, (key, value))

    def append(self, value: Any) -> None:
        """Of what is a list elsewhere."""
        self.given = (*self.given, value)

    def __hash__(self) -> int:
        return id(self)


class _Refused(Exception):
    """The pickle calls a function or class of this name, which is not allowed."""


@dataclass(slots=True)
class TorchFile:
    """An open file of PyTorch's; `content` is what was saved, with `Tensor`s and `Placeholder`s in it.

    Raises:
      WeightsError: it is damaged, or its pickle asks for a call.
    """

    path: Path
    content: Any = None
    _archive: Any = field(default=None, repr=False)
    _folder: str = ""
    _order: Literal["<", ">"] = "<"

    def __enter__(self) -> TorchFile:
        try:
            self._archive = zipfile.ZipFile(self.path)
            self._folder = self._found("data.pkl").rpartition("/")[0]
            names = self._archive.namelist()
            marker = f"{self._folder}/byteorder"
            self._order = ">" if marker in names and self._archive.read(marker).strip() == b"big" else "<"
            self.content = _Unpickler(io.BytesIO(self._read("data.pkl"))).load()
        except _Refused as error:
            self.__exit__()
            raise WeightsError(
                f"{self.path}: refused: reading it would call {error}, which tensors do not need and could run anything; nothing of it "
                "was run. Save the tensors alone, with torch.save(model.state_dict(), path)."
            ) from None
        except _DAMAGED as error:
            self.__exit__()
            raise self._damaged(error) from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._archive is not None:
            self._archive.close()

    def arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """The elements of tensors by their names; each storage is read once.

        Raises:
          WeightsError: elements are missing, or they would take far more memory than the file has bytes.
        """
        try:
            check_inflation(str(self.path), sum(tensor.nbytes for tensor in tensors.values()), self.path.stat().st_size)
            kept: dict[Storage, np.ndarray] = {}
            return {name: tensor.array(self._elements(tensor.storage, kept)) for name, tensor in tensors.items()}
        except _DAMAGED as error:
            raise self._damaged(error) from error

    def _elements(self, storage: Storage, kept: dict[Storage, np.ndarray]) -> np.ndarray:
        if storage not in kept:
            content = self._read(f"data/{storage.key}")
            if len(content) != storage.elements * storage.dtype.itemsize:
                raise ValueError(f"storage {storage.key} has {len(content)} bytes for {storage.elements} elements of {storage.dtype}")
            kept[storage] = np.frombuffer(content, storage.dtype.newbyteorder(self._order)).astype(storage.dtype, copy=False)
        return kept[storage]

    def _read(self, name: str) -> bytes:
        info = self._archive.getinfo(f"{self._folder}/{name}" if self._folder else name)
        check_inflation(f"{self.path}: {name}", info.file_size, info.compress_size)
        return self._archive.read(info)

    def _found(self, name: str) -> str:
        names = [given for given in self._archive.namelist() if given.rpartition("/")[2] == name and given.count("/") <= 1]
        if len(names) != 1:
            raise ValueError(f"{len(names)} members are called {name}, expected one")
        return names[0]

    def _damaged(self, error: BaseException) -> WeightsError:
        return WeightsError(f"{self.path}: damaged, or not a file of PyTorch's: {one_line(error)}. Save it again.")


class _Unpickler(pickle.Unpickler):
    """The pickle of a file."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._classes: dict[str, _Named] = {}
        # Made anew for every file, so that a pickle that changes them changes nothing for the next one.
        self._rows: Mapping[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "builtins.set": set,
            "builtins.frozenset": frozenset,
            "builtins.complex": complex,
            "copyreg._reconstructor": lambda kind, base, state: kind.__new__(kind, state),
            "torch._utils._rebuild_tensor_v2": lambda *given: _tensor(*given[:4]),
            "torch._utils._rebuild_parameter": lambda data, *rest: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
            "torch._tensor._rebuild_from_type_v2": lambda make, kind, given, state: make(*given),
        }

    def find_class(self, module: str, name: str, /) -> Any:
        """What stands for a global of this name."""
        asked = f"{_RENAMED.get(module, module)}.{name}"
        return self._rows[asked] if asked in self._rows else self._class(asked)

    def persistent_load(self, pid: Any, /) -> Storage:
        """A storage, from ("storage", its kind, key, device, elements)."""
        what, kind, key, _, elements = pid
        if what != "storage" or not isinstance(kind, _Named) or kind.asked not in STORAGES:
            raise ValueError(f"elements of {getattr(kind, 'asked', kind)} are not read; there are {', '.join(STORAGES)}")
        if not isinstance(key, str) or type(elements) is not int:
            raise ValueError(f"a storage {key!r} of {elements!r} elements")
        return Storage(key, STORAGES[kind.asked], elements)

    def _class(self, asked: str) -> _Named:
        if asked not in self._classes:
            self._classes[asked] = _Named(asked.rpartition(".")[2], (Placeholder,), {"asked": asked})
        return self._classes[asked]


_RENAMED: Mapping[str, str] = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Modules by the names that pickles of the old protocols have for them."""


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
    shape, strides = (_sizes(given) for given in (shape, strides))
    if not isinstance(storage, Storage) or type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise ValueError(f"a tensor of {storage!r} from {offset!r} on, shape {shape}, strides {strides}")
    return Tensor(storage, offset, shape, strides)


def _sizes(given: Any) -> tuple[int, ...]:
    if isinstance(given, Placeholder):  # torch.Size((2, 3))
        (given,) = given.given
    sizes = tuple(given)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{given!r} are no sizes")
    return sizes


def is_module(value: Any) -> bool:
    """Whether it stands for an object of `torch.nn.Module` or of a class made from it."""
    return isinstance(value, Placeholder) and isinstance(value.state, Mapping) and isinstance(value.state.get("_modules"), Mapping)


def module_tensors(module: Any) -> dict[str, Tensor]:
    """The tensors of a stored module by the names that its state dict has for them.

    Raises:
      ValueError: modules hold each other without end.
    """
    found: dict[str, Tensor] = {}
    for number, (name, one) in enumerate(_modules(module, "")):
        if number > MOST_MODULES:
            raise ValueError(f"more than {MOST_MODULES} modules in each other")
        hidden = one.state.get("_non_persistent_buffers_set", ())
        for part in ("_parameters", "_buffers"):
            tensors = one.state.get(part)
            for own, tensor in (tensors if isinstance(tensors, Mapping) else {}).items():
                if isinstance(tensor, Tensor) and own not in hidden:
                    found[f"{name}{own}"] = tensor
    return found


def _modules(module: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """A module and those in it, each with what stands before the names of its tensors."""
    waiting = [(prefix, module, 0)]
    while waiting:
        prefix, module, depth = waiting.pop()
        if depth > 1000:
            raise ValueError("modules hold each other without end")
        yield prefix, module
        children = [(name, child) for name, child in module.state["_modules"].items() if is_module(child)]
        waiting += [(f"{prefix}{name}.", child, depth + 1) for name, child in reversed(children)]
