"""results.csv: a line of figures for each epoch, in the original's columns; and results.png, their curves."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from tpuflow.errors import ConfigError
from tpuflow.training.plotting import matplotlib_figures, save_figure

COLUMNS = (
    "train/box_loss", "train/obj_loss", "train/cls_loss", "metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95",
    "val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1", "x/lr2",
)  # fmt: skip
SHOWN = (*COLUMNS[:5], *COLUMNS[7:10], *COLUMNS[5:7])
"""The panels of the picture, five a row: losses of training above those of validation."""
WIDTH = 20


def append_results(path: Path, epoch: int, values: Sequence[float]) -> None:
    """Add an epoch's line, values in the order of COLUMNS; the first one comes after a line of names.

    Raises:
      ConfigError: the file cannot be written.
    """
    fields = [f"{epoch:{WIDTH}d}", *(f"{value:{WIDTH}.5g}" for value in values)]
    try:
        head = "" if path.exists() else ",".join(f"{name:>{WIDTH}}" for name in ("epoch", *COLUMNS)) + "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(head + ",".join(fields) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from error


def read_results(path: Path) -> dict[str, list[float]]:
    """The columns of a file by name, `epoch` among them.

    Raises:
      ConfigError: it is no such file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            names, *rows = [[word.strip() for word in row] for row in csv.reader(file)]
        columns = list(zip(*[map(float, row) for row in rows], strict=True)) or [()] * len(names)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a table of results: {error}") from error
    return {name: list(column) for name, column in zip(names, columns, strict=True)}


def draw_results(path: Path) -> None:
    """Write results.png beside a results.csv.

    Raises:
      ConfigError: the table cannot be read, matplotlib is missing, or the file cannot be written.
    """
    table = read_results(path)
    figure = matplotlib_figures().Figure(figsize=(12.0, 6.0), layout="constrained")
    for axes, name in zip(figure.subplots(2, 5).flat, SHOWN, strict=True):
        axes.plot(table["epoch"], table[name], marker=".", linewidth=2, markersize=8)
        axes.set_title(name, fontsize=12)
        axes.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, path.with_suffix(".png"))
