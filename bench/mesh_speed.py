"""The host's time for simulated chips beside one chip with the whole batch: `python -m bench.mesh_speed`.

The same training, in turns in one process; a step's time is that of launches of the fast engine alone, and of several runs the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import optax

import tpuflow
from models.cifar_net import CifarNet
from models.lenet import LeNet5
from models.mlp import MLP

CHIPS = 8
LIMIT = 1.2
"""Times one chip with the whole batch."""
BATCH, STEPS = 256, 20
MODELS = {"mlp": (MLP, (28, 28, 1)), "lenet": (LeNet5, (32, 32, 1)), "cifar": (CifarNet, (32, 32, 3))}
SHARDINGS = ("ddp", "zero2")


def step_seconds(name: str, chips: int, sharding: str) -> float:
    """Host seconds of one step of a training, launches alone."""
    model, shape = MODELS[name]
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((BATCH * STEPS, *shape), np.float32), rng.integers(0, 10, BATCH * STEPS).astype(np.int32)
    parallel = {"mesh": {"data": chips}, "sharding": sharding} if chips > 1 else {}
    result = tpuflow.train(
        model(), (x, y), optimizer=optax.sgd(0.01, 0.9), loss="softmax_cross_entropy", batch_size=BATCH, epochs=1, **parallel
    )
    return float(result.seconds["train"]) / STEPS


def ratios(name: str, rounds: int) -> Mapping[str, float]:
    """Of each sharding, the time of a step on several chips over that on one."""
    seconds: dict[str, list[float]] = {label: [] for label in ("one", *SHARDINGS)}
    for _ in range(rounds):
        for label, found in seconds.items():
            found.append(step_seconds(name, 1 if label == "one" else CHIPS, label))
    middle = {label: statistics.median(found) for label, found in seconds.items()}
    return {"one chip, ms": middle["one"] * 1e3} | {label: middle[label] / middle["one"] for label in SHARDINGS}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios; 0 if all are within the limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.mesh_speed", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    found = {name: ratios(name, given.rounds) for name in given.models}
    for name, row in found.items():
        print(name, ", ".join(f"{label} {value:.2f}" for label, value in row.items()))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if all(row[label] <= LIMIT for row in found.values() for label in SHARDINGS) else 1


if __name__ == "__main__":
    sys.exit(main())
