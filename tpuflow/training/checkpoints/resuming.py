"""A training as a checkpoint has it, and back: what is saved beside the arrays, and what must be equal before they are taken up."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tpuflow.data.positions import Position
from tpuflow.errors import CheckpointError, TpuflowError, one_line
from tpuflow.stages.flattening import flat, from_device, leaf_names, nested
from tpuflow.training.callbacks.base import Callback, Run, named, state_of
from tpuflow.training.checkpoints.fingerprints import differences, layout_differences


@dataclass(slots=True)
class Place:
    """Where a training stands: the data's position, the epoch, whether its steps are done, and whether it is closed (evaluated, told)."""

    position: Position
    sink_size: int
    epoch: int = 0
    steps_done: bool = False
    closed: bool = False

    def first_epoch(self, sink_size: int) -> int:
        """The epoch to go on with, if that is now counted in other sinks."""
        if self.same_epochs(sink_size):
            return self.epoch + self.closed
        return self.position.steps // sink_size if sink_size > 0 else self.position.passes

    def same_epochs(self, sink_size: int) -> bool:
        """Whether an epoch of that sink size is one of this: both whole passes, or both of as many steps."""
        return self.sink_size == sink_size or max(self.sink_size, sink_size) <= 0


def progress_of(run: Run, place: Place, callbacks: Sequence[Callback], fingerprint: Mapping[str, Any], step_code: str) -> dict[str, Any]:
    """Everything but arrays, as plain data."""
    return {
        "steps": run.steps,
        "place": asdict(place),
        "round_trips": run.round_trips,
        "eval_round_trips": run.eval_round_trips,
        "history": run.history,
        "callbacks": state_of(callbacks),
        "fingerprint": dict(fingerprint),
        "step_code": step_code,
    }


def place_of(progress: Mapping[str, Any]) -> Place:
    """The place that was saved."""
    place = progress["place"]
    return Place(**{**place, "position": Position(**place["position"])})


def check_same(path: Path, progress: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """That the checkpoint is of this training.

    Raises:
      CheckpointError: it was saved by another, in words.
    """
    other = differences(progress["fingerprint"], fingerprint)
    if other:
        raise CheckpointError(
            f"cannot resume from {path}: it was saved by another training: {'; '.join(other)}. Use the same settings, or start from its "
            f"parameters alone: params={str(path)!r}."
        )


def check_step(path: Path, progress: Mapping[str, Any], step_code: str) -> None:
    """Warn if the compiled step is not the one that the checkpoint was made with."""
    if progress["step_code"] != step_code:
        warnings.warn(
            f"resuming from {path}: the compiled training step is not the one it was saved with; the learning rate, its schedule, another "
            "hyperparameter, the model's code, the chip or tpuflow itself has changed. The training goes on, but not bit for bit.",
            RuntimeWarning,
            stacklevel=2,
        )


def restored_state(path: Path, arrays: Mapping[str, Any], like: Any) -> Any:
    """The arrays as the state of this training, on the device's host side: copies, since the device overwrites its state.

    Raises:
      CheckpointError: the model's or the optimizer's arrays are others, each named.
    """
    saved, here = dict(flat(arrays)), dict(flat(nested(like)))
    wrong = layout_differences(saved.items(), here.items())
    if wrong:
        raise CheckpointError(f"cannot resume from {path}: the model or the optimizer is another:\n  " + "\n  ".join(wrong))
    leaves, tree = jax.tree.flatten(like)
    # Empty arrays were not saved: there is nothing in them.
    found = [saved[name] if name in saved else leaf for name, leaf in zip(leaf_names(like), leaves, strict=True)]
    return jax.tree.unflatten(tree, [jax.device_put(leaf, may_alias=False) for leaf in from_device(found, leaves)])


def restore_callbacks(path: Path, states: Mapping[str, Any], callbacks: Sequence[Callback]) -> None:
    """Hand every callback what it saved; one that is new starts afresh."""
    here = named(callbacks)
    for name, callback in here.items():
        if name in states:
            with taking_up(path, f"the state of the callback {name}"):
                callback.load_state_dict(states[name])
    gone = [name for name in states if name not in here]
    if gone:
        warnings.warn(f"resuming from {path}: no callback takes up the saved state of {', '.join(gone)}.", RuntimeWarning, stacklevel=2)


@contextmanager
def taking_up(path: Path, what: str) -> Iterator[None]:
    """That a saved state which its owner, code of ours or of the user's, cannot take apart is an error of the checkpoint.

    Raises:
      CheckpointError: it cannot; the owner's own error is the cause.
    """
    try:
        yield
    except TpuflowError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"cannot resume from {path}: {what} cannot be taken up: {type(error).__name__}: {one_line(error)}."
        ) from error


def new_epoch(number: int) -> dict[str, Any]:
    """The history's entry of an epoch in which nothing has happened yet."""
    return {
        "epoch": number + 1,
        "losses": [],
        "loss_scale": [],
        "skipped": [],
        "metrics": {},
        "steps": 0,
        "evaluations": [],
        "complete": False,
    }
