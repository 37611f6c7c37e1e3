"""One self-contained HTML page of a profile: figures, timeline, layers, queues, roofline, memory, kernels and numerics; no network."""

from __future__ import annotations

import datetime
import html
import importlib.resources
import json
import math
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tpuflow import __version__
from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.device.timing.result import KernelRow, joules_text, seconds_text
from tpuflow.isa.instruction import QUEUES
from tpuflow.reports.files import write_text
from tpuflow.reports.memory import Allocation, MemoryMap
from tpuflow.reports.profile import OUTSIDE, KernelLine, LayerLine, Profile, place_in
from tpuflow.reports.units import bytes_text

MOST_KERNELS = 2000
"""Kernels, the longest ones, in the table and the roofline; the timeline has all of one step."""
MOST_BOXES = 1500
"""Buffers, the largest ones, in the memory map."""
DIGITS = 7


class Numbers(Protocol):
    """What a page shows of a `tpuflow.NumericsReport`: what it is of, its sentences, and its rows, each with `as_dict`."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def rows(self) -> Sequence[Any]: ...

    def explain(self) -> list[str]: ...


def page(profile: Profile, numerics: Numbers | Iterable[Numbers] = (), summary: str = "") -> str:
    """The page as text.

    numerics: a numerics report, or several, as of a training after so many steps or of one step in several precisions. Their sentences
    come after the key figures. summary: text to begin with.
    """
    reports = tuple(numerics) if isinstance(numerics, Iterable) else (numerics,)
    parts = {
        "title": html.escape(profile.title),
        "facts": "".join(f"<span>{html.escape(name)} <b>{html.escape(value)}</b></span>" for name, value in facts(profile).items()),
        "provenance": html.escape(f"Times are {profile.time.provenance}. Nothing was run."),
        "cards": cards(_cards(profile)),
        "totals": _totals(profile),
        "summary": _summary(summary),
        "numerics": _numerics(reports),
        "text": html.escape(profile.to_text(), quote=False),
        "data": _embedded(_data(profile, reports)),
        "style": asset("page.css"),
        "script": asset("page.js"),
    }
    return filled("page.html", parts)


def facts(profile: Profile) -> dict[str, str]:
    """What a report is of: the step's settings, chip, steps of a round trip, version and day."""
    chip = {"chip": profile.time.chip.name, "steps a round trip": str(profile.steps)}
    return {**profile.settings, **chip, "tpuflow": __version__, "date": datetime.date.today().isoformat()}


def cards(figures: Iterable[tuple[str, str]]) -> str:
    """Key figures, (name, value) each, as the inside of a `cards` element."""
    return "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for name, value in figures)


def text_page(title: str, text: str) -> str:
    """A page of text alone, for what has no profile."""
    return filled("text.html", {"title": html.escape(title), "summary": _summary(text), "style": asset("page.css")})


STILL = "default-src 'none'; style-src 'unsafe-inline'"
SCRIPTED = "; script-src 'unsafe-inline'; img-src data:"


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template of this folder, below the head that all pages have, with its markers (@name@) replaced by parts, which are HTML.

    Pages load nothing from elsewhere; only one that is given a `script` may run it, and show pictures that lie in it.
    """
    parts = {"policy": STILL + (SCRIPTED if "script" in parts else ""), **parts}
    pieces = (asset("head.html") + asset(template)).split("@")  # text between markers, marker names in between
    return "".join(parts.get(piece, f"@{piece}@") if i % 2 else piece for i, piece in enumerate(pieces))


def html_table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: Container[str] = ()) -> str:
    """A table of cells that are HTML; columns of numbers have their heading on the right."""
    head = "".join(f'<th class="number">{name}</th>' if name in numbers else f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_cell(text: str) -> str:
    """A cell of text."""
    return f"<td>{html.escape(text)}</td>"


def html_number(text: str) -> str:
    """A cell of a number."""
    return f'<td class="number">{html.escape(text)}</td>'


def html_bar(difference: float, most: float) -> str:
    """A cell with a bar from its middle: to the right for what is more, to the left for what is less, of at most so much."""
    share = 50 * abs(difference) / most  # of the cell's width
    side, color = (50, "more") if difference > 0 else (50 - share, "less")
    return f'<td class="bar"><i style="margin-left:{side:.2f}%;width:{share:.2f}%;background:var(--{color})"></i></td>'


def _summary(text: str) -> str:
    return f'<section id="summary"><pre>{html.escape(text, quote=False)}</pre></section>' if text else ""


def write_page(profile: Profile, path: str | os.PathLike[str], numerics: Numbers | Iterable[Numbers] = ()) -> None:
    """Write `page` to a file.

    Raises:
      ConfigError: the file cannot be written.
    """
    write_text(path, page(profile, numerics))


def asset(name: str) -> str:
    """The text of a file of this folder."""
    return importlib.resources.files("tpuflow.reports").joinpath(name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element."""
    return json.dumps(_rounded(data), separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(value: Any) -> Any:
    """Floats with few digits, since they are drawn; those that JSON lacks as text."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


def _numerics(reports: Sequence[Numbers]) -> str:
    if not reports:
        return ""
    parts = "".join(f"{_heading(r)}<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in r.explain())}</ul>" for r in reports)
    rows = '<details><summary>Rows by layer</summary><div class="table long"></div></details>'
    return f'<section id="numerics"><h2>Numerics</h2>{parts}{rows}</section>'


def _heading(report: Numbers) -> str:
    after = f" after {report.settings['step']} steps" if "step" in report.settings else ""
    return f"<h3>{html.escape(report.settings['policy'])}{after}</h3>"


def _cards(p: Profile) -> list[tuple[str, str]]:
    t = p.time
    return [
        ("time, host included", seconds_text(t.seconds / p.steps)),
        ("device", seconds_text(t.device_seconds / p.steps)),
        ("waiting for data", seconds_text(t.feed_picoseconds / PICOSECONDS / p.steps)),
        ("host", seconds_text(t.launch_picoseconds / PICOSECONDS / p.steps)),
        ("roofline", seconds_text(t.roofline_seconds / p.steps)),
        ("matrix utilisation", f"{t.mfu:.1%}"),
        ("operations a byte", f"{t.intensity:.1f}"),
        ("HBM traffic", bytes_text(t.work.hbm_bytes / p.steps)),
        ("HBM planned", f"{bytes_text(p.memory.planned_bytes)} of {bytes_text(t.chip.available_hbm_bytes)}"),
        *_resident(p),
        *([("at the host", bytes_text(most))] if (most := max(p.memory.host_bytes, default=0)) else []),
        ("kernels", f"{sum(r.count for r in t.kernels) / p.steps:.6g}"),
        *([("energy at most", joules_text(t.joules_at_most / p.steps))] if t.joules_at_most is not None else []),
    ]


def _resident(p: Profile) -> list[tuple[str, str]]:
    """What arrays take of the memory where they stay, if the chip has one."""
    chip, most = p.time.chip, max(p.memory.resident_bytes, default=0)
    found = f"{bytes_text(most)} of {bytes_text(chip.resident_bytes)}"
    return [(f"arrays in {chip.array_space.upper()}", found)] if chip.array_space else []


def _totals(p: Profile) -> str:
    """The figures of a whole round trip, where that is more than the step."""
    if p.steps == 1:
        return ""
    t = p.time
    figures = [
        ("time", seconds_text(t.seconds)),
        ("HBM traffic", bytes_text(t.work.hbm_bytes)),
        ("kernels", str(sum(r.count for r in t.kernels))),
        *([("energy at most", joules_text(t.joules_at_most))] if t.joules_at_most is not None else []),
    ]
    return f'<h3>Round trip of {p.steps} steps</h3><div class="cards">{cards(figures)}</div>'


def _data(p: Profile, numerics: Sequence[Numbers]) -> dict[str, Any]:
    chip = p.time.chip
    return {
        "timeline": _timeline(p),
        "layer_names": _layer_names(p),
        "queue_names": list(QUEUES),
        "layers": [_layer(line) for line in p.layers],
        "queues": [{"queue": q.queue, "seconds": q.seconds, "share": q.share} for q in p.queues if q.seconds],
        "kernels": [_kernel(k) for k in p.kernels[:MOST_KERNELS]],
        "peaks": {name: chip.peak_flops(name) for name in sorted(p.time.work.macs) or ("f32",)},
        "bandwidth": chip.hbm_bytes_per_second,
        "memory": _memory(p.memory),
        "numerics": [{**(_which(r) if len(numerics) > 1 else {}), **row.as_dict()} for r in numerics for row in r.rows],
    }


def _which(report: Numbers) -> dict[str, Any]:
    return {name: report.settings[name] for name in ("policy", "step") if name in report.settings}


def _layer_names(p: Profile) -> list[str]:
    return sorted({k.layer for k in p.kernels})


def _layer(line: LayerLine) -> dict[str, Any]:
    work = {"kernels": line.kernels, "macs": line.macs, "hbm_bytes": line.hbm_bytes}
    return {"layer": line.layer, "seconds": dict(line.seconds), "total": line.total_seconds, **work}


def _kernel(k: KernelLine) -> dict[str, Any]:
    left_out = ("place", "cores", "busy_seconds")
    return {name: getattr(k, name) for name in KernelLine.__dataclass_fields__ if name not in left_out}


def _timeline(p: Profile) -> dict[str, Any]:
    """One execution of every kernel, in program order; a kernel in an inner loop is as long as all its trips of one step."""
    trains = any(k.phase == "backward" for k in p.kernels)
    rows = [(r, max(r.count // p.steps, 1)) for r in p.time.kernels]
    places = [place_in(r.time.scope, trains=trains) for r, _ in rows]
    number = {name: i for i, name in enumerate(_layer_names(p))}
    durations = [times * r.time.seconds for r, times in rows]
    return {
        "start": list(_starts(durations)),
        "duration": durations,
        "seconds": sum(durations),
        "what": [r.time.name for r, _ in rows],
        "source": [r.time.source for r, _ in rows],
        "layer": [number[layer.path or OUTSIDE] for layer in places],
        "phase": [layer.phase for layer in places],
        "bound": [r.time.bound for r, _ in rows],
        "busy": [_busy(r, times) for r, times in rows],
    }


def _starts(durations: Iterable[float]) -> Iterable[float]:
    now = 0.0
    for duration in durations:
        yield now
        now += duration


def _busy(row: KernelRow, times: int) -> list[float]:
    return [times * busy / PICOSECONDS for busy in row.time.busy_picoseconds]


def _memory(m: MemoryMap) -> dict[str, Any]:
    boxes = sorted(m.allocations, key=lambda a: -a.bytes * (a.last - a.first + 1))[:MOST_BOXES]
    plain = {name: value for name, value in m.as_dict().items() if name not in ("on_chip", "places")}
    return {**plain, "places": list(m.places), "peak_tick": m.peak_tick, "map": [_box(a) for a in boxes]}


def _box(a: Allocation) -> dict[str, Any]:
    return {name: getattr(a, name) for name in Allocation.__dataclass_fields__ if name != "buffer"}
