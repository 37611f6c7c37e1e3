"""How long `tpuflow estimate` takes, and how much of the host's memory: whole processes, imports included.

Processes find the bytecode of modules that one before them has written, as a user's do from the second command on, whatever is set here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.timing import publish

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """What is estimated, in words and for the command line."""

    words: str
    target: str
    batch: int
    chip: str
    policy: str | None = None

    @property
    def options(self) -> list[str]:
        """Behind `tpuflow estimate`."""
        policy = [] if self.policy is None else ["--policy", self.policy]
        return [self.target, "--batch", str(self.batch), "--chip", self.chip, *policy]


BF16 = "mixed_bf16"
RESNET, TRANSFORMER, DIFFUSION = "models.resnet:resnet50_step", "models.gpt2:transformer_1b3", "train.diffusion.steps:stable_diffusion"
TARGETS = (
    Target("ResNet-50", RESNET, 256, "tpu-v3"),
    Target("a transformer of 1.3 billion parameters, its 24 layers written out, checkpointed", f"{TRANSFORMER}_step", 1, "tpu-v4", BF16),
    Target("the same as a scan over the layers", f"{TRANSFORMER}_scan_step", 1, "tpu-v4", BF16),
    Target("the same, nothing checkpointed", f"{TRANSFORMER}_kept_step", 1, "tpu-v5p", BF16),
    Target("Stable Diffusion 1.4, all of the UNet", f"{DIFFUSION}_step", 1, "ascend910"),
    Target("the same with inner values computed again", f"{DIFFUSION}_checkpointed_step", 1, "ascend910"),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process took of the host: seconds until it ended, seconds of its processors, bytes of memory at its peak."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


_ACCOUNT = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(json.dumps((os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss)))
"""


def cost_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end, without what it prints, as the operating system accounts for it: to a small process, since the peak of a
    command counts what the process that started it held.

    environment: all of the process's; this one's if None.

    Raises:
      RuntimeError: it did not end with status 0.
    """
    began = time.perf_counter()
    account = [sys.executable, "-c", _ACCOUNT, *command]
    told = subprocess.run(account, stdout=subprocess.PIPE, check=True, env=environment).stdout
    status, cpu_seconds, peak_bytes = json.loads(told)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}; what it said is above.")
    return Cost(time.perf_counter() - began, cpu_seconds, peak_bytes)


def with_bytecode(folder: Path) -> dict[str, str]:
    """The environment of processes that keep the bytecode of modules in a folder."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**own, "PYTHONPYCACHEPREFIX": str(folder)}


def measured(one: Target, rounds: int, bytecode: Path) -> dict[str, Any]:
    """Medians over fresh processes behind one that is not counted, and what was estimated: kernels and modelled seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "estimate.json"
        command = [sys.executable, "-m", "tpuflow", "estimate", *one.options, "--json", str(path)]
        costs = [cost_of(command, with_bytecode(bytecode)) for _ in range(1 + rounds)][1:]
        found = json.loads(path.read_text())
    found = found[0] if isinstance(found, list) else found
    medians = {name: statistics.median(asdict(cost)[name] for cost in costs) for name in asdict(costs[0])}
    return {**asdict(one), "command": " ".join(["tpuflow estimate", *one.options]), **medians, "step_seconds": found["step_seconds"]}


def run(rounds: int = ROUNDS) -> tuple[str, Mapping[str, Any]]:
    """All targets, one after the other."""
    rows = []
    with tempfile.TemporaryDirectory() as bytecode:
        for one in TARGETS:
            rows.append(measured(one, rounds, Path(bytecode)))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return "\n".join(map(_line, rows)), {"rounds": rounds, "rows": rows}


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['seconds']:7.2f} s, {row['cpu_seconds']:7.2f} s of processors, {row['peak_bytes'] / 1e6:6.0f} MB: {row['command']}"


if __name__ == "__main__":
    publish(__doc__, run)
