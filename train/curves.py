"""Loss curves of ResNet-50 on CIFAR-10 under two policies, side by side: `python -m train.curves` writes a picture and a JSON file.

For each seed both trainings see the same batches from the same initial weights; only the precision differs. So short a training is chaotic:
the final accuracies of one pair differ by points whatever the precision. What precision does is therefore judged by the mean over seeds of
the difference within a pair, and that mean's standard error says how well it is known.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpuflow.errors import ConfigError
from tpuflow.examples.data import ImageData
from train import cifar10, resnet
from train.published import exit_status
from train.resnet import ResNetOptions

POLICIES = ("O0", "O3")
SEEDS = 8
ACCURACY_BOUND = 2.0
"""Points between the means of the final accuracies."""

DEFAULTS = replace(
    resnet.DEFAULTS, image_size=32, steps=400, batch_size=32, lr=0.05, lr_init=0.001, lr_end=0.0, schedule="linear", warmup_epochs=0,
    augment=False, sink_size=-1,
)  # fmt: skip
"""Small images, a rate that falls to zero so that the end is steady, and nothing random but the order of the images."""

Runs = dict[str, list[dict[str, Any]]]
"""By policy, what `run` found for each seed, in the order of the seeds."""

WINDOW = 20
"""Steps whose mean makes the smooth line."""


def run(images: ImageData, options: ResNetOptions) -> dict[str, Any]:
    """One training: its losses, loss scales, skipped steps and final accuracy."""
    history = resnet.TRAINING_50.run(options, images, logs=False).history
    joined = {name: [value for epoch in history for value in epoch[name]] for name in ("losses", "loss_scale", "skipped")}
    return {**joined, "accuracy": history[-1]["accuracy"], "avg_loss": history[-1]["avg_loss"]}


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of several seeds: their mean, their standard deviation (of a sample: n - 1), and the standard error of the mean."""

    mean: float
    deviation: float
    error: float
    values: tuple[float, ...]

    def text(self, unit: str = "") -> str:
        """All but the values."""
        return f"{self.mean:.2f}{unit} (standard deviation {self.deviation:.2f}, standard error {self.error:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Mean and spread of two values or more."""
    deviation = statistics.stdev(values)
    return Spread(statistics.fmean(values), deviation, deviation / math.sqrt(len(values)), tuple(values))


def compare(runs: Runs) -> dict[str, Any]:
    """What the seeds say: accuracies and losses of each policy, and by how many points the second is above the first within a pair."""
    first, second = runs.values()
    differences = [b["accuracy"] - a["accuracy"] for a, b in zip(first, second, strict=True)]
    apart = np.abs(smooth_all(first).mean(axis=0) - smooth_all(second).mean(axis=0))
    return {
        "accuracies": {policy: asdict(spread([found["accuracy"] for found in of])) for policy, of in runs.items()},
        "avg_losses": {policy: asdict(spread([found["avg_loss"] for found in of])) for policy, of in runs.items()},
        "accuracy_difference": asdict(spread(differences)),
        "largest_loss_difference": float(apart.max()),
    }


def seeds_needed(difference: Spread) -> int:
    """How many seeds, spread like these, would know the mean to half of the bound: about what tells it from none at 95 %."""
    return max(len(difference.values), math.ceil((difference.deviation / (ACCURACY_BOUND / 2)) ** 2))


def smooth_all(runs: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The smooth lines of several trainings: float64 [runs, steps - WINDOW + 1]."""
    return np.stack([smooth(found["losses"]) for found in runs])


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Means of WINDOW losses in a row (of all, if they are fewer): float64 [steps - WINDOW + 1]."""
    window = min(WINDOW, len(losses))
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def draw(runs: Runs, title: str, path: Path) -> None:
    """The mean curve of each policy over the seeds, in a band of one standard deviation, into one picture: .png, .svg or .pdf.

    Raises:
      ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("the picture needs matplotlib: pip install 'tpuflow[plot]'") from error
    figure = figures.Figure(figsize=(8.0, 4.5), layout="constrained")
    axis = figure.subplots()
    for policy, of in runs.items():
        lines, accuracy = smooth_all(of), spread([found["accuracy"] for found in of])
        mean, deviation = lines.mean(axis=0), lines.std(axis=0, ddof=1)
        total = len(of[0]["losses"])
        steps = range(total - len(mean) + 1, total + 1)
        label = f"{policy}: final accuracy {accuracy.mean:.1f} % ± {accuracy.error:.1f} over {len(of)} seeds"
        (drawn,) = axis.plot(steps, mean, label=label)
        axis.fill_between(steps, mean - deviation, mean + deviation, alpha=0.2, color=drawn.get_color(), linewidth=0)
    axis.set(title=title, xlabel="steps", ylabel=f"loss, mean of {WINDOW} steps and all seeds")
    axis.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}. Give a .png, .svg or .pdf in an existing folder.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Train, draw, write JSON; 0 if the means of the accuracies are near enough, 1 if not, 2 for bad data or files, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.curves", description=__doc__)
    parser.add_argument("--policies", nargs=2, default=POLICIES, metavar="POLICY", help="[%(default)s]")
    parser.add_argument(
        "--seeds", type=_several, default=SEEDS, metavar="N", help="how many seeds, from --seed on, at least 2 [%(default)s]"
    )
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
    policies, seeds, plot, path = (given.pop(name) for name in ("policies", "seeds", "plot", "json"))
    return exit_status(lambda: _published(policies, seeds, replace(DEFAULTS, **given), plot, path), path)


def _several(text: str) -> int:
    """A number of seeds that has a spread."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: one seed has no spread; give 2 or more")
    return int(text)


def _published(policies: Sequence[str], seeds: int, options: ResNetOptions, plot: Path, path: Path) -> int:
    train = partial(run, cifar10.load(options.data_dir))
    runs: Runs = {policy: [] for policy in policies}
    for seed in range(options.seed, options.seed + seeds):
        for policy in policies:
            runs[policy].append(train(replace(options, policy=policy, seed=seed)))
    figures = compare(runs)
    settings = {name: getattr(options, name) for name in ("steps", "batch_size", "image_size", "lr", "schedule", "momentum", "seed")}
    path.write_text(json.dumps({"settings": {**settings, "seeds": seeds}, **figures, "runs": runs}, indent=1) + "\n")
    draw(runs, f"ResNet-50 on CIFAR-10 at {options.image_size}x{options.image_size}, batch {options.batch_size}", plot)
    print(report(runs, figures))
    print(f"written to {path} and {plot}")
    return 1 if abs(figures["accuracy_difference"]["mean"]) > ACCURACY_BOUND else 0


def report(runs: Runs, figures: Mapping[str, Any]) -> str:
    """The figures in words, the bound and whether the seeds suffice to judge it among them."""
    lines = []
    for policy, of in runs.items():
        accuracy, loss = (Spread(**figures[name][policy]) for name in ("accuracies", "avg_losses"))
        skipped = sum(sum(found["skipped"]) for found in of)
        each = ", ".join(f"{value:.2f}" for value in accuracy.values)
        lines.append(f"{policy}: accuracy {accuracy.text(' %')} [{each}], average loss {loss.text()}, {skipped} steps skipped")
    first, second = runs
    difference = Spread(**figures["accuracy_difference"])
    within = "within" if abs(difference.mean) <= ACCURACY_BOUND else "beyond"
    over = f"over {len(difference.values)} seeds: the mean is {within} the bound of {ACCURACY_BOUND:g}"
    lines.append(f"{second} - {first}: {difference.text(' points')} {over}")
    if difference.error > ACCURACY_BOUND / 2:
        lines.append(
            f"the standard error is more than half of the bound: these seeds do not tell precision from chance; {seeds_needed(difference)} "
            "would, or longer trainings"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
