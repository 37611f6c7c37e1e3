"""Loss curves of ResNet-50 on CIFAR-10 under two policies, side by side: `python -m train.curves` writes a picture and a JSON file.

Both trainings see the same batches from the same initial weights; only the precision differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.resnet import resnet50
from tpuflow.errors import ConfigError
from train import cifar10, resnet
from train.data import ImageData
from train.published import exit_status
from train.recipe import run_task
from train.resnet import ResNetOptions

POLICIES = ("O0", "O3")
ACCURACY_BOUND = 2.0
"""Points between the final accuracies."""

DEFAULTS = replace(
    resnet.DEFAULTS, image_size=32, steps=400, batch_size=32, lr=0.05, lr_init=0.001, lr_end=0.0, schedule="linear", warmup_epochs=0,
    augment=False, sink_size=-1,
)  # fmt: skip
"""Small images, a rate that falls to zero so that the end is steady, and nothing random but the order of the images."""

WINDOW = 20
"""Steps whose mean makes the smooth line."""


def run(images: ImageData, options: ResNetOptions) -> dict[str, Any]:
    """One training: its losses, loss scales, skipped steps and final accuracy."""
    task = replace(resnet.task(resnet50, images, options), callbacks=())
    history = run_task(task, options).history
    joined = {name: [value for epoch in history for value in epoch[name]] for name in ("losses", "loss_scale", "skipped")}
    return {**joined, "accuracy": history[-1]["accuracy"], "avg_loss": history[-1]["avg_loss"]}


def compare(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The points between the final accuracies, and the largest distance of the smooth lines."""
    first, second = (runs[policy] for policy in runs)
    apart = np.abs(smooth(first["losses"]) - smooth(second["losses"]))
    return {"accuracy_difference": abs(first["accuracy"] - second["accuracy"]), "largest_loss_difference": float(apart.max())}


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Means of WINDOW losses in a row (of all, if they are fewer): float64 [steps - WINDOW + 1]."""
    window = min(WINDOW, len(losses))
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def draw(runs: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Both curves into one picture, .png, .svg or .pdf.

    Raises:
      ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("the picture needs matplotlib: pip install 'tpuflow[plot]'") from error
    figure = figures.Figure(figsize=(8.0, 4.5), layout="constrained")
    axis = figure.subplots()
    for policy, found in runs.items():
        line = smooth(found["losses"])
        label = f"{policy}: final accuracy {found['accuracy']:.1f} %"
        (drawn,) = axis.plot(range(len(found["losses"]) - len(line) + 1, len(found["losses"]) + 1), line, label=label)
        axis.plot(range(1, len(found["losses"]) + 1), found["losses"], linewidth=0.5, alpha=0.3, color=drawn.get_color())
    axis.set(title=title, xlabel="steps", ylabel=f"loss, mean of {WINDOW} steps")
    axis.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}. Give a .png, .svg or .pdf in an existing folder.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Train, draw, write JSON; 0 if the accuracies are near enough, 1 if not, 2 for bad data or files, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.curves", description=__doc__)
    parser.add_argument("--policies", nargs=2, default=POLICIES, metavar="POLICY", help="[%(default)s]")
    for name, parse in (("steps", int), ("batch_size", int), ("image_size", int), ("lr", float), ("seed", int)):
        default = getattr(DEFAULTS, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=parse, default=default, help="[%(default)s]")
    parser.add_argument("--train-samples", type=int, metavar="N", help="use the first N training images only")
    parser.add_argument("--test-samples", type=int, metavar="N", help="use the first N test images only")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; else $TPUFLOW_DATA, the user's cache, a download")
    parser.add_argument("--plot", type=Path, default=Path("resnet50_curves.png"), metavar="FILE", help="[%(default)s]")
    parser.add_argument("--json", type=Path, default=Path("resnet50_curves.json"), metavar="FILE", help="[%(default)s]")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    given = vars(parser.parse_args(argv))
    policies, plot, path = (given.pop(name) for name in ("policies", "plot", "json"))
    return exit_status(lambda: _published(policies, replace(DEFAULTS, **given), plot, path), path)


def _published(policies: Sequence[str], options: ResNetOptions, plot: Path, path: Path) -> int:
    train = partial(run, cifar10.load(options.data_dir))
    runs = {policy: train(replace(options, policy=policy)) for policy in policies}
    figures = compare(runs)
    settings = {name: getattr(options, name) for name in ("steps", "batch_size", "image_size", "lr", "schedule", "momentum", "seed")}
    path.write_text(json.dumps({"settings": settings, **figures, "runs": runs}, indent=1) + "\n")
    title = f"ResNet-50 on CIFAR-10 at {options.image_size}x{options.image_size}, batch {options.batch_size}"
    draw(runs, title, plot)
    for policy, found in runs.items():
        print(f"{policy}: accuracy {found['accuracy']:.2f} %, average loss {found['avg_loss']:.4f}, {sum(found['skipped'])} steps skipped")
    print(f"accuracies differ by {figures['accuracy_difference']:.2f} points (bound {ACCURACY_BOUND:g}); written to {path} and {plot}")
    return 1 if figures["accuracy_difference"] > ACCURACY_BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
