"""What bit-exact fidelity costs: the MLP's training step in a sink, `bitexact` beside `native`, time and peak memory."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.timing import publish

POLICIES = ("fp32", "fp16", "mixed")
FIDELITIES = ("native", "bitexact")
STEPS, BATCH, RUNS, ROUNDS = 300, 64, 6, 5


def measure(policy: str, fidelity: str) -> dict[str, float]:
    """Seconds of the training launches of a warm run (median of all but the first), and the peak memory of the process."""
    import optax

    import tpuflow
    from models.mlp import MLP

    rng = np.random.default_rng(0)
    data = rng.random((STEPS * BATCH, 28, 28), np.float32), rng.integers(0, 10, STEPS * BATCH).astype(np.int32)
    seconds = []
    for _ in range(RUNS):
        result = tpuflow.train(
            MLP(),
            data,
            policy=policy,
            optimizer=optax.sgd(1e-3),
            loss="softmax_cross_entropy",
            batch_size=BATCH,
            fidelity=fidelity,
            progress=False,
        )
        seconds.append(result.seconds["train"])
    return {"train_seconds": statistics.median(seconds[1:]), "peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def run() -> tuple[str, Mapping[str, Any]]:
    """A row a policy: milliseconds a step and megabytes, medians over `ROUNDS`, and the ratios."""
    lines, rows = (
        [f"{'policy':7} {'native ms':>10} {'bitexact ms':>12} {'time x':>7} {'native MB':>10} {'bitexact MB':>12} {'memory x':>9}"],
        {},
    )
    for policy in POLICIES:
        runs = [[_in_process(policy, fidelity) for fidelity in FIDELITIES] for _ in range(ROUNDS)]  # in turns
        native, exact = (_medians([run[i] for run in runs]) for i in range(len(FIDELITIES)))
        time_ratio = exact["train_seconds"] / native["train_seconds"]
        memory_ratio = exact["peak_bytes"] / native["peak_bytes"]
        rows[policy] = {"native": native, "bitexact": exact, "time_ratio": time_ratio, "memory_ratio": memory_ratio}
        lines.append(
            f"{policy:7} {1e3 * native['train_seconds'] / STEPS:10.2f} {1e3 * exact['train_seconds'] / STEPS:12.2f} {time_ratio:7.2f} "
            f"{native['peak_bytes'] / 1e6:10.0f} {exact['peak_bytes'] / 1e6:12.0f} {memory_ratio:9.2f}"
        )
    return "\n".join(lines), {"rows": rows}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _in_process(policy: str, fidelity: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-m", "bench.fidelity", "--one", policy, fidelity], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        publish(__doc__, run)
