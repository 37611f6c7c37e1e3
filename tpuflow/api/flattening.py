"""Trees of arrays as the flat lists that the device takes: random keys travel as their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuflow.lower.frontend.jax_compat import KEY_IMPLEMENTATION, is_key


def to_device(leaves: Sequence[Any]) -> list[Any]:
    """Arrays as the device has them: words for keys, other leaves as they are."""
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]


def from_device(arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """The device's arrays as values of the given types: words become keys again."""
    return [_as_key(a) if is_key(v) else a for a, v in zip(arrays, avals, strict=True)]


def _as_key(words: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(words), impl=KEY_IMPLEMENTATION)


def leaf_names(tree: Any) -> tuple[str, ...]:
    """A readable name for every leaf, in flattening order: "params/Dense_0/kernel"."""
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree))
