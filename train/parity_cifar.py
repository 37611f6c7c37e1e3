"""The CIFAR-10 network beside PyTorch, step by step: `python -m train.parity cifar` trains both from the same weights on the same batches.

Two orders of the same fp32 sums differ, and training feeds the difference back into itself. How far it grows is shown by what PyTorch
does to itself with other threads, other kernels, and float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tpuflow.examples.data import ImageData
from train import cifar, cifar10
from train.export_torch import torch_cifar
from train.published import exit_status, judged
from train.recipe import first_samples, transformed
from train.transforms import TUTORIAL

LOSS_BOUND = 1e-5
"""Relative difference of any of the first losses from PyTorch's."""

ACCURACY_BOUND = 1.0
"""Points of test accuracy between PyTorch's and ours, after the whole training."""

STEPS, EPOCHS = 500, 2


def our_losses(images: ImageData, steps: int, *, fidelity: str = "native", progress: bool = False) -> np.ndarray:
    """The losses of the recipe's first steps on the simulated device."""
    options = replace(cifar.DEFAULTS, steps=steps, test_samples=0, train_samples=steps * cifar.DEFAULTS.batch_size)
    options = replace(options, fidelity=fidelity, progress=progress)
    return np.asarray(cifar.TRAINING.run(options, images, logs=False).losses)


def torch_losses(images: ImageData, steps: int, names: Sequence[str] = ()) -> Mapping[str, np.ndarray]:
    """The same from PyTorch: on one thread, which is the reference, and otherwise. `names`: of the runs to make; without any, all."""
    import torch

    from train.torch_training import Setting, losses

    options = replace(cifar.DEFAULTS, train_samples=steps * cifar.DEFAULTS.batch_size)
    data = transformed(first_samples(images, options)[0], TUTORIAL)
    settings = {
        "PyTorch": Setting(threads=1),
        "PyTorch, two threads": Setting(threads=2),
        "PyTorch, without oneDNN": Setting(threads=1, onednn=False),
        "PyTorch, float64": Setting(torch.float64, threads=1),
    }
    return {
        name: losses(torch_cifar(), data, options.batch_size, lr=options.lr, momentum=options.momentum, setting=settings[name])
        for name in names or settings
    }


def difference(found: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Largest relative difference of a loss, where it is, and how many are beyond the bound."""
    relative = np.abs(found - reference) / np.abs(reference)
    return {"largest": float(relative.max()), "at_step": int(relative.argmax()) + 1, "beyond": int(np.sum(~(relative <= LOSS_BOUND)))}


def accuracies(images: ImageData, *, progress: bool) -> dict[str, float]:
    """Test accuracy in percent after the whole training, PyTorch's and ours."""
    from train import torch_training

    options = replace(cifar.DEFAULTS, progress=progress, epochs=EPOCHS)
    train, test = (transformed(part, TUTORIAL) for part in first_samples(images, options))
    network = torch_cifar()
    epochs = np.concatenate([train[0]] * EPOCHS), np.concatenate([train[1]] * EPOCHS)  # in one walk, which keeps the momentum
    one = torch_training.Setting(threads=1)
    torch_training.losses(network, epochs, options.batch_size, lr=options.lr, momentum=options.momentum, setting=one)
    theirs = torch_training.classes_of(network, test[0])
    result = cifar.TRAINING.run(options, images)
    return {"PyTorch": 100.0 * float(np.mean(theirs == test[1])), "ours": result.history[-1]["accuracy"]}


def report(images: ImageData, steps: int, *, whole: bool, progress: bool, names: Sequence[str] = ()) -> dict[str, Any]:
    """All figures, and "failed": how many bounds do not hold. `names`: of PyTorch's runs, if not all are asked for."""
    runs = {**torch_losses(images, steps, names), "ours": our_losses(images, steps, progress=progress)}
    differences = {name: difference(found, runs["PyTorch"]) for name, found in runs.items()}
    failed = int(differences["ours"]["beyond"] > 0)
    figures: dict[str, Any] = {"steps": steps, "origin": Path(images.origin.split(" ")[0]).name, "differences": differences}
    if whole:
        figures["accuracy"] = accuracies(images, progress=progress)
        failed += int(abs(figures["accuracy"]["ours"] - figures["accuracy"]["PyTorch"]) > ACCURACY_BOUND)
    return {"failed": failed, **figures, "losses": {name: found.tolist() for name, found in runs.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, write JSON; 0 if every bound holds, 1 if one fails, 2 if there are no data, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m train.parity cifar", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="losses to compare [%(default)s]")
    parser.add_argument("--whole", action="store_true", help="train both for two epochs, too, and compare the test accuracies")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; else $TPUFLOW_DATA, the user's cache, a download")
    parser.add_argument("--json", type=Path, default=Path("parity_cifar.json"), metavar="FILE", help="[%(default)s]")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    options = parser.parse_args(argv)

    def make() -> dict[str, Any]:
        return report(cifar10.load(options.data_dir), options.steps, whole=options.whole, progress=not options.no_progress)

    return exit_status(lambda: judged(make(), table, options.json), options.json)


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'losses of ' + str(figures['steps']) + ' steps':26} largest relative difference from PyTorch on one thread"]
    lines += [f"{name:26} {row['largest']:.1e} at step {row['at_step']}" for name, row in figures["differences"].items()]
    lines += [f"test accuracy, {name:11} {value:.2f} %" for name, value in figures.get("accuracy", {}).items()]
    return "\n".join([*lines, f"{figures['failed']} bounds fail (losses {LOSS_BOUND:g}, accuracy {ACCURACY_BOUND:g} points)"])
