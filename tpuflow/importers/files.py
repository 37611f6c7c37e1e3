"""Files of weights: PyTorch state dicts in .pt, .bin, .npz and .safetensors files, as names and arrays."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from tpuflow.archives import Archive, write_arrays
from tpuflow.errors import ArchiveError, WeightsError, nothing_at
from tpuflow.importers.pickled import Tensor, TorchFile, is_module, module_tensors

WRAPPERS = ("state_dict", "model_state_dict", "ema", "model")
"""Keys of a training's checkpoint under which the model may be: an average of its parameters before the parameters themselves."""


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read tensor name -> array from a .pt, .pth or .bin (without PyTorch unless it is older than release 1.6), .npz or .safetensors file.

    A PyTorch file may hold a state dict or a whole module, by itself or under one of WRAPPERS, the first that there is. None of its code is
    run and none of its classes is needed, see `tpuflow/importers/pickled.py`. Raises WeightsError if the file is missing, damaged, of
    another kind, asks for a call, or holds no tensors.
    """
    path = Path(path)
    if path.suffix not in READERS:
        raise WeightsError(
            f"{path}: unknown kind of weight file {path.suffix!r}; there are: {', '.join(READERS)}. Save the weights as one of these."
        )
    if not path.exists():
        raise WeightsError(f"{nothing_at(path)} Give the path of a file of weights.")
    return READERS[path.suffix](path)


def save_state_dict(path: str | os.PathLike[str], state_dict: Mapping[str, np.ndarray]) -> None:
    """Write tensors by their names into a file of the kind that its name says, as PyTorch's and transformers' readers want it.

    The file appears whole or not at all. Raises WeightsError if the kind is unknown or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in WRITERS:
        raise WeightsError(f"{path}: unknown kind of weight file {path.suffix!r}; there are: {', '.join(WRITERS)}. Give it such a name.")
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        WRITERS[path.suffix](partial, state_dict)
        os.replace(partial, path)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be written ({error}); give a path in a folder that exists and may be written.") from error
    finally:
        partial.unlink(missing_ok=True)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with Archive(path) as archive:
            return archive.read_all()
    except (OSError, ArchiveError) as error:
        raise WeightsError(str(error)) from error


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    safetensors = _optional("safetensors", path)
    reader = _optional("safetensors.numpy", path)
    try:
        return dict(reader.load_file(path))
    except (safetensors.SafetensorError, OSError, KeyError, TypeError) as error:
        raise WeightsError(f"{path}: damaged, or not a .safetensors file ({error})") from error


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        return _read_old_torch(path)
    with TorchFile(path) as file:
        return file.arrays(_tensors(path, file.content))


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    """The tensors of what was saved: a state dict or a module, by itself or in a training's checkpoint."""
    found = content
    if isinstance(content, Mapping):
        found = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping) or is_module(content.get(key))), content)
    if is_module(found):
        try:
            return module_tensors(found)
        except ValueError as error:
            raise WeightsError(f"{path}: {error}; save the state dict alone with torch.save(model.state_dict(), path)") from error
    if not isinstance(found, Mapping):
        kind = getattr(type(found), "asked", type(found).__name__)
        raise WeightsError(f"{path}: holds a {kind}, expected a state dict; save it with torch.save(model.state_dict(), path)")
    others = [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
    if others:
        raise WeightsError(f"{path}: {', '.join(others)}: not tensors; save the state dict alone with torch.save(model.state_dict(), path)")
    return {str(name): tensor for name, tensor in found.items()}


def _read_old_torch(path: Path) -> dict[str, np.ndarray]:
    """What PyTorch wrote before release 1.6, by PyTorch itself."""
    torch = _optional("torch", path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch's unpickler fails on damaged bytes in any way it happens to, IndexError included
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise WeightsError(f"{path}: damaged, or not a file of plain PyTorch tensors ({reason})") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise WeightsError(f"{path}: holds no plain state dict; save it with torch.save(model.state_dict(), path)")
    return {str(name): _torch_array(torch, tensor) for name, tensor in content.items()}


def _torch_array(torch: ModuleType, tensor: Any) -> np.ndarray:
    """NumPy has no bfloat16 of its own, so PyTorch hands those bits over as int16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def _write_safetensors(path: Path, state_dict: Mapping[str, np.ndarray]) -> None:
    safetensors, writer = _optional("safetensors", path), _optional("safetensors.numpy", path)
    try:
        writer.save_file(dict(state_dict), path, metadata={"format": "pt"})  # transformers asks for this word
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def _write_torch(path: Path, state_dict: Mapping[str, np.ndarray]) -> None:
    torch = _optional("torch", path)
    try:
        torch.save({name: _torch_tensor(torch, array) for name, array in state_dict.items()}, path)
    except RuntimeError as error:  # of a full disk or a missing folder
        raise OSError(next(iter(str(error).splitlines()), "")) from error


def _torch_tensor(torch: ModuleType, array: np.ndarray) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _optional(module: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise WeightsError(f"{path.suffix} files need the package {package}; pip install 'tpuflow[torch]'") from error


READERS: Mapping[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".npz": _read_npz,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".bin": _read_torch,
    ".safetensors": _read_safetensors,
}

WRITERS: Mapping[str, Callable[[Path, Mapping[str, np.ndarray]], None]] = {
    ".npz": write_arrays,
    ".pt": _write_torch,
    ".pth": _write_torch,
    ".bin": _write_torch,
    ".safetensors": _write_safetensors,
}
