"""Patterns of parameter paths: which parameters are trained, and with which optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpuflow.errors import ConfigError
from tpuflow.stages.flattening import leaf_names

SHOWN = 6


def param_groups(groups: Mapping[str, optax.GradientTransformation | None]) -> optax.GradientTransformationExtraArgs:
    """An optimizer that updates each group of parameters by an optimizer of its own, with schedules of its own.

        optimizer = tpuflow.param_groups({"*/bias": optax.sgd(rate), "backbone/*": None, "*": optax.adamw(rate, weight_decay=1e-2)})

    groups: patterns of parameter paths such as "Dense_0/kernel", with * and ? as in file names (* also matches "/"), and the optimizer of
      those that match; the first pattern that matches counts. None: they stay as they are (`frozen=` of `tpuflow.train` also saves the
      work of their gradients).

    Raises:
      ConfigError: when it is initialised: a parameter matches no pattern, or a pattern no parameter.
    """
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"param_groups: expected a mapping from patterns of parameter paths to optimizers, got {groups!r}.")
    rows: dict[Hashable, optax.GradientTransformation] = {
        str(i): optax.set_to_zero() if tx is None else tx for i, tx in enumerate(groups.values())
    }

    def labels(params: Any) -> Any:
        names = parameter_names(params)
        found = [next((i for i, pattern in enumerate(groups) if fnmatchcase(name, pattern)), None) for name in names]
        without = [name for name, i in zip(names, found, strict=True) if i is None]
        if without:
            raise ConfigError(f"param_groups: no pattern matches {some(without)}; add a last one, '*'.")
        for i, pattern in enumerate(groups):
            if i not in found:
                raise ConfigError(f"param_groups: the pattern {pattern!r} gets no parameter; there are {some(names)}.")
        return jax.tree.unflatten(jax.tree.structure(params), [str(i) for i in found])

    return optax.multi_transform(rows, labels)


def trained_mask(params: Any, frozen: Sequence[str]) -> Any:
    """A tree of booleans like the parameters: false for those whose path matches one of the patterns.

    Raises:
      ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    names = parameter_names(params)
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"frozen: the pattern {pattern!r} matches no parameter; there are {some(names)}.")
    flags = [not any(fnmatchcase(name, pattern) for pattern in frozen) for name in names]
    if not any(flags):
        raise ConfigError(f"frozen: {', '.join(map(repr, frozen))} match every parameter, so there is nothing to train.")
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def check_trained(params: Any, frozen: Sequence[str]) -> None:
    """Check that every parameter that is trained can have a gradient.

    Raises:
      ConfigError: as `trained_mask`, or one is not of a floating-point type.
    """
    flags = jax.tree.leaves(trained_mask(params, frozen)) if frozen else [True] * len(jax.tree.leaves(params))
    for name, leaf, trained in zip(parameter_names(params), jax.tree.leaves(params), flags, strict=True):
        if trained and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ConfigError(
                f"the parameter {name} is of {leaf.dtype}, which has no gradient; leave it as it is with frozen=[{name!r}], or keep it in "
                "a collection of its own."
            )


def trained_part(params: Any, mask: Any) -> Any:
    """The tree with `optax.MaskedNode` in place of the parameters that are not trained."""
    return jax.tree.map(lambda leaf, trained: leaf if trained else optax.MaskedNode(), params, mask)


def with_rest(part: Any, params: Any) -> Any:
    """The inverse of `trained_part`: the tree with its masked nodes replaced by the leaves of `params`."""
    return jax.tree.map(lambda new, old: old if _is_gap(new) else new, part, params, is_leaf=_is_gap)


def parameter_names(params: Any) -> tuple[str, ...]:
    """The path of every parameter, such as "Dense_0/kernel"; nnx ends a path with the field "value" of its variables, which is left out."""
    return tuple(name.removesuffix("/value") for name in leaf_names(params))


def some(names: Sequence[str]) -> str:
    """The first few names in words."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _is_gap(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)
