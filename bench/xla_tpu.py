"""Training steps beside XLA:TPU's own compile of them: `python -m bench.xla_tpu` writes a section of docs/xla_tpu.md.

What XLA:TPU plans takes it half a minute, and the package libtpu, but no TPU: `--compile` has it plan what bench/results/xla_tpu.json does
not have yet. Its code takes minutes, and tells which operands it reads again: `--compile --whole`. Without them our side alone is made
again. What is kept of its are two sums a step; nothing that libtpu prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kept_rows import Figures, Rows, Task, kept, make, options, wanted
from bench.recorded import table
from bench.sections import put_section
from bench.vendor_plans import DOES_NOT_FIT, FAILS, compiled, plan
from bench.vendor_steps import STEPS, VendorStep
from tpuflow.chips import get_chip
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import training_program
from tpuflow.stages.analysis import memory_analysis

HERE = Path(__file__).parent
RESULTS, PAGE, TITLE = HERE / "results" / "xla_tpu.json", HERE.parent / "docs" / "xla_tpu.md", "Training steps"
CHIPS = ("tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
OURS, THEIRS = "ours", "theirs"
TIMED = 100


def row_of(step: VendorStep, chip: str) -> str:
    """What a step on a chip is called in the file."""
    return f"{step.name} | {chip}"


def theirs(number: int, chip: str) -> Figures:
    """What XLA:TPU plans for a step."""
    return plan(STEPS[number], chip)


def theirs_whole(number: int, chip: str) -> Figures:
    """The same, with its code."""
    return compiled(STEPS[number], chip)


def ours(number: int, chip: str) -> Figures:
    """The same of our plan."""
    try:
        program = training_program(STEPS[number].config, get_chip(chip))[1]
    except OutOfMemoryError:
        return {"refused": DOES_NOT_FIT}
    return {
        "temporaries": memory_analysis(program).temp_size_in_bytes,
        "hbm": round(sink_time(program, TIMED).work.hbm_bytes / TIMED),
    }


def cell(row: Mapping[str, Figures], what: str) -> float | str:
    """Ours over theirs; why there is none."""
    sides = [row.get(side, {}) for side in (OURS, THEIRS)]
    refused = next((side["refused"] for side in sides if "refused" in side), "")
    return refused or (sides[0][what] / sides[1][what] if all(sides) else "")


def section(rows: Rows) -> str:
    """The section as Markdown."""
    shown = []
    for step in STEPS:
        cells = [[cell(rows.get(row_of(step, chip), {}), what) for chip in CHIPS] for what in ("hbm", "temporaries")]
        pairs = [
            " / ".join(dict.fromkeys(one if isinstance(one, str) else f"{one:.2f}" for one in pair)) for pair in zip(*cells, strict=True)
        ]
        marks = [_mark(rows.get(row_of(step, chip), {}).get(THEIRS, {})) for chip in CHIPS]
        shown.append((step.name, f"{step.limit:g}", *(pair and mark + pair for mark, pair in zip(marks, pairs, strict=True))))
    return f"""What a step moves to and from HBM / its temporaries, ours over XLA:TPU's; "limit": what neither is to be beyond.

{table(("step", "limit", *CHIPS), shown)}

{FAILS}: XLA:TPU's compile ends with an error of its own. An empty cell: not compiled yet by both. ≤: XLA:TPU moves at least as much as this
is made of, since what its products read again is known with their code alone, which was not made. ~: XLA:TPU's is of an earlier run, of
which two or three digits are known."""


def _mark(figures: Figures) -> str:
    return "≤" if figures.get("at_least") else "~" if figures.get("rounded") else ""


def beyond(rows: Rows) -> Sequence[str]:
    """The steps that are beyond their limits."""
    found = [
        (step, chip, what, cell(rows.get(row_of(step, chip), {}), what))
        for step in STEPS
        for chip in CHIPS
        for what in ("hbm", "temporaries")
    ]
    return [f"{row_of(step, chip)}: {what} {x:.2f}" for step, chip, what, x in found if isinstance(x, float) and x > step.limit]


def _has(figures: Figures, whole: bool) -> bool:
    return bool(figures) and not (whole and _mark(figures))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one side or both, of the steps that are named or all, and write the section."""
    parser = options("xla_tpu", __doc__)
    parser.add_argument("--whole", action="store_true", help="with --compile: code included, of all that the file does not have so")
    chosen = parser.parse_args(arguments)
    names = {row_of(step, chip): (number, chip) for number, step in enumerate(STEPS) for chip in CHIPS}
    rows, side = kept(RESULTS), THEIRS if chosen.compile else OURS
    function = ours if not chosen.compile else theirs_whole if chosen.whole else theirs
    tasks: dict[tuple[str, str], Task] = {(name, side): (function, names[name]) for name in wanted(names, chosen.only)}
    if chosen.compile:
        tasks = {key: task for key, task in tasks.items() if not _has(rows.get(key[0], {}).get(side, {}), chosen.whole)}
    rows = make(RESULTS, tasks, chosen.jobs)
    put_section(PAGE, TITLE, section(rows))
    print("\n".join(beyond(rows)) or "no step is beyond its limit")


if __name__ == "__main__":
    main()
