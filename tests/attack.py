"""`python -m tests.attack`: forged and mutated binaries, each loaded and run by both engines, which must agree or refuse alike.

    python -m tests.attack --forged 2000 --mutated 2000 --json attack.json

Every file is judged in a process that is watched: one that dies or does not come back is a finding, as is any error that is not ours, bits
that differ, refusals that differ, and more than `--seconds` of processor time. The same seeds give the same files.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import forging, mutating
from tpuflow.device.fast import cache, cuts, execution
from tpuflow.device.limits import Limits
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import DType
from tpuflow.errors import TpuflowError
from tpuflow.isa.program import Port

REPOSITORY = Path(__file__).parents[1]
KINDS = {"forged": forging.forged, "mutated": mutating.mutated}
LIMITS = Limits(work=20_000, memory_bytes=2**28)
ITEMS = 6
SECONDS = 5.0
LOST_SECONDS = 120.0  # of waiting for an answer, on a machine that may be busy
FILES_A_PROCESS = 100  # translations are kept
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-42, 1e-7, 65504.0, 3e38)
MOST_MADE = 2**16  # elements of an input that are really made; of a longer one all are the same


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a file: "agree" (bits), "refused" or "finding", with the error or what is wrong, and the seconds that both took."""

    kind: str
    seed: int
    outcome: str
    text: str
    seconds: float


def judge(kind: str, seed: int) -> Verdict:
    """Make file number `seed` and give it to both engines."""
    data = KINDS[kind](np.random.default_rng(seed))
    began = time.process_time()
    reference = _outcome(data, "reference", seed)
    with _cut(seed):
        fast = _outcome(data, "fast", seed)
    seconds = time.process_time() - began
    if reference != fast or reference[0] == "broken":
        outcome, text = "finding", f"reference: {_short(reference)}; fast: {_short(fast)}"
    else:
        outcome, text = ("agree", "") if reference[0] == "bits" else ("refused", reference[1])
    if seconds > SECONDS:
        outcome, text = "finding", f"{seconds:.1f} s of processor time for {len(data)} bytes; {outcome}: {text}"
    return Verdict(kind, seed, outcome, text, round(seconds, 3))


@contextmanager
def _cut(seed: int) -> Iterator[None]:
    """The fast engine as it is for every other file; else its loops are launched a trip or two at a time, or gone round by the host."""
    whole = cuts.SHORT, cuts.LONG_TRIP, execution.SLICE_SECONDS
    try:
        if seed % 2:
            cuts.SHORT, cuts.LONG_TRIP, execution.SLICE_SECONDS = -1.0, (-1.0 if seed % 4 == 1 else np.inf), 0.0
        yield
    finally:
        cuts.SHORT, cuts.LONG_TRIP, execution.SLICE_SECONDS = whole
        cache.clear()


def _short(outcome: tuple[str, Any]) -> str:
    return f"{outcome[0]} {str(outcome[1])[:600]}" if outcome[0] != "bits" else f"bits {[x[:16].hex() for x in outcome[1]]}"


def _outcome(data: bytes, engine: str, seed: int) -> tuple[str, Any]:
    """("bits", bytes of outputs and outfeeds), ("refused", class and text), or ("broken", an error that is not ours)."""
    try:
        executable = Executable(data, engine, "bitexact", LIMITS)
        rng = np.random.default_rng(seed)
        inputs = [array(rng, p.dtype, p.shape) for p in executable.program.inputs]
        infeeds = [_items(rng, p) for p in executable.program.infeeds]
        outputs, outfeeds = executable.launch(inputs, infeeds, count=ITEMS)
        executable.time()
    except TpuflowError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "broken", f"{type(error).__name__}: {error}"
    return "bits", [np.asarray(x).tobytes() for x in (*outputs, *outfeeds)]


def _items(rng: np.random.Generator, port: Port) -> np.ndarray:
    return array(rng, port.dtype, (ITEMS, *port.shape))


def array(rng: np.random.Generator, dtype: DType, shape: Sequence[int]) -> np.ndarray:
    """Small random numbers (indices, trip counts and branches stay near what there is), a few floats that are special; a long array holds
    one number everywhere."""
    made = tuple(shape) if np.prod(shape, dtype=float) <= MOST_MADE else ()
    if dtype.is_float:
        numbers = np.where(rng.random(made) < 0.03, rng.choice(SPECIAL, made), rng.standard_normal(made))
        with np.errstate(over="ignore"):
            values = np.asarray(numbers).astype(dtype.numpy)
    else:
        values = np.asarray(rng.integers(0, 2 if dtype.kind == "pred" else 5, made)).astype(dtype.numpy)
    return values if made == tuple(shape) else np.broadcast_to(values, shape)


# --- processes


def attack(jobs: Sequence[tuple[str, int]]) -> Iterator[Verdict]:
    """A verdict for every (kind, seed), whatever the file does to the process that judges it."""
    worker: subprocess.Popen[str] | None = None
    for n, (kind, seed) in enumerate(jobs):
        if worker is not None and n % FILES_A_PROCESS == 0:
            _end(worker)
            worker = None
        worker = worker or _start()
        answer = _ask(worker, f"{kind} {seed}")
        if answer:
            yield Verdict(**json.loads(answer))
            continue
        _end(worker, wait=answer is not None)
        what = f"gave no answer for {LOST_SECONDS:.0f} s" if answer is None else f"died with exit status {worker.returncode}"
        yield Verdict(kind, seed, "finding", f"the process {what}", LOST_SECONDS)
        worker = None
    if worker is not None:
        _end(worker)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.attack", "--judge"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )


def _ask(worker: subprocess.Popen[str], job: str) -> str | None:
    """The worker's line, nothing if it has ended, None if it takes too long."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(job + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return ""
    ready, _, _ = select.select([worker.stdout], [], [], LOST_SECONDS)
    return worker.stdout.readline() if ready else None


def _end(worker: subprocess.Popen[str], *, wait: bool = False) -> None:
    """Kill the worker, unless it ends by itself."""
    if not wait:
        worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        pipe.close()


def _judge_lines() -> None:
    """Judge what standard input names, a line each; the first one waits for what the engines load once a process."""
    judge("mutated", 0)
    for line in sys.stdin:
        kind, seed = line.split()
        print(json.dumps(asdict(judge(kind, int(seed)))), flush=True)


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="Forged and mutated binaries for both engines.")
    parser.add_argument("--forged", type=int, default=100, metavar="N")
    parser.add_argument("--mutated", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="number of the first file of each kind")
    parser.add_argument("--json", type=Path, help="write every verdict here")
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.judge:
        _judge_lines()
        return 0
    jobs = [(kind, args.seed + n) for kind in KINDS for n in range(getattr(args, kind))]
    verdicts: list[Verdict] = []
    for verdict in attack(jobs):
        verdicts.append(verdict)
        if verdict.outcome == "finding":
            print(f"{verdict.kind} {verdict.seed}: {verdict.text}", flush=True)
    print(table(verdicts))
    if args.json:
        args.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    return int(any(v.outcome == "finding" for v in verdicts))


def table(verdicts: Sequence[Verdict]) -> str:
    """A line a kind: how many agreed, were refused and by which error, and the longest time."""
    lines = [f"{'kind':8} {'files':>6} {'agree':>6} {'refused':>8} {'findings':>9} {'longest':>8}"]
    for kind in KINDS:
        found = [v for v in verdicts if v.kind == kind]
        count = Counter(v.outcome for v in found)
        longest = max((v.seconds for v in found), default=0.0)
        lines.append(f"{kind:8} {len(found):6} {count['agree']:6} {count['refused']:8} {count['finding']:9} {longest:7.2f}s")
    errors = Counter(v.text.split(":")[0] for v in verdicts if v.outcome == "refused")
    return "\n".join([*lines, "refusals: " + ", ".join(f"{name} {n}" for name, n in errors.most_common())])


if __name__ == "__main__":
    sys.exit(main())
