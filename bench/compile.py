"""From trace to executable, cold: the four Programs of MNIST (training and evaluation, full and ragged batch) in a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.timing import publish

POLICIES = ("fp32", "fp16", "mixed")
ROUNDS, BATCH, REST = 3, 64, 32


def measure(policy: str) -> dict[str, float]:
    """Seconds of tracing, compiling and translating, as `tpuflow.train` reports them, for two batches and a rest of each kind."""
    import optax

    import tpuflow
    from models.mlp import MLP

    rng = np.random.default_rng(0)
    n = 2 * BATCH + REST
    data = rng.random((n, 28, 28), np.float32), rng.integers(0, 10, n).astype(np.int32)
    began = time.perf_counter()
    result = tpuflow.train(MLP(), data, policy=policy, optimizer=optax.sgd(1e-3), batch_size=BATCH, eval_data=data, progress=False)
    return {
        "compile_seconds": result.seconds["compile"],
        "total_seconds": time.perf_counter() - began,
        "programs": float(len(result.executables)),
    }


def run() -> tuple[str, Mapping[str, Any]]:
    """Median over fresh processes."""
    lines, rows = [f"{'policy':7} {'programs':>9} {'compile s':>10} {'whole call s':>13}"], {}
    for policy in POLICIES:
        runs = [_in_process(policy) for _ in range(ROUNDS)]
        rows[policy] = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
        m = rows[policy]
        lines.append(f"{policy:7} {m['programs']:9.0f} {m['compile_seconds']:10.2f} {m['total_seconds']:13.2f}")
    return "\n".join(lines), {"rows": rows}


def _in_process(policy: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-m", "bench.compile", "--one", policy], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        publish(__doc__, run)
