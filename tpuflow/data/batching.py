"""Batches, in every form that users give them, as flat NumPy arrays of element types that the device has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tpuflow.errors import DataError, a_thing, one_line
from tpuflow.stages.flattening import leaf_names

PAIR = ("inputs", "labels")
LABEL_NAMES = ("label", "labels", "target", "targets", "y")
NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}

Leaves = tuple[np.ndarray, ...]
Signature = tuple[tuple[tuple[int, ...], str], ...]


class BatchStructure:
    """The tree structure of batches: the first batch sets it, and every further one must have it.

    `samples`: the rules of `tpuflow.train` hold: every array has a leading axis of samples, a list at the top counts as a tuple (loaders
    make lists), and the parts of a pair are named inputs and labels.
    """

    def __init__(self, *, samples: bool = False) -> None:
        self.tree: Any = None
        self.names: tuple[str, ...] = ()
        self._samples = samples

    def leaves(self, batch: Any, what: str = "data") -> Leaves:
        """The arrays in flattening order; the first batch fixes the structure.

        Raises:
          DataError: the structure differs, there is no array in it, or a leaf is not an array of numbers.
        """
        batch = as_batch(batch) if self._samples else batch
        parts, tree = jax.tree.flatten(batch)
        if self.tree is None:
            if not parts:
                raise DataError(f"{what}: a batch must hold at least one array, got {tree}.")
            self.tree, self.names = tree, names_of(batch, pair=self._samples)
        if tree != self.tree:
            raise DataError(
                f"{what}: every batch must have the structure of the first, {self.tree}; got {tree}. Make all batches alike, or run a loop "
                "for each kind."
            )
        leaves = tuple(to_array(part, f"{what}: {name or 'batch'}") for part, name in zip(parts, self.names, strict=True))
        for name, part, leaf in zip(self.names, parts, leaves, strict=True):
            if self._samples and leaf.ndim > 0 and not hasattr(part, "shape"):
                raise DataError(f"{what}: {name or 'a batch'} is {a_thing(part)}, not an array of samples. {_ALIKE}")
            if self._samples and leaf.ndim == 0:
                raise DataError(
                    f"{what}: {name or 'a batch'} must have a leading batch axis, got a single number. If these are samples, or lists "
                    "of numbers, make arrays of all of them, with a leading axis of samples: np.stack(samples)."
                )
        return leaves

    def batch(self, leaves: Sequence[Any]) -> Any:
        """The batch with these leaves: the inverse of `leaves`."""
        return jax.tree.unflatten(self.tree, leaves)


def as_batch(batch: Any) -> Any:
    """The batch, with a list at its top as a tuple, since loaders make lists."""
    return tuple(batch) if isinstance(batch, list) else batch


def names_of(batch: Any, *, pair: bool) -> tuple[str, ...]:
    """The names of a batch's arrays; `pair`: the parts of a pair are called inputs and labels."""
    if pair and isinstance(batch, tuple) and len(batch) == len(PAIR):
        return tuple("/".join(filter(None, (part, name))) for part, tree in zip(PAIR, batch, strict=True) for name in leaf_names(tree))
    return leaf_names(batch)


def is_data_of_arrays(data: Any) -> bool:
    """Whether training data are one tree of arrays that hold all samples, rather than a sequence of batches. Tuples and mappings of arrays
    are; of lists only one of two arrays is."""
    if isinstance(data, list):
        return len(data) == len(PAIR) and all(map(_is_array, data))
    return is_tree_of_arrays(data)


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
        instead = _ALIKE if isinstance(error, ValueError) else _READABLE
        raise DataError(f"{what}: cannot be made an array: {one_line(error).rstrip('!')}. {instead}") from error
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise DataError(f"{what}: elements must be numbers, got {array.dtype}. {_NUMBERS.get(array.dtype.kind, _ALIKE)}")
    narrow = NARROW.get(array.dtype.name)
    return array if narrow is None else array.astype(narrow)


def _torch_to_numpy(value: Any) -> Any:
    """A PyTorch tensor as a NumPy array, bfloat16 included; PyTorch is only looked for where the user has imported it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().cpu()
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


_ALIKE = "All samples must have one shape: pad, crop, or resize them, then np.stack(samples)."
_READABLE = "Give what np.asarray takes: arrays, nested lists of numbers, tensors whose memory the host can read."
_NUMBERS = {
    "U": "Number the words: np.unique(words, return_inverse=True)[1].",
    "S": "Number the words: np.unique(words, return_inverse=True)[1].",
    "c": "Give the real and the imaginary part as two channels: np.stack([x.real, x.imag], axis=-1).",
    "M": "Give times as numbers: (x - x[0]) / np.timedelta64(1, 's').",
    "m": "Give durations as numbers: x / np.timedelta64(1, 's').",
}
"""What to do with elements that are no numbers, by NumPy's kind of type; objects are samples of unequal shapes."""


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
