"""One self-contained HTML page of a comparison with XLA:TPU; it has no script."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpuflow.comparing.comparison import EXPLAINED, THEM, US, explanation, largest_of, megabytes, ratio_text, total
from tpuflow.device.timing.result import seconds_text
from tpuflow.reports.page import asset, filled, html_bar, html_cell, html_number, html_table

if TYPE_CHECKING:
    from tpuflow.comparing.comparison import Comparison, LayerRow

SIDES = (US, THEM)
MOST_LAYERS = 200
"""Layers, those that differ most, on the page; the file of data has all."""


def comparison_page(found: Comparison) -> str:
    """The page as text."""
    rows = found.rows()
    parts = {
        "title": html.escape(found.title),
        "remarks": " ".join(html.escape(f"{remark}.") for remark in found.remarks()),
        "totals": _totals(found),
        "sent": _sent(found),
        "explained": "".join(map(_explained, rows[:EXPLAINED])),
        "layers": _layers(rows[:MOST_LAYERS]),
        "style": asset("page.css"),
    }
    return filled("comparison.html", parts)


def _totals(found: Comparison) -> str:
    rows = [(html_cell(name.replace("  ", "of it ")), *map(html_number, numbers)) for name, *numbers in found.totals()]
    return html_table(("", *SIDES, "ratio"), rows, (*SIDES, "ratio"))


def _sent(found: Comparison) -> str:
    if not (found.ours.collectives or found.theirs.collectives):
        return ""
    text = html.escape("\n".join(found.sent()), quote=False)
    return f'<section id="sent"><h2>Between chips</h2><pre>{text}</pre></section>'


def _explained(row: LayerRow) -> str:
    rows = [(html_cell(who), html_number(size), html_cell(f"{what}{aside and ','}{aside}")) for who, size, aside, what in largest_of(row)]
    heading = f"<h3>{html.escape(f'{row.layer}, {row.phase}')}</h3><p>{html.escape(explanation(row))}.</p>"
    return heading + html_table(("", "HBM traffic", "its largest kernels and copies"), rows, ("HBM traffic",))


def _layers(rows: Sequence[LayerRow]) -> str:
    heads = ("layer and phase", *SIDES, "ratio", "difference", "", "kernels", "products")
    most = max((abs(row.difference) for row in rows), default=0) or 1
    return html_table(heads, [_layer(row, most) for row in rows], (*SIDES, "ratio", "difference", "kernels", "products"))


def _layer(row: LayerRow, most: int) -> tuple[str, ...]:
    a, b = total(row.ours), total(row.theirs)
    timed = a.product_seconds or b.product_seconds
    numbers = (
        megabytes(a.hbm_bytes), megabytes(b.hbm_bytes), ratio_text(a.hbm_bytes, b.hbm_bytes),
        f"{'+' if row.difference > 0 else '−'}{megabytes(abs(row.difference))}",
    )  # fmt: skip
    others = (f"{a.kernels} / {b.kernels}", f"{seconds_text(a.product_seconds)} / {seconds_text(b.product_seconds)}" if timed else "")
    cells = map(html_number, numbers), map(html_number, others)
    return (html_cell(f"{row.layer}, {row.phase}"), *cells[0], html_bar(row.difference, most), *cells[1])
