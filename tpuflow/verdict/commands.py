"""The command `tpuflow check`: `tpuflow.check` of a target of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from tpuflow.chips import get_chip
from tpuflow.errors import ConfigError, OutOfMemoryError
from tpuflow.estimating.estimating import SINK_STEPS
from tpuflow.estimating.targets import estimate_target, load_step
from tpuflow.verdict.judging import COMPARED, check
from tpuflow.verdict.options import Option
from tpuflow.verdict.verdict import Verdict

BATCHES_TRIED = 3
"""Smaller batches that are estimated where the one asked for does not fit."""


def check_target(
    target: str, batch: int, chip: str, policy: str | None, sink_size: int | None, calibration: str | None, compare: Sequence[str] | None
) -> Verdict:
    """The verdict on what "module:function" or "file.py:function" gives for a batch size.

    Raises:
      ConfigError: there is no such function, it gives something else, or an option does not belong to what it gives.
    """
    made = load_step(target, batch)
    chosen = made.options.get("policy") if policy is None else policy
    options: dict[str, Any] = {**made.options, "chip": chip, "policy": chosen, "calibration": calibration}
    if sink_size is not None:
        if not made.trains:
            raise ConfigError(
                f"--sink-size: {target} gives a function, which is called once a round trip; let it give a model and a batch."
            )
        options["sink_size"] = sink_size
    found = check(made.step, *made.arguments, **options, compare=COMPARED if compare is None else compare)
    smaller = [] if found.error is None else _smaller_batches(target, batch, found.error, chip, policy)
    return dataclasses.replace(found, options=(*smaller, *found.options))


def _smaller_batches(target: str, batch: int, error: OutOfMemoryError, chip: str, policy: str | None) -> list[Option]:
    """The largest power of two that fits, by the memory that the whole batch needs; with what did not fit on the way to it."""
    if error.needed_bytes is None:
        return []
    most = int(batch * get_chip(chip).available_hbm_bytes / error.needed_bytes)
    tried: list[Option] = []
    for halved in range(BATCHES_TRIED):
        size = (1 << max(most, 1).bit_length() - 1) >> halved
        if size and not (tried and tried[-1].cost):
            tried.append(Option.tried(f"--batch {size}", partial(estimate_target, target, size, chip, policy, SINK_STEPS)))
    return tried
