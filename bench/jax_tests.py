"""JAX's own tests on the simulated device: `python -m bench.jax_tests CHECKOUT` runs test files of a checkout of JAX against the plugin.

Each file runs under pytest in a process of its own, with the device as JAX's default backend; a case that crashes or hangs costs that case,
and the rest go on in a new process. What fails is run once more on JAX's CPU backend: what fails there too says nothing of the device. The
other failures are classed by their cause. Nothing of the checkout is copied.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.sections import put_section

FILES = (
    "lax_test", "lax_numpy_test", "lax_numpy_operators_test", "lax_numpy_indexing_test", "lax_control_flow_test", "lax_autodiff_test",
    "lax_vmap_test", "lax_scipy_test", "nn_test", "random_test", "image_test", "fft_test", "linalg_test", "api_test", "pjit_test",
    "export_test",
)  # fmt: skip
MESH_FILES = ("shard_map_test", "pjit_test")
"""Those that are about several devices."""
LIMIT_SECONDS = 60
START_SECONDS = 300
"""Until the first case begins: the largest file takes a minute to make its cases."""
POLL_SECONDS = 0.2
MOST_STARTS = 40
"""Of one file: as many crashes and hangs, less one, before the rest is given up."""

CRASH, HANG, NOT_RUN = "Crash", "Hang", "NotRun"
"""Kinds of ends that are no exceptions."""


@dataclass(frozen=True, slots=True)
class Case:
    """What became of a case: passed, failed or skipped; of a failure the kind of exception and its text; its class, once it has one."""

    name: str
    outcome: str
    seconds: float = 0.0
    kind: str = ""
    text: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """A class of failures: whether it counts against the device, and what the kind and the text look like."""

    name: str
    pattern: str
    counts: bool = True

    def holds(self, case: Case) -> bool:
        """Whether a failure is of it."""
        return re.search(self.pattern, f"{case.kind}: {case.text}", re.DOTALL) is not None


ELSEWHERE = "fails on JAX's CPU backend, too"
CAUSES = (
    Cause("hangs", f"^{HANG}:"),
    Cause("ends the process", f"^{CRASH}:"),
    Cause("not run: too many cases before it crashed or hung", f"^{NOT_RUN}:"),
    Cause("64-bit types, only emulated on TPUs", r"UNIMPLEMENTED.*(64-bit (elements|integers)|complex numbers of two f64)", counts=False),
    Cause("a program for several devices", r"multi-chip programs"),
    Cause("8-bit floating types and 4-bit types", r"no such elements"),
    Cause("a dot algorithm that the matrix unit does not have", r"the algorithm #stablehlo.dot_algorithm", counts=False),
    Cause("exported for other platforms by name", r"was exported for platforms", counts=False),
    Cause("no lowering rule", r"no lowering rule"),
    Cause("a form that a rule does not cover", r"UNIMPLEMENTED|^UnsupportedPrimitiveError"),
    Cause("memory", r"RESOURCE_EXHAUSTED"),
    Cause("a defect: INTERNAL", r"INTERNAL"),
    Cause("other refusals", r"JaxRuntimeError|TpuflowError"),
    Cause("wrong values", r"^AssertionError: .*(Not equal to tolerance|Mismatched elements|not equal|ot close|!= )"),
    Cause("other", ""),
)  # fmt: skip
"""The first that holds is a failure's; in this order."""


@dataclass(frozen=True, slots=True)
class Run:
    """How cases are run: on which backend and how many devices, how many of each file (0: all), from which seed; how many of each
    parameterised test, and how long at most."""

    checkout: Path
    platforms: str = "tpusim,cpu"
    sample: int = 24
    seed: int = 0
    generated: int = 1
    devices: int = 1
    limit_seconds: float = LIMIT_SECONDS


@dataclass(frozen=True, slots=True)
class Suite:
    """Files that run on as many devices, and the section of docs/conformance.md that says how they fare."""

    title: str
    files: tuple[str, ...]
    devices: int
    sample: int


SUITES = (Suite("JAX's own tests", FILES, 1, 24), Suite("JAX's own tests of several devices", MESH_FILES, 8, 60))


def cases_of(run: Run, file: str, only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of a file, in as many processes as it takes."""
    done: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(MOST_STARTS):
            ended = True
            for case in _one_process(run, file, Path(folder), only, done):
                done.add(case.name)
                ended = case.kind not in (CRASH, HANG)
                yield case
            if ended:
                return
    yield Case(file, "failed", kind=NOT_RUN, text=f"more than {MOST_STARTS - 1} cases of {file} crashed or hung")


def _one_process(run: Run, file: str, folder: Path, only: Sequence[str], done: set[str]) -> list[Case]:
    """Those that one process gets to; the last one is a crash or a hang, if it did not get to all."""
    log = folder / "log"
    log.write_text("")
    child = subprocess.Popen(
        _command(run, file, folder, only, done), cwd=run.checkout, env=_environment(run), stdout=(folder / "output").open("w"),
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    hung = _wait(child, log, run.limit_seconds)
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return _read(records, file, hung, child.returncode, (folder / "output").read_text(errors="replace"))


def _command(run: Run, file: str, folder: Path, only: Sequence[str], done: set[str]) -> list[str]:
    (folder / "done").write_text("\n".join(done))
    (folder / "only").write_text("\n".join(only))
    chosen = [f"--cases-only={folder / 'only'}"] if only else [f"--cases-sample={run.sample}", f"--cases-seed={run.seed}"]
    return [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "bench.jax_cases",
        f"--cases-to={folder / 'log'}", f"--cases-done={folder / 'done'}", *chosen, f"tests/{file}.py",
    ]  # fmt: skip


def _environment(run: Run) -> dict[str, str]:
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    said = {"JAX_PLATFORMS": run.platforms, "JAX_NUM_GENERATED_CASES": str(run.generated), "TPUFLOW_DEVICES": str(run.devices)}
    return {**os.environ, "PYTHONPATH": path, **said}


def _wait(child: subprocess.Popen[Any], log: Path, limit_seconds: float) -> bool:
    """Wait until it ends, or until nothing was written for too long: then it is ended, and True."""
    size, since = 0, time.monotonic()
    while child.poll() is None:
        time.sleep(POLL_SECONDS)
        if log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        elif time.monotonic() - since > (limit_seconds if size else START_SECONDS):
            child.kill()
            child.wait()
            return True
    return False


def _read(records: Sequence[dict[str, Any]], file: str, hung: bool, code: int, output: str) -> list[Case]:
    """The cases of a process's records; what it was at when it ended is one, too."""
    made = [Case(r["case"], **{k: v for k, v in r.items() if k != "case"}) for r in records if "outcome" in r]
    cases = list({c.name: c for c in sorted(made, key=lambda c: _WORSE.index(c.outcome))}.values())  # of subtests the worst
    unreadable = [Case(file, "failed", kind=NOT_RUN, text=r["unreadable"]) for r in records if "unreadable" in r]
    begun = [r["case"] for r in records if "began" in r]
    if begun and begun[-1] not in {c.name for c in cases}:
        kind, text = (HANG, "over the time limit") if hung else (CRASH, f"exit status {code}: {_last_line(output)}")
        cases.append(Case(begun[-1], "failed", kind=kind, text=text))
    elif not begun and not unreadable and code not in (0, 5):  # 5: nothing was chosen
        unreadable.append(Case(file, "failed", kind=NOT_RUN, text=f"exit status {code}: {_last_line(output)}"))
    return [*cases, *unreadable]


_WORSE = ("skipped", "passed", "failed")


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["nothing was printed"])[-1]


def classed(run: Run, file: str, cases: Sequence[Case]) -> list[Case]:
    """The cases with their causes; failures are tried on the CPU backend first."""
    failed = [c.name for c in cases if c.outcome == "failed" and c.kind != NOT_RUN]
    control = cases_of(replace(run, platforms="cpu"), file, failed) if failed else ()
    elsewhere = {c.name for c in control if c.outcome == "failed"}
    return [replace(c, cause=cause_of(c, elsewhere)) if c.outcome == "failed" else c for c in cases]


def cause_of(case: Case, elsewhere: set[str]) -> str:
    """The name of a failure's class; `elsewhere`: the names of those that fail on JAX's CPU backend, too."""
    return ELSEWHERE if case.name in elsewhere else next(cause.name for cause in CAUSES if cause.holds(case))


def counted(case: Case) -> bool:
    """Whether a case says something of the device."""
    uncounted = {ELSEWHERE, *(cause.name for cause in CAUSES if not cause.counts)}
    return case.outcome != "skipped" and case.cause not in uncounted


def page(run: Run, found: dict[str, list[Case]]) -> str:
    """The section of docs/conformance.md."""
    everything = [case for cases in found.values() for case in cases]
    how = f"{run.sample} cases of each file, drawn with seed {run.seed}" if run.sample else "every case of each file"
    lines = [
        f"Test files of JAX's repository, by pytest, with the plugin as JAX's default backend{_on(run)} ([how](pjrt.md)). Written by",
        f"`make conformance JAX_TESTS=path` for a checkout of JAX: {how}, {run.generated} of each parameterised test.",
        "Not counted are cases that JAX itself skips, that fail on its CPU backend too, and that ask for what a TPU does not have.",
        "",
        "| file | cases | passed | failed | not counted | pass rate |",
        "|---|---|---|---|---|---|",
        *(row(file, cases) for file, cases in found.items()),
        row("all", everything),
        "",
        "| why | cases | one of them |",
        "|---|---|---|",
        *causes(everything),
    ]
    return "\n".join(lines) + "\n"


def _on(run: Run) -> str:
    return f", on {run.devices} devices" if run.devices > 1 else ""


def row(file: str, cases: Sequence[Case]) -> str:
    """A row of the page's table: how a file's cases fared."""
    of = [c for c in cases if counted(c)]
    passed = sum(c.outcome == "passed" for c in of)
    rate = f"{passed / len(of):.1%}" if of else ""
    return f"| {file} | {len(cases)} | {passed} | {len(of) - passed} | {len(cases) - len(of)} | {rate} |"


def causes(cases: Sequence[Case], skipped: str = "skipped by JAX") -> Iterator[str]:
    """A row for each cause, those that count first, the most frequent first."""
    left_out = sum(c.outcome == "skipped" for c in cases)
    failed = [c for c in cases if c.outcome == "failed"]
    numbers = Counter(c.cause for c in failed)
    for cause, number in sorted(numbers.items(), key=lambda row: (not counted(Case("", "failed", cause=row[0])), -row[1])):
        example = next(c for c in failed if c.cause == cause)
        remark = "" if counted(example) else " (not counted)"
        yield f"| {cause}{remark} | {number} | `{example.name.split('::')[-1]}`: {_brief(example)} |"
    yield f"| {skipped} (not counted) | {left_out} | |"


def _brief(case: Case) -> str:
    """What it said, as a table's cell."""
    text = re.sub(r"\S*/(?=[^/\s]+\.py\b)", "", " ".join(case.text.split()))[:160]
    return f"{case.kind}: {text}".replace("|", "\\|").replace("<", "\\<").replace("`", "'")


def run_suite(suite: Suite, run: Run, files: Sequence[str], cases: dict[str, dict[str, list[Case]]], path: Path) -> None:
    """Run these of a suite's files, which adds their cases, and write its section of the page; nothing if it has none of them."""
    own = [file for file in suite.files if file in files]
    found = cases[suite.title] = {}
    for file in own:
        found[file] = classed(run, file, list(cases_of(run, file)))
        print(row(file, found[file]), flush=True)
    if own:
        put_section(path, suite.title, page(run, found))


def _parser() -> argparse.ArgumentParser:
    every = sorted({file for suite in SUITES for file in suite.files})
    samples = ", ".join(f"{suite.sample} on {suite.devices} device{'s' * (suite.devices > 1)}" for suite in SUITES)
    parser = argparse.ArgumentParser(prog="python -m bench.jax_tests", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of JAX, of the version that is installed")
    parser.add_argument("--files", nargs="+", choices=every, default=every, metavar="FILE", help=f"of {', '.join(every)} [all]")
    parser.add_argument("--devices", type=int, choices=[suite.devices for suite in SUITES], help="those of so many devices alone")
    parser.add_argument("--sample", type=int, help=f"cases of each file [{samples}]")
    parser.add_argument("--whole", action="store_true", help="every case of each file; hours")
    parser.add_argument("--seed", type=int, default=0, help="of the sample [%(default)s]")
    parser.add_argument("--generated", type=int, default=1, help="cases of each parameterised test, JAX_NUM_GENERATED_CASES [%(default)s]")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS, help="of one case [%(default)s]")
    parser.add_argument("--json", type=Path, help="every case, as JSON")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/conformance.md"), help="[%(default)s]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the files and write the sections; 0 if all that counts passed, 1 if not, 2 if there is no such checkout."""
    given = _parser().parse_args(argv)
    missing = [f for f in given.files if not (given.checkout / "tests" / f"{f}.py").is_file()]
    if missing:
        print(f"{given.checkout}: no tests/{missing[0]}.py; expected a checkout of JAX's repository.", file=sys.stderr)
        return 2
    cases: dict[str, dict[str, list[Case]]] = {}
    for suite in SUITES:
        if given.devices in (None, suite.devices):
            sample = 0 if given.whole else suite.sample if given.sample is None else given.sample
            run = Run(given.checkout.resolve(), sample=sample, seed=given.seed, generated=given.generated, devices=suite.devices,
                      limit_seconds=given.limit_seconds)  # fmt: skip
            run_suite(suite, run, given.files, cases, given.output)
    if given.json:
        written = {title: {file: [asdict(c) for c in of] for file, of in files.items()} for title, files in cases.items()}
        given.json.write_text(json.dumps(written, indent=1), encoding="utf-8")
    return 0 if all(c.outcome == "passed" for files in cases.values() for of in files.values() for c in of if counted(c)) else 1


if __name__ == "__main__":
    sys.exit(main())
