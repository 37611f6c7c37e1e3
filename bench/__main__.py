"""`python -m bench`: every benchmark, one after the other; figures are kept in bench/results/."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("mnist", "lenet", "cifar", "resnet50", "gpt2", "conv", "compile", "dispatch", "pjrt", "fidelity", "depth", "programs")


def main() -> int:
    """Run them all; the exit status is that of the first that failed."""
    for name in BENCHMARKS:
        print(f"--- bench.{name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"bench.{name}", "--json", f"bench/results/{name}.json"])
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
