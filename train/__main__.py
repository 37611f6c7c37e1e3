"""The command line of the recipes: `python -m train mnist --policy mixed --epochs 5`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from tpuflow.errors import ConfigError, TpuflowError
from tpuflow.jaxprs.processes import is_first, join, leave
from tpuflow.numerics.report import timeline
from train import compile_mode
from train.options import add_options, from_arguments
from train.recipe import Recipe
from train.recipes import RECIPES

INTERRUPTED = 130  # what a shell returns after Ctrl-C

EPILOG = """examples:
  python -m train mnist                                          the documented run: mixed precision, five epochs
  python -m train mnist --policy fp16 --epochs 1 --json out.json
  python -m train lenet --policy O3                              ten sinks of 1000 steps
  python -m train cifar --steps 4000 --sink-size 1000
  python -m train resnet50 --image-size 32 --policy O0 --steps 300 --schedule constant
  python -m train compile --model resnet50 --chip bm1690 --debug const_name --out dump
                                                                 a step's IR at every stage, its weights and its device binary
  JAX_COORDINATOR_ADDRESS=host:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 python -m train cifar_deepspeed --chips 4
                                                                 one of two processes, each with two of the chips
  python -m train.parity --help                                  documented figures and PyTorch's beside ours
"""


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m train`."""
    top = argparse.ArgumentParser(
        prog="python -m train", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument(
        "--distributed", action="store_true",
        help="one of several processes that share a mesh, as Slurm, MPI or the like started them; JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment do without it",
    )  # fmt: skip
    commands = top.add_subparsers(dest="recipe", required=True, metavar="RECIPE")
    for recipe in RECIPES.values():
        sub = commands.add_parser(recipe.name, help=recipe.summary, description=recipe.about)
        add_options(sub, recipe.defaults, recipe.without, spelling=recipe.spelling)
    compile_mode.add_command(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one recipe. Returns 0, or 2 for a bad option, bad data or an unwritable file, 130 after Ctrl-C (what was trained is reported)."""
    arguments = parser().parse_args(argv)
    try:
        join(asked=arguments.distributed)
        with nullcontext() if is_first() else redirect_stdout(io.StringIO()):
            return _done(arguments)
    except TpuflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was trained", file=sys.stderr)
        return INTERRUPTED


def _done(arguments: argparse.Namespace) -> int:
    """Do what was asked for."""
    if arguments.recipe not in RECIPES:
        own = {k: v for k, v in vars(arguments).items() if k not in ("recipe", "distributed")}
        return compile_mode.run(compile_mode.Options(**own))
    recipe = RECIPES[arguments.recipe]
    return run(recipe, from_arguments(recipe.defaults, arguments))


def run(recipe: Recipe, options: Any) -> int:
    """Train, print the result's report, and write what is asked for."""
    options.check()
    for name in ("json", "plot"):
        if path := getattr(options, name, None):
            _check_writable(name, path)
    result = recipe.run(options)
    if result is None or not is_first():
        return 0
    print(result.report(), flush=True)
    if result.numerics:
        print(f"\n{timeline(result.numerics)}\n\n{result.numerics[-1]}", flush=True)
    if options.json:
        result.to_json(options.json)
    if getattr(options, "plot", None):
        result.plot(options.plot)
    return INTERRUPTED if result.interrupted else 0


def _check_writable(option: str, path: Path) -> None:
    """Find out before the training, not after it, that its result cannot be written."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--{option} {path}: cannot be written ({error.strerror}); nothing was trained") from error
    if not existed:
        path.unlink()


if __name__ == "__main__":
    status = main()
    leave(status)
    sys.exit(status)
