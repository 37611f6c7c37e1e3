"""Shardings that `tpuflow.jit` is given for its arguments and results, or that arguments bring along, a leaf at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tpuflow.errors import ConfigError, shown
from tpuflow.jaxprs.compat import mesh_around
from tpuflow.jaxprs.shardings import cuts, is_explicit
from tpuflow.lower.operations.memories import HOST_KINDS

Leaf = NamedSharding | None
_AS_IT_COMES = "as it comes"


@dataclass(frozen=True, slots=True)
class Shardings:
    """What `in_shardings` and `out_shardings` say, which are trees of shardings, or beginnings of such trees."""

    inputs: Any = None
    outputs: Any = None

    def __bool__(self) -> bool:
        return self.inputs is not None or self.outputs is not None

    def __post_init__(self) -> None:
        for option, given in (("in_shardings", self.inputs), ("out_shardings", self.outputs)):
            for leaf in jax.tree.leaves(given, is_leaf=_is_leaf):
                _check_kind(option, leaf)

    def of_arguments(self, tree: Any, names: Sequence[str], types: Sequence[Any], own: Sequence[Leaf]) -> tuple[Leaf, ...]:
        """Of every leaf of the positional arguments as `in_shardings` says, of the others, and where it says nothing, as they bring along.

        Raises:
          ConfigError: `in_shardings` does not fit the arguments.
        """
        given = tuple(_named("in_shardings", leaf) for leaf in self._given_arguments(tree))
        _check_all("in_shardings", given, names, types)
        return tuple(one or other for one, other in zip(given, own, strict=True))

    def arguments_at_host(self, tree: Any, own: Sequence[bool]) -> tuple[bool, ...]:
        """Of every leaf of the arguments whether it is in the host's memory: as `in_shardings` says, else as it is."""
        given = self._given_arguments(tree)
        return tuple(other if leaf is None else in_host_memory(leaf) for leaf, other in zip(given, own, strict=True))

    def results_at_host(self, tree: Any) -> tuple[bool, ...]:
        """Of every leaf of the result whether `out_shardings` puts it into the host's memory."""
        return tuple(map(in_host_memory, _spread("out_shardings", self.outputs, tree)))

    def _given_arguments(self, tree: Any) -> tuple[Any, ...]:
        arguments, others = tree.children()
        return (*_spread("in_shardings", self.inputs, arguments), *(None,) * others.num_leaves)

    def of_results(self, tree: Any, types: Sequence[Any]) -> tuple[Leaf, ...]:
        """Of every leaf of the result.

        Raises:
          ConfigError: `out_shardings` does not fit the result.
        """
        given = tuple(_named("out_shardings", leaf) for leaf in _spread("out_shardings", self.outputs, tree))
        paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
        _check_all("out_shardings", given, [f"result{jax.tree_util.keystr(path)}" for path, _ in paths], types)
        return given


def brought(sharding: Any) -> Leaf:
    """The sharding of an array, if it is one over several devices that says something."""
    if type(sharding) is not NamedSharding or sharding.mesh.size == 1:
        return None
    return sharding if cuts(sharding) or is_explicit(sharding) else None


def in_host_memory(sharding: Any) -> bool:
    """Whether a sharding is in a kind of the host's memory."""
    return getattr(sharding, "memory_kind", None) in HOST_KINDS


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | Sharding)


def _check_kind(option: str, leaf: Any) -> None:
    if not (leaf is None or isinstance(leaf, NamedSharding | PartitionSpec | SingleDeviceSharding)):
        raise ConfigError(
            f"tpuflow.jit: {option}: expected jax.sharding.NamedShardings (or PartitionSpecs within jax.set_mesh), got {shown(leaf)}. Name "
            "mesh and axes: NamedSharding(jax.sharding.AbstractMesh((2, 4), ('data', 'model')), PartitionSpec('data'))."
        )


def _spread(option: str, given: Any, tree: Any) -> tuple[Any, ...]:
    """For every leaf of a tree what is given for it, or for a subtree that it is in."""
    if given is None:
        return (None,) * tree.num_leaves
    marked = jax.tree.map(lambda leaf: _AS_IT_COMES if leaf is None else leaf, given, is_leaf=_is_leaf)  # None has no leaves
    try:
        leaves = jax.tree.leaves(jax.tree.broadcast(marked, jax.tree.unflatten(tree, range(tree.num_leaves)), is_leaf=_is_leaf))
    except ValueError as error:
        raise ConfigError(
            f"tpuflow.jit: {option}: {shown(given)} does not fit the structure {tree}. Give one sharding for all, one for "
            "each (None: as it comes), or one for each part of them."
        ) from error
    return tuple(None if leaf == _AS_IT_COMES else leaf for leaf in leaves)


def _named(option: str, leaf: Any) -> Leaf:
    """A sharding with its mesh, which for a `PartitionSpec` is the one around; None for one that means any device."""
    if not isinstance(leaf, PartitionSpec):
        return leaf if isinstance(leaf, NamedSharding) and leaf.mesh.size > 1 else None
    mesh = mesh_around()
    if mesh.empty:
        raise ConfigError(
            f"tpuflow.jit: {option}: {leaf} names axes of a mesh, and none is set where the function is called. Call it within "
            "jax.set_mesh(mesh), or give NamedSharding(mesh, spec)."
        )
    return NamedSharding(mesh, leaf)


def _check_all(option: str, given: Sequence[Leaf], names: Sequence[str], types: Sequence[Any]) -> None:
    for sharding, name, type_ in zip(given, names, types, strict=True):
        if sharding is not None:
            check_fits(f"tpuflow.jit: {option}: {name} {type_.dtype}{list(type_.shape)}", sharding, tuple(type_.shape))


def check_fits(where: str, sharding: NamedSharding, shape: Sequence[int]) -> None:
    """Refuse a sharding that does not cut an array of this shape into equal pieces; `where` begins the message.

    Raises:
      ConfigError: it names more axes than there are, or one does not divide.
    """
    if len(sharding.spec) > len(shape):
        raise ConfigError(
            f"{where} has {len(shape)} axes, and {sharding.spec} is for {len(sharding.spec)}. Name one mesh axis, or None, each."
        )
    for d, entry in enumerate(sharding.spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        chips = math.prod(sharding.mesh.shape[name] for name in names if isinstance(name, str))
        if shape[d] % chips:
            raise ConfigError(
                f"{where}: axis {d} of {shape[d]} elements is cut over {chips} chips ({', '.join(map(str, names))}), and does not divide. "
                "Cut another axis, leave it whole (None), or fill it up."
            )
