"""Batches of every accepted form as flat NumPy arrays in types that the device has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tpuflow.errors import DataError
from tpuflow.stages.flattening import leaf_names

LABEL_NAMES = ("label", "labels", "target", "targets", "y")
NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}

Leaves = tuple[np.ndarray, ...]
Signature = tuple[tuple[tuple[int, ...], str], ...]


class PairForm:
    """Batches (inputs, labels) of `tpuflow.train`: a pair, or a mapping of two with a label among its names."""

    names: tuple[str, ...] = ("inputs", "labels")
    tree: Any = jax.tree.structure((0, 0))

    def leaves(self, batch: Any, what: str = "data") -> Leaves:
        """The two arrays.

        Raises:
          DataError: the batch is nothing of the kind.
        """
        if isinstance(batch, Mapping):
            batch = _pair_of_mapping(batch, what)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(f"{what}: a batch must be a pair (inputs, labels), got {_describe(batch)}.")
        leaves = tuple(to_array(part, f"{what}: {name}") for part, name in zip(batch, self.names, strict=True))
        for name, leaf in zip(self.names, leaves, strict=True):
            if leaf.ndim == 0:
                raise DataError(f"{what}: {name} must have a leading batch axis, got a single number.")
        return leaves


class TreeForm:
    """Batches of a step function of the user's own: any tree of arrays, all of the structure of the first."""

    def __init__(self) -> None:
        self.tree: Any = None
        self.names: tuple[str, ...] = ()

    def leaves(self, batch: Any, what: str = "data") -> Leaves:
        """The arrays in flattening order; the first batch fixes the structure.

        Raises:
          DataError: the structure differs, there is no array in it, or a leaf is not an array of numbers.
        """
        parts, tree = jax.tree.flatten(batch)
        if self.tree is None:
            if not parts:
                raise DataError(f"{what}: a batch must hold at least one array, got {tree}.")
            self.tree, self.names = tree, leaf_names(batch)
        if tree != self.tree:
            raise DataError(f"{what}: every batch must have the structure of the first, {self.tree}; got {tree}.")
        return tuple(to_array(part, f"{what}: {name or 'batch'}") for part, name in zip(parts, self.names, strict=True))


Form = PairForm | TreeForm


def is_pair_of_arrays(data: Any) -> bool:
    """Whether data are one pair of arrays rather than a sequence of batches."""
    parts = list(data.values()) if isinstance(data, Mapping) else data
    return isinstance(parts, (tuple, list)) and len(parts) == 2 and all(map(_is_array, parts))


def is_tree_of_arrays(data: Any) -> bool:
    """Whether data are an array, or a tree of arrays, rather than a sequence of batches (a list, an iterator, a loader)."""
    if isinstance(data, Iterable) and not isinstance(data, (tuple, Mapping)) and not _is_array(data):
        return False
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(map(_is_array, leaves))


def signature(leaves: Leaves) -> Signature:
    """Shape and type of every array of a batch."""
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def to_array(value: Any, what: str) -> np.ndarray:
    """A NumPy array in a type that the device has: 64-bit numbers are narrowed.

    Raises:
      DataError: it cannot be made an array of numbers.
    """
    try:
        array = np.asarray(_torch_to_numpy(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what}: cannot be made an array: {error}") from error
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise DataError(f"{what}: elements must be numbers, got {array.dtype}.")
    narrow = NARROW.get(array.dtype.name)
    return array if narrow is None else array.astype(narrow)


def _torch_to_numpy(value: Any) -> Any:
    """A PyTorch tensor as a NumPy array, bfloat16 included; PyTorch is only looked for where the user has imported it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().cpu()
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _pair_of_mapping(batch: Mapping[Any, Any], what: str) -> tuple[Any, Any]:
    labels = [name for name in batch if name in LABEL_NAMES]
    if len(batch) != 2 or len(labels) != 1:
        raise DataError(f"{what}: a mapping needs two entries, one named {' or '.join(LABEL_NAMES)}; got {', '.join(map(str, batch))}.")
    (inputs,) = (value for name, value in batch.items() if name != labels[0])
    return inputs, batch[labels[0]]


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _describe(batch: Any) -> str:
    return f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
