"""A training that is put on a mesh by rules for its parameters: XLA's partitioner does the rest (`tpuflow.jaxprs.partitioner`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tpuflow.errors import ConfigError
from tpuflow.jaxprs.shardings import axes_in
from tpuflow.stages.shardings import check_fits
from tpuflow.training.groups import parameter_names, some
from tpuflow.training.parallel import AXES, Loss, OneChip, Select, Step
from tpuflow.training.state import TrainState

BATCH_AXIS = AXES[0]
"""The axis of a mesh that batches are cut over."""

Rules = Mapping[str, PartitionSpec]
"""Patterns of parameter paths, as `tpuflow.param_groups` takes them, and the mesh axes that the dimensions of parameters are cut over."""


@dataclass(frozen=True, slots=True)
class Partitioned(OneChip):
    """The step of one chip with the whole batch, partitioned: parameters lie as the rules say, or whole; batches are cut over the axis
    `BATCH_AXIS` of the mesh, if it has one. What follows from that (gradients, the optimizer's state, activations) XLA finds out.

    `lies`: how each parameter lies, a tree like the parameters.
    """

    mesh: AbstractMesh
    rules: Rules
    lies: Any = None

    def of_state(self, state: TrainState, loss: Loss) -> Partitioned:
        """The same for states of these shapes.

        Raises:
          ConfigError: a rule matches no parameter, or does not fit one.
        """
        return replace(self, lies=_lies(state.params, self.rules, self.mesh))

    def over(self, step: Step, state: Any, batch: Any) -> Any:
        """(new state, figures) of a step of the whole state and batch, which lie on the mesh before it and after it."""
        new, figures = step(self._placed(state), self._cut(batch))
        return self._placed(new), figures

    def evaluated(self, step: Step, state: Any, batch: Any, select: Select, *, joined: bool) -> Any:
        """What a step gives of what evaluations need of the state, and the whole batch, which lie on the mesh."""
        return step(self._placed(state), self._cut(batch))

    def _placed(self, state: TrainState) -> TrainState:
        ema = state.ema
        if ema is not None:
            ema = ema._replace(params=self._as_said(ema.params))
        return state._replace(params=self._as_said(state.params), ema=ema)

    def _as_said(self, params: Any) -> Any:
        return jax.tree.map(lax.with_sharding_constraint, params, self.lies)

    def _cut(self, batch: Any) -> Any:
        """A batch in pieces; a last one that does not divide, whole."""
        chips, leaves = self.mesh.shape.get(BATCH_AXIS, 1), jax.tree.leaves(batch)
        if chips == 1 or any(leaf.shape[0] % chips for leaf in leaves if jnp.ndim(leaf)):
            return batch
        pieces = NamedSharding(self.mesh, PartitionSpec(BATCH_AXIS))
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, pieces) if jnp.ndim(leaf) else leaf, batch)


def check_rules(name: str, value: Any) -> None:
    """Refuse what is no mapping from patterns to `PartitionSpec`s.

    Raises:
      ConfigError: saying what is expected.
    """
    good = isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(spec, PartitionSpec) for k, spec in value.items())
    if not good or not value:
        raise ConfigError(
            f"{name}: expected patterns of parameter paths with jax.sharding.PartitionSpecs, such as {{'*/kernel': PartitionSpec(None, "
            f"'model')}}, got {value!r}."
        )


def _lies(params: Any, rules: Rules, mesh: AbstractMesh) -> Any:
    names, leaves = parameter_names(params), jax.tree.leaves(params)
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"sharding: the pattern {pattern!r} matches no parameter; there are {some(names)}.")
    specs = [next((spec for pattern, spec in rules.items() if fnmatchcase(name, pattern)), PartitionSpec()) for name in names]
    rows = zip(names, leaves, specs, strict=True)
    lies = [_sharding(f"sharding: parameter {name} {x.dtype}{list(x.shape)}", x.shape, spec, mesh) for name, x, spec in rows]
    return jax.tree.unflatten(jax.tree.structure(params), lies)


def _sharding(where: str, shape: Sequence[int], spec: PartitionSpec, mesh: AbstractMesh) -> NamedSharding:
    for axis in axes_in(spec):
        if axis not in mesh.shape:
            raise ConfigError(f"{where}: {spec} names the axis {axis!r}, and the mesh has {', '.join(map(repr, mesh.shape))}.")
    sharding = NamedSharding(mesh, spec)
    check_fits(where, sharding, shape)
    return sharding


def partitioned(mesh: Mapping[str, int], rules: Rules, samples: int) -> Partitioned:
    """How a training is put on a mesh by rules, of batches of so many samples.

    Raises:
      ConfigError: the batches do not divide over the mesh.
    """
    if samples % mesh.get(BATCH_AXIS, 1):
        raise ConfigError(
            f"mesh: a batch of {samples} samples does not divide over the {mesh[BATCH_AXIS]} chips of its axis {BATCH_AXIS!r}; give a "
            f"batch_size that is a multiple of {mesh[BATCH_AXIS]}."
        )
    return Partitioned(AbstractMesh(tuple(mesh.values()), tuple(mesh)), dict(rules))
