"""`python -m bench`: every benchmark, one after the other; figures are kept in bench/results/."""

from __future__ import annotations

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
    """Run them all; the exit status is that of the first that failed."""
    codes = []
    for name in BENCHMARKS:
        print(f"--- bench.{name}", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", f"bench.{name}", "--json", f"bench/results/{name}.json"]).returncode)
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
