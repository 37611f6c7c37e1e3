"""Trees of arrays as the flat lists that the device takes: random keys travel as their words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpuflow.jaxprs.compat import as_keys, is_key


def to_device(leaves: Sequence[Any]) -> list[Any]:
    """Arrays as the device has them: words for keys, other leaves as they are."""
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]


def from_device(arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """The device's arrays as values of the given types: words become keys again."""
    return [as_keys(a, v) if is_key(v) else a for a, v in zip(arrays, avals, strict=True)]


def leaf_names(tree: Any) -> tuple[str, ...]:
    """A readable name for every leaf, in flattening order: "params/Dense_0/kernel"."""
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def nested(tree: Any) -> dict[str, Any]:
    """Any tree of arrays as nested dicts of NumPy arrays, named by the keys, fields and indices on the way; keys become words.

    Empty arrays are left out: Orbax has no place for them.
    """
    found: dict[str, Any] = {}
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
    for path, leaf in zip(paths, to_device(leaves), strict=True):
        parts = [jax.tree_util.keystr((part,), simple=True) for part in path]
        place = found
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        array = np.asarray(leaf)
        if array.size:
            place[parts[-1]] = array
    return found


def flat(arrays: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts with names like "params/Dense_0/kernel"."""
    for name, child in arrays.items():
        if isinstance(child, Mapping):
            yield from flat(child, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", child
