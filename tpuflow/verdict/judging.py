"""`tpuflow.check`: a step looked at before it is run for long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optax

from tpuflow import amp
from tpuflow.chips import Chip, get_chip
from tpuflow.errors import ConfigError, OutOfMemoryError
from tpuflow.estimating.estimating import SINK_STEPS, Calibrated
from tpuflow.estimating.targets import is_model
from tpuflow.numerics.report import NumericsReport
from tpuflow.verdict.options import policy_options
from tpuflow.verdict.subjects import Function, Policy, Subject, Training
from tpuflow.verdict.verdict import Verdict

COMPARED = ("bf16", "mixed")
"""Precisions that a step is estimated in beside its own, if nothing else is said."""
NO_DATA = "not checked: shapes have no numbers; give arrays for the arguments"
NO_ROOM = "not checked: with its measurements the step does not fit; use a smaller batch"
NOT_RUN = "not checked: what does not fit cannot be run"


def check(
    step: Any,
    *args: Any,
    chip: str | Chip = "generic",
    policy: Policy = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: Any = None,
    sink_size: int | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    calibration: Calibrated = None,
    compare: Sequence[str] = COMPARED,
    **kwargs: Any,
) -> Verdict:
    """Whether a step fits on a chip, what its numbers do, how long it is, and what would help.

    Time and memory are modelled from shapes; numbers are looked at if arrays are given, by running the step on the simulated device.

    Args:
      step: a function of arrays (or of nnx objects, as for `tpuflow.nnx.jit`), or a Flax module, which is trained.
      args, kwargs: of a function, its arguments; of a module, one batch: inputs and labels. Arrays or `jax.ShapeDtypeStruct`s.
      chip: a row of the catalogue, a .toml file, or a Chip.
      policy: precision; as the function is written if None, "fp32" for a module.
      optimizer, loss, sink_size: of a module, as for `tpuflow.estimate_training`.
      donate_argnums, static_argnums: of a function, as for `tpuflow.jit`.
      calibration: as of `tpuflow.estimate`.
      compare: policies that the step is estimated in besides.

    Raises:
      ConfigError: an option is unknown, or does not belong to what `step` is.
      UnsupportedPrimitiveError, DataError: as compiling and training do. What does not fit is no error but part of the verdict.
    """
    row = get_chip(chip)
    for name in compare:
        amp.get_policy(name)
    of_models = {"optimizer": optimizer, "loss": loss, "sink_size": sink_size}
    donated, static = _positions(donate_argnums, len(args)), _positions(static_argnums, len(args))
    of_functions = {"donate_argnums": donated or None, "static_argnums": static or None, **kwargs}
    if is_model(step):
        _refuse(of_functions, f"check: {type(step).__name__} is a model, which is trained on a batch", "a function's")
        subject: Subject = Training(step, args, row, optimizer, loss, SINK_STEPS if sink_size is None else sink_size, calibration)
        return _verdict(subject, policy or "fp32", row, compare)
    if not callable(step):
        raise ConfigError(f"check: expected a function or a Flax module, got {type(step).__name__}.")
    _refuse(of_models, "check: a function is called as it is", "a model's")
    subject = Function(step, args, kwargs, row, donated, static, calibration)
    return _verdict(subject, policy, row, compare)


def _verdict(subject: Subject, policy: Policy, chip: Chip, compare: Sequence[str]) -> Verdict:
    name = policy.name if isinstance(policy, amp.Policy) else policy or ""
    found = error = None
    try:
        found = subject.estimated(policy)
    except OutOfMemoryError as refused:
        error = refused
    options = (*subject.options(found, policy), *policy_options(subject.estimated, compare, name))
    numerics, unchecked = _numerics(subject, policy) if found is not None else (None, NOT_RUN)
    return Verdict(subject.name, chip.name, name, found, error, numerics, unchecked, options)


def _numerics(subject: Subject, policy: Policy) -> tuple[NumericsReport | None, str]:
    """The report of the numbers, or why there is none."""
    if not subject.has_data():
        return None, NO_DATA
    try:
        return subject.numerics(policy), ""
    except OutOfMemoryError:
        return None, NO_ROOM


def _refuse(given: Mapping[str, Any], what: str, whose: str) -> None:
    """Options that do not belong to this kind of step."""
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ConfigError(
            f"{what}: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} {whose}; leave {'it' if len(wrong) == 1 else 'them'} out."
        )


def _positions(numbers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The positions among so many arguments; those from the end counted from the beginning."""
    given = (numbers,) if isinstance(numbers, int) else numbers
    return tuple(n % count if -count <= n < 0 else n for n in given)
