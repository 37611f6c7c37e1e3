"""One training step of a network in three systems: tpuflow's sink, plain jax.jit + lax.scan of the same step, and PyTorch on the CPU.

Every contender has a process of its own, and they take turns, so that whatever else the machine does hits all alike. Ratios of medians
are what counts. "cold" is everything until the first sink has run (trace, compile, run); the peak of memory is the process's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bench.peers import SAME_ARITHMETIC, own_copy, step_of
from bench.timing import interleaved, machine, medians

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained: `steps` steps of `batch` random images of `shape` in a run, `rounds` runs, in each of `processes`
    processes one after the other: XLA's compiler makes the same program up to a sixth faster or slower from process to process.

    `twin`: of `train.torch_models` the network in PyTorch; None: it takes no part. `limits`: (ours, other) -> what the ratio of their
    times should not exceed; `peak_limit`: that of peaks of memory, fp32 against plain JAX, `cold_limit` of first runs. `peer`: how plain
    JAX runs the steps. `vocabulary`: the samples are rows of so many tokens instead, `shape` long, and the labels those after them. The
    optimizer is AdamW where `momentum` is None.

    What is no classifier brings its own: `samples`, so many of them as a tree of arrays; `step`, of a policy and a batch the
    `tpuflow.TrainingStep`; `torch`, PyTorch's run of so many samples.
    """

    name: str
    model: Callable[[], Any]
    twin: Callable[[ModuleType], Any] | None
    shape: tuple[int, ...]
    batch: int
    steps: int
    rounds: int
    lr: float
    momentum: float | None
    policies: tuple[str, ...]
    limits: Mapping[tuple[str, str], float]
    peer: str = "jax_scan"
    vocabulary: int | None = None
    processes: int = 1
    peak_limit: float = 1.2
    cold_limit: float | None = None
    samples: Callable[[int], Any] | None = None
    step: Callable[[str, Any], Any] | None = None
    torch: Callable[[Any], Run] | None = None

    def data(self, steps: int) -> Any:
        """Samples and labels for so many steps."""
        rng, count = np.random.default_rng(0), steps * self.batch
        if self.samples is not None:
            return self.samples(count)
        if self.vocabulary is not None:
            tokens = rng.integers(0, self.vocabulary, (count, self.shape[0] + 1)).astype(np.int32)
            return tokens[:, :-1], tokens[:, 1:]
        return rng.standard_normal((count, *self.shape)).astype(np.float32), rng.integers(0, 10, count).astype(np.int32)

    @property
    def contenders(self) -> tuple[str, ...]:
        """tpuflow in every policy, the peers in fp32."""
        peers = (f"{self.peer} fp32", *(("torch fp32",) if self.twin or self.torch else ()))
        return (*(f"tpuflow {policy}" for policy in self.policies), *peers)


def tpuflow_run(work: Workload, policy: str, steps: int) -> Run:
    """A sink of `tpuflow.sink`."""
    import tpuflow

    data = work.data(steps)
    step, state = _step(work, policy, data)
    return tpuflow.sink(step, data, steps, state=state, batch_size=work.batch, donate=True).__next__


def jax_run(work: Workload, policy: str, steps: int) -> Run:
    """The same step in a lax.scan under jax.jit, its state donated, its data on the device."""
    import jax

    data = work.data(steps)
    step, state = _step(work, policy, data)
    batches = jax.device_put(jax.tree.map(lambda array: array.reshape(steps, work.batch, *array.shape[1:]), data))
    epoch = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0, compiler_options=SAME_ARITHMETIC)
    held = [state]

    def run() -> None:
        held[0], figures = epoch(held[0], batches)
        jax.block_until_ready((held[0], figures))

    return run


def jax_jit_run(work: Workload, policy: str, steps: int) -> Run:
    """The same step under plain jax.jit, one call a step, its state donated, its data on the device."""
    import jax

    data = work.data(steps)
    step, state = _step(work, policy, data)
    batches = [jax.device_put(_batch(data, i * work.batch, work.batch)) for i in range(steps)]
    compiled = jax.jit(step, donate_argnums=0)
    held = [state]

    def run() -> None:
        for batch in batches:
            held[0], figures = compiled(held[0], batch)
        jax.block_until_ready((held[0], figures))

    return run


def torch_run(work: Workload, policy: str, steps: int) -> Run:
    """PyTorch's usual loop, on one thread or on all, whichever was the faster in a first run of each."""
    if work.torch is not None:
        return work.torch(work.data(steps))
    from train import torch_models
    from train.torch_training import Setting, losses

    assert work.twin is not None
    assert work.momentum is not None
    network, data, rates = work.twin(torch_models), work.data(steps), {"lr": work.lr, "momentum": work.momentum}

    def run(setting: Setting) -> object:
        return losses(network, data, work.batch, **rates, setting=setting)

    settings = (Setting(threads=1), Setting(threads=os.cpu_count()))
    times = medians(interleaved({str(i): functools.partial(run, setting) for i, setting in enumerate(settings)}, 1))
    return functools.partial(run, settings[0] if times["0"] <= times["1"] else settings[1])


NARROW_LIMITS: Mapping[tuple[str, str], float] = {("tpuflow fp16", "tpuflow fp32"): 1.15, ("tpuflow mixed", "tpuflow fp32"): 1.15}
"""Of a sink in fp16 and in a mixed policy over the same in fp32."""

CONTENDERS: Mapping[str, Callable[[Workload, str, int], Run]] = {
    "tpuflow": tpuflow_run,
    "jax_scan": jax_run,
    "jax_jit": jax_jit_run,
    "torch": torch_run,
}


def _batch(data: Any, first: int, count: int) -> Any:
    import jax

    return jax.tree.map(lambda array: array[first : first + count], data)


def _step(work: Workload, policy: str, data: Any) -> tuple[Any, Any]:
    import optax

    if work.step is not None:
        made = work.step(policy, _batch(data, 0, work.batch))
        return made.step, own_copy(made.state)
    rule = optax.adamw(work.lr) if work.momentum is None else optax.sgd(work.lr, momentum=work.momentum)
    return step_of(work.model(), data, policy, rule, work.batch, None)


class Worker:
    """A contender in a process of its own that runs when it is told to. The first run is the cold one."""

    def __init__(self, work: Workload, contender: str, steps: int):
        print(contender, file=sys.stderr, flush=True)
        self._name = contender
        command = [sys.executable, "-m", f"bench.{work.name}", "--steps", str(steps), "--worker", contender]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cold_seconds = self._answer()["seconds"]
        self.peak_bytes = 0.0

    def run(self) -> float:
        """One run; its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_bytes = answer["peak_bytes"]
        return answer["seconds"]

    def end(self) -> None:
        """No more runs."""
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with status {self._process.wait()}; what it said is above.")
        return json.loads(line)


def serve(work: Workload, contender: str, steps: int) -> None:
    """The worker's side: a cold run, then one for every line that comes; each is answered with its seconds and the peak of memory."""
    name, policy = contender.split()
    __import__("torch" if name == "torch" else "optax")
    began = time.perf_counter()
    run = CONTENDERS[name](work, policy, steps)
    run()
    _tell(time.perf_counter() - began)
    for _ in sys.stdin:
        began = time.perf_counter()
        run()
        _tell(time.perf_counter() - began)


def _tell(seconds: float) -> None:
    print(json.dumps({"seconds": seconds, "peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}), flush=True)


def measure(work: Workload, steps: int, rounds: int) -> dict[str, Any]:
    """Of each contender the seconds a step of every round in every process; over all of them the medians, of cold seconds and peaks of
    memory those over processes."""
    seconds, cold, peak = ({name: [] for name in work.contenders} for _ in range(3))
    for _ in range(work.processes):
        workers = {contender: Worker(work, contender, steps) for contender in work.contenders}
        for _ in range(rounds):
            for name, worker in workers.items():
                seconds[name].append(worker.run() / steps)
        for name, worker in workers.items():
            worker.end()
            cold[name].append(worker.cold_seconds)
            peak[name].append(worker.peak_bytes)
    return {
        "workload": work.name, "batch": work.batch, "steps": steps, "rounds": rounds, "processes": work.processes,
        "cold_seconds": medians(cold), "step_seconds": seconds, "medians": medians(seconds), "peak_bytes": medians(peak),
    }  # fmt: skip


def ratios(figures: Mapping[str, Any], work: Workload) -> list[dict[str, Any]]:
    """Every ratio that has a limit: of medians of a step, of peaks, of first runs."""
    rows = [_ratio("step", figures["medians"], a, b, limit) for (a, b), limit in work.limits.items()]
    whole = [("peak memory", "peak_bytes", work.peak_limit), ("first run", "cold_seconds", work.cold_limit)]
    ours, other = "tpuflow fp32", f"{work.peer} fp32"
    return [*rows, *(_ratio(what, figures[name], ours, other, limit) for what, name, limit in whole if limit is not None)]


def _ratio(what: str, values: Mapping[str, float], a: str, b: str, limit: float) -> dict[str, Any]:
    return {"of": what, "ours": a, "other": b, "ratio": values[a] / values[b], "limit": limit, "holds": values[a] <= limit * values[b]}


def report(figures: Mapping[str, Any]) -> str:
    """The table."""
    lines = [f"{figures['workload']}, batch {figures['batch']}", f"{'contender':16} {'cold s':>8} {'ms a step':>10} {'peak MB':>8}"]
    for name, seconds in figures["medians"].items():
        peak = figures["peak_bytes"].get(name)
        lines.append(
            f"{name:16} {figures['cold_seconds'][name]:8.2f} {1e3 * seconds:10.3f} {'' if peak is None else f'{peak / 1e6:.0f}':>8}"
        )
    for row in figures["ratios"]:
        verdict = "" if row["holds"] else "  OVER"
        lines.append(f"{row['of']}: {row['ours']} / {row['other']} = {row['ratio']:.2f} (limit {row['limit']:g}){verdict}")
    return "\n".join(lines)


def main(work: Workload, description: str | None) -> None:
    """Command line of a benchmark of this kind."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=work.steps, help="steps of one run [%(default)s]")
    parser.add_argument("--rounds", type=int, default=work.rounds, help="runs of each contender, in turn [%(default)s]")
    parser.add_argument("--worker", choices=work.contenders, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    if args.worker:
        serve(work, args.worker, args.steps)
        return
    figures = measure(work, args.steps, args.rounds)
    figures["ratios"] = ratios(figures, work)
    print(report(figures))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
