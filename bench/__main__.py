"""`python -m bench`: every benchmark, or those named, one after the other; figures are kept in bench/results/."""

from __future__ import annotations

import argparse
import subprocess
import sys

BENCHMARKS = (
    "mnist",
    "lenet",
    "cifar",
    "resnet50",
    "gpt2",
    "conv",
    "compile",
    "dispatch",
    "pjrt",
    "fidelity",
    "depth",
    "programs",
    "mesh_speed",
)


def main() -> int:
    """Run them; the exit status is that of the first that failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    names = parser.parse_args().names or BENCHMARKS
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"{unknown[0]} is none of {', '.join(BENCHMARKS)}; other measurements are run as python -m bench.{unknown[0]}")
    codes = []
    for name in names:
        print(f"--- bench.{name}", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", f"bench.{name}", "--json", f"bench/results/{name}.json"]).returncode)
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
