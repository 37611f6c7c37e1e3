"""The Pareto front of a sweep, in time, memory, energy and price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpuflow.device.timing.result import joules_text, seconds_text
from tpuflow.estimating.sweeping import Point
from tpuflow.reports.memory import MIB


@dataclass(frozen=True, slots=True)
class Objective:
    """A quantity to minimise: its name, how it is printed, and its value at a point, or None if the point has none."""

    name: str
    text: Callable[[float], str]
    value: Callable[[Point], float | None]


def _seconds(point: Point) -> float | None:
    return None if point.estimate is None else point.estimate.step_seconds / point.batch


def _mebibytes(point: Point) -> float | None:
    return None if point.estimate is None else point.estimate.memory.peak_memory_in_bytes / MIB


def _joules(point: Point) -> float | None:
    whole = None if point.estimate is None else point.estimate.step_joules_at_most
    return None if whole is None else whole / point.batch


def _dollars(point: Point) -> float | None:
    return None if point.sample_dollars is None else 1e6 * point.sample_dollars


TIME = Objective("time a sample", seconds_text, _seconds)
MEMORY = Objective("HBM at most (MiB)", "{:.1f}".format, _mebibytes)
ENERGY = Objective("energy a sample at most", joules_text, _joules)
PRICE = Objective("dollars a million samples", "{:.3g}".format, _dollars)
OBJECTIVES = (TIME, MEMORY, ENERGY, PRICE)
"""Time, energy and price are of a sample, so that batch sizes compare; energy is at the chip's greatest power, where its row has one,
and the price is the user's."""


def front(points: Sequence[Point], objectives: Sequence[Objective] = OBJECTIVES) -> tuple[Point, ...]:
    """The points of the Pareto front: no other point of the same target dominates them, being no larger in all objectives and smaller in
    one.

    Two points are compared in the objectives that both have. Points that do not fit on their chip are not part of it.
    """
    fitting = [p for p in points if p.estimate is not None]
    return tuple(p for p in fitting if not any(_beats(q, p, objectives) for q in fitting if q.target == p.target))


def _beats(q: Point, p: Point, objectives: Sequence[Objective]) -> bool:
    pairs = [(o.value(q), o.value(p)) for o in objectives]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return all(a <= b for a, b in both) and any(a < b for a, b in both)
