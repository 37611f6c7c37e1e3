"""The largest batch that fits, beside XLA:TPU's: `python -m bench.xla_batches` writes a section of docs/xla_tpu.md.

Ours is searched for; of XLA:TPU's it is only asked, with `--compile`, whether it is farther away than `WITHIN`: whether XLA:TPU compiles
the step with so much less than ours, and refuses it with so much more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.kept_rows import Figures, Rows, kept, make, options, wanted
from bench.recorded import table
from bench.sections import put_section
from bench.vendor_steps import BERT_128, BERT_512, GPT2, RESNET
from bench.xla_products import device_of
from bench.xla_tpu import CHIPS, DOES_NOT_FIT, FAILS, OURS, PAGE, THEIRS
from tpuflow.chips import get_chip
from tpuflow.comparing.comparing import vendor_training
from tpuflow.errors import ConfigError, OutOfMemoryError
from tpuflow.estimating.estimating import training_program

RESULTS, TITLE = Path(__file__).parent / "results" / "xla_batches.json", "Largest batches"
STEPS = (RESNET, BERT_128, BERT_512, GPT2)
WITHIN = 0.1
CLOSE = 50
"""The search ends where the next batch is larger by less than a fiftieth."""
FITS = "fits"


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest batch that fits, or nearly; 0 if none does. Memory grows with the batch."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // CLOSE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def ours(number: int, chip: str) -> Figures:
    """The largest batch of ours, on what XLA:TPU compiles for."""
    row, step = device_of(chip), STEPS[number]

    def fits(batch: int) -> bool:
        try:
            training_program(step.make(batch), row)
        except OutOfMemoryError:
            return False
        return True

    return {"batch": largest(fits, step.batch)}


def around(batch: int) -> tuple[int, int]:
    """The largest and the smallest batch of XLA:TPU that ours, `batch`, is within the limit of."""
    return int(batch / (1 - WITHIN)) + 1, -int(-batch / (1 + WITHIN) // 1)


def theirs(number: int, chip: str, batch: int) -> Figures:
    """What becomes of the two batches around ours."""
    return {str(one): _answer(number, chip, one) for one in around(batch)}


def _answer(number: int, chip: str, batch: int) -> str:
    try:
        vendor_training(STEPS[number].make(batch), get_chip(chip))
    except (ConfigError, RuntimeError) as error:
        return DOES_NOT_FIT if "RESOURCE_EXHAUSTED" in str(error) else FAILS
    return FITS


def section(rows: Rows) -> str:
    """The section as Markdown."""
    shown = [(step.words, *(_cell(rows.get(f"{step.words} | {chip}", {})) for chip in CHIPS)) for step in STEPS]
    return f"""The largest batch that fits by our plan, on the whole memory of what XLA:TPU compiles for, and where its own is:
"within" {WITHIN:.0%} of ours; "less", since ours needs less memory; or "more".

{table(("step", *CHIPS), shown)}"""


def _cell(row: Mapping[str, Figures]) -> str:
    if OURS not in row:
        return ""
    batch, answers = row[OURS]["batch"], row.get(THEIRS, {})
    more, less = (answers.get(str(one), "") for one in around(batch))
    if FAILS in (more, less):
        return f"{batch}, fails"
    found = "" if not answers else "more" if more == FITS else "within" if less == FITS else "less"
    return f"{batch}{found and ', '}{found}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one side or both, and write the section."""
    chosen = options("xla_batches", __doc__).parse_args(arguments)
    rows = kept(RESULTS)
    names = {f"{step.words} | {chip}": (number, chip) for number, step in enumerate(STEPS) for chip in CHIPS}
    if chosen.compile:
        batches = {name: rows[name][OURS]["batch"] for name in wanted(names, chosen.only) if OURS in rows.get(name, {})}
        asked = {name: batch for name, batch in batches.items() if str(around(batch)[0]) not in rows[name].get(THEIRS, {})}
        tasks = {(name, THEIRS): (theirs, (*names[name], batch)) for name, batch in asked.items()}
    else:
        tasks = {(name, OURS): (ours, names[name]) for name in wanted(names, chosen.only)}
    put_section(PAGE, TITLE, section(make(RESULTS, tasks, chosen.jobs)))


if __name__ == "__main__":
    main()
