"""Modelled against published times, every row of bench/measured_steps.csv whose model there is: `python -m bench.accuracy`.

Writes docs/accuracy.md, of the constants that tpuflow has or, with --fit, of new ones, and tpuflow/device/timing/fits.py: these constants
and their errors. Training steps on several chips are compiled for all of them, and timed with their collectives.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from bench.measured import Case, cases
from tpuflow.device.timing.program import sink_time
from tpuflow.estimating.calibrating import Curve, Fit, Measurement, constants_of, curve, fit_curves, leave_one_model_out
from tpuflow.isa.program import Program
from tpuflow.stages.analysis import memory_analysis

HERE = Path(__file__).parent
ROWS, PAGE = HERE / "measured_steps.csv", HERE.parent / "docs" / "accuracy.md"
FITS = HERE.parent / "tpuflow" / "device" / "timing" / "fits.py"
CURVES = HERE / "results" / "accuracy.json"
FAMILIES = ("ascend", "tpu")
ABOUT_CONSTANTS = (
    "Every constant is a property of the machine, and no time is below its roofline: the bytes that a kernel moves at the chip's full",
    "HBM bandwidth, and its products at the matrix peak (`tests/test_roofline.py`, over the table of operations and random programs).",
    "`kernel_seconds` is what passes between two kernels; the fit looks no lower than 0.5 us and no higher than 32; on the Ascend it is",
    "assumed, 0.55 us. `step_seconds`, on the Ascend, goes by in every step beside its kernels, before the next batch is there: LeNet-5,",
    "whose kernels take next to nothing, is what fixes it, so read its error with itself left out. `input_bytes_per_second`, on the",
    "Ascend, is how fast the host's input pipeline makes the batches of a chip, beside the step before. Pipelines differ, and the",
    "constant is that of a good one: the fit takes no rate at which the batch of a fitted row alone takes longer than its measured step,",
    "and looks no higher than the 32 GB/s of the host's link. `hbm_share` is the sustained share of the HBM bandwidth; the fit looks no",
    "lower than 0.6, what copies of 1 MB sustain on an A100, and no higher than 1, on the Ascend no higher than the 0.85 of CANN's own",
    "cost table. Shorter transfers sustain less, by the start-up of their moves and the time between kernels. The matrix peak is not",
    "fitted: what a product leaves of it follows from the edges of its tiles and the loading of the arrays.",
)
ABOUT_ERRORS = (
    "What the errors are of, the largest first. **On the Ascend VGG-16 and WideResNet were measured to take more than two and three times",
    "as long as is modelled**, ResNet-50 with BAM half as long again. They come with the model zoo, where every operator is a kernel and",
    "layouts change between them, which is not modelled. It is not that alone: compiled with the first of the passes that fuse and none",
    "after it, ResNet-50 takes twice as long as was measured, and WideResNet still less than half. BERT has the dropout of its sources",
    "there, with bits of threefry from the vector units; on TPUs, which draw them in hardware, it has none. Its gradients are clipped as",
    "its sources do, on the Ascend each by its own norm, on TPUs all by one.",
    "",
    "**What was published of small networks on the Ascend is the time of the host's input pipeline.** SqueezeNet, GoogLeNet and ResNet-50,",
    "which multiplies five times as much as SqueezeNet, take 1,560 to 1,920 pictures a second and chip alike, on eight chips 12.5 to 13.7",
    "thousand in all. MindCV has times of two chips (its configs/squeezenet and configs/googlenet, batch 32 on eight): 22.4 and 21.4 ms on",
    "the first, 23.5 and 23.5 on the successor, whose matrix peak is 1.4 times as high. So a step there takes no less than its batch takes",
    "to be made. The quickest pipeline in the fit is that of the maker's benchmark, ResNet-50 at batch 256; the zoo's steps come out up to",
    "a quarter too short with it. A rate in bytes knows nothing of what is done to pictures: AlexNet's, 32 in 7.2 ms and of grade B, are",
    "resized and scaled by eight workers; SqueezeNet's, by eight as well, are normalised besides, lose a square and have colours changed",
    "and axes exchanged.",
    "",
    "**ResNet-50 on TPUs** is in bf16 from layer to layer, as in MLPerf's programs (TensorFlow's `bfloat16_scope`). At batch 256 it is a",
    "tenth too long on tpu-v2 and tpu-v4: at batch 32 and 16 arrays stay in the 128 MiB of CMEM that tpu-v4's cores have in common;",
    "those of batch 256, of 100 to 400 MB, do not fit. Batches of 16 to 64 ran on 256 to 4,096 chips, most with the software of MLPerf",
    "0.5 to 0.7, and those are up to a quarter too short. Part of that is what XLA's layouts pad, which is not modelled: at batch 32 a",
    "device 15 to 22 % of the traffic of ResNet-50's step, since 64 channels fill half of a tile's 128 lanes (`tpuflow compare` on tpu-v3",
    "to v5p; next to nothing in transformers). What such a slice waits for beside its links is not modelled either. The logs show that",
    "it waits: the five runs of a submission on 16 and 64 chips of tpu-v3 take the same to a tenth of a per cent, on 128 and 256 chips the",
    "slowest takes 15 and 17 % longer than the quickest (of which L005 is of grade B), and 16 chips take 169 ms (M258, 8 % apart) with the",
    "software that takes 137 on four (L001). At 8 to 32, 64 or 128 pictures are normalised together (`model_bn_span` in the logs): two to",
    "eight chips exchange statistics in every layer. Over eight that is modelled as a quarter too long (L011). The later of BERT's two",
    "times on tpu-v4 is of packed sentences, other work than what is modelled. On tpu-v7x the product of 4,096 sustains 0.77 of the peak",
    "and is modelled at 0.94.",
)
"""What the page says of the constants, and of rows that are far off."""
ABOUT_SERIES = (
    "*Stable Diffusion* is modelled with the VAE's encoder and the text encoder in the step, as MindONE trains it, without recomputing and",
    "in float16 but for normalisations, losses and the update; its dropout of 0.1 is left out. What was measured on one chip and on",
    "eight says where the time goes. On one, a step of sampling, which is the UNet for eight latents, 6.5 TFLOP, takes 279 ms, 9 % of",
    "the chip's peak; a training step, 11 TFLOP in 502 ms, does no better. Every operator of MindSpore's is a kernel there, and the",
    "scores of attention over 64x64 pixels, 2.1 GB in each of five layers, are written and read by each of them. The compiler here",
    "fuses, and changes of layout between convolutions and attention, which the chip's operators need as well, are not modelled. On eight",
    "chips a step is published as 268 ms longer; with low-rank matrices, which have next to no gradients, 16 ms. So most of it is the sum",
    "of 3.4 GB of gradients, made after the backward pass; here they are made beside it, and next to nothing is left. The successor",
    "(`ascend910b`, put together from published cost models in `bench/measured.py`: neither in the catalogue nor in the fit) was",
    "measured with later software, MindSpore 2.3 at level O2, and there the modelled times of training at 512x512 are near. At 768x768",
    "(2.1-v, which predicts velocities) the source fuses attention on the first chip (its flash attention), as is done here, and the",
    "modelled times are nearer than at 512x512, where it does not. On the successor the published step at 768x768 takes 2.0 times 1.5's at",
    "512x512, less than the 2.25 of the pixels alone; the modelled one takes 2.7 times as long, since attention grows by 5.",
    "",
    "*YOLOv5* was measured with its mosaics made on the host, and that is what the times are of: on the same chip n takes as long as s,",
    "and l, with 24 times the multiplications of n, a tenth longer.",
)
"""What the published times of single models are of."""
WORKERS = 2


def measured_seconds(row: Mapping[str, str]) -> float:
    """The seconds of one step that a row states, in whichever way it does."""
    value, batch = float(row["value"]), float(row["batch_per_chip"] or 0)
    if row["unit"].startswith("ms"):
        return value / 1e3
    if row["unit"] in ("images/s", "sentences/s"):
        return float(row["global_batch"]) / value
    if row["unit"].endswith("steps/s"):
        return 1 / value
    if row["unit"] == "TFLOP/s" and row["model"].startswith("matmul"):
        side = int(row["model"].split()[1].partition("^")[0])
        return 2 * side**3 / value / 1e12
    raise ValueError(f"row {row['id']}: no way to read {row['unit']!r} for batch {batch}")


@dataclass(frozen=True, slots=True)
class Line:
    """A row with its modelled time under the fit of its family."""

    row: Mapping[str, str]
    case: Case
    measured: float
    modelled: float
    left_out: float | None

    @property
    def error(self) -> float:
        """Modelled over measured, less one."""
        return self.modelled / self.measured - 1

    @property
    def batch(self) -> int:
        """Examples in a step of one chip, 0 where there are none."""
        return int(float(self.row["batch_per_chip"] or 0))

    @property
    def grade(self) -> str:
        """A: everything stated by the source; B: one item inferred."""
        return self.row["extra"].partition("q=")[2][:1]


@dataclass(frozen=True, slots=True)
class Modelled:
    """A step's time as a curve over the constants, and on several chips what its Program needs of one's memory and how long it waits for
    the links."""

    times: Sequence[float]
    slopes: Sequence[float]
    input_bytes: float = 0.0
    outside_seconds: float = 0.0
    peak_bytes: int = 0
    exposed_seconds: float = 0.0

    def of(self, measured: Measurement) -> Curve:
        """The curve beside what was measured."""
        return Curve(measured, self.times, self.slopes, self.input_bytes, self.outside_seconds)


def modelled(program: Program, steps: int) -> Modelled:
    """A step's Program, of which a round trip runs so many."""
    found = Modelled(*curve(program, steps))
    if not program.mesh:
        return found
    waited = sink_time(program, 1).exposed_link_seconds
    return replace(found, peak_bytes=memory_analysis(program).peak_memory_in_bytes, exposed_seconds=waited)


def model(row_id: str) -> Modelled:
    """Compile a case and time it (in a process of its own)."""
    case = cases_of_rows(measured_rows())[row_id]
    print(f"{row_id}: {case.key}", file=sys.stderr, flush=True)
    return modelled(case.make(case.chip), case.steps)


def cases_of_rows(rows: Mapping[str, Mapping[str, str]]) -> dict[str, Case]:
    """How to model each row that can be, on as many chips as it was measured on."""
    return {row_id: case.on(int(rows[row_id]["num_chips"])) for row_id, case in cases().items()}


def curves_of(known: Mapping[str, Case], *, stored: bool) -> dict[str, Modelled]:
    """Every case's curve by its key, and stored: modelled anew, or only those that are not there yet."""
    found = read(CURVES) if stored else {}
    first = {case.key: row_id for row_id, case in reversed(list(known.items())) if case.key not in found}
    if not first:
        return found
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        found |= dict(zip(first, pool.map(model, first.values()), strict=True))
    kept = {case.key: found[case.key] for case in known.values()}
    write(CURVES, kept)
    return kept


def read(path: Path) -> dict[str, Modelled]:
    """What has been modelled before, by its key; nothing if there is no such file."""
    return {key: Modelled(**fields) for key, fields in json.loads(path.read_text()).items()} if path.exists() else {}


def write(path: Path, found: Mapping[str, Modelled]) -> None:
    """Keep what has been modelled."""
    path.write_text(json.dumps({key: asdict(m) for key, m in found.items()}, indent=1) + "\n")


def measured_rows() -> dict[str, Mapping[str, str]]:
    """Every published row, by its number."""
    with ROWS.open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def curves_of_rows(rows: Mapping[str, Mapping[str, str]], known: Mapping[str, Case], found: Mapping[str, Modelled]) -> dict[str, Curve]:
    """Of every row that is modelled, what was measured and the time over the constants."""
    curves = {}
    for row_id, case in known.items():
        measured = Measurement(row_id, case.model, case.chip, measured_seconds(rows[row_id]), "q=A" in rows[row_id]["extra"])
        curves[row_id] = found[case.key].of(measured)
    return curves


def fit_of(curves: Sequence[Curve], *, anew: bool) -> Fit:
    """The best constants for the rows of a family, or those that tpuflow has; the error of a model left out is that of fits without it."""
    best = fit_curves(curves)
    if anew:
        return best
    constants = constants_of(curves[0].measurement.chip)
    return replace(
        best, constants=constants, median_error=statistics.median(abs(c.error(constants)) for c in curves if c.measurement.fitted)
    )


def run(*, stored: bool = False, anew: Sequence[str] = ()) -> tuple[dict[str, Fit], list[Line], list[Mapping[str, str]]]:
    """Model every row by each family's constants, those that there are or, of families `anew`, new ones; (fits, lines, rows without a
    model)."""
    rows = measured_rows()
    known = cases_of_rows(rows)
    curves = curves_of_rows(rows, known, curves_of(known, stored=stored))
    fits: dict[str, Fit] = {}
    left_out: dict[str, float] = {}
    for family in FAMILIES:
        mine = [c for c in curves.values() if c.measurement.chip.family == family]
        fits[family] = fit_of(mine, anew=family in anew)
        left_out |= {c.measurement.name: e for c, e in leave_one_model_out(mine)}
    lines = []
    for row_id, c in curves.items():
        fit = fits.get(known[row_id].chip.family)
        seconds = c.seconds(fit.constants if fit else constants_of(known[row_id].chip))
        lines.append(Line(rows[row_id], known[row_id], c.measurement.seconds, seconds, left_out.get(row_id)))
    return fits, lines, [row for row in rows.values() if row["id"] not in known]


def page(fits: Mapping[str, Fit], lines: list[Line], others: list[Mapping[str, str]]) -> str:
    """docs/accuracy.md."""
    graded = [abs(line.error) for line in lines if line.grade == "A"]
    left = [abs(line.left_out) for line in lines if line.left_out is not None and line.grade == "A"]
    constants = sum(len(fit.constants) for fit in fits.values())
    text = [
        "# How far off the modelled times are",
        "",
        "Made by `python -m bench.accuracy`; do not edit. Measured rows are published figures, each with its source, in",
        "`bench/measured_steps.csv`; grade A rows are fully specified, in grade B rows one item was inferred. A row is modelled by",
        "compiling the very step and timing its Program on the chip's row. The host's input pipeline is a rate, on the Ascend, and on TPUs",
        "left out.",
        "",
        "A step on several chips is compiled for all of them, data parallel, and its collectives are in the Program: every gradient is",
        "summed as soon as it is there, by itself, while the backward pass goes on ([several chips](several_chips_accuracy.md)). The",
        "published software joined gradients to a few sums, MindSpore by default to one after the backward pass.",
        "",
        f"{len(lines)} rows modelled; {constants} constants fitted, {len(graded)} rows of grade A. **Median absolute error over grade A: "
        f"{statistics.median(graded):.1%}; with the row's model left out of the fit: {statistics.median(left):.1%}.**",
        "",
        "| family | constants | fitted with a model left out | fit |",
        "|---|---|---|---|",
    ]
    text += [
        f"| {family} | {', '.join(f'`{name}` {_constant(name, value)}' for name, value in fit.constants.items())} | "
        f"{', '.join(f'{_constant(name, least)} to {_constant(name, most)}' for name, (least, most) in fit.ranges.items())} | {fit.text} |"
        for family, fit in fits.items()
    ]
    text += [
        "",
        *ABOUT_CONSTANTS,
        "",
        "The constants are those that tpuflow has, as the last `--fit` found them; errors of a model left out are those of fits to",
        "the other rows. A fit minimises the mean absolute logarithm of modelled over measured, a row that is off by half or more counting",
        "as off by half: such a row does not pull on the constants. Rows of grade B are compared, not fitted.",
        "",
        *ABOUT_ERRORS,
        "",
        *ABOUT_SERIES,
        "",
        "Batches are those of one chip.",
        "",
        "| row | model | batch | chips | grade | measured ms | modelled ms | error | model left out | remarks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    text += [_line(line) for line in lines]
    orders = _orders(lines)
    models = [order for order in orders if ": models at" in order]
    alone = [order for order in orders if order not in models]
    text += [
        "",
        "## Order within each series",
        "",
        f"{_right(alone)} series over batch sizes, chips and sizes are in the right order, and {_right(models)} of different models.",
        "Milliseconds measured, and modelled in brackets, in the order measured;",
        "the median where a point has several rows. A series may mix generations of software:",
        "MLPerf 0.5's TensorFlow takes 169 ms for the step that 0.7's does in 126 on the same chip.",
        "",
        *alone,
        "",
        *models,
        "",
        "## Rows without a model",
        "",
    ]
    text += [f"{len(others)} rows are of models, chips, tasks or sizes that are not built or not modelled here yet:", ""]
    text += [", ".join(sorted({f"{row['model']} ({row['chip']})" for row in others})) + "."]
    return "\n".join(text) + "\n"


def _right(orders: Sequence[str]) -> str:
    return f"{sum(order.startswith('- right') for order in orders)} of {len(orders)}"


def _constant(name: str, value: float) -> str:
    if name.endswith("_per_second"):
        return f"{value / 1e9:.3g} GB/s"
    return f"{value * 1e6:.4g} us" if name.endswith("_seconds") else f"{value:g}"


def _line(line: Line) -> str:
    left = "" if line.left_out is None else f"{line.left_out:+.0%}"
    several = line.case.config is not None and line.case.config.mesh
    chips = f"{line.row['num_chips']} x {line.case.chip.name}" if several else line.case.chip.name
    return (
        f"| {line.row['id']} | {line.row['model'][:60]} | {line.batch or ''} | {chips} | {line.grade} | {line.measured * 1e3:.4g} | "
        f"{line.modelled * 1e3:.4g} | {line.error:+.0%} | {left} | {line.case.note} |"
    )


def _orders(lines: list[Line]) -> list[str]:
    """For every series of comparable rows, whether modelled times are in the order of the measured ones, and both."""
    series: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        for name, point in _series(line):
            series.setdefault(name, {}).setdefault(point, []).append(line)
    return [_order(name, points) for name, points in series.items() if len(points) > 1]


def _series(line: Line) -> Iterator[tuple[str, str]]:
    """(series, point of it) that a row belongs to: batch sizes of a model on a chip, chips at a batch size, models at a batch size."""
    model, chip = line.case.model, line.case.chip.name
    if model == "matmul":
        yield f"matmul on {chip} over sizes", line.row["model"].split()[1]
        return
    yield f"{model} on {chip} over batch sizes", str(line.batch)
    yield f"{model}, batch {line.batch}, over chips", chip
    yield f"models at batch {line.batch} on {line.row['num_chips']} x {chip}", line.row["model"]


def _order(name: str, points: Mapping[str, list[Line]]) -> str:
    """One series: points in the order measured, medians where a point has several rows."""
    found = sorted((statistics.median(x.measured for x in p), statistics.median(x.modelled for x in p), at) for at, p in points.items())
    right = [m for _, m, _ in found] == sorted(m for _, m, _ in found)
    text = ", ".join(f"{at} {measured * 1e3:.4g} ({modelled * 1e3:.4g})" for measured, modelled, at in found)
    return f"- {'right' if right else 'WRONG'}: {name}: {text}"


def fits_module(fits: Mapping[str, Fit]) -> str:
    """tpuflow/device/timing/fits.py."""
    rows = "".join(f'    "{family}": {{\n{_fields(fit)}        "fit": "{fit.text}",\n    }},\n' for family, fit in fits.items())
    return (
        '"""Efficiency constants by chip family; written by `python -m bench.accuracy` from published times '
        '(docs/accuracy.md)."""\n\n'
        "from __future__ import annotations\n\nfrom collections.abc import Mapping\nfrom typing import Any\n\n"
        f"FITS: Mapping[str, Mapping[str, Any]] = {{\n{rows}}}\n"
    )


def _fields(fit: Fit) -> str:
    return "".join(f'        "{name}": {float(f"{value:.4g}")!r},\n' for name, value in fit.constants.items())


def main() -> int:
    """Fit, model, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--fit", nargs="+", default=(), choices=FAMILIES, help="find the constants of these families anew")
    parser.add_argument("--stored", action="store_true", help="model only what the last run, kept in bench/results, has not")
    args = parser.parse_args()
    fits, lines, others = run(stored=args.stored, anew=args.fit)
    text = page(fits, lines, others)
    print(text)
    PAGE.write_text(text)
    FITS.write_text(fits_module(fits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
