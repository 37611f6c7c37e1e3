"""One self-contained HTML page of two reports' differences; it has no script."""

from __future__ import annotations

import html
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from tpuflow.device.timing.result import seconds_text
from tpuflow.reports.figures import signed_seconds
from tpuflow.reports.page import asset, filled

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
    return _table(("", "before", "after"), [tuple(map(_cell, row)) for row in found.settings])


def _figures(found: Differences) -> str:
    rows = [(_cell(r.name), _number(r.text(r.before)), _number(r.text(r.after)), _number(r.change)) for r in found.rows]
    return _table(("", "before", "after", "change"), rows, NUMBERS)


def _layers(rows: Sequence[LayerDifference]) -> str:
    most = max((abs(row.seconds) for row in rows), default=0.0) or 1.0
    return _table(("layer and phase", "before", "after", "difference", "", "causes"), [_layer(row, most) for row in rows], NUMBERS)


def _layer(row: LayerDifference, most_seconds: float) -> tuple[str, ...]:
    times = (seconds_text(row.before.seconds), seconds_text(row.after.seconds), signed_seconds(row.seconds))
    share = 50 * abs(row.seconds) / most_seconds  # of the cell's width, from its middle
    side, color = (50, "more") if row.seconds > 0 else (50 - share, "less")
    bar = f'<td class="bar"><i style="margin-left:{side:.2f}%;width:{share:.2f}%;background:var(--{color})"></i></td>'
    causes = "".join(f"<div>{html.escape(cause.replace(' -> ', ' → '))}</div>" for cause in row.causes)  # browsers break a line within "->"
    return (_cell(f"{row.layer}, {row.phase}"), *map(_number, times), bar, f"<td>{causes}</td>")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: Container[str] = ()) -> str:
    """A table of cells that are HTML; columns of numbers have their heading on the right."""
    head = "".join(f'<th class="number">{name}</th>' if name in numbers else f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}</td>"


def _number(text: str) -> str:
    return f'<td class="number">{html.escape(text)}</td>'
