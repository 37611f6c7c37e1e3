"""One self-contained HTML page of two reports' differences; it has no script."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpuflow.device.timing.result import seconds_text
from tpuflow.reports.figures import signed_seconds
from tpuflow.reports.page import asset, filled, html_bar, html_cell, html_number, html_table

if TYPE_CHECKING:
    from tpuflow.reports.differences import Differences, LayerDifference

NUMBERS = ("before", "after", "change", "difference")
MOST_LAYERS = 200
"""Layers, those that differ most, on the page; the file of data has all."""


def differences_page(found: Differences) -> str:
    """The page as text."""
    parts = {
        "title": html.escape(f"{found.before.title} → {found.after.title}"),
        "settings": _settings(found),
        "figures": _figures(found),
        "layers": _layers(found.layers[:MOST_LAYERS]),
        "style": asset("page.css"),
    }
    return filled("differences.html", parts)


def _settings(found: Differences) -> str:
    if not found.settings:
        return "<p>Settings and chip are the same: what differs is the program, or the version that compiled it.</p>"
    return html_table(("", "before", "after"), [tuple(map(html_cell, row)) for row in found.settings])


def _figures(found: Differences) -> str:
    rows = [(html_cell(r.name), html_number(r.text(r.before)), html_number(r.text(r.after)), html_number(r.change)) for r in found.rows]
    return html_table(("", "before", "after", "change"), rows, NUMBERS)


def _layers(rows: Sequence[LayerDifference]) -> str:
    most = max((abs(row.seconds) for row in rows), default=0.0) or 1.0
    return html_table(("layer and phase", "before", "after", "difference", "", "causes"), [_layer(row, most) for row in rows], NUMBERS)


def _layer(row: LayerDifference, most_seconds: float) -> tuple[str, ...]:
    times = (seconds_text(row.before.seconds), seconds_text(row.after.seconds), signed_seconds(row.seconds))
    causes = "".join(f"<div>{html.escape(cause.replace(' -> ', ' → '))}</div>" for cause in row.causes)  # browsers break a line within "->"
    return (html_cell(f"{row.layer}, {row.phase}"), *map(html_number, times), html_bar(row.seconds, most_seconds), f"<td>{causes}</td>")
