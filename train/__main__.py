"""The command line of the recipes: `python -m train mnist --policy mixed --epochs 5`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tpuflow.errors import ConfigError, TpuflowError
from train.data import SOURCES, load
from train.mnist import INITS, Recipe, train_mnist

INTERRUPTED = 130  # what a shell returns after Ctrl-C

EPILOG = """examples:
  python -m train mnist                                          the documented run: mixed precision, five epochs
  python -m train mnist --policy fp16 --epochs 1 --json out.json
  python -m train mnist --sink-size 0 --engine reference --fidelity bitexact --epochs 1
  python -m train.parity                                         every documented figure beside ours
"""


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m train`."""
    top = argparse.ArgumentParser(
        prog="python -m train", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="RECIPE")
    _add_mnist(commands.add_parser("mnist", help="the perceptron on Fashion-MNIST"))
    return top


def _add_mnist(sub: argparse.ArgumentParser) -> None:
    sub.description = "Train the documented perceptron on the simulated TPU and print the documented log lines."
    run = sub.add_argument_group("training")
    run.add_argument("--policy", default="mixed", help="precision policy, such as fp32, fp16, mixed, bf16 or mixed_bf16 [%(default)s]")
    run.add_argument("--epochs", type=int, default=5, help="passes over the training data [%(default)s]")
    run.add_argument("--batch-size", type=int, default=64, help="images a step; the last batch may be smaller [%(default)s]")
    run.add_argument("--lr", type=float, default=1e-3, help="learning rate of plain SGD [%(default)s]")
    run.add_argument("--init", choices=INITS, default="torch-seed0", help="initial weights: exported from PyTorch, or drawn [%(default)s]")
    run.add_argument("--seed", type=int, default=0, help="seed of --init random [%(default)s]")
    device = sub.add_argument_group("device")
    device.add_argument("--chip", default="bm1690", help="row of the chip catalogue [%(default)s]")
    device.add_argument(
        "--sink-size", type=int, default=-1, help="steps a host round trip: -1 a whole epoch, 0 each step by itself [%(default)s]"
    )
    device.add_argument("--engine", choices=("fast", "reference"), default="fast", help="XLA, or NumPy tile by tile: slow [%(default)s]")
    device.add_argument(
        "--fidelity", choices=("native", "bitexact"), default="native", help="sums as the host orders them, or the device [%(default)s]"
    )
    files = sub.add_argument_group("data and output")
    files.add_argument(
        "--data-set", choices=tuple(SOURCES), default="fashion-mnist", help="the documented run uses the default [%(default)s]"
    )
    files.add_argument("--data-dir", type=Path, help="folder of the data [$TPUFLOW_DATA, else the user's cache, else a download]")
    files.add_argument("--json", type=Path, metavar="FILE", help="write the whole result there")
    files.add_argument("--no-progress", action="store_true", help="no progress bar")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one recipe. Returns 0, or 2 for a bad option, bad data or an unwritable file, 130 after Ctrl-C (what was trained is reported)."""
    options = parser().parse_args(argv)
    try:
        return run_mnist(options)
    except TpuflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was trained", file=sys.stderr)
        return INTERRUPTED


def run_mnist(options: argparse.Namespace) -> int:
    """Train, print the log lines, the wall time and the result's report, and write the JSON file if one is asked for."""
    if options.json:
        _check_writable(options.json)
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})
    data = load(options.data_set, options.data_dir)
    started = time.perf_counter()
    result = train_mnist(data, recipe, progress=not options.no_progress)
    print(f"Total execution time = {time.perf_counter() - started:.3f} sec", flush=True)
    print(result.report(), flush=True)
    if options.json:
        result.to_json(options.json)
    return INTERRUPTED if result.interrupted else 0


def _check_writable(path: Path) -> None:
    """Find out before the training, not after it, that its result cannot be written."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror}); nothing was trained") from error
    if not existed:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
