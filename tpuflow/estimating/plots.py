"""A sweep as pictures: its figures over what varies, and what beats what; drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tpuflow.device.timing.result import seconds_text
from tpuflow.errors import ConfigError
from tpuflow.estimating.pareto import ENERGY, MEMORY, PRICE, TIME, Objective, front
from tpuflow.estimating.sweeping import AXES, Point
from tpuflow.reports.units import count_text
from tpuflow.training.plotting import matplotlib_figures, save_figure

ACROSS = {"batch": "batch size", "sink_size": "steps a round trip", "policy": "policy", "chip": "chip", "target": "model"}
"""What lies across, the first of these that varies, and its label."""
LOGARITHMIC = 10.0
"""A range from which on an axis is logarithmic."""
ROOM = 1.15
"""Where an axis from nothing ends, as a multiple of the largest value."""
NAMED = 12
"""Points of a front that are named."""


def plot_sweep(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Draw step time, samples a second and memory over what varies first: batch size, sink size, policy, chip or model.

    Raises:
      ConfigError: matplotlib is missing, nothing fits, or the file cannot be written.
    """
    fitting = _fitting(points)
    across = next((a for a in ACROSS if len({getattr(p, a) for p in fitting}) > 1), "batch")
    figure = matplotlib_figures().Figure(figsize=(9.0, 8.0), layout="constrained")
    figure.suptitle(_shared(points))
    panels = figure.subplots(3, sharex=True)
    measures: Sequence[tuple[str, Callable[[float], str], Callable[[Point], float]]] = (
        ("step, host included", seconds_text, lambda p: p.step_seconds or 0.0),
        ("samples a second", count_text, lambda p: p.batch / (p.step_seconds or 1.0)),
        (MEMORY.name, MEMORY.text, lambda p: MEMORY.value(p) or 0.0),
    )
    series = _series(fitting, across)
    ticks = list(dict.fromkeys(_tick(p, across) for p in fitting))
    for axis, (label, text, value) in zip(panels, measures, strict=True):
        for name, line in series.items():
            axis.plot([ticks.index(_tick(p, across)) for p in line], [value(p) for p in line], marker="o", markersize=4, label=name)
        axis.set_ylabel(label)
        _readable(axis.yaxis, [value(p) for p in fitting], text)
    panels[-1].set_xticks(range(len(ticks)), ticks)
    panels[-1].set_xlabel(ACROSS[across])
    if len(series) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    save_figure(figure, path)


def plot_pareto(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Draw memory, energy (where a chip's row has a power) and price (where one was said) against time a sample.

    Points that no other beats in the two are filled and numbered; their names stand beside the panel, where they hide nothing.

    Raises:
      ConfigError: matplotlib is missing, nothing fits, or the file cannot be written.
    """
    fitting = _fitting(points)
    against = [o for o in (MEMORY, ENERGY, PRICE) if any(o.value(p) is not None for p in fitting)]
    figure = matplotlib_figures().Figure(figsize=(9.0, 5.0 * len(against)), layout="constrained")
    figure.suptitle(_shared(points))
    for axis, objective in zip(figure.subplots(len(against), squeeze=False)[:, 0], against, strict=True):
        _draw_front(axis, [p for p in fitting if objective.value(p) is not None], objective)
    save_figure(figure, path)


def _draw_front(axis: Any, points: Sequence[Point], objective: Objective) -> None:
    best = sorted(front(points, (TIME, objective)), key=lambda p: TIME.value(p) or 0.0)
    varied = _varied(points)
    for one in points:
        at = TIME.value(one), objective.value(one)
        axis.plot(*at, "o", color="C0", fillstyle="full" if one in best else "none")
    for target in dict.fromkeys(p.target for p in best):
        line = [p for p in best if p.target == target]
        axis.plot([TIME.value(p) for p in line], [objective.value(p) for p in line], drawstyle="steps-post", color="C0", alpha=0.4)
    for number, one in enumerate(best[:NAMED], 1):  # to the lower left of the front, where by its meaning nothing is
        at = TIME.value(one), objective.value(one)
        axis.annotate(
            str(number), at, xytext=(-4, -3), textcoords="offset points", horizontalalignment="right", verticalalignment="top",
            fontsize="small",
        )  # fmt: skip
        axis.plot([], [], " ", label=f"{number}: {_label(one, varied)}")
    axis.legend(
        title="no other beats",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        handlelength=0,
        handletextpad=0,
        fontsize="small",
        frameon=False,
    )
    axis.set_xlabel(TIME.name)
    axis.set_ylabel(objective.name)
    axis.margins(x=0.1, y=0.15)
    _readable(axis.xaxis, [TIME.value(p) or 0.0 for p in points], TIME.text)
    _readable(axis.yaxis, [objective.value(p) or 0.0 for p in points], objective.text)


def _readable(axis: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    """Ticks with units; powers of ten, twos and fives where the values are far apart, else a scale from nothing."""
    side = "x" if axis.axis_name == "x" else "y"
    panel = axis.axes
    if min(values) > 0 and max(values) >= LOGARITHMIC * min(values):
        getattr(panel, f"set_{side}scale")("log", subs=(2, 5))
        axis.set_minor_formatter(lambda value, _: _short(text(value)))
    else:
        getattr(panel, f"set_{side}lim")(0, ROOM * max(values))
    axis.set_major_formatter(lambda value, _: _short(text(value)) if value > 0 else "0")
    panel.grid(alpha=0.3, which="both")


def _short(text: str) -> str:
    """A tick without the zeros that its text ends with: "2.000 ms" is 2 ms."""
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}".strip()


def _fitting(points: Sequence[Point]) -> list[Point]:
    fitting = [p for p in points if p.step_seconds]
    if not fitting:
        raise ConfigError("plot: none of the points fits on its chip; there is nothing to draw.")
    return fitting


def _varied(points: Sequence[Point]) -> list[str]:
    return [a for a in AXES if len({getattr(p, a) for p in points}) > 1]


def _shared(points: Sequence[Point]) -> str:
    """What all points have in common, as a title."""
    one, varied = points[0], _varied(points)
    parts = {
        "target": one.target.rpartition(":")[2],
        "chip": f"on {one.chip}",
        "policy": f"in {one.policy}" if one.policy else "",
        "batch": f"batch {one.batch}",
        "sink_size": _sink(one),
    }
    return ", ".join(text for axis, text in parts.items() if axis not in varied and text)


def _label(p: Point, varied: Sequence[str]) -> str:
    texts = {"target": p.target.rpartition(":")[2], "batch": f"batch {p.batch}", "chip": p.chip, "policy": p.policy or "as written"}
    return ", ".join(texts.get(a) or _sink(p) for a in varied) or texts["target"]


def _sink(p: Point) -> str:
    return "an epoch a round trip" if p.sink_size < 0 else f"{max(p.sink_size, 1)} steps a round trip"


def _tick(p: Point, across: str) -> str:
    return {"sink_size": "epoch" if p.sink_size < 0 else str(p.sink_size)}.get(across, str(getattr(p, across)) or "as written")


def _series(points: Sequence[Point], across: str) -> dict[str, list[Point]]:
    """Points that differ in `across` only, under what sets them apart from the others."""
    varied = [a for a in _varied(points) if a != across]
    found: dict[str, list[Point]] = {}
    for p in points:
        found.setdefault(_label(p, varied), []).append(p)
    return found
