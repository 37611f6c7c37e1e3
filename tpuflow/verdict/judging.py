"""`tpuflow.check`: whether a step fits on a chip, overflows or underflows, how long it takes, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow import amp
from tpuflow.chips import Chip, get_chip
from tpuflow.errors import ConfigError, OutOfMemoryError
from tpuflow.estimating.estimating import Calibrated
from tpuflow.numerics.report import NumericsReport
from tpuflow.training.adapters.choosing import is_model
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
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    calibration: Calibrated = None,
    compare: Sequence[str] = COMPARED,
    **kwargs: Any,
) -> Verdict:
    """Whether a step fits on a chip, what its numbers do, how long it is, and what would help.

    Time and memory are modelled from shapes; numbers are looked at if arrays are given, by running the step on the simulated device.

    Args:
      step: a function of arrays (or of nnx objects, as for `tpuflow.nnx.jit`), such as a training step of your own, or a model, which is
        trained: a Flax, Haiku or Equinox one, or a `tpuflow.Model`.
      args: of a function, its arguments; of a model, one batch, as for `tpuflow.estimate_training`. Arrays or `jax.ShapeDtypeStruct`s.
      chip: a row of the catalogue, a .toml file, or a Chip.
      policy: precision; as the function is written if None, "fp32" for a model.
      donate_argnums, static_argnums: of a function, as for `tpuflow.jit`.
      calibration: as of `tpuflow.estimate`.
      compare: policies that the step is estimated in besides.
      kwargs: of a function, its arguments; of a model, options of `tpuflow.estimate_training`: optimizer, loss, sink_size, ...

    Raises:
      ConfigError: an option is unknown, or does not belong to what `step` is.
      UnsupportedPrimitiveError, DataError: as compiling and training do. What does not fit is no error but part of the verdict.
    """
    row = get_chip(chip)
    for name in compare:
        amp.get_policy(name)
    donated, static = _positions(donate_argnums, len(args)), _positions(static_argnums, len(args))
    if not is_model(step):
        if not callable(step):
            raise ConfigError(f"check: expected a function or a model, got {type(step).__name__}.")
        return _verdict(Function(step, args, kwargs, row, donated, static, calibration), policy, row, compare)
    if donated or static:
        raise ConfigError(f"check: {type(step).__name__} is a model; donate_argnums and static_argnums are a function's, leave them out.")
    if len(args) != 1:
        expected = "expected one batch, such as (inputs, labels), arrays or shapes"
        raise ConfigError(f"check: {type(step).__name__} is a model, which is trained: {expected}, got {len(args)} arguments.")
    return _verdict(Training(step, args[0], row, calibration, kwargs), policy or "fp32", row, compare)


def _verdict(subject: Subject, policy: Policy, chip: Chip, compare: Sequence[str]) -> Verdict:
    name = policy.name if isinstance(policy, amp.Policy) else policy or ""
    found = error = None
    try:
        found = subject.estimated(policy)
    except OutOfMemoryError as refused:
        error = refused
    options = (*subject.options(found, policy), *policy_options(subject.estimated, compare, name))
    numerics, unchecked = _numerics(subject, policy) if found is not None else (None, NOT_RUN)
    return Verdict(found.name if found else subject.name, chip.name, name, found, error, numerics, unchecked, options)


def _numerics(subject: Subject, policy: Policy) -> tuple[NumericsReport | None, str]:
    """The report of the numbers, or why there is none."""
    if not subject.has_data():
        return None, NO_DATA
    try:
        return subject.numerics(policy), ""
    except OutOfMemoryError:
        return None, NO_ROOM


def _positions(numbers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The positions among so many arguments; those from the end counted from the beginning."""
    given = (numbers,) if isinstance(numbers, int) else numbers
    return tuple(n % count if -count <= n < 0 else n for n in given)
