"""The strategy for a mesh by rules for the parameters' shardings; XLA's partitioner does the rest (`tpuflow.jaxprs.partitioner`)."""

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
from tpuflow.training.state import TrainState
from tpuflow.training.strategies import AXES, Loss, OneChip, Select, Step

BATCH_AXIS = AXES[0]
"""The axis of a mesh that batches are cut over."""

Rules = Mapping[str, PartitionSpec]
"""Pattern of parameter paths, as for `tpuflow.param_groups` -> the mesh axes that the dimensions of these parameters are sharded over."""


@dataclass(frozen=True, slots=True)
class Partitioned(OneChip):
    """The step of one chip with the whole batch, annotated with shardings: of the parameters by the rules (replicated without one), of
    batches over the axis `BATCH_AXIS` of the mesh, if it has one. XLA propagates them to gradients, optimizer state and activations.

    `shardings`: that of each parameter, a tree like the parameters.
    """

    mesh: AbstractMesh
    rules: Rules
    shardings: Any = None

    def for_state(self, state: TrainState, loss: Loss) -> Partitioned:
        """The strategy for states of these shapes.

        Raises:
          ConfigError: a rule matches no parameter, or does not fit one.
        """
        return replace(self, shardings=_shardings(state.params, self.rules, self.mesh))

    def run_step(self, step: Step, state: Any, batch: Any) -> Any:
        """(new state, figures) of a step, with sharding constraints on the state before and after it and on the batch."""
        new, figures = step(self._constrain_state(state), self._constrain_batch(batch))
        return self._constrain_state(new), figures

    def run_eval_step(self, step: Step, state: Any, batch: Any, select: Select, *, joined: bool) -> Any:
        """The results of an evaluation step, with sharding constraints on the state and the batch."""
        return step(self._constrain_state(state), self._constrain_batch(batch))

    def _constrain_state(self, state: TrainState) -> TrainState:
        ema = state.ema
        if ema is not None:
            ema = ema._replace(params=self._constrain_params(ema.params))
        return state._replace(params=self._constrain_params(state.params), ema=ema)

    def _constrain_params(self, params: Any) -> Any:
        return jax.tree.map(lax.with_sharding_constraint, params, self.shardings)

    def _constrain_batch(self, batch: Any) -> Any:
        """A batch cut over `BATCH_AXIS`; a last batch that does not divide is replicated."""
        chips, leaves = self.mesh.shape.get(BATCH_AXIS, 1), jax.tree.leaves(batch)
        if chips == 1 or any(leaf.shape[0] % chips for leaf in leaves if jnp.ndim(leaf)):
            return batch
        pieces = NamedSharding(self.mesh, PartitionSpec(BATCH_AXIS))
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, pieces) if jnp.ndim(leaf) else leaf, batch)


def check_rules(name: str, value: Any) -> None:
    """Check the option `sharding` where it is not the name of one.

    Raises:
      ConfigError: it is no mapping from patterns to `PartitionSpec`s.
    """
    good = isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(spec, PartitionSpec) for k, spec in value.items())
    if not good or not value:
        raise ConfigError(
            f"{name}: expected patterns of parameter paths with jax.sharding.PartitionSpecs, such as {{'*/kernel': PartitionSpec(None, "
            f"'model')}}, got {value!r}."
        )


def _shardings(params: Any, rules: Rules, mesh: AbstractMesh) -> Any:
    names, leaves = parameter_names(params), jax.tree.leaves(params)
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"sharding: the pattern {pattern!r} matches no parameter; there are {some(names)}.")
    specs = [next((spec for pattern, spec in rules.items() if fnmatchcase(name, pattern)), PartitionSpec()) for name in names]
    rows = zip(names, leaves, specs, strict=True)
    shardings = [_sharding(f"sharding: parameter {name} {x.dtype}{list(x.shape)}", x.shape, spec, mesh) for name, x, spec in rows]
    return jax.tree.unflatten(jax.tree.structure(params), shardings)


def _sharding(where: str, shape: Sequence[int], spec: PartitionSpec, mesh: AbstractMesh) -> NamedSharding:
    for axis in axes_in(spec):
        if axis not in mesh.shape:
            raise ConfigError(f"{where}: {spec} names the axis {axis!r}, and the mesh has {', '.join(map(repr, mesh.shape))}.")
    sharding = NamedSharding(mesh, spec)
    check_fits(where, sharding, shape)
    return sharding


def partitioned(mesh: Mapping[str, int], rules: Rules, samples: int) -> Partitioned:
    """The strategy for a mesh by rules; `samples` is the batch size.

    Raises:
      ConfigError: the batches do not divide over the mesh.
    """
    if samples % mesh.get(BATCH_AXIS, 1):
        raise ConfigError(
            f"mesh: a batch of {samples} samples does not divide over the {mesh[BATCH_AXIS]} chips of its axis {BATCH_AXIS!r}; give a "
            f"batch_size that is a multiple of {mesh[BATCH_AXIS]}."
        )
    return Partitioned(AbstractMesh(tuple(mesh.values()), tuple(mesh)), dict(rules))
