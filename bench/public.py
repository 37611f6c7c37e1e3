"""Public programs on the simulated device: `python -m bench.public FOLDER` runs scripts and notebooks of checkouts in a folder, unmodified.

Each runs twice in processes of their own, with `JAX_PLATFORMS=cpu` and with `tpusim`, from the same seeds (`bench.public_run`). What they
had at their ends is put side by side: the arrays and numbers of the program's names and of its `main`'s, what it drew, and the numbers it
printed. Nothing of the checkouts is copied.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.public_programs import PROGRAMS, REASONS, Program
from bench.sections import put_section

LIMIT_SECONDS = 900
SMALL = 0.01
"""What an array's largest element is at least taken for."""
RESULTS = Path("bench/results/public.json")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)(?![\w.]*[A-Za-z_])")
_PASSING = re.compile(r"(?<=0x)[0-9a-f]+|\b(CPU|TPUSIM)\b|[\u2500-\u257f]")
"""What says nothing: addresses, where it ran, frames."""
_CLOCK = re.compile(r"(?i)\b(time|took|elapsed|seconds?|duration)\b")


@dataclass(frozen=True)
class Ended:
    """What a run left: its arrays, what it printed, how long it took."""

    arrays: dict[str, np.ndarray]
    printed: str
    seconds: float


def run(program: Program, checkouts: Path, platform: str, kept: Path) -> Ended | str:
    """Run it on a platform, unless `kept` has that run; the last line of what it says if it fails."""
    place = kept / f"{program.short}.{platform}"
    if not (place / "run.json").is_file() and not (place / "failed").is_file():
        place.mkdir(parents=True, exist_ok=True)
        failed = _start(program, checkouts, platform, place)
        if failed:
            (place / "failed").write_text(failed, encoding="utf-8")
    return (place / "failed").read_text(encoding="utf-8") if (place / "failed").is_file() else _read(place)


def _start(program: Program, checkouts: Path, platform: str, place: Path) -> str:
    """A run's process; what it says if it fails, else nothing."""
    without = ["--without", *program.without.rsplit(".", 1)] if program.without else []
    command = [sys.executable, "-m", "bench.public_run", *without, str(place), str((checkouts / program.project / program.path).resolve())]
    environment = _environment(program, platform)
    try:
        done = subprocess.run(
            [*command, *program.arguments], capture_output=True, text=True, check=False, env=environment, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_SECONDS} seconds"
    return _said(done.stderr) if done.returncode else ""


def _environment(program: Program, platform: str) -> dict[str, str]:
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg", "PYTHONHASHSEED": "0", "JAX_PLATFORMS": platform, **program.environment}


def _read(folder: Path) -> Ended:
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    with np.load(folder / "arrays.npz") as arrays:
        return Ended(dict(arrays), record["printed"], record["seconds"])


def _said(text: str) -> str:
    """The line with the error."""
    lines = [line for line in text.strip().splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (lines or text.strip().splitlines() or ["nothing was said"])[-1]


def printed(text: str) -> dict[str, np.ndarray]:
    """The numbers of what was printed, by the words before them; those of a clock are left out."""
    found: dict[str, list[float]] = defaultdict(list)
    text, end, words = _PASSING.sub("", text), 0, ""
    for match in _NUMBER.finditer(text):
        between = " ".join(text[end : match.start()].split())
        words, end = (between if re.search("[A-Za-z]", between) else words), match.end()
        if not (_CLOCK.search(words) or re.match(r"\s*(s|ms|it/s|seconds?)\b", text[end:])):
            found[f"printed: {words}"].append(float(match.group()))
    return {words: np.asarray(numbers) for words, numbers in found.items()}


def compared(program: Program, plain: Ended, ours: Ended) -> dict[str, Any]:
    """How many arrays were compared, how many numbers that is, the largest difference, and which array has it."""
    first, second = (_kept(program, run.arrays | printed(run.printed)) for run in (plain, ours))
    if first.keys() != second.keys():
        raise ValueError(f"only one has {sorted(first.keys() ^ second.keys())[0]!r}")
    differences = {name: difference(name, array, second[name]) for name, array in first.items()}
    worst = max(differences, key=lambda name: differences[name], default="")
    numbers = sum(array.size for array in first.values())
    return {"arrays": len(first), "numbers": numbers, "difference": differences.get(worst, 0.0), "worst": worst}


def _kept(program: Program, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if not any(re.search(skipped, name) for skipped in program.skip)}


def difference(name: str, plain: np.ndarray, ours: np.ndarray) -> float:
    """The largest difference of an array's elements, relative to its largest element; what is no number must be so in both.

    Raises:
      ValueError: the arrays are of different shapes.
    """
    if plain.shape != ours.shape:
        raise ValueError(f"{name}: {plain.shape} on the CPU, {ours.shape} on the device")
    kind = np.complex128 if plain.dtype.kind == "c" else np.float64
    a, b = plain.astype(kind), ours.astype(kind)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if (~same & ~(np.isfinite(a) & np.isfinite(b))).any():
        return float("inf")
    largest = max(SMALL, float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)))
    return float(np.max(np.abs(np.subtract(a, b, where=~same, out=np.zeros_like(a))), initial=0.0)) / largest


def measure(program: Program, checkouts: Path, kept: Path) -> dict[str, Any]:
    """A program's row: what was compared and how long both runs took; or what went wrong."""
    ends = {platform: run(program, checkouts, platform, kept) for platform in ("cpu", "tpusim")}
    row: dict[str, Any] = {platform: end.seconds for platform, end in ends.items() if isinstance(end, Ended)}
    for platform, end in ends.items():
        if isinstance(end, str):
            return row | {"failed": f"on the CPU, too: {end}" if platform == "cpu" else end}
    plain, ours = ends.values()
    assert isinstance(plain, Ended) and isinstance(ours, Ended)
    try:
        return row | compared(program, plain, ours)
    except ValueError as error:
        return row | {"failed": str(error)}


def agrees(program: Program, row: dict[str, Any]) -> bool:
    """Whether both ran and nothing differs by more than the program's bound."""
    return "failed" not in row and row["numbers"] > 0 and row["difference"] <= program.bound


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The section of docs/conformance.md."""
    of = [program for program in PROGRAMS if program.name in rows]
    good = sum(agrees(program, rows[program.name]) for program in of)
    return "\n".join(
        [
            f"{len(of)} scripts and notebooks of {len({p.project for p in of})} projects' repositories, unmodified, with",
            f"`JAX_PLATFORMS=cpu` and with `tpusim`, from the same seeds: {good} agree. Written by `make conformance EXAMPLES=path` for",
            "a folder of checkouts. Compared are the arrays and numbers of all names that a program has at its end, and its `main`'s,",
            "the lines, points and pictures that it drew, and the numbers it printed: relative to an array's largest element, or to",
            f"{SMALL} where that is smaller. Seconds are of whole runs with imports and compilations, on a machine that others use, too.",
            "",
            "| program | arrays | numbers | largest difference | bound | cpu, s | tpusim, s | |",
            "|---|---|---|---|---|---|---|---|",
            *(_line(program, rows[program.name]) for program in of),
            "",
            *_notes(of),
            "",
            *REASONS,
        ]
    )


def _line(program: Program, row: dict[str, Any]) -> str:
    seconds = " | ".join(f"{row[p]:.1f}" if p in row else "" for p in ("cpu", "tpusim"))
    if "failed" in row:
        text = row["failed"][:220].replace("|", "\\|").replace("<", "\\<")
        return f"| {program.name} | | | | {program.bound:g} | {seconds} | fails: {text} |"
    verdict = "agrees" if agrees(program, row) else f"differs: `{row['worst']}`"
    figures = f"{row['arrays']} | {row['numbers']:,} | {row['difference']:.1e}"
    return f"| {program.name} | {figures} | {program.bound:g} | {seconds} | {verdict} |"


def _notes(of: Sequence[Program]) -> Iterator[str]:
    """What else was said to a program, and why its bound is what it is."""
    for program in of:
        said = [f"{name}={value}" for name, value in program.environment.items()] + list(program.arguments)
        parts = [f"run with `{' '.join(said)}`"] if said else []
        parts += [f"without `{program.without}`"] if program.without else []
        parts += [program.remark] if program.remark else []
        if parts:
            yield f"- {program.name}: {'; '.join(parts)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the programs and write the page; 0 if all agree, 1 if one does not, 2 if the folder has none of them."""
    parser = argparse.ArgumentParser(prog="python -m bench.public", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"with checkouts of {', '.join(sorted({p.project for p in PROGRAMS}))}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs; the rows of the others stay as they were")
    parser.add_argument("--keep", type=Path, help="a folder in which runs stay; one that is there is not done again")
    parser.add_argument("--json", type=Path, default=RESULTS, help="every row [%(default)s]")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/conformance.md"), help="[%(default)s]")
    given = parser.parse_args(argv)
    chosen = [p for p in PROGRAMS if (given.folder / p.project / p.path).is_file() and (not given.only or p.name in given.only)]
    if not chosen:
        print(f"{given.folder}: none of the programs found; expected folders {sorted({p.project for p in PROGRAMS})}.", file=sys.stderr)
        return 2
    rows = json.loads(given.json.read_text(encoding="utf-8")) if given.only and given.json.is_file() else {}
    kept = given.keep or Path(tempfile.mkdtemp())
    for program in chosen:
        rows[program.name] = measure(program, given.folder, kept)
        print(_line(program, rows[program.name]), flush=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    put_section(given.output, "Public programs", page(rows))
    return 0 if all(agrees(program, rows[program.name]) for program in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
