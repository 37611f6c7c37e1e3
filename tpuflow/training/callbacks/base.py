"""Callbacks: what a user may do while a training runs, and the two that come with tpuflow."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tpuflow.checking import check_number
from tpuflow.errors import ConfigError, did_you_mean, shown
from tpuflow.jaxprs.processes import is_first


@dataclass(slots=True)
class Run:
    """What callbacks see of a running training.

    Step numbers count from 0 over the whole training, epochs from 0; `steps` is how many are done, `step_in_epoch` how many of this
    epoch. `loss`, `loss_scale` and `skipped` are those of the step that `on_step_end` reports, `step_metrics` what else a loss of
    the user's own has measured in it; `losses` those of the last sink, which
    took `sink_seconds` on the host. `metrics` holds what the last evaluation of this epoch found: a number for each metric,
    or a list of them; if none were asked for "avg_loss" and, for class labels, "accuracy" in percent.
    `resumed_at` is the number of steps that a checkpoint brought. Setting `stop` ends the training after the current
    round trip. `save(directory)` writes a checkpoint and returns its path; call it in `on_checkpoint` only. From the first `save`, or from
    `claim(directory)`, until this training ends no other training can write there. `learning_rate()` is the one in the optimizer's state,
    where `optax.inject_hyperparams` puts it; None otherwise. `eval_params()` are the parameters that evaluations use, as JAX arrays: the
    average if one is kept; call it between round trips, such as in `on_sink_end`.
    """

    epochs: int
    steps_per_epoch: int | None
    batch_size: int
    policy: str
    epoch: int = 0
    step: int = -1
    step_in_epoch: int = 0
    loss: float = float("nan")
    loss_scale: float = 1.0
    skipped: bool = False
    step_metrics: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    sink_seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    round_trips: int = 0
    eval_round_trips: int = 0
    resumed_at: int | None = None
    resumed_from: Path | None = None
    stop: bool = False
    finished: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    save: Callable[[Any], Path] = field(default=lambda directory: _not_running(), repr=False)
    claim: Callable[[Any], None] = field(default=lambda directory: _not_running(), repr=False)
    learning_rate: Callable[[], float | None] = field(default=lambda: None, repr=False)
    eval_params: Callable[[], Any] = field(default=lambda: _not_running(), repr=False)

    @property
    def steps(self) -> int:
        """Steps done, those before a resumption included."""
        return self.step + 1


class Callback:
    """Base of callbacks: override what you need.

    The order, inner lines once for every round trip, step, evaluation:

        on_train_begin
          on_epoch_begin
            on_sink_begin
              on_step_begin, on_step_end      after the round trip, in the order of the steps
            on_sink_end
            on_eval_begin, on_eval_end        if an evaluation is due after so many steps
            on_checkpoint                     unless the epoch is over
          on_eval_begin, on_eval_end          if an evaluation is due after this epoch
          on_epoch_end
          on_checkpoint
        on_train_end
        on_checkpoint                         `run.finished` is true

    Methods called on_... are hooks: one of another name, or with other arguments, is refused, since it would never be called.
    Callbacks are called in the order of their list. A sink runs on the device without the host, so step callbacks come when it has
    ended. A callback that has to see the training after every so many steps says so in `every_steps`: round trips then end there, which
    changes no value.
    """

    every_steps: int | None = None

    def on_train_begin(self, run: Run) -> None:
        """Before the first step."""

    def on_train_end(self, run: Run) -> None:
        """After the last step, also when the training was interrupted."""

    def on_epoch_begin(self, run: Run) -> None:
        """Before an epoch (of `sink_size` batches if that is positive), or before the rest of one that is resumed."""

    def on_epoch_end(self, run: Run) -> None:
        """After an epoch and its evaluation."""

    def on_sink_begin(self, run: Run) -> None:
        """Before every host round trip."""

    def on_sink_end(self, run: Run) -> None:
        """After every host round trip and its steps."""

    def on_step_begin(self, run: Run) -> None:
        """Once for every step, just before its `on_step_end`: `run.step` is its number, its figures are not there yet."""

    def on_step_end(self, run: Run) -> None:
        """Once for every step."""

    def on_eval_begin(self, run: Run) -> None:
        """Before an evaluation."""

    def on_eval_end(self, run: Run) -> None:
        """After an evaluation: `run.metrics` is new."""

    def on_checkpoint(self, run: Run) -> None:
        """When the training can be saved by `run.save(directory)`: every callback has seen what happened until now."""

    def state_dict(self) -> dict[str, Any]:
        """What has to survive a resumption, as plain data; saved in every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; called before `on_train_begin`."""


def notify(callbacks: Sequence[Callback], event: str, run: Run) -> None:
    """Call the method `event` of every callback, in order; an error of one gets a note that names it."""
    for callback in callbacks:
        try:
            getattr(callback, event)(run)
        except Exception as error:
            error.add_note(f"in {type(callback).__name__}.{event}, epoch {run.epoch + 1}, after {run.steps} steps")
            raise


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """The option `callbacks` as a tuple, checked.

    Raises:
      ConfigError: one is no `tpuflow.Callback`, has a hook that does not exist or takes something else than the run, or its
        `every_steps` is no number of steps.
    """
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, (str, Mapping)):
        raise ConfigError(
            f"callbacks: expected a list of instances of tpuflow.Callback, got {shown(callbacks)}; give a list, callbacks=[...]."
        )
    callbacks = tuple(callbacks)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            what = (
                f"the class {callback.__name__}; pass an instance, {callback.__name__}(...)"
                if isinstance(callback, type)
                else f"{shown(callback)}; derive a class from it that has the hooks you need"
            )
            raise ConfigError(f"callbacks: expected instances of tpuflow.Callback, got {what}.")
        _check_hooks(callback)
        check_every("every_steps", callback.every_steps)
    return callbacks


ELSEWHERE = {
    "on_batch_begin": "on_step_begin",
    "on_batch_end": "on_step_end",
    "on_fit_end": "on_train_end",
    "on_fit_start": "on_train_begin",
    "on_save_checkpoint": "on_checkpoint",
    "on_test_begin": "on_eval_begin",
    "on_test_end": "on_eval_end",
    "on_train_batch_begin": "on_step_begin",
    "on_train_batch_end": "on_step_end",
    "on_train_batch_start": "on_step_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_validation_end": "on_eval_end",
    "on_validation_start": "on_eval_begin",
}
"""What hooks of Keras, Lightning and Transformers are called here, where the names are not alike."""


def _check_hooks(callback: Callback) -> None:
    """Check that a callback's methods called on_... are hooks, and take the run.

    Raises:
      ConfigError: one is no hook, or has another signature.
    """
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if not name.startswith("on_") or getattr(type(callback), name, None) is getattr(Callback, name, None):
            continue
        where = f"callbacks: {type(callback).__name__}.{name}"
        if name not in hooks:
            here = did_you_mean(name, hooks) if name not in ELSEWHERE else f" Did you mean {ELSEWHERE[name]!r}?"
            raise ConfigError(f"{where}: there is no such hook, so it would never be called.{here} Hooks: {', '.join(hooks)}.")
        try:
            inspect.signature(getattr(callback, name)).bind(Run(1, None, 1, ""))
        except TypeError as error:
            raise ConfigError(
                f"{where}: hooks are called with the run alone, which does not fit: {error}. Write def {name}(self, run)."
            ) from error


def check_every(what: str, value: Any) -> None:
    """Check that a period is a whole number of at least 1, or None.

    Raises:
      ConfigError: it is not.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{what}: expected a whole number of at least 1, or None, got {value!r}.")


def state_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The states of all callbacks that have one, by the callback's name."""
    return {name: state for name, callback in named(callbacks).items() if (state := callback.state_dict())}


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by their class's name; the second of a class is "Name 2"."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = sum(type(other).__name__ == name for other in found.values())
        found[f"{name} {number + 1}" if number else name] = callback
    return found


def _not_running() -> NoReturn:
    raise ConfigError(
        "run.claim works within a running training only, run.save within its on_checkpoint: call it in on_checkpoint of a tpuflow.Callback."
    )


class LossMonitor(Callback):
    """Print the loss of every `every`-th step, in the first process if there are several."""

    def __init__(self, every: int = 100, out: TextIO | None = None):
        check_number("LossMonitor: every", every, 1)
        self._every, self._out = every, out

    def on_step_end(self, run: Run) -> None:
        if run.step % self._every == 0 and is_first():
            print(f"epoch: {run.epoch + 1} step: {run.step + 1}, loss is {run.loss:.6f}", file=self._out or sys.stdout, flush=True)


class TimeMonitor(Callback):
    """Print the host's time of every epoch and of one step in it, evaluation included, in the first process if there are several."""

    def __init__(self, out: TextIO | None = None):
        self._out = out
        self._started, self._first_step = 0.0, 0

    def on_epoch_begin(self, run: Run) -> None:
        self._started, self._first_step = time.perf_counter(), run.step

    def on_epoch_end(self, run: Run) -> None:
        milliseconds = 1e3 * (time.perf_counter() - self._started)
        steps = max(1, run.step - self._first_step)
        text = f"epoch time: {milliseconds:.3f} ms, per step time: {milliseconds / steps:.3f} ms (host)"
        if is_first():
            print(text, file=self._out or sys.stdout, flush=True)
