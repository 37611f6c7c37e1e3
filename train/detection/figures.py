"""Curves of precision and recall, the confusion matrix and the course of a training, as pictures that people look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpuflow.training.plotting import matplotlib_figures, save_figure
from train.detection.average_precision import CONFIDENCES, Scores, smoothed
from train.detection.confusion import ConfusionMatrix
from train.detection.evaluation import Evaluation

MOST_NAMED = 20
MOST_NUMBERED = 30
LEAST_SHOWN_SHARE = 0.005
SMOOTHED_SHARE = 0.05


def draw_evaluation(evaluation: Evaluation, folder: Path) -> None:
    """Write PR_curve.png, P_curve.png, R_curve.png, F1_curve.png and confusion_matrix.png.

    Raises:
      ConfigError: matplotlib is missing, or a file cannot be written.
    """
    found, names = evaluation.scores, evaluation.data.names
    draw_confusion(evaluation.confusion, names, folder / "confusion_matrix.png")
    if not len(found.classes):
        return
    _draw_precision_recall(found, names, folder / "PR_curve.png")
    curves = found.curves
    for file, title, values in (("P", "Precision", curves.precision), ("R", "Recall", curves.recall), ("F1", "F1", curves.f1)):
        _draw_by_confidence(values, [names[kind] for kind in found.classes], title, folder / f"{file}_curve.png")


def draw_confusion(confusion: ConfusionMatrix, names: Sequence[str], path: Path) -> None:
    """The share of each class's labels that was detected as each class; shares below half a percent are left white."""
    shares = confusion.shares()
    shares[shares < LEAST_SHOWN_SHARE] = np.nan
    ticks = [*names, "background"]
    figure = matplotlib_figures().Figure(figsize=(12.0, 9.0), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0), ax=axes)
    if len(ticks) <= MOST_NUMBERED:
        for (row, column), share in np.ndenumerate(shares):
            if not np.isnan(share):
                axes.text(column, row, f"{share:.2f}", ha="center", va="center", color="white" if share > 0.5 else "black")
    axes.set_xticks(range(len(ticks)), ticks, rotation=90)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.set(xlabel="True", ylabel="Predicted", title="Confusion matrix: shares of each column")
    save_figure(figure, path)


def _draw_precision_recall(found: Scores, names: Sequence[str], path: Path) -> None:
    figure, axes = _square("Recall", "Precision", "Precision-recall curve, overlap 0.5")
    curves = found.curves.precision_at_recall
    labels = [f"{names[kind]} {ap:.3f}" for kind, ap in zip(found.classes, found.ap[:, 0], strict=True)]
    _draw_classes(axes, curves, labels)
    axes.plot(CONFIDENCES, curves.mean(0), linewidth=3, color="blue", label=f"all classes {found.map50:.3f} mAP@0.5")
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left")
    save_figure(figure, path)


def _draw_by_confidence(values: np.ndarray, labels: Sequence[str], title: str, path: Path) -> None:
    figure, axes = _square("Confidence", title, f"{title} by confidence")
    _draw_classes(axes, values, labels)
    mean = smoothed(values.mean(0), SMOOTHED_SHARE)
    best = int(mean.argmax())
    axes.plot(CONFIDENCES, mean, linewidth=3, color="blue", label=f"all classes {mean[best]:.2f} at {CONFIDENCES[best]:.3f}")
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left")
    save_figure(figure, path)


def _draw_classes(axes: Any, values: np.ndarray, labels: Sequence[str]) -> None:
    """A thin line for each class; beyond twenty of them grey ones without a name."""
    for line, label in zip(values, labels, strict=True):
        named = {"label": label} if len(labels) <= MOST_NAMED else {"color": "grey"}
        axes.plot(CONFIDENCES, line, linewidth=1, **named)


def _square(x: str, y: str, title: str) -> tuple[Any, Any]:
    figure = matplotlib_figures().Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y, title=title, xlim=(0, 1), ylim=(0, 1))
    return figure, axes
