"""Steps of YOLOv5s at 640x640, batch 2, run on the simulated device in each precision, as docs/yolov5_steps.md."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

import tpuflow
from bench.step_estimates import DOCS, MIB
from bench.timing import machine
from bench.yolov5 import samples
from bench.yolov5_estimates import BATCH, BOXES, CLASSES, POLICIES, SIZE, options
from models.yolov5 import yolov5
from tpuflow.device.timing.program import sink_time
from tpuflow.stages.analysis import memory_analysis

CHIP = "bm1690"
STEPS = 3
"""In mixed precision the first may be one that the loss scale skips."""
SINK = 100
"""Steps a round trip of the modelled time, as in docs/yolov5_estimates.md."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What steps from new weights gave: a loss and a loss scale each, and what the Program that ran takes on the chip."""

    chip: str
    policy: str
    losses: tuple[float, ...]
    loss_scales: tuple[float, ...]
    skipped: tuple[int, ...]
    parameters_finite: bool
    step_ms: float
    peak_mib: float
    arguments_mib: float
    temporaries_mib: float
    host_seconds: float

    @property
    def finite(self) -> bool:
        """Whether all losses and the parameters after the last step are finite numbers."""
        return self.parameters_finite and all(map(math.isfinite, self.losses))

    def __str__(self) -> str:
        """A row of the table."""
        losses = ", ".join(f"{loss:.5g}" for loss in self.losses)
        skipped = ", ".join(f"{n + 1}" for n in self.skipped) or "none"
        memory = (f"{mib:.0f}" for mib in (self.peak_mib, self.arguments_mib, self.temporaries_mib))
        return (
            f"| {' | '.join((self.chip, self.policy, losses, skipped, 'yes' if self.finite else 'NO', f'{self.step_ms:.2f}', *memory))} |"
        )


def run(chip: str, policy: str, steps: int = STEPS) -> Ran:
    """Train so many steps, each on the same two pictures."""
    began = time.perf_counter()
    result = tpuflow.train(
        yolov5("yolov5s", CLASSES), [samples(BATCH, SIZE, BOXES)] * steps, policy=policy, chip=chip, epochs=1, seed=0, progress=False,
        **options(SIZE, BATCH),
    )  # fmt: skip
    took = time.perf_counter() - began
    program = result.executables[0].program
    memory = memory_analysis(program)
    finite = all(bool(np.isfinite(np.asarray(leaf, np.float32)).all()) for leaf in jax.tree.leaves(result.variables))
    return Ran(
        chip,
        policy,
        tuple(result.losses),
        tuple(result.history[0]["loss_scale"]),
        tuple(result.skipped_steps),
        finite,
        1e3 * sink_time(program, SINK).seconds / SINK,
        memory.peak_memory_in_bytes / MIB,
        memory.argument_size_in_bytes / MIB,
        memory.temp_size_in_bytes / MIB,
        took,
    )


def page(rows: Sequence[Ran]) -> str:
    """The text of docs/yolov5_steps.md."""
    heads = ("chip", "precision", "losses", "skipped", "all finite", "ms a step", "MiB at most", "of them arguments", "temporaries")
    about = f"""# Steps of YOLOv5s, run

Made by `python -m bench.yolov5_steps`; do not edit. {STEPS} steps of `python -m train yolov5 --img {SIZE} --batch-size {BATCH}` with
{CLASSES} classes, from new weights, each on the same {BATCH} random pictures, by the fast engine. The loss is the sum of the three losses
times the pictures; a step that the loss scale skipped changed nothing. All finite: every loss, and every parameter and batch
statistic at the end. Times are modelled ([how](timing.md), [how far off](accuracy.md)), {SINK} steps a round trip, and memory is
what was planned, both of the very Program that ran. More chips: [yolov5_estimates.md](yolov5_estimates.md)."""
    return "\n".join((about, "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *map(str, rows))) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.yolov5_steps", description=__doc__)
    parser.add_argument("--chip", default=CHIP, help="a row of the chip catalogue; of another the page stays as it is [%(default)s]")
    parser.add_argument("--policy", choices=POLICIES, help="this precision only; the page stays as it is")
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args()
    rows = []
    for policy in POLICIES if given.policy is None else (given.policy,):
        rows.append(run(given.chip, policy))
        print(rows[-1], f"({rows[-1].host_seconds:.0f} s)", flush=True)
    if (given.chip, given.policy) == (CHIP, None):
        (DOCS / "yolov5_steps.md").write_text(page(rows))
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
