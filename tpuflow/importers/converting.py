"""Conversion between PyTorch state dicts and Flax variables, by the mapping of `tpuflow/importers/places.py`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tpuflow.errors import WeightsError
from tpuflow.importers.places import WITHOUT_COUNTERPART, Place, Source, rows, sources, spellings


def flax_params(
    state_dict: Mapping[str, np.ndarray],
    params_like: Mapping[str, Any],
    mapping: Mapping[str, Place] | None = None,
    *,
    skip_mismatched: bool = False,
) -> dict[str, Any]:
    """Convert a PyTorch state dict to the tree, shapes and floating types of `params_like`.

    `params_like`: Flax variables ({"params": ..., "batch_stats": ...}) or a bare tree of parameters; arrays or shapes (`jax.eval_shape`).
    `mapping`: PyTorch module name -> Flax module path with "/" between its parts, e.g. {"features.0": "Conv_0", "fc": "head/Dense_0"}, and
    what else `tpuflow/importers/places.py` describes; without it the names must be equal but for "." and "/". Raises WeightsError naming
    every tensor that is missing, left over or of the wrong shape; with `skip_mismatched`, `params_like` keeps its own arrays there, and a
    warning names them.
    """
    converter = _Converter(dict(state_dict), mapping, skip_mismatched=skip_mismatched)
    tree = converter.tree(params_like, ())
    converter.finish()
    return tree


def state_dict(variables: Mapping[str, Any], mapping: Mapping[str, Place] | None = None) -> dict[str, np.ndarray]:
    """Convert Flax variables back to the state dict that `flax_params` makes the same variables from with this mapping.

    Tensors are named in full, a tied one once; `num_batches_tracked` and other tensors without a counterpart are not among them.
    """
    table = rows(mapping)
    found: dict[str, np.ndarray] = {}
    for path, leaf in _leaves(variables, ()):
        source, array = sources(path, table)[0], np.asarray(leaf)
        pieces = array.reshape(-1, *array.shape[source.stacked :])  # the stacked axes as one
        for name, piece in zip(source.names(array.shape), pieces, strict=True):
            found[next(spellings(name))] = np.ascontiguousarray(source.to_torch(piece))
    return found


class _Converter:
    """One pass over the Flax tree; problems are gathered so that one error can name them all."""

    def __init__(self, state_dict: dict[str, np.ndarray], mapping: Mapping[str, Place] | None, *, skip_mismatched: bool):
        self._state_dict = state_dict
        self._rows = rows(mapping)
        self._skip = skip_mismatched
        self._used: set[str] = set()
        self._second: set[str | None] = set()  # rows that give other names to tensors
        self._problems: list[str] = []

    def tree(self, like: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        return {
            name: self.tree(child, (*path, name)) if isinstance(child, Mapping) else self._leaf(child, (*path, name))
            for name, child in like.items()
        }

    def finish(self) -> None:
        left_over = [name for name in self._state_dict if name not in self._used and not self._without_counterpart(name)]
        unknown = self._unknown_rows()
        if unknown:
            modules = ", ".join(sorted({name.rpartition(".")[0] for name in left_over})) or "no others than those it names beside"
            self._problems.append(f"the mapping names {', '.join(unknown)}, but the state dict has {modules}")
        self._problems += [f"{name} {self._state_dict[name].shape} has no place in the Flax tree" for name in left_over]
        if self._problems and self._skip and not unknown:
            warnings.warn("not taken from the state dict:\n  " + "\n  ".join(self._problems), RuntimeWarning, stacklevel=3)
        elif self._problems:
            raise WeightsError("the state dict does not fit the Flax parameters:\n  " + "\n  ".join(self._problems))

    def _unknown_rows(self) -> list[str]:
        """Rows of the mapping that match no tensor of the state dict."""
        asking = [row for row in self._rows if row.place is not None and row.name not in self._second]
        return [row.name for row in asking if not any(row.names(name) for name in self._state_dict)]

    def _without_counterpart(self, name: str) -> bool:
        return name.rpartition(".")[2] in WITHOUT_COUNTERPART or any(row.place is None and row.names(name) for row in self._rows)

    def _leaf(self, like: Any, path: tuple[str, ...]) -> Any:
        first, *others = sources(path, self._rows)
        found = self._found(first, like, path)
        for other in others:
            self._tied(other, first, tuple(like.shape))
        if found is None and self._skip and not hasattr(like, "__array__"):
            raise WeightsError(f"{'/'.join(path)} {tuple(like.shape)} is not in the state dict, and only its shape is given: give arrays")
        return like if found is None else found

    def _found(self, source: Source, like: Any, path: tuple[str, ...]) -> Any:
        """The array for a leaf, or None after a problem with any of its tensors."""
        shape = tuple(like.shape)
        pieces = [self._piece(source, name, shape, path) for name in source.names(shape)]
        if any(piece is None for piece in pieces):
            return None
        whole = np.stack(pieces).reshape(shape) if source.stacked else pieces[0]
        return np.ascontiguousarray(whole, dtype=like.dtype)

    def _piece(self, source: Source, wanted: str, shape: tuple[int, ...], path: tuple[str, ...]) -> Any:
        name = self._take(wanted)
        if name is None:
            return self._problem(f"{'/'.join(path)} {shape} needs {next(spellings(wanted))}, which is missing")
        tensor, own = self._state_dict[name], shape[source.stacked :]
        try:
            found = source.to_flax(tensor)
        except ValueError as error:
            return self._problem(f"{name} {tensor.shape}: {error}")
        if found.shape != own:
            part = " and that of one layer is " + str(own) if source.stacked else ""
            return self._problem(f"{name} {tensor.shape} becomes {found.shape}, but {'/'.join(path)} is {shape}{part}")
        if not _is_floating(tensor):
            return self._problem(f"{name} is {tensor.dtype}, expected floating-point weights (quantised weights are not converted)")
        return found

    def _tied(self, other: Source, first: Source, shape: tuple[int, ...]) -> None:
        """Check tied tensors, stored under another name as well: they may be missing, but must be equal."""
        self._second.add(other.row)
        for one, two in zip(first.names(shape), other.names(shape), strict=True):
            name, tied = self._take(one), self._take(two)
            if name and tied and not np.array_equal(self._state_dict[name], self._state_dict[tied]):
                self._problem(f"{tied} is not equal to {name}, which is the same parameter of this model (tied weights)")

    def _take(self, wanted: str) -> str | None:
        """The name under which the state dict has a tensor."""
        name = next((name for name in spellings(wanted) if name in self._state_dict), None)
        if name is not None:
            self._used.add(name)
        return name

    def _problem(self, text: str) -> None:
        self._problems.append(text)


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, child in tree.items():
        if isinstance(child, Mapping):
            yield from _leaves(child, (*path, name))
        else:
            yield (*path, name), child


def _is_floating(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16
