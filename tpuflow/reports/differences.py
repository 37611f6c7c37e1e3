"""`tpuflow.diff` and the command `tpuflow diff`: two reports of a step compared, in total and by layer, with causes of the differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpuflow.device.timing.result import seconds_text
from tpuflow.reports.differences_page import differences_page
from tpuflow.reports.figures import KernelTotals, Report, StepFigures, figures_of, signed_seconds
from tpuflow.reports.files import PlainData, write_text
from tpuflow.reports.units import bytes_text, count_text

SHOWN = 12
SEEN = 0.005
"""The least relative change of an amount for it to be named as a cause."""
MUCH = 0.25
"""The least part of a layer's difference in time that a queue must account for to be named as a cause."""
RATE_OF = {"load": "HBM bandwidth", "store": "HBM bandwidth", "launch": "time between kernels", "matrix": "products"}
"""Queue -> the entry of `StepFigures.rates` that its speed depends on; those of the vector and scalar queues depend on the chip alone."""


AMOUNTS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "kernels": ("kernels", "{:.6g}".format),
    "hbm_bytes": ("HBM traffic", bytes_text),
    "macs": ("multiply-adds", count_text),
}
"""Field of `KernelTotals` -> its name, and the function that prints it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure before and after, with what makes its text."""

    name: str
    before: float
    after: float
    text: Callable[[float], str]

    @property
    def change(self) -> str:
        """In per cent; "" where there is nothing to compare with."""
        return f"{self.after / self.before - 1:+.1%}" if self.before else ""


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """A layer in one phase, before and after, and why it takes longer or shorter, a few words each."""

    layer: str
    phase: str
    before: KernelTotals
    after: KernelTotals
    causes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """By how much it takes longer."""
        return self.after.seconds - self.before.seconds

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "layer": self.layer,
            "phase": self.phase,
            "difference_seconds": self.seconds,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "causes": list(self.causes),
        }


@dataclass(frozen=True, slots=True)
class Differences(PlainData):
    """What `tpuflow.diff` finds, everything of one step; `layers` has those that differ, the most different first; `str` prints it."""

    before: StepFigures
    after: StepFigures
    layers: tuple[LayerDifference, ...]

    def __str__(self) -> str:
        return self.to_text()

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """(what, before, after) of settings and of the chips' rates, where they differ."""
        a, b = self.before, self.after
        return [*_unequal(a.facts, b.facts), *_unequal(a.rates, b.rates)]

    @property
    def rows(self) -> list[Row]:
        """The key figures, before and after."""
        a, b = self.before, self.after
        found = [Row(name, a.seconds[name], b.seconds[name], seconds_text) for name in a.seconds]
        if a.batch and b.batch and a.batch != b.batch:
            found.insert(1, Row("time a sample", a.seconds["time"] / a.batch, b.seconds["time"] / b.batch, seconds_text))
        found += [Row(name, getattr(a.total, key), getattr(b.total, key), text) for key, (name, text) in AMOUNTS.items()]
        bounds = {**b.total.bounds, **a.total.bounds}
        found += [Row(f"bound by {q}", a.total.bounds.get(q, 0.0), b.total.bounds.get(q, 0.0), seconds_text) for q in sorted(bounds)]
        found += [
            Row("matrix utilisation", a.mfu, b.mfu, "{:.1%}".format),
            Row("HBM planned", a.planned_bytes, b.planned_bytes, bytes_text),
        ]
        memory = {**a.memory, **b.memory}
        return found + [Row(f"at the peak: {c}", a.memory.get(c, 0), b.memory.get(c, 0), bytes_text) for c in memory]

    def to_text(self, most: int = SHOWN) -> str:
        """Settings, key figures, and so many layers with the causes of their difference."""
        heads = [f"before: {self.before.title}", f"after:  {self.after.title}"]
        settings = [f"{name}: {a} -> {b}" for name, a, b in self.settings] or ["settings and chip are the same"]
        figures = [f"{r.name:26} {r.text(r.before):>14} {r.text(r.after):>14} {r.change:>8}".rstrip() for r in self.rows]
        rest = len(self.layers) - most
        more = [f"... and {rest} more"] if rest > 0 else []
        columns = f"{'':26} {'before':>14} {'after':>14} {'change':>8}"
        return "\n".join([*heads, "", *settings, "", columns, *figures, "", *_layer_lines(self.layers[:most]), *more])

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data: seconds, bytes and operations of one step."""
        return {
            "before": self.before.title,
            "after": self.after.title,
            "settings": [{"name": name, "before": a, "after": b} for name, a, b in self.settings],
            "figures": [{"name": r.name, "before": r.before, "after": r.after} for r in self.rows],
            "layers": [row.as_dict() for row in self.layers],
        }

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page.

        Raises:
          ConfigError: the file cannot be written.
        """
        write_text(path, differences_page(self))


def diff(before: Report, after: Report) -> Differences:
    """Two reports of a step side by side: precisions, chips, batch sizes, or a model before and after a change.

    Args:
      before, after: an estimate, what was compiled or trained, a profile, or the path of a file that `tpuflow estimate ... --json` or
        `Profile.to_json` wrote.

    Raises:
      ConfigError: one is a file that cannot be read, or that is no report.
    """
    a, b = figures_of(before), figures_of(after)
    places = dict.fromkeys([*a.places, *b.places])
    rows = [row for row in (_layer(*place, a, b) for place in places) if row.seconds or row.causes]
    return Differences(a, b, tuple(sorted(rows, key=lambda row: -abs(row.seconds))))


def _layer(layer: str, phase: str, a: StepFigures, b: StepFigures) -> LayerDifference:
    before, after = (side.places.get((layer, phase), KernelTotals()) for side in (a, b))
    return LayerDifference(layer, phase, before, after, tuple(dict.fromkeys(_causes(before, after, a.rates, b.rates))))


def _causes(before: KernelTotals, after: KernelTotals, rates_before: Mapping[str, str], rates_after: Mapping[str, str]) -> Iterator[str]:
    """The causes of a layer's difference, in words: changed amounts, changed queue times with the rates behind them, a changed bound."""
    if not before.kernels or not after.kernels:
        yield "only after" if after.kernels else "only before"
        return
    for key, (name, text) in AMOUNTS.items():
        a, b = getattr(before, key), getattr(after, key)
        if abs(b - a) > SEEN * max(a, b):
            yield f"{name} {text(a)} -> {text(b)}"
    for queue, a, b in _queues(before, after):
        yield f"{'between kernels' if queue == 'launch' else f'{queue} busy'} {seconds_text(a)} -> {seconds_text(b)}"
        rate = RATE_OF.get(queue, "")
        yield from (f"{rate} {x} -> {y}" for name, x, y in _unequal(rates_before, rates_after) if name == rate)
    if before.bound != after.bound:
        yield f"bound by {before.bound} -> {after.bound}"


def _queues(before: KernelTotals, after: KernelTotals) -> list[tuple[str, float, float]]:
    """(queue, seconds before, after) of those that make up much of the difference, the largest first."""
    difference = after.seconds - before.seconds
    changes = [(q, before.busy.get(q, 0.0), after.busy.get(q, 0.0)) for q in {**before.busy, **after.busy}]
    large = [one for one in changes if (one[2] - one[1]) * difference > MUCH * difference**2 > 0]
    return sorted(large, key=lambda one: -abs(one[2] - one[1]))


def _unequal(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys([*before, *after])
    return [(n, before.get(n, "-"), after.get(n, "-")) for n in names if before.get(n) != after.get(n)]


def _layer_lines(rows: Sequence[LayerDifference]) -> list[str]:
    if not rows:
        return ["no layer differs"]
    heading = f"{'layer':44} {'phase':8} {'before':>11} {'after':>11} {'difference':>12}  causes"
    return [
        heading,
        *(
            f"{row.layer[-44:]:44} {row.phase:8} {seconds_text(row.before.seconds):>11} {seconds_text(row.after.seconds):>11} "
            f"{signed_seconds(row.seconds):>12}  {'; '.join(row.causes)}".rstrip()
            for row in rows
        ),
    ]
