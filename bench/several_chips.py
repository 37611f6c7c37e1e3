"""Modelled against published times of several chips: `python -m bench.several_chips` writes docs/several_chips_accuracy.md.

Collectives by the closed forms of the links, and training steps that are compiled for their whole mesh and timed with their collectives:
those of ResNet-50 and BERT as `bench.accuracy` keeps them, and transformers. What was modelled of these is kept in
bench/results/several_chips.json, over the fitted constants; --anew models them again.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.accuracy import (
    Modelled,
    cases_of_rows,
    curves_of,
    curves_of_rows,
    measured_rows,
    measured_seconds,
    modelled,
    read,
    run,
    write,
)
from bench.measured import SUNK
from bench.recorded import table
from bench.transformers import PUBLISHED
from tpuflow.chips import Chip, get_chip
from tpuflow.chips.links import collective_seconds
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.calibrating import Curve, Measurement, constants_of, leave_one_model_out
from tpuflow.estimating.estimating import training_program
from tpuflow.training.config import StepConfig

HERE = Path(__file__).parent
COLLECTIVES, FIGURES = HERE / "measured_collectives.csv", HERE / "results" / "several_chips.json"
PAGE = HERE.parent / "docs" / "several_chips_accuracy.md"
MODELS = ("ResNet-50", "BERT-base", "BERT-large")
"""Those of data-parallel rows, which are timed from Programs of the whole mesh."""
ROOM = 4  # times the chip's memory, for what does not fit
GIB = 2**30


# --- collectives


@dataclass(frozen=True, slots=True)
class Sent:
    """A published time of a collective."""

    row: Mapping[str, str]

    @property
    def measured(self) -> float:
        """Seconds."""
        return float(self.row["microseconds"]) / 1e6

    @property
    def modelled(self) -> float:
        """Seconds by the closed form; `torus` of a chip's axes have links in that slice."""
        chip, sizes = get_chip(self.row["chip"]), [int(n) for n in self.row["sizes"].split("x")]
        if self.row["torus"]:
            axes = int(self.row["torus"])
            chip = replace(chip, link_axes=axes, link_bytes_per_second=chip.link_bytes_per_second * axes / chip.link_axes)
        return collective_seconds(chip, self.row["kind"], float(self.row["bytes_per_chip"]), sizes, (int(self.row["axes"]),))

    @property
    def error(self) -> float:
        """Modelled over measured, less one."""
        return self.modelled / self.measured - 1


def collectives() -> list[Sent]:
    """All that are published."""
    with COLLECTIVES.open() as file:
        return [Sent(row) for row in csv.DictReader(file)]


# --- steps


@dataclass(frozen=True, slots=True)
class Row:
    """A published training step that is compiled for all of its chips: what it measured in seconds, and its step. Rows of equal keys are of
    one step."""

    key: str
    measured: float
    model: str
    chip: Chip
    chips: int
    config: StepConfig
    size: str
    note: str = ""


def data_parallel() -> dict[str, Row]:
    """Steps of ResNet-50 and BERT on several chips, by the number of the published row."""
    found, measured = {}, measured_rows()
    for row_id, case in cases_of_rows(measured).items():
        published = measured[row_id]
        if case.model in MODELS and case.config is not None and case.config.mesh:
            size, chips = f"{int(float(published['batch_per_chip']))} a chip, data parallel", int(published["num_chips"])
            found[row_id] = Row(case.key, measured_seconds(published), case.model, case.chip, chips, case.config, size, case.note)
    return found


def transformers() -> dict[str, Row]:
    """Steps of transformers, by the number of the published row."""
    found, measured = {}, measured_rows()
    for row_id, published in PUBLISHED.items():
        row = measured[row_id]
        seconds = measured_seconds(row) if row["metric"] == "step_time" else published.step_flops / 1e12 / float(row["value"])
        mesh = " x ".join(f"{name} {size}" for name, size in published.mesh.items())
        note = "; ".join(filter(None, (published.remat_policy if published.remat_policy != "full" else "", published.note)))
        size = f"{published.batch:g} x {published.tokens} a chip, {mesh}"
        found[row_id] = Row(row_id, seconds, published.name, published.row, published.chips, published.step(), size, note)
    return found


def model(row: Row) -> Modelled:
    """A row's step, in `ROOM` times the chip's memory if it does not fit."""
    try:
        program = training_program(row.config, row.chip)[1]
    except OutOfMemoryError:
        program = training_program(row.config, replace(row.chip, hbm_bytes=ROOM * row.chip.hbm_bytes))[1]
    return modelled(program, SUNK)


def figures_of(known: Mapping[str, Row], *, anew: bool) -> dict[str, Modelled]:
    """Of every row's key: those that are not stored are modelled, or all."""
    found = {} if anew else read(FIGURES)
    wanted = {row.key: row for row in known.values()}
    for key, row in wanted.items():
        if key not in found:
            print(f"{row.model} on {row.chips} x {row.chip.name}: {row.size}", file=sys.stderr, flush=True)
            found[key] = model(row)
            write(FIGURES, {k: found[k] for k in wanted if k in found})
    return {key: found[key] for key in wanted}


@dataclass(frozen=True, slots=True)
class Line:
    """A row with its modelled seconds, and how far off it is under constants that were fitted without its model."""

    row_id: str
    row: Row
    figures: Modelled
    modelled: float
    left_out_error: float

    @property
    def error(self) -> float:
        """Modelled over measured, less one."""
        return self.modelled / self.row.measured - 1


def lines(known: dict[str, Row], found: dict[str, Modelled]) -> list[Line]:
    """These transformers and all data-parallel rows, under the constants that tpuflow has and under those fitted to the rows of other
    models; sorted."""
    measured = measured_rows()
    cases = cases_of_rows(measured)
    kept = curves_of(cases, stored=True)
    over = curves_of_rows(measured, cases, kept) | {row_id: _curve(row_id, row, found[row.key]) for row_id, row in known.items()}
    left_out = {}
    for family in {c.measurement.chip.family for c in over.values()}:
        left_out |= {
            c.measurement.name: e for c, e in leave_one_model_out([c for c in over.values() if c.measurement.chip.family == family])
        }
    return [
        Line(row_id, row, (kept | found)[row.key], over[row_id].seconds(constants_of(row.chip)), left_out[row_id])
        for row_id, row in sorted((data_parallel() | known).items())
    ]


def _curve(row_id: str, row: Row, figures: Modelled) -> Curve:
    """A transformer's time over the constants, only compared."""
    return figures.of(Measurement(row_id, "transformers", row.chip, row.measured, fitted=False))


# --- the page


def page(sent: Sequence[Sent], steps: Sequence[Line], missing: Sequence[str] = ()) -> str:
    """docs/several_chips_accuracy.md; `missing` are rows that have not been modelled yet."""
    parallel = [line for line in steps if line.row.model in MODELS]
    transformers = [line for line in steps if line not in parallel]
    return "\n".join(
        [
            *ABOUT,
            "",
            f"Median absolute errors: **collectives {_median(s.error for s in sent):.1%}** ({len(sent)} rows), **ResNet-50 and BERT",
            f"{_median(x.error for x in parallel):.1%}**, with the model left out of the fit "
            f"{_median(x.left_out_error for x in parallel):.1%} ({len(parallel)} rows), **transformers",
            f"{_median(x.error for x in transformers):.1%}** ({len(transformers)} rows, none of them in the fit).",
            "",
            _all_of_grade_a(transformers),
            "",
            *ABOUT_COLLECTIVES,
            "",
            _sent_table(sent),
            "",
            *ABOUT_PARALLEL,
            "",
            _step_table(parallel, left_out=True),
            "",
            *ABOUT_TRANSFORMERS,
            "",
            _step_table(transformers, left_out=False),
            "",
            *ABOUT_ORDER,
            "",
            *_orders(steps),
            "",
            *NOT_CONFIGURED,
            *([f"- Configured, but not modelled yet (`python -m bench.several_chips` does): {', '.join(missing)}."] if missing else []),
            "",
            *ABOUT_SIZE,
            "",
        ]
    )


def _all_of_grade_a(transformers: Sequence[Line]) -> str:
    """What the page says of all steps that are fully specified, whichever page has them."""
    graded = {row_id for row_id, row in measured_rows().items() if "q=A" in row["extra"]}
    errors = [(line.error, line.left_out) for line in run(stored=True)[1] if line.row["id"] in graded and line.left_out is not None]
    errors += [(line.error, line.left_out_error) for line in transformers if line.row_id in graded]
    of, out = (_median(found) for found in zip(*errors, strict=True))
    return (
        f"All {len(errors)} rows of grade A whose family has a fit, these and those of [accuracy.md](accuracy.md): **{of:.1%}**, with the\n"
        f"model left out of the fit **{out:.1%}**."
    )


def _median(errors: Iterator[float] | Sequence[float]) -> float:
    return statistics.median(map(abs, errors))


def _sent_table(sent: Sequence[Sent]) -> str:
    heading = ("row", "collective", "mesh, axis", "MB a chip", "measured us", "modelled us", "error", "what, and where from")
    rows = [
        (
            s.row["id"],
            f"{s.row['kind']} on {s.row['chip']}",
            f"{s.row['sizes']}, {s.row['axes']}",
            f"{float(s.row['bytes_per_chip']) / 1e6:.4g}",
            f"{s.measured * 1e6:.4g}",
            f"{s.modelled * 1e6:.4g}",
            f"{s.error:+.0%}",
            f"{s.row['note']}; {s.row['source']}",
        )
        for s in sent
    ]
    return table(heading, rows)


def _step_table(steps: Sequence[Line], *, left_out: bool) -> str:
    heading = (
        *("row", "model", "chips", "batch, mesh", "measured ms", "modelled ms", "error", *(("left out",) if left_out else ())),
        *("waits for links", "GiB a chip", "remarks"),
    )
    return table(heading, [_step(line, left_out=left_out) for line in steps])


def _step(line: Line, *, left_out: bool) -> tuple[str, ...]:
    row, figures = line.row, line.figures
    crowded = figures.peak_bytes > row.chip.available_hbm_bytes
    return (
        line.row_id,
        row.model,
        f"{row.chips} x {row.chip.name}",
        row.size,
        f"{row.measured * 1e3:.5g}",
        f"{line.modelled * 1e3:.5g}",
        f"{line.error:+.0%}",
        *((f"{line.left_out_error:+.0%}",) if left_out else ()),
        f"{figures.exposed_seconds / line.modelled:.0%}",
        f"{figures.peak_bytes / GIB:.1f}",
        "; ".join(filter(None, (row.note, "more than the chip has" if crowded else ""))),
    )


def _orders(steps: Sequence[Line]) -> list[str]:
    """Of every series whether modelled times are in the order of the measured ones."""
    series: dict[str, list[Line]] = {}
    for line in steps:
        series.setdefault(f"{line.row.model} on {line.row.chip.name}", []).append(line)
    return [_order(name, points) for name, points in series.items() if len({(p.row.chips, p.row.size) for p in points}) > 1]


def _order(name: str, points: Sequence[Line]) -> str:
    """One series: rates of a chip, in samples or sequences a second, in the order measured; rows of the same step as their median."""
    same: dict[tuple[int, str], list[Line]] = {}
    for line in points:
        same.setdefault((line.row.chips, line.row.size), []).append(line)
    found = sorted(
        (_rate(p, "measured"), _rate(p, "modelled"), f"{chips} chips, {size.split()[0]} a chip") for (chips, size), p in same.items()
    )
    right = [m for _, m, _ in found] == sorted(m for _, m, _ in found)
    text = "; ".join(f"{at}: {measured:.4g} ({modelled:.4g})" for measured, modelled, at in found)
    return f"- {'right' if right else 'WRONG'}: {name}: {text}"


def _rate(same: Sequence[Line], what: str) -> float:
    samples = float(same[0].row.size.split()[0])
    seconds = [x.row.measured if what == "measured" else x.modelled for x in same]
    return samples / statistics.median(seconds)


ABOUT = (
    "# How far off the modelled times of several chips are",
    "",
    "Made by `python -m bench.several_chips`; do not edit. Published figures, each with its source, in `bench/measured_steps.csv` and",
    "`bench/measured_collectives.csv`. A step is compiled for the whole mesh, and its Program is timed with the collectives in it; nothing",
    "is added beside it. Data-parallel steps are rows of [accuracy.md](accuracy.md), too, on which the constants are fitted.",
)
ABOUT_COLLECTIVES = (
    "## Collectives",
    "",
    "By the closed forms of `tpuflow/chips/links.py`. Two of the constants are from these rows: C002 gives the 3 us that begin and end a",
    "collective, C009 the 0.9 of the links' bandwidth. The axis of a mesh is counted from 0. A slice of 2 x 2 x 1 chips has links on two",
    "of the chip's three axes, and none of these closes to a ring. The sum over 256 chips sustains less than the gathers: 0.65 of what",
    "four links send.",
)
ABOUT_PARALLEL = (
    "## Data parallel: ResNet-50 and BERT",
    "",
    "Every gradient is summed as soon as it is there, each by itself; with batch normalisation so are its statistics. Those who published",
    'the times joined them to a few sums a step. "Left out" is under constants fitted to the rows of other models.',
)
ABOUT_TRANSFORMERS = (
    "## Transformers",
    "",
    "MaxText's own tables, of synthetic data, AdamW, float32 parameters (but M389), bfloat16 activations. Most state TFLOP/s of a chip;",
    "the measured time is the step's operations, as MaxText counted them in 2024 (6 for each parameter of a product and token, scores of",
    "all pairs of tokens), by that rate. Parameters are cut over the axis `data` and gathered layer by layer in a scan (FSDP), products",
    "over `model`; slices share a batch over the network. Layers are computed again in the backward pass, or what products with weights",
    "give is kept (`minimal`), or arrays of some names are, on the chip or in the host's memory. The rows from M366 on state times. Their",
    "sizes are from MaxText's src/maxtext/configs/models, what they keep from its benchmarks/maxtext_trillium_model_configs.py and",
    "maxtext_v5p_model_configs.py and from tpu-recipes (training/ironwood), Mistral's and Mixtral's from tpu-recipes v0.1.2.",
    "",
    "Experts have places of a fixed number in a sequence. Mixtral's have 1.25 times their share, and products with masks bring tokens",
    "there and back: neither `megablox` nor `sparse_matmul`. Where the source has these, tokens are sorted by their experts and moved, and",
    "experts have places for their even share: what tokens that are routed at random take, as Qwen3's are (`use_random_routing`). Gemma's",
    "layers see a window of 1,024 tokens but for each sixth: so many queries at once see twice as many keys.",
    "",
    "What is not modelled of theirs: products that begin on what has already been gathered over `model` (XLA's",
    "collective matmul), so on v5p every layer waits for its gathers and sums; an attention kernel of its own, which leaves out what a",
    "causal mask hides. (The compiler fuses scores, softmax and the product with the values by itself, and computes all scores: no bit",
    "may depend on what is hidden, which is half of attention.)",
)
ABOUT_ORDER = (
    "## Order",
    "",
    "Samples or sequences a second of a chip, measured and modelled (in brackets), in the order measured. What is behind those in another",
    "order: 256 chips of tpu-v4 with ResNet-50 ran MLPerf 0.7's software, 2,048 and more that of 1.0 and 2.0, and those of tpu-v3 that of",
    "0.5 to 0.7, with which large slices waited ([accuracy.md](accuracy.md)). 128B on tpu-v5p: the",
    "source has slices of 128 and 256 chips alone within half a per cent of each other, and pairs of them, which are modelled as near, a",
    "tenth apart, though each chip of the larger ones has half as much to send between them. 1024B: a slice of 2,048 chips is a sixth",
    "faster for each chip than one of 1,024 also where it is alone, with the same batch and products of the same size. Llama 3.1 8B on",
    "tpu-v6e: the three points are within two per cent.",
)
NOT_CONFIGURED = (
    "## Rows that cannot be configured from their sources, or not here",
    "",
    "- Products in 8 bits: GPT-3 175B (M310, M312, M383, M402), Llama 3.1 and DeepSeek-V3 on v7x (M408, M410, M419, M421, M423, M425).",
    "- Models that are not built here: Gemma 4's 2B and 4B, whose layers share keys and have embeddings of their own (M411, M412), and",
    "  gpt-oss, whose softmax has a sink (M416).",
    "- The same run as another row: M367, as a rate, and M368, its memory (M366).",
    "- The batch or what is computed again is not stated: the models of 754B and 915B (M370, M373), M374, M376.",
    "- The sum over the network in C004's source: for how many slices is not said.",
)


ABOUT_SIZE = (
    "## How long an estimate takes",
    "",
    "`tpuflow estimate bench.transformers:gpt3_175b --batch 1024 --chip tpu-v5p`, GPT-3's 175 billion parameters in shares on 1,024 chips,",
    "takes less than a minute of a processor (`tests/test_several_chips.py`): layers in a scan are compiled once, one chip's Program",
    "stands for all, and no array is made.",
)


def main() -> int:
    """Model, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.several_chips", description=__doc__)
    parser.add_argument("--anew", action="store_true", help="model every row again")
    parser.add_argument("--stored", action="store_true", help="model none, and leave rows out that the last run has not")
    args = parser.parse_args()
    known, missing = transformers(), []
    if args.stored:
        stored = read(FIGURES)
        missing = [row_id for row_id, row in known.items() if row.key not in stored]
        known = {row_id: row for row_id, row in known.items() if row.key in stored}
    text = page(collectives(), lines(known, figures_of(known, anew=args.anew)), missing)
    print(text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
