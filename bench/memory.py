"""What training steps hold and move, beside what XLA plans for TPUs: `python -m bench.memory`, as docs/memory.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tpuflow.compiler
from bench.kept_rows import Figures, kept
from bench.vendor_steps import BERT_128, BERT_512, GPT2, LLAMA, RESNET, VendorStep
from bench.xla_tpu import RESULTS, THEIRS, row_of
from tpuflow.chips import get_chip
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import training_program
from tpuflow.lower.passes.rematerialize import Rematerialize
from tpuflow.stages.analysis import memory_analysis
from tpuflow.training.config import StepConfig

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
STEPS = 100
ROWS: tuple[tuple[VendorStep, tuple[str, ...]], ...] = (
    (GPT2, ("tpu-v5e", "tpu-v3", "tpu-v5p")),
    (BERT_512, ("tpu-v5e", "tpu-v3")),
    (BERT_128, ("tpu-v5e", "tpu-v3")),
    (RESNET, ("tpu-v5e", "tpu-v3", "tpu-v5p", "tpu-v4")),
    (LLAMA, ("tpu-v5e", "tpu-v3")),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """Temporaries of a step, its traffic and what it moves within the chip, in GB; its modelled milliseconds."""

    temporaries: float
    traffic: float
    within_chip: float
    ms: float

    @classmethod
    def of(cls, step: StepConfig, chip: str) -> Planned | None:
        """Compile a step; None if it does not fit."""
        try:
            program = training_program(step, get_chip(chip))[1]
        except OutOfMemoryError:
            return None
        time, memory = sink_time(program, STEPS), memory_analysis(program)
        hbm, kept = time.work.hbm_bytes / STEPS, time.work.resident_bytes / STEPS
        return cls(memory.temp_size_in_bytes / 1e9, hbm / 1e9, kept / 1e9, 1e3 * time.seconds / STEPS)


@contextmanager
def keeping() -> Iterator[None]:
    """Compile without the pass that computes again."""
    whole = tpuflow.compiler.PIPELINE
    tpuflow.compiler.PIPELINE = tuple(step for step in whole if not isinstance(step, Rematerialize))
    try:
        yield
    finally:
        tpuflow.compiler.PIPELINE = whole


ABOUT = """# Memory of training steps

Made by `python -m bench.memory`; do not edit. Mixed bf16; temporaries are all that is neither parameter, optimizer state nor batch;
traffic is what a step moves to and from HBM, and "on chip" what it moves to and from arrays that stay there; times are modelled
([how](timing.md)).

What keeps temporaries low: `Rematerialize` computes again, in a kernel of the backward pass that reads what they are made of, softmax,
GELU and normalised rows that the forward pass would store for it; results take the place of operands that are read for the last time;
arrays are placed by size where placing them by time leaves gaps ([passes](architecture.md)). None of it changes a bit of any result.
The columns "kept" are of the same compiler without `Rematerialize`.

XLA:TPU's columns are what the vendor's compiler plans for the same steps ([more of them](xla_tpu.md)). Traffic counts what is
read again, of both. Both keep whole arrays in VMEM from kernel to kernel, and copy others to it or from it for a part of their lives, while
kernels run ([how](architecture.md)); of several cores each keeps what it alone reads and writes, for which rows are cut into equal blocks,
equally many for each. The CMEM of tpu-v4 all its cores reach, so that it keeps any.
Where ours is lower, attention stores neither scores nor weights (`JoinProducts`). Traffic and "on chip" both count what copies move.

| step | chip | temporaries GB | kept | XLA:TPU | traffic GB | kept | XLA:TPU | on chip GB | ms | kept |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def line(name: str, chip: str, now: Planned | None, before: Planned | None, vendor: Figures) -> str:
    """A row of the table."""
    ours, others = ([p.temporaries, p.traffic, p.within_chip, p.ms] if p else [None] * 4 for p in (now, before))
    theirs = [vendor[what] / 1e9 if what in vendor else None for what in ("temporaries", "hbm")]
    cells = [(ours[0], 2), (others[0], 2), (theirs[0], 2), (ours[1], 1), (others[1], 1), (theirs[1], 1)]
    cells += [(ours[2], 1), (ours[3], 1), (others[3], 1)]
    return f"| {name} | {chip} | {' | '.join('' if x is None else f'{x:.{digits}f}' for x, digits in cells)} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--only", help="the rows that have this text, printed; the page stays as it is")
    only = parser.parse_args().only
    vendor = kept(RESULTS)
    lines = []
    for step, chip in [(step, chip) for step, chips in ROWS for chip in chips if only is None or only in f"{step.name} {chip}"]:
        now = Planned.of(step.config, chip)
        with keeping():
            before = Planned.of(step.config, chip)
        lines.append(line(step.name, chip, now, before, vendor.get(row_of(step, chip), {}).get(THEIRS, {})))
        print(lines[-1], flush=True)
    if only is None:
        PAGE.write_text(ABOUT + "\n".join(lines) + "\n\nAn empty cell: XLA:TPU's compile fails; of ours, it does not fit.\n")


if __name__ == "__main__":
    main()
