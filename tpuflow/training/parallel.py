"""A training step over several chips: each takes a piece of the batch, and all make the same update with the mean of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from tpuflow import amp
from tpuflow.errors import ConfigError

SHARDINGS = ("ddp",)
"""How a training is put on a mesh: "ddp", data parallel, parameters and optimizer state whole on every chip."""


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Data parallel over one mesh axis of so many chips."""

    axis: str
    chips: int

    def over(self, step: Callable[[Any, Any], Any], state: Any, batch: Any) -> Any:
        """(new state, figures) of a step of a piece of the batch, [B, ...] -> [B / chips, ...]; every chip has the whole of the state.

        A batch that does not divide, such as the last one of an epoch may be, every chip takes whole.
        """
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
        divides = all(n % self.chips == 0 for n in lengths)
        pieces = jax.tree.map(lambda leaf: PartitionSpec(self.axis) if divides and jnp.ndim(leaf) else PartitionSpec(), batch)
        mesh, whole = AbstractMesh((self.chips,), (self.axis,)), PartitionSpec()
        return jax.shard_map(step, mesh=mesh, in_specs=(whole, pieces), out_specs=whole, check_vma=False)(state, batch)

    def mean(self, tree: Any) -> Any:
        """Floating arrays as their means over the chips, divided before they are added so that no sum overflows; others as they are."""
        return jax.tree.map(lambda x: lax.psum(x / jnp.asarray(self.chips, x.dtype), self.axis) if amp.is_float(x) else x, tree)

    def own_key(self, key: Any) -> Any:
        """A chip's own random key."""
        return jax.random.fold_in(key, lax.axis_index(self.axis))


def get_parallel(mesh: Mapping[str, int] | None, sharding: str, samples: int) -> DataParallel | None:
    """What a training's options `mesh` and `sharding` say of batches of so many samples; None for one chip.

    Raises:
      ConfigError: the mesh is none, or the batches do not divide over it.
    """
    if mesh is None:
        return None
    sizes = dict(mesh)
    if len(sizes) != 1:
        raise ConfigError(f"mesh: {sharding!r} is over one axis, got {sizes}; give one, such as {{'data': 4}}.")
    ((axis, chips),) = sizes.items()
    if samples % chips:
        raise ConfigError(
            f"mesh: a batch of {samples} samples does not divide over {chips} chips; give a batch_size that is a multiple of {chips}."
        )
    return DataParallel(axis, chips) if chips > 1 else None


def check_mesh(name: str, value: Any) -> None:
    """Refuse what names no axes with sizes.

    Raises:
      ConfigError: saying what is expected.
    """
    good = isinstance(value, Mapping) and value and all(isinstance(n, str) and n for n in value)
    if not good or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value.values()):
        raise ConfigError(f"{name}: expected axes with how many chips they have, such as {{'data': 4}}, got {value!r}.")
