"""Five epochs of MNIST: tpuflow's fast engine beside plain JAX and PyTorch, in one run, every figure from a process of its own.

`python -m bench.mnist --json bench/results/mnist.json` prints a table of medians and ratios. "all" is the whole of it in a fresh
process (imports and data aside): trace, compile, train, evaluate. "train" is the training launches alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import peers
from bench.timing import machine

POLICIES = ("fp32", "fp16", "mixed")
SLOW = ("torch_steps",)


def tpuflow_fast(policy: str, train: peers.Arrays, test: peers.Arrays, params: Any) -> tuple[float, float]:
    """tpuflow.train on the fast engine, one sink an epoch."""
    import optax

    import tpuflow
    from models.mlp import MLP

    result = tpuflow.train(
        MLP(), train, policy=policy, optimizer=optax.sgd(peers.LEARNING_RATE), loss="softmax_cross_entropy", epochs=peers.EPOCHS,
        batch_size=peers.BATCH, sink_size=-1, eval_data=test, params=params, progress=False,
    )  # fmt: skip
    return result.seconds["train"], result.history[-1]["accuracy"]


CONTENDERS: dict[str, Callable[..., tuple[float, float]]] = {
    "tpuflow": tpuflow_fast,
    "jax_scan": peers.jax_scan,
    "jax_steps": peers.jax_steps,
    "torch_steps": peers.torch_steps,
}


def measure(contender: str, policy: str) -> dict[str, float]:
    """All figures of one contender, cold and then again in the same (warm) process."""
    from tpuflow.examples.data import load
    from train.mnist import initial_variables

    data = load(embedded=False)
    params = initial_variables()
    __import__("torch" if contender == "torch_steps" else "optax")
    run = CONTENDERS[contender]
    figures: dict[str, float] = {}
    for mode in ("cold",) if contender in SLOW else ("cold", "warm"):
        start = time.perf_counter()
        train_seconds, accuracy = run(policy, data.train, data.test, params)
        figures[f"{mode}_seconds"] = time.perf_counter() - start
        figures[f"{mode}_train_seconds"] = train_seconds
        figures["accuracy"] = accuracy
        if mode == "cold":
            figures["peak_bytes"] = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return figures


def _in_process(contender: str, policy: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.mnist", "--one", contender, policy]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        raise RuntimeError(f"{contender} in {policy} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(repeats: int, policies: tuple[str, ...], contenders: tuple[str, ...]) -> dict[str, Any]:
    """Medians over `repeats` rounds (PyTorch once), the contenders of a round one after the other."""
    runs: dict[str, list[dict[str, float]]] = {}
    for policy in policies:
        for round_ in range(repeats):
            for contender in contenders:
                if round_ and contender in SLOW:
                    continue
                print(f"{policy} {contender} round {round_ + 1}/{repeats}", file=sys.stderr, flush=True)
                runs.setdefault(f"{policy}/{contender}", []).append(_in_process(contender, policy))
    medians = {k: {f: statistics.median(r[f] for r in v) for f in v[0]} for k, v in runs.items()}
    return {
        "machine": machine(),
        "repeats": repeats,
        "runs": runs,
        "medians": medians,
    }


def report(result: dict[str, Any]) -> str:
    """The table: seconds, and ratios to jax_scan of the same policy where it was measured."""
    lines = [
        f"{'policy':7} {'contender':12} {'cold s':>8} {'warm s':>8} {'train s':>8} {'peak MB':>8} {'acc %':>6}   "
        "ratio to jax_scan: cold, warm, train, peak"
    ]
    for key, found in result["medians"].items():
        policy, contender = key.split("/")
        m, base = (_compared(x) for x in (found, result["medians"].get(f"{policy}/jax_scan", {})))
        cold, warm, train, peak = m
        lines.append(
            f"{policy:7} {contender:12} {cold:8.2f} {warm:8.2f} {train:8.2f} {peak / 1e6:8.0f} {found['accuracy']:6.1f}   "
            + "  ".join(f"{x / y:6.2f}" for x, y in zip(m, base, strict=True))
        )
    return "\n".join(lines)


def _compared(figures: Mapping[str, float]) -> tuple[float, float, float, float]:
    """Cold, warm and training seconds and peak bytes; not a number where they were not measured."""
    cold, warm, peak = (figures.get(name, math.nan) for name in ("cold_seconds", "warm_seconds", "peak_bytes"))
    return cold, warm, figures.get("warm_train_seconds", figures.get("cold_train_seconds", math.nan)), peak


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "POLICY"), help="measure one contender in this process and print JSON")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--contenders", nargs="+", default=tuple(CONTENDERS), choices=tuple(CONTENDERS))
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    result = table(args.repeats, tuple(args.policies), tuple(args.contenders))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


if __name__ == "__main__":
    main()
