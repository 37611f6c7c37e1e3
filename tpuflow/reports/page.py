"""One self-contained HTML page of a profile: figures, timeline, layers, queues, roofline, memory, kernels and numerics; no network."""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.device.timing.result import KernelRow, seconds_text
from tpuflow.isa.instruction import QUEUES
from tpuflow.reports.files import write_text
from tpuflow.reports.memory import MIB, Allocation, MemoryMap
from tpuflow.reports.profile import OUTSIDE, KernelLine, LayerLine, Profile, place_in

MOST_KERNELS = 2000
"""Kernels, the longest ones, in the table and the roofline; the timeline has all of one step."""
MOST_BOXES = 1500
"""Buffers, the largest ones, in the memory map."""
DIGITS = 7

Rows = Sequence[Mapping[str, Any]]


def page(profile: Profile, numerics: Rows = (), summary: str = "") -> str:
    """The page as text. `numerics`: rows of a numerics report, plain data under column names, shown as a table if there are any;
    `summary`: text to begin with."""
    parts = {
        "title": html.escape(f"{profile.name} on {profile.time.chip.name}"),
        "provenance": html.escape(f"Times are {profile.time.provenance}. Nothing was run."),
        "cards": "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for name, value in _cards(profile)),
        "summary": _summary(summary),
        "numerics": '<section id="numerics"><h2>Numerics</h2><div class="table"></div></section>' if numerics else "",
        "text": html.escape(profile.to_text(), quote=False),
        "data": _embedded(_data(profile, numerics)),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
    }
    return _filled("page.html", parts)


def text_page(title: str, text: str) -> str:
    """A page of text alone, for what has no profile."""
    return _filled("text.html", {"title": html.escape(title), "summary": _summary(text), "style": _asset("page.css")})


def _filled(template: str, parts: Mapping[str, str]) -> str:
    pieces = _asset(template).split("@")  # text between markers, marker names in between
    return "".join(parts.get(piece, f"@{piece}@") if i % 2 else piece for i, piece in enumerate(pieces))


def _summary(text: str) -> str:
    return f'<section id="summary"><pre>{html.escape(text, quote=False)}</pre></section>' if text else ""


def write_page(profile: Profile, path: str | os.PathLike[str], numerics: Rows = ()) -> None:
    """Write `page` to a file.

    Raises:
      ConfigError: the file cannot be written.
    """
    write_text(path, page(profile, numerics))


def _asset(name: str) -> str:
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


def _cards(p: Profile) -> list[tuple[str, str]]:
    t = p.time
    return [
        ("a step, host included", seconds_text(t.seconds / p.steps)),
        ("host, a step", seconds_text(t.launch_picoseconds / PICOSECONDS / p.steps)),
        ("steps a round trip", str(p.steps)),
        ("matrix utilisation", f"{t.mfu:.1%}"),
        ("roofline of a step", seconds_text(t.roofline_seconds / p.steps)),
        ("operations a byte", f"{t.intensity:.1f}"),
        ("HBM planned", f"{p.memory.planned_bytes / MIB:.1f} MiB of {t.chip.available_hbm_bytes / MIB:.0f}"),
        ("arrays in VMEM", f"{max(p.memory.resident_bytes, default=0) / MIB:.1f} MiB of {t.chip.vmem_bytes / MIB:g}"),
        ("kernels a step", str(sum(r.count for r in t.kernels) // p.steps)),
    ]


def _data(p: Profile, numerics: Rows) -> dict[str, Any]:
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
        "numerics": [dict(row) for row in numerics],
    }


def _layer_names(p: Profile) -> list[str]:
    return sorted({k.layer for k in p.kernels})


def _layer(line: LayerLine) -> dict[str, Any]:
    return {"layer": line.layer, "seconds": dict(line.seconds), "total": line.total_seconds, "share": line.share}


def _kernel(k: KernelLine) -> dict[str, Any]:
    left_out = ("place", "cores")
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
