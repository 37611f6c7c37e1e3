"""How a training step is put on one chip or several: what each holds of the state, and what they tell one another.

On several chips each takes a piece of the batch, and all make the same update with the mean of their gradients. "ddp": every chip holds
everything. The stages of ZeRO (Rajbhandari et al., 2020) cut over the chips what need not be whole: the optimizer's state (1), the
gradients (2), the parameters (3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from tpuflow import amp
from tpuflow.errors import ConfigError
from tpuflow.jaxprs.compat import ClosedJaxpr
from tpuflow.training.layers import lending, on_whole, scanned
from tpuflow.training.shards import Axis, gathering_again, shareable
from tpuflow.training.shared_updates import on_shares
from tpuflow.training.state import TrainState

SHARDINGS: Mapping[str, int] = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""How a training is put on a mesh, by ZeRO's stages."""

AXES = ("data", "expert")
"""Axes that a mesh may have together: models whose layers have experts send samples over the second one."""

Step = Callable[[Any, Any], Any]
"""Of a state and a batch."""
Loss = Callable[[], ClosedJaxpr]
"""Traces the loss of a step, whose first inputs are the parameters."""
Select = Callable[[TrainState], TrainState]
"""What evaluations need of a state."""


@dataclass(frozen=True, slots=True)
class OneChip:
    """One chip holds everything, and has nobody to tell."""

    def of_state(self, state: TrainState, loss: Loss) -> OneChip:
        """The same for states of these shapes. loss: gives the jaxpr of a step's loss, whose first inputs are the parameters."""
        return self

    def placed(self, state: TrainState) -> TrainState:
        """A state as the device takes it; shapes do."""
        return state

    def gathered(self, state: TrainState) -> TrainState:
        """A state as one chip would have it, of what the device gives."""
        return state

    def over(self, step: Step, state: Any, batch: Any) -> Any:
        """(new state, figures) of a step of a state and a batch."""
        return step(state, batch)

    def evaluated(self, step: Step, state: Any, batch: Any, select: Select, *, joined: bool) -> Any:
        """What a step gives of what evaluations need of the state, which is what `select` takes of a whole one."""
        return step(state, batch)

    def mean(self, tree: Any) -> Any:
        """The means over the chips of floating arrays."""
        return tree

    def own_key(self, key: Any) -> Any:
        """A chip's own random key."""
        return key

    def places(self, params: Any) -> Any:
        """What gradients are taken by, of what a chip holds of the parameters: the same, or where their shares go."""
        return params

    def on_whole(self, function: Callable[[Any], Any], places: Any, params: Any) -> Any:
        """A function of whole parameters, of what a chip holds of them, and differentiable by `places`."""
        return function(places)

    def value_and_grad(self, loss: Callable[[Any], tuple[jax.Array, Any]], params: Any) -> tuple[tuple[jax.Array, Any], Any]:
        """((loss, others), gradients) of a loss of parameters, with others besides."""
        return jax.value_and_grad(loss, has_aux=True)(params)

    def reduced(self, grads: Any, opt_state: Any) -> Any:
        """Gradients as the optimizer takes them, of a chip's own."""
        return grads

    def update(
        self, optimizer: optax.GradientTransformationExtraArgs, grads: Any, opt_state: Any, params: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        """(updates, the optimizer's new state, new parameters)."""
        updates, new_state = optimizer.update(grads, opt_state, params, **extra)
        return updates, new_state, amp.when_updated(opt_state, new_state, lambda: optax.apply_updates(params, updates), params)


@dataclass(frozen=True, slots=True)
class DataParallel(OneChip):
    """Every chip of a mesh holds everything. `axis`: all axes of the mesh as one, over which batches are cut."""

    axis: Axis
    mesh: AbstractMesh

    def over(self, step: Step, state: Any, batch: Any) -> Any:
        """(new state, figures) of a step of a piece of the batch on each chip, [B, ...] -> [B / chips, ...]; they are the same on all.

        A batch that does not divide, such as the last one of an epoch may be, every chip takes whole.
        """
        own = self._state_specs()
        return self._mapped(step, state, batch, (own, PartitionSpec()), own, pieces=self.divides(batch))

    def evaluated(self, step: Step, state: Any, batch: Any, select: Select, *, joined: bool) -> Any:
        """What a step gives for a piece of the batch on each chip: the same on all, or if `joined`, arrays [B / chips, ...] which become
        whole ones; what has no axis of samples, every chip computes for the whole batch."""
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
        results = jax.tree.leaves(jax.eval_shape(step, self._whole_shapes(state, select), batch)) if joined else []
        pieces = self.divides(batch) and all(leaf.shape and leaf.shape[0] in lengths for leaf in results)
        result = PartitionSpec(self.axis.name) if joined and pieces else PartitionSpec()
        return self._mapped(self._of_whole(step, select), state, batch, result, self._eval_specs(select), pieces=pieces)

    def _mapped(self, step: Step, state: Any, batch: Any, results: Any, own: Any, *, pieces: bool) -> Any:
        piece = PartitionSpec(self.axis.name) if pieces else PartitionSpec()
        cuts = jax.tree.map(lambda leaf: piece if jnp.ndim(leaf) else PartitionSpec(), batch)
        return jax.shard_map(step, mesh=self.mesh, in_specs=(own, cuts), out_specs=results, check_vma=False)(state, batch)

    def divides(self, batch: Any) -> bool:
        """Whether every chip gets a piece of the batch."""
        return all(leaf.shape[0] % self.axis.chips == 0 for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf))

    def mean(self, tree: Any) -> Any:
        """Floating arrays as their means over the chips."""
        return self.axis.mean(tree)

    def own_key(self, key: Any) -> Any:
        """A chip's own random key."""
        return jax.random.fold_in(key, lax.axis_index(self.axis.name))

    def reduced(self, grads: Any, opt_state: Any) -> Any:
        """The means of all chips' gradients."""
        return self.axis.mean(grads)

    def _state_specs(self) -> Any:
        return PartitionSpec()

    def _eval_specs(self, select: Select) -> Any:
        return PartitionSpec()

    def _whole_shapes(self, state: Any, select: Select) -> Any:
        return state

    def _of_whole(self, step: Step, select: Select) -> Step:
        return step


@dataclass(frozen=True, slots=True)
class Zero(DataParallel):
    """ZeRO: a chip holds its share of the optimizer's state, from stage 2 on of the gradients, in stage 3 of the parameters.

    `like`: the shapes and types of the state as one chip would have it. Between steps, gradients are held where they accumulate.
    """

    stage: int
    like: TrainState | None = None

    def of_state(self, state: TrainState, loss: Loss) -> Zero:
        """The same for states of these shapes. From stage 2 on the parameters that stack the layers of a scan are cut layer by layer."""
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        stacks = _stacks(jax.tree.leaves(like.params), scanned(loss())) if self.stage >= 2 else frozenset()
        return replace(self, like=like, axis=replace(self.axis, stacks=stacks))

    def placed(self, state: TrainState) -> TrainState:
        """All shares of an array one after the other, of which each chip takes its own."""
        shared = self.shared(self._like)
        place = jax.jit(lambda s: jax.tree.map(lambda x, cut: self.axis.in_row(x) if cut else x, s, shared))
        return jax.eval_shape(place, state) if _is_shapes(state) else place(state)

    def gathered(self, state: TrainState) -> TrainState:
        """Whole arrays, of all shares one after the other."""
        like = self._like
        whole = jax.jit(lambda s: jax.tree.map(lambda x, w, cut: self.axis.from_row(x, w.shape) if cut else x, s, like, self.shared(like)))
        return whole(state)

    def shared(self, like: TrainState) -> TrainState:
        """Which arrays of a state of these shapes chips hold shares of."""
        of_params = self.stage == 3
        state = jax.tree.map(shareable, like.opt_state)
        if self.stage == 1 and isinstance(state, amp.AccumulationState):
            state = state._replace(grads=jax.tree.map(lambda _: False, state.grads))
        ema = None if like.ema is None else jax.tree.map(lambda _: False, like.ema)
        if ema is not None and like.ema is not None and of_params:
            ema = ema._replace(params=jax.tree.map(shareable, like.ema.params))
        return TrainState(
            jax.tree.map(lambda leaf: of_params and shareable(leaf), like.params), jax.tree.map(lambda _: False, like.carried), state,
            jax.tree.map(lambda _: False, like.key), ema,
        )  # fmt: skip

    def places(self, params: Any) -> Any:
        """Stage 2: of whole parameters, shares without anything in them."""
        return jax.tree.map(lambda p: self._place(p) if shareable(p) else p, params) if self.stage == 2 else params

    def _place(self, param: Any) -> Any:
        return jnp.zeros(self.axis.share_shape(param.shape), param.dtype)

    def on_whole(self, function: Callable[[Any], Any], places: Any, params: Any) -> Any:
        """Stage 2: each gradient is scattered as it is made. Stage 3: all parameters are from everybody's shares besides, for as long as
        they are needed."""
        if self.stage == 1:
            return function(places)
        if self.stage == 2:
            return lending(self.axis, function, places, params, jax.tree.map(shareable, params))
        like = self._like
        return on_whole(self.axis, function, places, like.params, self.shared(like).params)

    def value_and_grad(self, loss: Callable[[Any], tuple[jax.Array, Any]], params: Any) -> tuple[tuple[jax.Array, Any], Any]:
        """Stage 3 gathers parameters once more for the backward pass."""
        return gathering_again(loss, params) if self.stage == 3 else DataParallel.value_and_grad(self, loss, params)

    def reduced(self, grads: Any, opt_state: Any) -> Any:
        """Shares of the means of all chips' gradients; in stage 1 whole ones where they accumulate. From stage 2 on they are that already,
        but for those of arrays that are whole everywhere."""
        if self.stage == 1 and isinstance(opt_state, amp.AccumulationState):
            return self.axis.mean(grads)
        are_shares = self.stage >= 2
        return jax.tree.map(lambda g, w: self._reduced(g, whole=not shareable(w), share=are_shares), grads, self._trained(grads))

    def _reduced(self, grad: Any, *, whole: bool, share: bool) -> Any:
        if whole:
            return self.axis.mean(grad)
        return grad if share else self.axis.mean_share(grad)

    def update(
        self, optimizer: optax.GradientTransformationExtraArgs, grads: Any, opt_state: Any, params: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Every chip updates its shares; up to stage 2, all parameters are gathered from them."""
        like, shared = self._trained(params), self.shared(self._like).opt_state
        own = params if self.stage == 3 else jax.tree.map(lambda p: self.axis.share(p) if shareable(p) else p, params)

        def whole_update(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
            return optimizer.update(grads, opt_state, params, value=value, grad=grads, value_fn=_no_loss, grad_fn=_no_loss)

        cut = jax.tree.map(shareable, like)
        accumulates = self.stage == 1 and isinstance(opt_state, amp.AccumulationState)
        given = jax.tree.map(lambda _: False, cut) if accumulates else cut
        updates, new_state = on_shares(
            self.axis, whole_update, (grads, opt_state, own, extra["value"]), (like, self._like.opt_state, like, extra["value"]),
            (given, shared, cut, False), lambda shapes: (jax.tree.map(shareable, shapes[0]), shared),
        )  # fmt: skip

        def new() -> Any:
            """Shares, or all parameters, gathered from everybody's."""
            updated = optax.apply_updates(own, updates)
            if self.stage == 3:
                return updated
            return jax.tree.map(lambda x, p: self.axis.whole(x, p.shape) if shareable(p) else x, updated, params)

        return updates, new_state, amp.when_updated(opt_state, new_state, new, params)

    def _trained(self, part: Any) -> Any:
        """The shapes, on one chip, of those parameters that a tree has."""
        return jax.tree.map(lambda x, w: x if _is_gap(x) else w, part, self._like.params, is_leaf=_is_gap)

    def _state_specs(self) -> Any:
        return self._specs(self._like)

    def _eval_specs(self, select: Select) -> Any:
        return self._specs(select(self._like))

    def _whole_shapes(self, state: Any, select: Select) -> Any:
        return select(self._like)

    def _of_whole(self, step: Step, select: Select) -> Step:
        """A step of shares, which gathers what evaluations need."""
        like = select(self._like)
        return lambda state, batch: on_whole(self.axis, lambda whole: step(whole, batch), state, like, self.shared(like))

    def _specs(self, like: TrainState) -> Any:
        return jax.tree.map(lambda w, cut: self.axis.spec(w.shape) if cut else PartitionSpec(), like, self.shared(like))

    @property
    def _like(self) -> TrainState:
        assert self.like is not None, "of_state has not been called"
        return self.like


Parallel = OneChip
"""Any of them."""
ONE_CHIP = OneChip()


def get_parallel(mesh: Mapping[str, int], sharding: str, samples: int) -> Parallel:
    """How a training is put on a mesh by one of `SHARDINGS`, of batches of so many samples.

    Raises:
      ConfigError: batches are not cut over all its axes, or do not divide over it.
    """
    sizes, chips = dict(mesh), math.prod(mesh.values())
    if len(sizes) > 1 and not set(sizes) <= set(AXES):
        raise ConfigError(
            f"mesh: expected one axis, or {' and '.join(AXES)}, which batches are cut over, got {sizes}; give for example {{'data': 4}}, "
            "or rules for the parameters: sharding={'*/kernel': PartitionSpec(None, 'model')}."
        )
    if samples % chips:
        raise ConfigError(
            f"mesh: a batch of {samples} samples does not divide over {chips} chips; give a batch_size that is a multiple of {chips}."
        )
    names, stage = tuple(sizes), SHARDINGS[sharding]
    axis, whole = Axis(names[0] if len(names) == 1 else names, chips), AbstractMesh(tuple(sizes.values()), names)
    return Zero(axis, whole, stage) if stage else DataParallel(axis, whole)


def check_mesh(name: str, value: Any) -> None:
    """Refuse what names no axes with sizes.

    Raises:
      ConfigError: saying what is expected.
    """
    good = isinstance(value, Mapping) and value and all(isinstance(n, str) and n for n in value)
    if not good or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value.values()):
        raise ConfigError(f"{name}: expected axes with how many chips they have, such as {{'data': 4}}, got {value!r}.")


def _no_loss(part: Any, *_: Any, grad_fn: Any = None) -> Any:
    """In place of a loss that an optimizer may compute by itself.

    Raises:
      ConfigError: it does.
    """
    raise ConfigError(
        "sharding: this optimizer computes the loss by itself (value_fn, as a line search does), for which a chip would need all "
        "parameters; choose another optimizer, or sharding='ddp'."
    )


def _stacks(params: Sequence[Any], scanned: Sequence[bool]) -> frozenset[tuple[int, ...]]:
    """The shapes of the parameters that stack arrays of layers; one of scalars is cut as a whole, since each of them fills up a share."""
    return frozenset(p.shape for p, is_scanned in zip(params, scanned, strict=False) if is_scanned and shareable(p) and p.ndim > 1)


def _is_gap(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _is_shapes(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
