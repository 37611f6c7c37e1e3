"""The part of a checkpoint beside its arrays: what the training loop saves, what must match before resuming, and how it is restored."""

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
class LoopPosition:
    """Where the training loop is: the position in the data, the epoch, whether its steps are done, and whether it is closed: evaluated, and
    reported to the callbacks."""

    position: Position
    sink_size: int
    epoch: int = 0
    steps_done: bool = False
    closed: bool = False

    def first_epoch(self, sink_size: int) -> int:
        """The epoch to continue with, if epochs are now of this sink size."""
        if self.same_epochs(sink_size):
            return self.epoch + self.closed
        return self.position.steps // sink_size if sink_size > 0 else self.position.passes

    def same_epochs(self, sink_size: int) -> bool:
        """Whether epochs of this sink size are the saved ones: whole passes over the data both, or of equally many steps."""
        return self.sink_size == sink_size or max(self.sink_size, sink_size) <= 0


def progress_of(
    run: Run, place: LoopPosition, callbacks: Sequence[Callback], fingerprint: Mapping[str, Any], step_code: str
) -> dict[str, Any]:
    """The content of training.json: the state of the loop and the callbacks as plain data."""
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


def loop_position_of(progress: Mapping[str, Any]) -> LoopPosition:
    """The saved position of the training loop."""
    place = progress["place"]
    return LoopPosition(**{**place, "position": Position(**place["position"])})


def check_same(path: Path, progress: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Check that a checkpoint was saved by a training with these settings and data.

    Raises:
      CheckpointError: it was not; the message lists the differences.
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
    """The state of this training, from a checkpoint's arrays: copies, since the device overwrites its state.

    Raises:
      CheckpointError: names, shapes or types of the arrays differ; the message lists them.
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
    """Restore every callback's state; a callback that the checkpoint does not know starts afresh."""
    here = named(callbacks)
    for name, callback in here.items():
        if name in states:
            with restoring(path, f"the state of the callback {name}"):
                callback.load_state_dict(states[name])
    gone = [name for name in states if name not in here]
    if gone:
        warnings.warn(f"resuming from {path}: no callback takes up the saved state of {', '.join(gone)}.", RuntimeWarning, stacklevel=2)


@contextmanager
def restoring(path: Path, what: str) -> Iterator[None]:
    """Around the code, ours or the user's, that reads a saved state: turns its errors into a `CheckpointError`.

    Raises:
      CheckpointError: the code failed; its error is the cause.
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
