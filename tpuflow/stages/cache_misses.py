"""Why a function is traced again: what a call has otherwise than the most alike of those before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from tpuflow.jaxprs.compat import changed_settings

logger = logging.getLogger("tpuflow.jit")
_PARTS = ("the structure of its arguments", "the static arguments")
Key = tuple[Any, tuple[Any, ...], tuple[Any, ...], Any]
"""Structure, static arguments, signatures of the leaves, JAX's settings where it is called (`traced_under`)."""


def explain(name: str, key: Key, before: Iterable[Key], leaf_names: Callable[[Any, Any], Sequence[str]]) -> None:
    """Log what is new about a call, if `jax_explain_cache_misses` is set.

    leaf_names: the names of the leaves of a structure with static arguments.
    """
    if jax.config.jax_explain_cache_misses:  # type: ignore[attr-defined]
        logger.warning("%s", explanation(name, key, list(before), leaf_names))


def explanation(name: str, key: Key, before: Sequence[Key], leaf_names: Callable[[Any, Any], Sequence[str]]) -> str:
    """A sentence or two, for people."""
    if not before:
        return f"{name} is traced for the first time."
    nearest = min(before, key=lambda other: len(_differences(key, other, leaf_names)))
    return f"{name} is traced again ({len(before)} before). New is {'; '.join(_differences(key, nearest, leaf_names))}."


def _differences(key: Key, other: Key, leaf_names: Callable[[Any, Any], Sequence[str]]) -> list[str]:
    """What differs, one entry each; the leaves of another structure are not compared."""
    found = [f"{what}: {new}, was {old}" for what, new, old in zip(_PARTS, key[:2], other[:2], strict=True) if new != old]
    if key[0] == other[0]:
        leaves = zip(leaf_names(key[0], key[1]), key[2], other[2], strict=True)
        found += [f"{leaf}: {_described(new)}, was {_described(old)}" for leaf, new, old in leaves if new != old]
    return found + ([] if key[3] == other[3] else [f"around the call, {' and '.join(changed_settings(key[3], other[3]))}"])


def _described(signature: tuple[Any, Any, bool, bool, Any]) -> str:
    """A shape, a type, whether the type is weak, whether it is in the host's memory, and how the array is cut over devices:
    "float32[3] (weak)"."""
    shape, dtype, weak, is_there, sharding = signature
    cut = "" if sharding is None else f" cut as {sharding.spec} over {dict(sharding.mesh.shape)}"
    return f"{dtype}[{','.join(map(str, shape))}]{' (weak)' * weak}{' at the host' * is_there}{cut}"
