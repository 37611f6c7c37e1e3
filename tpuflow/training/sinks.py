"""`tpuflow.sink`: a training loop of the user's own, whose steps run on the device many at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tpuflow.checking import check_choice, check_number, check_switch
from tpuflow.chips import Chip, get_chip
from tpuflow.data.batching import BatchStructure, Leaves, is_tree_of_arrays
from tpuflow.data.batching import signature as signature_of
from tpuflow.data.chunks import Chunk
from tpuflow.data.epochs import EpochIterator
from tpuflow.data.feeding import Feed, array_feed, stream_feed
from tpuflow.device.runtime import ENGINES, FIDELITIES, Executable
from tpuflow.errors import ConfigError, DataError, a_thing, shown
from tpuflow.jaxprs.compat import is_key
from tpuflow.stages.flattening import leaf_names
from tpuflow.stages.staging import Target, as_array
from tpuflow.stages.tracing import users_code
from tpuflow.training.descriptions import is_from_package
from tpuflow.training.device_sink import DeviceSink, compile_ahead

StepFunction = Callable[[Any, Any], tuple[Any, Any]]


def sink(
    step_fn: StepFunction,
    data: Any,
    size: int = -1,
    *,
    state: Any,
    epochs: int | None = None,
    batch_size: int | None = None,
    drop_remainder: bool = False,
    shuffle: bool = False,
    seed: int = 0,
    chip: str | Chip = "generic",
    engine: str = "fast",
    fidelity: str = "native",
    donate: bool = False,
) -> Sink:
    """A loop over round trips to the device, each of `size` steps: `for sunk in tpuflow.sink(step_fn, data, 100, state=state): ...`.

    The data are walked endlessly, each sink going on where the last one ended. The step is compiled once for each batch shape and the
    number of steps is a launch argument, so the values are the same bit for bit whatever the size.

    Args:
      step_fn: (state, batch) -> (new state, metrics), trees of arrays; the new state must have the structure, shapes and types of the old.
      data: an iterable of batches (trees of arrays), a loader, or a function that makes one; with `batch_size`, a tree of arrays that are
        cut along their leading axis.
      size: steps in one sink: -1 the whole data set; 0 not sunk: one step a round trip.
      state: what the first step begins with. Python numbers and 64-bit arrays are narrowed as JAX does.
      epochs: sinks; with size 0, passes over the data. Endless if not given: leave the loop with `break`.
      batch_size: samples a batch, for data that are arrays; the last batch of a pass may be smaller.
      drop_remainder: leave that last batch out (arrays only).
      shuffle, seed: a new order of the samples in each pass (arrays only).
      chip: a row of the catalogue, or a Chip.
      engine, fidelity: how the device is simulated, see `tpuflow.device`.
      donate: let the device take the memory of `state`, which must not be used afterwards; it is copied otherwise.

    Raises:
      ConfigError: an option does not fit, or `step_fn` does not return a state like the one it is given.
      DataError: the data are empty or are no batches of arrays of numbers.
      UnsupportedPrimitiveError: the step uses something the device's compiler has no rule for (in the first sink).
    """
    if not callable(step_fn) or is_from_package("flax", step_fn):
        raise ConfigError(
            f"step_fn: expected a function (state, batch) -> (state, metrics), got a {type(step_fn).__name__}; models are trained with "
            "tpuflow.train, or called in such a function."
        )
    check_number("size", size, -1)
    check_choice("engine", engine, ENGINES)
    check_choice("fidelity", fidelity, FIDELITIES)
    check_number("seed", seed, 0)
    for name, value in (("drop_remainder", drop_remainder), ("shuffle", shuffle), ("donate", donate)):
        check_switch(name, value)
    if epochs is not None:
        check_number("epochs", epochs, 1)
    structure = BatchStructure()
    arrays = {"drop_remainder": drop_remainder, "shuffle": shuffle}
    feed = _feed(data, structure, size, batch_size, **arrays, seed=seed)
    first = feed.first()
    target = Target(get_chip(chip), engine, fidelity)
    return Sink(step_fn, _owned(state, donate=donate), feed, first, structure, target, size, epochs)


@dataclass(frozen=True, slots=True)
class SinkResult:
    """One round trip. `metrics`: those of every step in it, stacked [steps, ...] in NumPy arrays.

    `step` counts the steps done since the loop began, these included; `epoch` the sinks before this one (with size 0: the passes over
    the data). `seconds` the round trip took on the host, without compiling.
    """

    metrics: Any
    steps: int
    step: int
    epoch: int
    seconds: float
    _loop: Sink

    @property
    def state(self) -> Any:
        """A copy of the state after these steps.

        Raises:
          RuntimeError: the next sink has begun, which overwrites the state on the device.
        """
        if self._loop.step != self.step:
            raise RuntimeError(f"the state after step {self.step} was handed on to later steps; take it before the loop goes on.")
        return self._loop.state


class Sink(Iterator[SinkResult]):
    """The loop that `tpuflow.sink` makes: an iterator over round trips, and a context manager that ends its loading threads.

    `step` counts the steps done, `round_trips` the round trips. `last` is the latest round trip, also one that Ctrl-C or an error in the
    data cut short; after Ctrl-C the loop can go on, with the rest of that sink.
    """

    def __init__(
        self,
        step_fn: StepFunction,
        state: Any,
        feed: Feed,
        first: Leaves,
        structure: BatchStructure,
        target: Target,
        size: int,
        epochs: int | None,
    ):
        _check_step(step_fn, state, first, structure)
        self._state, self._feed, self._size, self._epochs = state, feed, size, epochs
        self._device = DeviceSink(getattr(step_fn, "__name__", "step"), step_fn, target, structure)
        steps = None if size <= 0 else math.inf if epochs is None else epochs * size
        self._iterator = EpochIterator(feed, steps=steps)
        self._epoch = self._in_sink = 0
        self._compiled = self._closed = False
        self.step = self.round_trips = 0
        self.last: SinkResult | None = None

    def __iter__(self) -> Sink:
        return self

    def __next__(self) -> SinkResult:
        """The next round trip."""
        if not self._closed and self._sink_is_over():
            self._epoch, self._in_sink = self._epoch + 1, 0
        if self._closed or (self._epochs is not None and self._epoch >= self._epochs):
            self.close()
            raise StopIteration
        self._compile_ahead()
        return self._run(self._pieces())

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_iterator"):
            self.close()

    def close(self) -> None:
        """End the loop and what is being loaded ahead; happens by itself at the loop's end."""
        self._closed = True
        self._iterator.close()

    @property
    def state(self) -> Any:
        """A copy of the state after the steps done so far. It may be set: the next step begins with what it is set to."""
        return jax.tree.map(_copied, self._state)

    @state.setter
    def state(self, state: Any) -> None:
        new, old = _owned(state, donate=False), self._state
        if wrong := _differences(old, new):
            raise ConfigError(f"state: must stay like the loop's own: {wrong}.")
        self._state = new

    @property
    def executables(self) -> tuple[Executable, ...]:
        """The step on the device, once for each batch shape so far."""
        return tuple(self._device.executables.values())

    @property
    def compile_seconds(self) -> float:
        """Host seconds spent compiling so far."""
        return self._device.compile_seconds

    def _compile_ahead(self) -> None:
        """Everything that is known to be needed, before the first step."""
        if not self._compiled:
            steps = self._size * self._epochs if self._size > 0 and self._epochs else None
            self._device.compile_seconds += compile_ahead([(self._device, self._state, self._feed.layouts(steps))])
            self._compiled = True

    def _sink_is_over(self) -> bool:
        """Whether the last sink (with size 0: pass) has had all its steps; an interrupted one continues first."""
        self._iterator.put_back()
        return self._in_sink >= self._size if self._size > 0 else self.step > 0 and self._iterator.finish_epoch_if_over()

    def _pieces(self) -> Iterable[Chunk]:
        """The batches of the next round trip."""
        if self._size == 0:
            return self._iterator.chunks(1, within_epoch=True)
        return self._iterator.chunks(None if self._size < 0 else self._size - self._in_sink)

    def _run(self, pieces: Iterable[Chunk]) -> SinkResult:
        slices: list[Any] = []
        began, compiling = time.perf_counter(), self._device.compile_seconds

        def record(state: Any, metrics: Any, steps: int) -> None:
            self._state = state
            self._iterator.mark_done(steps)
            self.step, self._in_sink = self.step + steps, self._in_sink + steps
            slices.append((metrics, steps))

        self.round_trips += 1
        try:
            self._device.run(self._state, pieces, record)
        finally:
            seconds = time.perf_counter() - began - (self._device.compile_seconds - compiling)
            steps = sum(count for _, count in slices)
            if slices:
                self.last = SinkResult(_stacked([m for m, _ in slices]), steps, self.step, self._epoch, seconds, self)
        assert self.last is not None
        return self.last


def _feed(
    data: Any, structure: BatchStructure, size: int, batch_size: int | None, *, drop_remainder: bool, shuffle: bool, seed: int
) -> Feed:
    """Arrays are cut if, and only if, a batch size is given: batches and samples cannot be told apart otherwise."""
    if batch_size is not None:
        check_number("batch_size", batch_size, 1)
        return array_feed(data, batch_size, "data", structure, shuffle=shuffle, seed=seed, drop_remainder=drop_remainder)
    if is_tree_of_arrays(data):
        raise ConfigError("data: arrays are given without batch_size; give batch_size to cut them, or an iterable of batches.")
    for name, wanted in (("shuffle", shuffle), ("drop_remainder", drop_remainder)):
        if wanted:
            raise ConfigError(
                f"{name}=True needs arrays and a batch_size, got {shown(data)}; batches of an iterable are taken as they come, so make "
                "them as you want them."
            )
    return stream_feed(data, "data", structure, sink_size=size)


def _owned(state: Any, *, donate: bool) -> Any:
    """The state in arrays that the device may overwrite."""

    def own(path: Any, leaf: Any) -> Any:
        try:
            array = leaf if hasattr(leaf, "dtype") and is_key(leaf) else as_array(leaf)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"state: {jax.tree_util.keystr(path) or 'the state'} is no array of numbers but {shown(leaf)}. Leave it out of the "
                "state; a step can use it from outside."
            ) from error
        return array if donate else _copied(array)

    return jax.tree_util.tree_map_with_path(own, state)


def _copied(leaf: Any) -> jax.Array:
    return jax.device_put(leaf, may_alias=False)


def _check_step(step_fn: StepFunction, state: Any, first: Leaves, structure: BatchStructure) -> None:
    """Check that the step returns a pair whose first part is a state like the one that it is given.

    Raises:
      ConfigError: it does not.
    """
    name = getattr(step_fn, "__name__", "step_fn")
    batch = jax.tree.unflatten(structure.tree, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signature_of(first)])
    told = ", ".join(f"{n or 'array'} {dtype}{list(shape)}" for n, (shape, dtype) in zip(structure.names, signature_of(first), strict=True))
    with users_code(f"while tracing {name} for a batch of {told}"):
        result = jax.eval_shape(step_fn, state, batch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"{name}: a step must return (state, metrics), got {a_thing(result)}; return a pair, with () if it measures nothing."
        )
    if wrong := _differences(state, result[0]):
        raise ConfigError(
            f"{name}: the state that a step returns must be like the one it is given: {wrong}. Return every part of it, with x.astype(...) "
            "where the type changes."
        )


def _differences(old: Any, new: Any) -> str:
    """The differences in structure, shapes and types between an old and a new state, in words; "" if there are none."""
    before, after = jax.tree.structure(old), jax.tree.structure(new)
    if before != after:
        lost, added = (sorted(set(leaf_names(a)) - set(leaf_names(b)) - {""}) for a, b in ((old, new), (new, old)))
        changed = "".join(f"; {what} {', '.join(names)}" for what, names in (("lost is", lost), ("new is", added)) if names)
        return f"its structure was {before} and is {after}{changed}"
    pairs = zip(leaf_names(old), jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return "; ".join(f"{n or 'it'} was {_type_of(a)} and is {_type_of(b)}" for n, a, b in pairs if _type_of(a) != _type_of(b))


def _type_of(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _stacked(slices: list[Any]) -> Any:
    """The metrics of several slices as one.

    Raises:
      DataError: their shapes depend on the batch's, and a smaller batch was among them.
    """
    if len(slices) == 1:
        return slices[0]
    for name, *parts in zip(leaf_names(slices[0]), *(jax.tree.leaves(s) for s in slices), strict=True):
        if len(shapes := {p.shape[1:] for p in parts}) > 1:
            found = " and ".join(str(list(s)) for s in sorted(shapes))
            raise DataError(
                f"metrics: {name or 'the array'} has shapes {found} in one sink, because a batch was smaller; reduce it in the step, or "
                "use drop_remainder=True."
            )
    return jax.tree.map(lambda *parts: np.concatenate(parts), *slices)
