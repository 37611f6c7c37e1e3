"""Estimates over models, batch sizes, chips, policies and sink sizes: a table, and plain data."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuflow.chips import get_chip
from tpuflow.device.timing.calibration import Calibration, family_of, get_calibration
from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.device.timing.program import sink_time
from tpuflow.device.timing.result import seconds_text
from tpuflow.errors import ConfigError, OutOfMemoryError
from tpuflow.estimating.estimating import Estimate
from tpuflow.estimating.targets import estimate_target
from tpuflow.garbage import between_pieces
from tpuflow.isa.program import Program

EPOCH = -1
AXES = ("target", "batch", "chip", "policy", "sink_size")
"""What may vary from point to point."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every combination of these is estimated; a policy of None is the function as it is written, a sink size of -1 an epoch.

    `calibrations` are files; each chip takes the one for its family, or what tpuflow has for it if there is none. `prices` are dollars an
    hour by chip, which change too often to be in the catalogue. `several_chips`: `mesh` and `sharding` of a training, of all points.
    """

    targets: tuple[str, ...]
    batches: tuple[int, ...] = (32,)
    chips: tuple[str, ...] = ("generic",)
    policies: tuple[str | None, ...] = (None,)
    sink_sizes: tuple[int, ...] = (100,)
    steps_per_epoch: int | None = None
    calibrations: tuple[str, ...] = ()
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    several_chips: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """One combination with its estimate, or with the reason why there is none: it does not fit; and the chip's price, if it was said."""

    target: str
    batch: int
    chip: str
    policy: str
    sink_size: int
    estimate: Estimate | None
    error: OutOfMemoryError | None = None
    dollars_an_hour: float | None = None

    @property
    def sample_dollars(self) -> float | None:
        """What the chip costs while it works on one sample; None if nobody said its price, or it does not fit."""
        if self.estimate is None or self.dollars_an_hour is None:
            return None
        return self.dollars_an_hour / 3600 * self.estimate.step_seconds / self.batch

    @property
    def step_seconds(self) -> float | None:
        """Time of one step with its share of the host's round trip; None if it does not fit."""
        return None if self.estimate is None else self.estimate.step_seconds

    @property
    def host_seconds(self) -> float:
        """A step's share of the host's round trip: the gap between launches."""
        return 0.0 if self.estimate is None else self.estimate.time.launch_picoseconds / PICOSECONDS / self.estimate.steps

    def as_dict(self) -> dict[str, Any]:
        """The combination and all figures as plain data."""
        named = {axis: getattr(self, axis) for axis in AXES}
        if self.estimate is None:
            return {**named, "fits": False, "why": str(self.error)}
        gap = {"host_seconds_a_step": self.host_seconds, "samples_per_second": self.batch / self.estimate.step_seconds}
        gap |= {} if self.sample_dollars is None else {"sample_dollars": self.sample_dollars}
        return {**named, "fits": True, **gap, **self.estimate.as_dict()}

    def file(self, path: Path) -> Path:
        """The path with the combination in the file's name."""
        name = "-".join(
            map(str, (self.target.rpartition(":")[2], f"b{self.batch}", Path(self.chip).stem, self.policy, f"sink{self.sink_size}"))
        )
        return path.with_name(f"{path.stem}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}{path.suffix}")


def run_sweep(sweep: Sweep) -> list[Point]:
    """Estimate every combination; what differs in the sink size only is compiled once.

    Raises:
      ConfigError: there is no such function, chip or policy; a sink size is below -1, or -1 without the length of an epoch; a calibration
        or a price is for none of the chips.
    """
    if unknown := [chip for chip in sweep.prices if chip not in sweep.chips]:
        raise ConfigError(f"price of {', '.join(unknown)}: expected one of the chips that are asked for: {', '.join(sweep.chips)}.")
    for size in sweep.sink_sizes:
        _steps(size, sweep.steps_per_epoch)
    calibrations = _by_chip(sweep)
    combinations = itertools.product(sweep.targets, sweep.chips, sweep.policies, sweep.batches)
    found: list[Point] = []
    for target, chip, policy, batch in combinations:
        if found:
            between_pieces()
        found += _points(sweep, target, batch, chip, policy, calibrations[chip])
    return [dataclasses.replace(p, dollars_an_hour=sweep.prices.get(p.chip)) for p in found]


def _by_chip(sweep: Sweep) -> dict[str, Calibration | None]:
    """The calibration that was given for each chip, if any."""
    families = {chip: family_of(get_chip(chip)) for chip in sweep.chips}
    given: dict[str, Calibration] = {}
    for path in sweep.calibrations:
        calibration = get_calibration(path)
        suited = [chip for chip, family in families.items() if calibration.family in ("", family)]
        if not suited:
            there = ", ".join(f"{chip} ({family})" for chip, family in families.items())
            raise ConfigError(f"calibration {path}: for chips of the family {calibration.family!r}; none of these is: {there}.")
        if twice := sorted(set(suited) & set(given)):
            raise ConfigError(f"calibration {path}: another one was given for {', '.join(twice)}; give one for each family.")
        given |= dict.fromkeys(suited, calibration)
    return {chip: given.get(chip) for chip in families}


def _points(sweep: Sweep, target: str, batch: int, chip: str, policy: str | None, calibration: Calibration | None) -> list[Point]:
    first = _steps(sweep.sink_sizes[0], sweep.steps_per_epoch)
    try:
        found = estimate_target(target, batch, chip, policy, first, calibration, sweep.several_chips)
    except OutOfMemoryError as error:
        return [Point(target, batch, chip, policy or "", size, None, error) for size in sweep.sink_sizes]
    if not _is_sunk(found.program):
        return [Point(target, batch, chip, found.policy, 0, found)]
    return [Point(target, batch, chip, found.policy, size, _sunk(found, _steps(size, sweep.steps_per_epoch))) for size in sweep.sink_sizes]


def _is_sunk(program: Program) -> bool:
    return bool(program.infeeds)


def _sunk(found: Estimate, steps: int) -> Estimate:
    if steps == found.steps:
        return found
    return dataclasses.replace(found, steps=steps, time=sink_time(found.program, steps, calibration=found.time.calibration))


def _steps(sink_size: int, steps_per_epoch: int | None) -> int:
    """Steps of one round trip."""
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise ConfigError(f"--steps-per-epoch: expected at least 1 (the number of samples over the batch size), got {steps_per_epoch}.")
    if sink_size < EPOCH:
        raise ConfigError(f"--sink-size: expected steps a round trip, 0 or more, or -1 for an epoch; got {sink_size}.")
    if sink_size == EPOCH and steps_per_epoch is None:
        raise ConfigError(
            "--sink-size -1 is an epoch, whose length is not known: add --steps-per-epoch N, the number of samples over the batch size."
        )
    return (steps_per_epoch or 1) if sink_size == EPOCH else max(1, sink_size)


# --- text ---------------------------------------------------------------------------------------------------------------


def table(points: Sequence[Point], best: Collection[Point] = ()) -> str:
    """A line for each point, those of `best` with a star at their end; "host gap" is a step's share of the host's round trip and what
    part of the step it is; "J at most" its energy at the chip's greatest power, "-" if the row has none; "$ a million" what a million
    samples cost, where a price was said."""
    places = f"{'target':34} {'chip':10} {'batch':>6} {'policy':10} {'sink':>6}"
    price = f" {'$ a million':>11}" if any(p.sample_dollars is not None for p in points) else ""
    heading = f"{places} {'step':>11} {'host gap':>18} {'samples/s':>10} {'MFU':>6} {'J at most':>10} {'MiB':>9}{price}"
    fits = sorted({p.estimate.time.provenance for p in points if p.estimate is not None})
    lines = [f"{_line(p)} *" if any(p is one for one in best) else _line(p) for p in points]
    marked = ["* no other beats it in time, energy and price of a sample, and memory at once"] if best else []
    return "\n".join([heading, *lines, *marked, *fits])


def _line(p: Point) -> str:
    named = f"{p.target[-34:]:34} {p.chip[-10:]:10} {p.batch:6} {p.policy or '-':10} {p.sink_size:6}"
    if p.estimate is None:
        return f"{named} {'does not fit':>11}: {str(p.error).splitlines()[0]}"
    seconds, time = p.estimate.step_seconds, p.estimate.time
    gap = f"{seconds_text(p.host_seconds)} {p.host_seconds / seconds:6.1%}"
    memory = p.estimate.memory.peak_memory_in_bytes / _MIB
    price = "" if p.sample_dollars is None else f" {1e6 * p.sample_dollars:11.4g}"
    joules = "-" if p.estimate.step_joules_at_most is None else f"{p.estimate.step_joules_at_most:.4g}"
    return f"{named} {seconds_text(seconds):>11} {gap:>18} {p.batch / seconds:10.1f} {time.mfu:6.1%} {joules:>10} {memory:9.1f}{price}"
