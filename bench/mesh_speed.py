"""The host's time for simulated chips beside one chip with the whole batch: `python -m bench.mesh_speed`.

The same training step, compiled before, its launches in turns in one process; wall and processor time, of several rounds the medians.
`--processes` measures the chips over two processes, each with half of the cores, beside one process with all of them. docs/meshes.md shows
`bench/results/mesh_speed.json`, docs/processes.md `bench/results/mesh_processes.json`, as `python -m bench.pages` writes them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from bench.timing import machine
from models.cifar_net import CifarNet
from models.gpt2 import GPT2, NO_DROPOUT, Config
from models.lenet import LeNet5
from models.mlp import MLP
from models.resnet import resnet50
from tpuflow.jaxprs.processes import COORDINATOR, PROCESS, PROCESSES, join
from tpuflow.training.config import TrainConfig
from tpuflow.training.device_sink import DeviceSink, to_device
from tpuflow.training.preparing import prepare

CHIPS = 8
LIMIT, PROCESSES_LIMIT = 1.2, 1.15
"""Times one chip with the whole batch; times one process with all cores."""
ROOT = Path(__file__).parents[1]
RNG = np.random.default_rng(0)
ONE = "one chip"
SHARDINGS = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, samples of a step, steps of a launch, and what makes so many samples and labels."""

    model: Callable[[], Any]
    batch: int
    steps: int
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]


def pictures(*shape: int) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Of ten classes."""
    return lambda count: (RNG.standard_normal((count, *shape), np.float32), RNG.integers(0, 10, count).astype(np.int32))


def texts(length: int, words: int) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Each word's label is a word."""
    x, y = ((lambda count: RNG.integers(0, words, (count, length)).astype(np.int32)) for _ in range(2))
    return lambda count: (x(count), y(count))


SMALL = Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None, **NO_DROPOUT)
CASES: Mapping[str, Case] = {
    "mlp": Case(MLP, 256, 20, pictures(28, 28, 1)),
    "lenet": Case(LeNet5, 256, 10, pictures(32, 32, 1)),
    "cifar": Case(CifarNet, 256, 10, pictures(32, 32, 3)),
    "gpt2": Case(lambda: GPT2(SMALL), 64, 4, texts(64, SMALL.vocab_size)),
    "resnet50": Case(resnet50, 16, 2, pictures(64, 64, 3)),
}


def launcher(case: Case, sharding: str) -> Callable[[], object]:
    """Launches a compiled training's sink from its first state; on one chip, or cut over `CHIPS`."""
    x, y = case.data(case.batch * case.steps)
    options = {} if sharding == ONE else {"mesh": {"data": CHIPS}, "sharding": sharding}
    config = TrainConfig(case.model(), (x, y), "fp32", optax.sgd(0.01, 0.9), loss="softmax_cross_entropy", batch_size=case.batch, **options)
    job = prepare(config)
    state = job.recipe.strategy.shard_state(job.state)
    executable = DeviceSink("train_step", job.recipe.train_step, job.target, job.feed.structure).prepare(state, job.signature).executable
    inputs = [np.array(case.steps, np.int32), *map(np.asarray, to_device(jax.tree.leaves(state)))]
    feeds = [leaf.reshape(case.steps, case.batch, *leaf.shape[1:]) for leaf in (x, y)]
    return lambda: jax.block_until_ready(executable.launch(inputs, feeds)[0])


def seconds_of(launch: Callable[[], object]) -> tuple[float, float]:
    """(wall, processor) seconds."""
    began, used = time.perf_counter(), time.process_time()
    launch()
    return time.perf_counter() - began, time.process_time() - used


def ratios(name: str, shardings: Sequence[str], rounds: int) -> dict[str, Any]:
    """Of each sharding, a step's time on several chips over that on one: wall, and processor."""
    launches = {label: launcher(CASES[name], label) for label in (ONE, *shardings)}
    for launch in launches.values():
        launch()
    found: dict[str, list[tuple[float, float]]] = {label: [] for label in launches}
    for _ in range(rounds):
        for label, launch in launches.items():
            found[label].append(seconds_of(launch))
    middle = {label: [statistics.median(times) for times in zip(*pairs, strict=True)] for label, pairs in found.items()}
    one = middle.pop(ONE)
    return {
        "one chip, ms": one[0] / CASES[name].steps * 1e3,
        "wall": {label: wall / one[0] for label, (wall, _) in middle.items()},
        "processor": {label: used / one[1] for label, (_, used) in middle.items()},
    }


# --- processes


def work(name: str, sharding: str, rounds: int) -> None:
    """What each process does: print a step's median seconds, wall and processor."""
    join()
    launch = launcher(CASES[name], sharding)
    launch()
    times = [seconds_of(launch) for _ in range(rounds)]
    print(json.dumps([statistics.median(found) / CASES[name].steps for found in zip(*times, strict=True)]))


def together(name: str, sharding: str, processes: int, rounds: int) -> tuple[float, float]:
    """A step's seconds over so many processes that share the cores: wall of the slowest, processor of all."""
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = []
    for n in range(processes):
        joining = {PROCESSES: str(processes), COORDINATOR: f"localhost:{port}", PROCESS: str(n)} if processes > 1 else {}
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **joining}
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores[n::processes]))]
        command = [*pinned, sys.executable, "-m", "bench.mesh_speed", "--work", name, sharding, "--rounds", str(rounds)]
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"bench.mesh_speed: a process of {name} {sharding} failed: {said}")
    walls, used = zip(*(json.loads(text.splitlines()[-1]) for text in said), strict=True)
    return max(walls), sum(used)


def two_over_one(name: str, sharding: str, rounds: int) -> dict[str, float]:
    """Two processes over one, in turns."""
    turns = [[together(name, sharding, processes, rounds) for processes in (1, 2)] for _ in range(2)]
    (one, one_used), (two, two_used) = ([min(column) for column in zip(*side, strict=True)] for side in zip(*turns, strict=True))
    return {"one process, ms": one * 1e3, "wall": two / one, "processor": two_used / one_used}


def measure_processes(models: Sequence[str], shardings: Sequence[str], rounds: int) -> tuple[dict[str, Any], bool]:
    """Figures by model and sharding, and whether all are within the limit."""
    found = {}
    for name, sharding in itertools.product(models, shardings):
        found[f"{name} {sharding}"] = row = two_over_one(name, sharding, rounds)
        print(name, sharding, ", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    return found, all(row["wall"] <= PROCESSES_LIMIT for row in found.values())


def measure_chips(models: Sequence[str], shardings: Sequence[str], rounds: int) -> tuple[dict[str, Any], bool]:
    """The same of chips in one process."""
    found = {}
    for name in models:
        found[name] = row = ratios(name, shardings, rounds)
        said = (f"{label} {row['wall'][label]:.2f} (processor {row['processor'][label]:.2f})" for label in shardings)
        print(f"{name}: one chip {row['one chip, ms']:.1f} ms,", ", ".join(said), flush=True)
    return found, all(ratio <= LIMIT for row in found.values() for ratio in row["wall"].values())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios; 0 if all are within the limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.mesh_speed", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shardings", nargs="+", choices=SHARDINGS, default=list(SHARDINGS))
    parser.add_argument("--rounds", type=int, default=7, help="[%(default)s]")
    parser.add_argument("--processes", action="store_true", help="two processes beside one, in place of chips in one process")
    parser.add_argument("--work", nargs=2, metavar=("MODEL", "SHARDING"), help="what one of these processes does")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    if given.work:
        name, sharding = given.work
        work(name, sharding, given.rounds)
        return 0
    measure = measure_processes if given.processes else measure_chips
    found, within = measure(given.models, given.shardings, given.rounds)
    if given.json:
        figures = {"machine": machine(), "chips": CHIPS, "limit": PROCESSES_LIMIT if given.processes else LIMIT, "rows": found}
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
