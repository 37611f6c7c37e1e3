"""The schema of a checkpoint's training.json, against which it is checked before anything in it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpuflow.errors import CheckpointError

Fits = Callable[[Any], bool]


def check_progress(checkpoint: Any) -> None:
    """Check that the progress of a checkpoint (a `files.Checkpoint`) has the schema of `resuming.progress_of`.

    Raises:
      CheckpointError: something is missing, is of another kind or contradicts the rest.
    """
    progress = checkpoint.progress
    for what, fits in (*((name, _fits(name)) for name in PROGRESS), *AGREEMENT):
        if not fits(progress):
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: training.json is not what tpuflow.train writes: {what} is missing, of another kind, or "
                "contradicts the rest."
            )


def _fits(name: str) -> Fits:
    return lambda progress: name in progress and PROGRESS[name](progress[name])


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _sink_size(value: Any) -> bool:
    return value == -1 or _count(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _anything(value: Any) -> bool:
    return True


def _list(item: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(item, value))


def _with(fields: Mapping[str, Fits]) -> Fits:
    """A JSON object with at least these fields."""
    return lambda value: _object(value) and all(name in value and fits(value[name]) for name, fits in fields.items())


def _numbers_by_name(value: Any) -> bool:
    return _object(value) and all(map(_list(_number), value.values()))


def _of(fields: Mapping[str, Fits]) -> Fits:
    """A JSON object with exactly these fields."""
    return lambda value: _with(fields)(value) and len(value) == len(fields)


POSITION: Mapping[str, Fits] = {"passes": _count, "batches": _count, "steps": _count, "source": _anything, "behind": _count}
"""The fields of `tpuflow.data.positions.Position`."""

LOOP_POSITION: Mapping[str, Fits] = {
    "position": _of(POSITION),
    "sink_size": _sink_size,
    "epoch": _count,
    "steps_done": _flag,
    "closed": _flag,
}
"""The fields of `tpuflow.training.checkpoints.resuming.LoopPosition`."""

EPOCH: Mapping[str, Fits] = {
    "epoch": _count, "losses": _list(_number), "loss_scale": _list(_number), "skipped": _list(_flag), "metrics": _numbers_by_name,
    "steps": _count,
    "evaluations": _list(_with({"step": _count})), "complete": _flag,
}  # fmt: skip
"""An entry of the history; the last evaluation's metrics stand beside these."""

PROGRESS: Mapping[str, Fits] = {
    "steps": _count, "place": _of(LOOP_POSITION), "round_trips": _count, "eval_round_trips": _count, "history": _list(_with(EPOCH)),
    "callbacks": lambda value: _object(value) and all(map(_object, value.values())), "fingerprint": _object, "step_code": _text,
}  # fmt: skip


def _history_agrees(progress: Mapping[str, Any]) -> bool:
    """Every step has a loss, a loss scale and a flag. (This also bounds the counts by the size of the file.)"""
    epochs = progress["history"]
    lists = ("losses", "loss_scale", "skipped")
    whole = all(len(epoch[name]) == epoch["steps"] for epoch in epochs for name in lists)
    whole = whole and all(len(values) == epoch["steps"] for epoch in epochs for values in epoch["metrics"].values())
    return whole and sum(epoch["steps"] for epoch in epochs) == progress["steps"]


def _position_agrees(progress: Mapping[str, Any]) -> bool:
    """Every pass has at least one batch, and the batches to draw again (`behind`) lie in the current pass."""
    at = progress["place"]["position"]
    return at["steps"] == progress["steps"] and at["passes"] + at["batches"] <= at["steps"] and at["behind"] <= at["batches"]


AGREEMENT = (("history", _history_agrees), ("place", _position_agrees))
"""What must hold between fields that are there."""
