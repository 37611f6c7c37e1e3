"""The largest batch that fits, beside XLA:TPU's: `python -m bench.xla_batches` writes a section of docs/xla_tpu.md.

Ours is searched for; of XLA:TPU's it is only asked, with `--compile`, whether it is farther away than `WITHIN`: whether XLA:TPU compiles
the step with so much less than ours, and refuses it with so much more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.kept_rows import Figures, Rows, kept, make, options, wanted
from bench.recorded import table
from bench.sections import put_section
from bench.vendor_plans import FAILS, plan
from bench.vendor_steps import BERT_128, BERT_512, GPT2, RESNET
from bench.xla_products import device_of
from bench.xla_tpu import CHIPS, OURS, PAGE, THEIRS
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import training_program

RESULTS, TITLE = Path(__file__).parent / "results" / "xla_batches.json", "Largest batches"
STEPS = (RESNET, BERT_128, BERT_512, GPT2)
WITHIN = 0.1
CLOSE = 50
"""The search ends where the next batch is larger by less than a fiftieth."""
FITS = "fits"


def largest(need: Callable[[int], int], room: int, start: int) -> int:
    """The largest batch whose step needs no more than `room` bytes, or nearly; 0 if none does. Its bytes grow with the batch, and about
    linearly: the next is tried where the line through the two nearest reaches the room, and every third time halfway."""
    bytes_of: dict[int, int] = {}
    low, high, batch = 0, math.inf, start
    while high - low > (step := max(1, low // CLOSE)):
        bytes_of[batch] = need(batch)
        low, high = (batch, high) if bytes_of[batch] <= room else (low, batch)
        near = sorted(bytes_of, key=lambda one: abs(bytes_of[one] - room))[:2]
        batch = 2 * batch if high == math.inf else (low + int(high)) // 2
        if len(bytes_of) % 3 and len(near) > 1 and (grows := bytes_of[near[0]] - bytes_of[near[1]]):
            batch = near[0] + int((room - bytes_of[near[0]]) / grows * (near[0] - near[1]))
        batch = min(max(batch, low + step), max(low + 1, int(min(high, 4 * low + start)) - step))
    return low


def ours(number: int, chip: str) -> Figures:
    """The largest batch of ours, on what XLA:TPU compiles for."""
    row, step = device_of(chip), STEPS[number]

    def need(batch: int) -> int:
        try:
            return training_program(step.make(batch), row)[1].hbm_bytes
        except OutOfMemoryError as error:
            if error.needed_bytes is None:
                raise
            return error.needed_bytes

    return {"batch": largest(need, row.available_hbm_bytes, step.batch)}


def around(batch: int) -> tuple[int, int]:
    """The largest and the smallest batch of XLA:TPU that ours, `batch`, is within the limit of."""
    return int(batch / (1 - WITHIN)) + 1, -int(-batch / (1 + WITHIN) // 1)


def theirs(number: int, chip: str, batch: int) -> Figures:
    """What becomes of the two batches around ours."""
    return {str(one): plan(replace(STEPS[number], batch=one), chip).get("refused", FITS) for one in around(batch)}


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
