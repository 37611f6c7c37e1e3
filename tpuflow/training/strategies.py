"""Strategies, in the sense of `tf.distribute.Strategy`: how a training step runs on one chip or several, and what each chip holds.

On several chips each takes a piece of the batch, and all make the same update with the mean of their gradients. "ddp": the state is
replicated. The stages of ZeRO (Rajbhandari et al., 2020) shard the optimizer's state (1), the gradients too (2), the parameters too (3).
`tpuflow.training.partitioning` has the strategy that leaves the sharding to XLA's partitioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from tpuflow import amp
from tpuflow.errors import ConfigError
from tpuflow.jaxprs.compat import ClosedJaxpr, with_axes
from tpuflow.training.param_gathering import scanned_inputs, with_gathered_params, with_scattered_grads
from tpuflow.training.sharded_updates import call_sharded
from tpuflow.training.shards import Axis, is_shardable, value_and_grad_regathering
from tpuflow.training.state import TrainState

SHARDINGS: Mapping[str, int] = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""The values of the option `sharding`, and the stage of ZeRO of each; 0 shards nothing."""

AXES = ("data", "group", "expert")
"""The axes of a mesh with several axes: batches are cut over all of them. Layers of the model may use any by name: batch normalisation the
first, or with smaller groups of chips the second, mixture-of-experts layers, which exchange samples, the third."""

Step = Callable[[Any, Any], Any]
"""(state, batch) -> results; a training step or an evaluation step."""
Loss = Callable[[], ClosedJaxpr]
"""() -> the jaxpr of a step's loss, whose first inputs are the parameters."""
Select = Callable[[TrainState], TrainState]
"""A state -> the part of it that evaluations need."""


@dataclass(frozen=True, slots=True)
class OneChip:
    """The strategy of one chip, which holds everything; the base class of all other strategies.

    `for_state`, `shard_state`, `gather_state`, `run_step`, `run_eval_step` and `with_axes` are called outside of the step. The others are
    called inside of it, by each chip, on what the chip holds.
    """

    def with_axes(self) -> AbstractContextManager[None]:
        """Within the block, what a chip computes can be traced outside of the step, collectives over axes of the mesh included."""
        return nullcontext()

    def for_state(self, state: TrainState, loss: Loss) -> OneChip:
        """The strategy for states of these shapes. loss: () -> the jaxpr of a step's loss, whose first inputs are the parameters."""
        return self

    def shard_state(self, state: TrainState) -> TrainState:
        """A whole state in the form in which the device holds it; given shapes, the shapes of that form."""
        return state

    def gather_state(self, state: TrainState) -> TrainState:
        """The inverse of `shard_state`: the whole state, as one chip would hold it."""
        return state

    def run_step(self, step: Step, state: Any, batch: Any) -> Any:
        """(new state, figures) of a training step; each chip calls `step` with what it holds of the state and its piece of the batch."""
        return step(state, batch)

    def run_eval_step(self, step: Step, state: Any, batch: Any, select: Select, *, joined: bool) -> Any:
        """The results of an evaluation step; `select` takes the part of a whole state that `step` is called with.

        joined: results are arrays [B, ...] and put together from the chips' pieces; otherwise they are equal on all chips.
        """
        return step(state, batch)

    def mean(self, tree: Any) -> Any:
        """The means over the chips of floating arrays."""
        return tree

    def chip_key(self, key: Any) -> Any:
        """A random key for this chip, different on every chip."""
        return key

    def grad_inputs(self, params: Any) -> Any:
        """What the loss is differentiated by: what the chip holds of the parameters, or (stage 2) arrays that take gradient shards."""
        return params

    def call_with_params(self, function: Callable[[Any], Any], grad_inputs: Any, params: Any) -> Any:
        """Call a function of whole parameters, such that it can be differentiated by `grad_inputs`. params: what the chip holds of them."""
        return function(grad_inputs)

    def value_and_grad(self, loss: Callable[[Any], tuple[jax.Array, Any]], params: Any) -> tuple[tuple[jax.Array, Any], Any]:
        """((loss, aux), gradients) of a function params -> (loss, aux)."""
        return jax.value_and_grad(loss, has_aux=True)(params)

    def reduce_grads(self, grads: Any, opt_state: Any) -> Any:
        """The gradients that the optimizer takes, from those of this chip's piece of the batch: means over the chips, or shards of them."""
        return grads

    def update(
        self, optimizer: optax.GradientTransformationExtraArgs, grads: Any, opt_state: Any, params: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        """(updates, the optimizer's new state, new parameters)."""
        updates, new_state = optimizer.update(grads, opt_state, params, **extra)
        return updates, new_state, amp.when_updated(opt_state, new_state, lambda: optax.apply_updates(params, updates), params)


@dataclass(frozen=True, slots=True)
class DataParallel(OneChip):
    """Data parallelism: the state is replicated, and batches are cut over `axis`, which is all axes of the mesh as one."""

    axis: Axis
    mesh: AbstractMesh

    def with_axes(self) -> AbstractContextManager[None]:
        """The axes of the mesh are bound."""
        return with_axes(self.mesh.shape)

    def run_step(self, step: Step, state: Any, batch: Any) -> Any:
        """(new state, figures), equal on all chips, of a step with a piece of the batch on each chip, [B, ...] -> [B / chips, ...].

        A batch that does not divide, such as the last one of an epoch, is given whole to every chip.
        """
        own = self._state_specs()
        return self._mapped(step, state, batch, (own, PartitionSpec()), own, pieces=self.divides(batch))

    def run_eval_step(self, step: Step, state: Any, batch: Any, select: Select, *, joined: bool) -> Any:
        """The results of a step with a piece of the batch on each chip: equal on all, or if `joined`, arrays [B / chips, ...] that are put
        together. A result that has no axis of samples every chip computes for the whole batch."""
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
        with self.with_axes():
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

    def chip_key(self, key: Any) -> Any:
        """A random key for this chip, different on every chip."""
        return jax.random.fold_in(key, lax.axis_index(self.axis.name))

    def reduce_grads(self, grads: Any, opt_state: Any) -> Any:
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
    """ZeRO: the optimizer's state is sharded, from stage 2 on the gradients too, in stage 3 the parameters too.

    `like`: the shapes and types of the whole state. Between steps, gradients exist only where they accumulate (`accumulate_steps`).
    """

    stage: int
    like: TrainState | None = None

    def for_state(self, state: TrainState, loss: Loss) -> Zero:
        """The strategy for states of these shapes. From stage 2 on a parameter that stacks layers of a scan is sharded layer by layer."""
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        stacks = _stacks(jax.tree.leaves(like.params), scanned_inputs(loss())) if self.stage >= 2 else frozenset()
        return replace(self, like=like, axis=replace(self.axis, stacks=stacks))

    def shard_state(self, state: TrainState) -> TrainState:
        """Sharded arrays flattened and padded, so that the pieces over the mesh axis are the shards."""
        sharded = self.sharded(self._like)
        flatten = jax.jit(lambda s: jax.tree.map(lambda x, cut: self.axis.flatten(x) if cut else x, s, sharded))
        return jax.eval_shape(flatten, state) if _is_shapes(state) else flatten(state)

    def gather_state(self, state: TrainState) -> TrainState:
        """Whole arrays in their own shapes again."""
        like = self._like
        whole = jax.jit(
            lambda s: jax.tree.map(lambda x, w, cut: self.axis.unflatten(x, w.shape) if cut else x, s, like, self.sharded(like))
        )
        return whole(state)

    def sharded(self, like: TrainState) -> TrainState:
        """A tree of booleans: which arrays of a state of these shapes are sharded."""
        of_params = self.stage == 3
        state = jax.tree.map(is_shardable, like.opt_state)
        if self.stage == 1 and isinstance(state, amp.AccumulationState):
            state = state._replace(grads=jax.tree.map(lambda _: False, state.grads))
        ema = None if like.ema is None else jax.tree.map(lambda _: False, like.ema)
        if ema is not None and like.ema is not None and of_params:
            ema = ema._replace(params=jax.tree.map(is_shardable, like.ema.params))
        return TrainState(
            jax.tree.map(lambda leaf: of_params and is_shardable(leaf), like.params), jax.tree.map(lambda _: False, like.carried), state,
            jax.tree.map(lambda _: False, like.key), ema,
        )  # fmt: skip

    def grad_inputs(self, params: Any) -> Any:
        """Stage 2: zeros of the shards' shapes in place of the parameters, which are whole."""
        return jax.tree.map(lambda p: self._zero_shard(p) if is_shardable(p) else p, params) if self.stage == 2 else params

    def _zero_shard(self, param: Any) -> Any:
        return jnp.zeros(self.axis.shard_shape(param.shape), param.dtype)

    def call_with_params(self, function: Callable[[Any], Any], grad_inputs: Any, params: Any) -> Any:
        """Stage 2: each gradient is scattered as soon as it is computed. Stage 3: parameters are gathered for as long as they are needed,
        too."""
        if self.stage == 1:
            return function(grad_inputs)
        if self.stage == 2:
            return with_scattered_grads(self.axis, function, grad_inputs, params, jax.tree.map(is_shardable, params))
        like = self._like
        return with_gathered_params(self.axis, function, grad_inputs, like.params, self.sharded(like).params)

    def value_and_grad(self, loss: Callable[[Any], tuple[jax.Array, Any]], params: Any) -> tuple[tuple[jax.Array, Any], Any]:
        """Stage 3 gathers parameters once more for the backward pass."""
        return value_and_grad_regathering(loss, params) if self.stage == 3 else DataParallel.value_and_grad(self, loss, params)

    def reduce_grads(self, grads: Any, opt_state: Any) -> Any:
        """Shards of the gradients' means over the chips; in stage 1 whole means where gradients accumulate.

        From stage 2 on the backward pass has scattered them already, and only those of replicated arrays are still to be reduced.
        """
        if self.stage == 1 and isinstance(opt_state, amp.AccumulationState):
            return self.axis.mean(grads)
        scattered = self.stage >= 2
        return jax.tree.map(
            lambda g, w: self._reduce_grad(g, replicated=not is_shardable(w), scattered=scattered), grads, self._trained(grads)
        )

    def _reduce_grad(self, grad: Any, *, replicated: bool, scattered: bool) -> Any:
        if replicated:
            return self.axis.mean(grad)
        return grad if scattered else self.axis.reduce_scatter_mean(grad)

    def update(
        self, optimizer: optax.GradientTransformationExtraArgs, grads: Any, opt_state: Any, params: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Every chip updates its shards; up to stage 2 the new parameters are then gathered."""
        like, sharded = self._trained(params), self.sharded(self._like).opt_state
        own = params if self.stage == 3 else jax.tree.map(lambda p: self.axis.local_shard(p) if is_shardable(p) else p, params)

        def whole_update(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
            return optimizer.update(grads, opt_state, params, value=value, grad=grads, value_fn=_no_loss, grad_fn=_no_loss)

        cut = jax.tree.map(is_shardable, like)
        accumulates = self.stage == 1 and isinstance(opt_state, amp.AccumulationState)
        given = jax.tree.map(lambda _: False, cut) if accumulates else cut
        updates, new_state = call_sharded(
            self.axis, whole_update, (grads, opt_state, own, extra["value"]), (like, self._like.opt_state, like, extra["value"]),
            (given, sharded, cut, False), lambda shapes: (jax.tree.map(is_shardable, shapes[0]), sharded),
        )  # fmt: skip

        def new() -> Any:
            """The new parameters: shards in stage 3, else gathered."""
            updated = optax.apply_updates(own, updates)
            if self.stage == 3:
                return updated
            return jax.tree.map(lambda x, p: self.axis.all_gather(x, p.shape) if is_shardable(p) else x, updated, params)

        return updates, new_state, amp.when_updated(opt_state, new_state, new, params)

    def _trained(self, part: Any) -> Any:
        """The shapes of the whole parameters, for those that a tree has (the trained ones)."""
        return jax.tree.map(lambda x, w: x if _is_gap(x) else w, part, self._like.params, is_leaf=_is_gap)

    def _state_specs(self) -> Any:
        return self._specs(self._like)

    def _eval_specs(self, select: Select) -> Any:
        return self._specs(select(self._like))

    def _whole_shapes(self, state: Any, select: Select) -> Any:
        return select(self._like)

    def _of_whole(self, step: Step, select: Select) -> Step:
        """A step that takes a sharded state, and gathers what it needs of it."""
        like = select(self._like)
        return lambda state, batch: with_gathered_params(self.axis, lambda whole: step(whole, batch), state, like, self.sharded(like))

    def _specs(self, like: TrainState) -> Any:
        return jax.tree.map(lambda w, cut: self.axis.spec(w.shape) if cut else PartitionSpec(), like, self.sharded(like))

    @property
    def _like(self) -> TrainState:
        assert self.like is not None, "for_state has not been called"
        return self.like


Strategy = OneChip
"""Any strategy, for type annotations."""
ONE_CHIP = OneChip()


def get_strategy(mesh: Mapping[str, int], sharding: str, samples: int) -> Strategy:
    """The strategy for a mesh, by one of `SHARDINGS`; `samples` is the batch size.

    Raises:
      ConfigError: batches are not cut over all its axes, or do not divide over it.
    """
    sizes, chips = dict(mesh), math.prod(mesh.values())
    if len(sizes) > 1 and not set(sizes) <= set(AXES):
        raise ConfigError(
            f"mesh: expected one axis, or some of {', '.join(AXES)}, which batches are cut over, got {sizes}; give for example "
            "{'data': 4}, or rules for the parameters: sharding={'*/kernel': PartitionSpec(None, 'model')}."
        )
    if samples % chips:
        raise ConfigError(
            f"mesh: a batch of {samples} samples does not divide over {chips} chips; give a batch_size that is a multiple of {chips}."
        )
    names, stage = tuple(sizes), SHARDINGS[sharding]
    axis, whole = Axis(names[0] if len(names) == 1 else names, chips), AbstractMesh(tuple(sizes.values()), names)
    return Zero(axis, whole, stage) if stage else DataParallel(axis, whole)


def check_mesh(name: str, value: Any) -> None:
    """Check the option `mesh`.

    Raises:
      ConfigError: it is no mapping from names of axes to numbers of chips.
    """
    good = isinstance(value, Mapping) and value and all(isinstance(n, str) and n for n in value)
    if not good or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value.values()):
        raise ConfigError(f"{name}: expected axes with how many chips they have, such as {{'data': 4}}, got {value!r}.")


def _no_loss(part: Any, *_: Any, grad_fn: Any = None) -> Any:
    """The `value_fn` and `grad_fn` of optimizers whose parameters are sharded.

    Raises:
      ConfigError: always; the optimizer computes the loss by itself.
    """
    raise ConfigError(
        "sharding: this optimizer computes the loss by itself (value_fn, as a line search does), for which a chip would need all "
        "parameters; choose another optimizer, or sharding='ddp'."
    )


def _stacks(params: Sequence[Any], scanned: Sequence[bool]) -> frozenset[tuple[int, ...]]:
    """The shapes of the parameters that are sharded layer by layer. A stack of scalars is not: each scalar would be padded to a shard."""
    return frozenset(p.shape for p, is_scanned in zip(params, scanned, strict=False) if is_scanned and is_shardable(p) and p.ndim > 1)


def _is_gap(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _is_shapes(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
