"""JAX's own tests on the simulated device: `python -m bench.jax_tests CHECKOUT` runs test files of a checkout of JAX against the plugin.

Each file runs under pytest in a process of its own, with the device as JAX's default backend; a case that crashes or hangs costs that case,
and the rest go on in a new process. What fails or is skipped is run once more on JAX's CPU backend with as many devices: what fares the
same there says nothing of the device. What does not is told that it runs on a TPU, on the device: JAX skips then what TPUs do not do, and
runs what it skipped for the device's name. The other failures are classed by their cause. Nothing of the checkout is copied.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.jax_causes import CRASH, HANG, NOT_RUN, SKIPPED, Case, asks, cause_of, causes, counted, reasons, row
from bench.sections import put_section

FILES = (
    "lax_test", "lax_numpy_test", "lax_numpy_operators_test", "lax_numpy_indexing_test", "lax_control_flow_test", "lax_autodiff_test",
    "lax_vmap_test", "lax_scipy_test", "nn_test", "random_test", "image_test", "fft_test", "linalg_test", "api_test", "pjit_test",
    "export_test",
)  # fmt: skip
MESH_FILES = ("shard_map_test", "pjit_test")
"""Those that are about several devices."""
LIMIT_SECONDS = 300
"""A case that takes longer hangs."""
START_SECONDS = 600
"""Until the first case begins: the largest file takes a minute to make its cases."""
POLL_SECONDS = 0.2
MOST_STARTS = 40
"""Of one file: as many crashes and hangs, less one, before the rest is given up."""
SAMPLE = 40


@dataclass(frozen=True, slots=True)
class Run:
    """How cases are run: on which backend and how many devices, how many of each file that are not skipped (0: all), in the order of which
    seed; how many of each parameterised test, and how long at most; whether it goes on from an earlier run; which device
    cases are told that they run on (the one that they do run on, if empty)."""

    checkout: Path
    platforms: str = "tpusim,cpu"
    sample: int = SAMPLE
    seed: int = 0
    generated: int = 1
    devices: int = 1
    limit_seconds: float = LIMIT_SECONDS
    resumed: bool = False
    as_device: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Files that run on as many devices, and the section of docs/conformance.md that says how they fare."""

    title: str
    files: tuple[str, ...]
    devices: int
    sample: int
    note: str = ""


SEVERAL = "JAX's own tests of several devices"
SUITES = (
    Suite("JAX's own tests", FILES, 1, SAMPLE, f'Cases that want several devices are set aside here: "{SEVERAL}" has those of pjit_test.'),
    Suite(SEVERAL, MESH_FILES, 8, 60),
)
ONCE = ", every test once"
"""Ends the title of the section that `--whole` writes."""


def cases_of(run: Run, file: str, only: Sequence[str] = (), done: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of a file but those that are done, in as many processes as it takes."""
    seen, left = set(done), run.sample
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(MOST_STARTS):
            ended = True
            for case in _one_process(replace(run, sample=left), file, Path(folder), only, seen):
                seen.add(case.name)
                left -= bool(run.sample) and case.outcome != "skipped"
                ended = case.kind not in (CRASH, HANG)
                yield case
            if ended or (run.sample and not left):
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
        f"--cases-to={folder / 'log'}", f"--cases-done={folder / 'done'}", f"--cases-as={run.as_device}", *chosen, f"tests/{file}.py",
    ]  # fmt: skip


def _environment(run: Run) -> dict[str, str]:
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    said = {"JAX_PLATFORMS": run.platforms, "JAX_NUM_GENERATED_CASES": str(run.generated)}
    devices = {"TPUFLOW_DEVICES": str(run.devices), "JAX_NUM_CPU_DEVICES": str(run.devices)}
    return {**os.environ, "PYTHONPATH": path, **said, **devices}


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
    """The cases with their causes. What did not pass is tried on the CPU backend; what fares otherwise there is tried here once more as if
    on a TPU, and what was skipped is what becomes of it then."""
    tried = {c.name: c.outcome for c in cases if c.outcome != "passed" and c.kind != NOT_RUN}
    there = _again(replace(run, platforms="cpu"), file, list(tried))
    elsewhere = {name for name, outcome in tried.items() if name in there and there[name].outcome == outcome}
    as_tpu = _again(replace(run, as_device="tpu"), file, [name for name in tried if name not in elsewhere])
    on_tpu = {name for name, case in as_tpu.items() if case.outcome == SKIPPED}
    final = [as_tpu.get(c.name, c) if c.outcome == SKIPPED else c for c in cases]
    return [c if c.outcome == "passed" else replace(c, cause=cause_of(c, elsewhere, on_tpu)) for c in final]


def _again(run: Run, file: str, names: Sequence[str]) -> dict[str, Case]:
    """What becomes of some cases in another run, by name."""
    return {case.name: case for case in cases_of(replace(run, sample=0), file, names)} if names else {}


def page(run: Run, found: dict[str, list[Case]], suite: Suite = SUITES[0]) -> str:
    """The section of docs/conformance.md."""
    everything = [case for cases in found.values() for case in cases]
    lines = [
        f"Test files of JAX {version('jax')}'s repository, by pytest, with the plugin as JAX's default backend{_on(run)} ([how](pjrt.md)).",
        f"Written by `make conformance JAX_TESTS=path{_options(run, suite)}` for a checkout of JAX.",
        f"Of each parameterised test there is {run.generated}. {_drawn(run)}",
        "A case that JAX skips on its CPU backend with as many devices, too, or here and on TPUs, asks nothing of a TPU: it is set aside,",
        "and the last table says why. What JAX skips here for the device's name, and not on TPUs, is run as if on one. Not counted are",
        "cases that fail on JAX's CPU backend too, that fail here and JAX skips on TPUs, and that ask for what a TPU does not have.",
        *(["The run went on from an earlier one: what failed there was run again, what passed was not."] if run.resumed else []),
        *([suite.note] if suite.note else []),
        *_left_out(found, suite),
        "",
        "| file | cases | passed | failed | not counted | pass rate |",
        "|---|---|---|---|---|---|",
        *(row(file, cases) for file, cases in found.items()),
        row("all", everything),
        "",
        "| why | cases | one of them |",
        "|---|---|---|",
        *causes(everything),
        "",
        "| file | set aside | JAX's reasons |",
        "|---|---|---|",
        *(_aside(file, cases) for file, cases in found.items()),
    ]
    return "\n".join(lines) + "\n"


def _options(run: Run, suite: Suite) -> str:
    """What the command is given beside the checkout."""
    if not run.sample:
        return " ARGS=--whole"
    return f' ARGS="--sample {run.sample}"' if run.sample != suite.sample else ""


def _left_out(found: dict[str, list[Case]], suite: Suite) -> list[str]:
    missing = [file for file in suite.files if file not in found]
    return [f"Not run: {', '.join(missing)}."] if missing else []


def _drawn(run: Run) -> str:
    if not run.sample:
        return "Every case of each file."
    return f"Cases of each file are drawn in the order of seed {run.seed} until {run.sample} were not skipped, or there are no more."


def _aside(file: str, cases: Sequence[Case]) -> str:
    aside = [case for case in cases if not asks(case)]
    return f"| {file} | {len(aside)} of {len(cases)} | {reasons(aside)} |"


def _on(run: Run) -> str:
    return f", on {run.devices} devices" if run.devices > 1 else ""


Found = dict[str, dict[str, list[Case]]]
"""Cases by the title of their section and their file."""


def run_suite(
    suite: Suite, run: Run, files: Sequence[str], cases: Found, path: Path, keep: Callable[[Found], None] = lambda _: None
) -> None:
    """Run these of a suite's files and write its section of the page; nothing if it has none of them. Cases that passed or were skipped
    stay as they are, others are run; all are kept after each file."""
    title = suite.title if run.sample else suite.title + ONCE
    own = [file for file in suite.files if file in files]
    found = cases.setdefault(title, {})
    for file in own:
        before = [c for c in found.get(file, ()) if c.outcome != "failed"]
        found[file] = before + classed(run, file, _further(run, file, before))
        print(row(file, found[file]), flush=True)
        keep(cases)
    if own:
        put_section(path, title, page(run, {file: found[file] for file in suite.files if file in found}, suite))


def _further(run: Run, file: str, before: Sequence[Case]) -> list[Case]:
    """The cases that are still to be run."""
    left = run.sample - sum(c.outcome != "skipped" for c in before)
    if run.sample and left <= 0:
        return []
    return list(cases_of(replace(run, sample=left if run.sample else 0), file, done=[c.name for c in before]))


def _kept(path: Path) -> Found:
    read = json.loads(path.read_text(encoding="utf-8"))
    return {title: {file: [Case(**c) for c in of] for file, of in files.items()} for title, files in read.items()}


def _keep(path: Path, cases: Found) -> None:
    written = {title: {file: [asdict(c) for c in of] for file, of in files.items()} for title, files in cases.items()}
    path.write_text(json.dumps(written, indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    every = sorted({file for suite in SUITES for file in suite.files})
    samples = ", ".join(f"{suite.sample} on {suite.devices} device{'s' * (suite.devices > 1)}" for suite in SUITES)
    parser = argparse.ArgumentParser(prog="python -m bench.jax_tests", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of JAX, of the version that is installed")
    parser.add_argument("--files", nargs="+", choices=every, default=every, metavar="FILE", help=f"of {', '.join(every)} [all]")
    parser.add_argument("--devices", type=int, choices=[suite.devices for suite in SUITES], help="those of so many devices alone")
    parser.add_argument("--sample", type=int, help=f"cases of each file that are not skipped [{samples}]")
    parser.add_argument("--whole", action="store_true", help="every case of each file, in a section of its own; hours")
    parser.add_argument("--seed", type=int, default=0, help="of the sample [%(default)s]")
    parser.add_argument("--generated", type=int, default=1, help="cases of each parameterised test, JAX_NUM_GENERATED_CASES [%(default)s]")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS, help="of one case [%(default)s]")
    parser.add_argument("--json", type=Path, help="every case, as JSON, after each file")
    parser.add_argument("--resume", action="store_true", help="go on from --json: what passed or was skipped is not run again")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/conformance.md"), help="[%(default)s]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the files and write the sections; 0 if all that counts passed, 1 if not, 2 if there is no such checkout."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.resume and not given.json:
        parser.error("--resume goes on from an earlier run's --json; give both")
    missing = [f for f in given.files if not (given.checkout / "tests" / f"{f}.py").is_file()]
    if missing:
        print(f"{given.checkout}: no tests/{missing[0]}.py; expected a checkout of JAX's repository.", file=sys.stderr)
        return 2
    cases = _kept(given.json) if given.resume and given.json.exists() else {}
    for suite in SUITES:
        if given.devices in (None, suite.devices):
            sample = 0 if given.whole else suite.sample if given.sample is None else given.sample
            run = Run(given.checkout.resolve(), sample=sample, seed=given.seed, generated=given.generated, devices=suite.devices,
                      limit_seconds=given.limit_seconds, resumed=given.resume)  # fmt: skip
            run_suite(suite, run, given.files, cases, given.output, partial(_keep, given.json) if given.json else lambda _: None)
    return 0 if all(c.outcome == "passed" for files in cases.values() for of in files.values() for c in of if counted(c)) else 1


if __name__ == "__main__":
    sys.exit(main())
