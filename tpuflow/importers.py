"""Weights from elsewhere: PyTorch state dicts in .pt, .npz and .safetensors files, converted to Flax variables.

How a PyTorch tensor becomes a Flax leaf:

| PyTorch module       | tensor         | Flax leaf   | axes                                                  |
|----------------------|----------------|-------------|-------------------------------------------------------|
| Linear               | weight         | `kernel`    | [out, in] -> [in, out]                                |
| Conv1d, 2d, 3d       | weight         | `kernel`    | [out, in/groups, *window] -> [*window, in/groups, out] |
| Embedding            | weight         | `embedding` | as they are                                           |
| BatchNorm, LayerNorm | weight         | `scale`     | as they are                                           |
| BatchNorm            | running_mean   | `mean`      | as they are                                           |
| BatchNorm            | running_var    | `var`       | as they are                                           |
| any                  | bias           | `bias`      | as they are                                           |

`num_batches_tracked` has no counterpart and is ignored. A Linear that follows a flattened image reads its inputs in the order C, H, W in
PyTorch and H, W, C in Flax: name its place as `Flattened(path, channels, height, width)`. ConvTranspose is not converted.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from tpuflow.archives import Archive
from tpuflow.errors import ArchiveError, WeightsError, nothing_at

COUNTERPARTS: Mapping[str, str] = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
"""Flax leaf name -> PyTorch tensor name."""

WITHOUT_COUNTERPART = frozenset({"num_batches_tracked"})
COLLECTIONS = frozenset({"params", "batch_stats"})


@dataclass(frozen=True, slots=True)
class Flattened:
    """The Flax place of a Linear whose inputs are a flattened image of this size: its kernel's rows go from C, H, W to H, W, C order."""

    path: str
    channels: int
    height: int
    width: int


Place = str | Flattened


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read tensor name -> array from a .pt/.pth (PyTorch needed; weights only, no code is run), .npz or .safetensors file.

    A .pt file may hold the state dict itself or have it under "state_dict", "model_state_dict" or "model".
    Raises WeightsError if the file is missing, damaged, of another kind, or holds anything but tensors.
    """
    path = Path(path)
    if path.suffix not in READERS:
        raise WeightsError(
            f"{path}: unknown kind of weight file {path.suffix!r}; there are: {', '.join(READERS)}. Save the weights as one of these."
        )
    if not path.exists():
        raise WeightsError(f"{nothing_at(path)} Give the path of a file of weights.")
    return READERS[path.suffix](path)


def flax_params(
    state_dict: Mapping[str, np.ndarray],
    params_like: Mapping[str, Any],
    mapping: Mapping[str, Place] | None = None,
    *,
    skip_mismatched: bool = False,
) -> dict[str, Any]:
    """Convert a PyTorch state dict to the tree, shapes and floating types of `params_like`.

    `params_like`: Flax variables ({"params": ..., "batch_stats": ...}) or a bare tree of parameters; arrays or shapes (`jax.eval_shape`).
    `mapping`: PyTorch module name -> Flax module path with "/" between its parts, e.g. {"features.0": "Conv_0", "fc": "head/Dense_0"};
    without it the names must be equal but for "." and "/". Raises WeightsError naming every tensor that is missing, left over or of the
    wrong shape; with `skip_mismatched`, `params_like` keeps its own arrays there, and a warning names them.
    """
    converter = _Converter(dict(state_dict), _by_flax_path(state_dict, mapping), skip_mismatched=skip_mismatched)
    tree = converter.tree(params_like, ())
    converter.finish()
    return tree


class _Converter:
    """One pass over the Flax tree; problems are gathered so that one error can name them all."""

    def __init__(self, state_dict: dict[str, np.ndarray], places: Mapping[str, tuple[str, Place]], *, skip_mismatched: bool):
        self._state_dict = state_dict
        self._places = places
        self._skip = skip_mismatched
        self._used: set[str] = set()
        self._problems: list[str] = []

    def tree(self, like: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        return {
            name: self.tree(child, (*path, name)) if isinstance(child, Mapping) else self._leaf(child, (*path, name))
            for name, child in like.items()
        }

    def finish(self) -> None:
        left_over = [name for name in self._state_dict if name not in self._used and name.rpartition(".")[2] not in WITHOUT_COUNTERPART]
        self._problems += [f"{name} {self._state_dict[name].shape} has no place in the Flax tree" for name in left_over]
        if self._problems and self._skip:
            warnings.warn("not taken from the state dict:\n  " + "\n  ".join(self._problems), RuntimeWarning, stacklevel=3)
        elif self._problems:
            raise WeightsError("the state dict does not fit the Flax parameters:\n  " + "\n  ".join(self._problems))

    def _leaf(self, like: Any, path: tuple[str, ...]) -> Any:
        found = self._found(like, path)
        if found is None and self._skip and not hasattr(like, "__array__"):
            raise WeightsError(f"{'/'.join(path)} {tuple(like.shape)} is not in the state dict, and only its shape is given: give arrays")
        return like if found is None else found

    def _found(self, like: Any, path: tuple[str, ...]) -> Any:
        module = "/".join(path[1:-1] if path[0] in COLLECTIONS else path[:-1])
        prefix, place = self._places.get(module, (module.replace("/", "."), module))
        name = f"{prefix}.{COUNTERPARTS.get(path[-1], path[-1])}".lstrip(".")
        if name not in self._state_dict:
            return self._problem(f"{'/'.join(path)} {tuple(like.shape)} needs {name}, which is missing")
        self._used.add(name)
        source = self._state_dict[name]
        try:
            found = _kernel(source, place) if path[-1] == "kernel" else source
        except ValueError as error:
            return self._problem(f"{name} {source.shape}: {error}")
        if found.shape != tuple(like.shape):
            return self._problem(f"{name} {source.shape} becomes {found.shape}, but {'/'.join(path)} is {tuple(like.shape)}")
        if not _is_floating(source):
            return self._problem(f"{name} is {source.dtype}, expected floating-point weights (quantised weights are not converted)")
        return np.ascontiguousarray(found, dtype=like.dtype)

    def _problem(self, text: str) -> None:
        self._problems.append(text)


def _by_flax_path(state_dict: Mapping[str, np.ndarray], mapping: Mapping[str, Place] | None) -> dict[str, tuple[str, Place]]:
    """Flax module path -> (PyTorch module name, place)."""
    mapping = mapping or {}
    unknown = [prefix for prefix in mapping if not any(name.startswith(f"{prefix}.") for name in state_dict)]
    if unknown:
        modules = sorted({name.rpartition(".")[0] for name in state_dict})
        raise WeightsError(f"the mapping names {', '.join(unknown)}, but the state dict has {', '.join(modules)}")
    return {(place.path if isinstance(place, Flattened) else place): (prefix, place) for prefix, place in mapping.items()}


def _kernel(weight: np.ndarray, place: Place) -> np.ndarray:
    """[out, in] -> [in, out]; [out, in, *window] -> [*window, in, out]."""
    if weight.ndim < 2:
        raise ValueError("a kernel needs at least two axes")
    if isinstance(place, Flattened):
        c, h, w = place.channels, place.height, place.width
        weight = weight.reshape(-1, c, h, w).transpose(0, 2, 3, 1).reshape(weight.shape)  # [out, C*H*W] -> [out, H*W*C]
    return weight.transpose(*range(2, weight.ndim), 1, 0)


def _is_floating(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16


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
    torch = _optional("torch", path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch's unpickler fails on damaged bytes in any way it happens to, IndexError included
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise WeightsError(f"{path}: damaged, or not a file of plain PyTorch tensors ({reason})") from error
    if not isinstance(content, Mapping):
        raise WeightsError(
            f"{path}: holds a {type(content).__name__}, expected a state dict; save it with torch.save(model.state_dict(), path)"
        )
    wrapped = next((content[key] for key in ("state_dict", "model_state_dict", "model") if isinstance(content.get(key), Mapping)), content)
    others = [str(name) for name, value in wrapped.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise WeightsError(f"{path}: {', '.join(others)}: not tensors; save the state dict alone with torch.save(model.state_dict(), path)")
    return {str(name): _torch_array(torch, tensor) for name, tensor in wrapped.items()}


def _torch_array(torch: ModuleType, tensor: Any) -> np.ndarray:
    """NumPy has no bfloat16 of its own, so PyTorch hands those bits over as int16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def _optional(module: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise WeightsError(f"{path}: reading it needs the package {package}; pip install 'tpuflow[torch]'") from error


READERS: Mapping[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".npz": _read_npz,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".safetensors": _read_safetensors,
}
