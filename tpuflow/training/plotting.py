"""The curves of a training as a picture: losses, metrics, loss scale; drawn by matplotlib."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tpuflow.errors import ConfigError

WINDOW_SHARE = 50
"""The smoothed loss is the mean over a window of a fiftieth of all steps."""


def plot_history(history: Sequence[Mapping[str, Any]], title: str, path: str | os.PathLike[str]) -> None:
    """Draw the history of a training into a .png, .svg or .pdf file, a panel for each: loss, every metric that is one number, loss scale.

    Raises:
      ConfigError: matplotlib is missing, or the file cannot be written.
    """
    save_figure(_drawn(history, title), path)


def history_svg(history: Sequence[Mapping[str, Any]], title: str) -> str:
    """The same picture as an SVG element."""
    text = io.StringIO()
    _drawn(history, title).savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _drawn(history: Sequence[Mapping[str, Any]], title: str) -> Any:
    figure_class = matplotlib_figures().Figure
    metrics = _metrics(history)
    scales = [scale for epoch in history for scale in epoch["loss_scale"]]
    panels = 1 + len(metrics) + (len(set(scales)) > 1)
    figure = figure_class(figsize=(8.0, 2.6 * panels), layout="constrained")
    axes = iter(figure.subplots(panels, sharex=True, squeeze=False)[:, 0])
    figure.suptitle(title)
    _draw_loss(next(axes), [loss for epoch in history for loss in epoch["losses"]])
    for name, points in metrics.items():
        _draw_metric(next(axes), name, points)
    for axis in axes:
        _draw_scale(axis, scales, [skipped for epoch in history for skipped in epoch["skipped"]])
    figure.axes[-1].set_xlabel("steps")
    return figure


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure as .png, .svg or .pdf.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: cannot write {os.fspath(path)!r}: {error}. Give a .png, .svg or .pdf in an existing folder.") from error


def _metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(steps, value) of every evaluation, by metric."""
    found: dict[str, list[tuple[int, float]]] = {}
    for evaluation in (evaluation for epoch in history for evaluation in epoch["evaluations"]):
        for name, value in evaluation.items():
            if name != "step" and isinstance(value, (int, float)):
                found.setdefault(name, []).append((evaluation["step"], value))
    return found


def _draw_loss(axis: Any, losses: Sequence[float]) -> None:
    window = max(1, len(losses) // WINDOW_SHARE)
    axis.plot(range(1, len(losses) + 1), losses, linewidth=0.6, alpha=0.4 if window > 1 else 1.0, label="each step")
    if window > 1:
        means = [sum(losses[i - window : i]) / window for i in range(window, len(losses) + 1)]
        axis.plot(range(window, len(losses) + 1), means, label=f"mean of {window} steps")
        axis.legend()
    axis.set_ylabel("loss")


def _draw_metric(axis: Any, name: str, points: Sequence[tuple[int, float]]) -> None:
    axis.plot([step for step, _ in points], [value for _, value in points], marker="o", markersize=3)
    axis.set_ylabel("accuracy (%)" if name == "accuracy" else name)


def _draw_scale(axis: Any, scales: Sequence[float], skipped: Sequence[bool]) -> None:
    axis.step(range(1, len(scales) + 1), scales, where="post")
    marked = [i for i, was in enumerate(skipped) if was]
    axis.plot([i + 1 for i in marked], [scales[i] for i in marked], "rx", label="skipped step")
    axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale")
    if marked:
        axis.legend()


def matplotlib_figures() -> Any:
    """matplotlib's figures, without pyplot: no window system, no global state."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("plot needs the package matplotlib; pip install 'tpuflow[plot]'.") from error
