"""Modelled against published times, every row of bench/measured_steps.csv whose model there is: `python -m bench.accuracy`.

Writes docs/accuracy.md and, with --fit, the fitted constants into tpuflow/chips/fits.py. Rows of several chips are modelled as one chip's
step; the collective that joins them is not part of it.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.lenet import LeNet5
from models.resnet import resnet50
from models.squeezenet import SqueezeNet
from models.vgg import VGG16
from tpuflow import amp
from tpuflow.api.calibrating import Curve, Fit, Measurement, curve, fit_curves, leave_one_model_out
from tpuflow.api.estimating import training_program, training_recipe
from tpuflow.chips import CHIPS, Chip
from tpuflow.compiler import compile_function
from tpuflow.isa.program import Program

HERE = Path(__file__).parent
ROWS, PAGE, FITS = HERE / "measured_steps.csv", HERE.parent / "docs" / "accuracy.md", HERE.parent / "tpuflow" / "chips" / "fits.py"
CURVES = HERE / "results" / "accuracy.json"
SUNK = 1000  # steps a round trip where the source says that the data are sunk, or loops on the device
FAMILIES = ("ascend", "tpu")
WORKERS = 3

Make = Callable[[Chip], Program]


@dataclass(frozen=True, slots=True)
class Case:
    """A measured row that can be modelled: what to compile for which chip, and what to say about it; cases with equal keys are one."""

    model: str
    chip: Chip
    key: str
    make: Make
    steps: int = 1
    note: str = ""


def training(module: Any, batch: int, side: int, channels: int, policy: str, optimizer: Any, steps: int = SUNK) -> tuple[Make, int]:
    """The training step of an image model."""

    def make(chip: Chip) -> Program:
        images, labels = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
        return training_program(training_recipe(module, labels, amp.get_policy(policy), optimizer, None), images, labels, chip)

    return make, steps


def matmul(rows: int, columns: int, depth: int) -> Make:
    """A bf16 product."""
    left, right = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16), jax.ShapeDtypeStruct((depth, columns), jnp.bfloat16)
    return lambda chip: compile_function(lambda a, b: a @ b, (left, right), name="matmul", chip=chip)


def inference(batch: int, dtype: Any) -> Make:
    """ResNet-50's forward pass, everything in one type."""
    module = resnet50(1000)
    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), dtype)
    variables = jax.eval_shape(lambda x: module.init(jax.random.key(0), x), jax.ShapeDtypeStruct(images.shape, jnp.float32))
    variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), variables)
    return lambda chip: compile_function(lambda v, x: module.apply(v, x), (variables, images), name="resnet50", chip=chip)


def cases() -> Mapping[str, Case]:
    """Row id -> how to model it."""
    ascend, momentum, lars = CHIPS["ascend910"], optax.sgd(0.1, 0.9), optax.lars(0.1)
    many = "several chips: all-reduce not modelled"

    def image(model: str, module: Any, batch: int, chip: Chip, policy: str, optimizer: Any, note: str = "", side: int = 224) -> Case:
        name = f"{model} {' '.join(f'{k}={v}' for k, v in vars(module).items() if isinstance(v, bool | int | str))}"
        make, steps = training(module, batch, side, 1 if model == "LeNet-5" else 3, policy, optimizer)
        return Case(
            model, chip, f"{name} {batch} {chip.name} {chip.clock_hz:g} {policy}{' lars' if optimizer is lars else ''}", make, steps, note
        )

    def resnet(batch: int, chip: Chip, policy: str, optimizer: Any = lars, note: str = many, classes: int = 1000) -> Case:
        return image("ResNet-50", resnet50(classes), batch, chip, policy, optimizer, note)

    v2, v3, v4 = (CHIPS[f"tpu-v{n}"] for n in (2, 3, 4))
    v7x = CHIPS["tpu-v7x"]
    device = replace(v7x, cores=1, hbm_bytes=v7x.hbm_bytes // 2, hbm_bytes_per_second=v7x.hbm_bytes_per_second / 2, launch_seconds=0.0)
    faster = replace(ascend, clock_hz=1.1e9)
    return {
        "M009": image("LeNet-5", LeNet5(), 32, ascend, "O2", momentum, side=32),
        "M013": image("VGG-16", VGG16(10), 64, ascend, "O2", momentum, many),
        "M015": image("VGG-16", VGG16(1000), 32, ascend, "O2", momentum, many),
        "M024": image("SqueezeNet", SqueezeNet(10), 32, ascend, "O2", momentum, side=227),
        "M026": image("SqueezeNet", SqueezeNet(1000), 32, ascend, "O2", momentum, many, side=227),
        "M027": image("SqueezeNet", SqueezeNet(10, residual=True), 32, ascend, "O2", momentum, side=227),
        "M029": image("SqueezeNet", SqueezeNet(1000, residual=True), 32, ascend, "O2", momentum, many, side=227),
        "M087": resnet(256, ascend, "O2", momentum, ""),
        "M089": resnet(256, ascend, "O2", momentum),
        "M091": resnet(32, ascend, "O2", momentum),
        "M303": resnet(64, ascend, "O2"),
        "M307": resnet(32, faster, "O2", note=f"{many}; 1.1 GHz"),
        "S001": resnet(32, ascend, "O3", momentum, "", 10),
        "M256": resnet(256, v2, "mixed_bf16", momentum),
        "M258": resnet(256, v3, "mixed_bf16", momentum),
        "M261": resnet(256, v3, "mixed_bf16"),
        "M263": resnet(256, v3, "mixed_bf16"),
        "M265": resnet(64, v3, "mixed_bf16"),
        "M267": resnet(256, v3, "mixed_bf16"),
        "M269": resnet(256, v4, "mixed_bf16"),
        "M271": resnet(32, v4, "mixed_bf16"),
        "M273": resnet(16, v3, "mixed_bf16"),
        "M275": resnet(16, v4, "mixed_bf16"),
        "M277": resnet(16, v4, "mixed_bf16"),
        "M435": Case("matmul", device, "matmul 256 256 256", matmul(256, 256, 256), note="one of the chip's two devices; device time"),
        "M436": Case("matmul", device, "matmul 512 512 512", matmul(512, 512, 512), note="one of the chip's two devices; device time"),
        "M439": Case(
            "matmul", device, "matmul 4096 4096 4096", matmul(4096, 4096, 4096), note="one of the chip's two devices; device time"
        ),
        "M445": Case(
            "matmul",
            replace(v2, launch_seconds=0.0),
            "matmul 8192 32768 8192",
            matmul(8192, 32768, 8192),
            note="one chip's share of a 4 x 2 mesh",
        ),
        "M493": Case("ResNet-50 forward", CHIPS["bm1684x"], "inference", inference(1, jnp.float16), note="no fit for this family"),
    }


def measured_seconds(row: Mapping[str, str]) -> float:
    """The seconds of one step that a row states, in whichever way it does."""
    value, batch = float(row["value"]), float(row["batch_per_chip"] or 0)
    if row["unit"].startswith("ms"):
        return value / 1e3
    if row["unit"] == "images/s":
        return float(row["global_batch"]) / value
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
    def grade(self) -> str:
        """A: everything stated by the source; B: one item inferred."""
        return self.row["extra"].partition("q=")[2][:1]


@dataclass(frozen=True, slots=True)
class Modelled:
    """A case's time, as a curve over the constants and on the chip's row as it stands."""

    times: tuple[float, ...]
    kernels: float


def model(row_id: str) -> Modelled:
    """Compile a case and time it (in a process of its own)."""
    case = cases()[row_id]
    print(f"{row_id}: {case.key}", file=sys.stderr, flush=True)
    return Modelled(*curve(case.make(case.chip), case.chip, case.steps))


def curves_of(known: Mapping[str, Case], *, stored: bool) -> dict[str, Modelled]:
    """Every case's curve by its key: stored ones, or modelled anew and stored."""
    if stored:
        return {key: Modelled(tuple(times), kernels) for key, (times, kernels) in json.loads(CURVES.read_text()).items()}
    first = {case.key: row_id for row_id, case in reversed(list(known.items()))}
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        found = dict(zip(first, pool.map(model, first.values()), strict=True))
    CURVES.write_text(json.dumps({key: (m.times, m.kernels) for key, m in found.items()}, indent=1) + "\n")
    return found


def run(*, stored: bool = False) -> tuple[dict[str, Fit], list[Line], list[Mapping[str, str]]]:
    """Fit each family, model every row; (fits, lines, rows without a model)."""
    with ROWS.open() as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    known = cases()
    found = curves_of(known, stored=stored)
    curves = {}
    for row_id, case in known.items():
        measured = Measurement(row_id, case.model, case.chip, measured_seconds(rows[row_id]), "q=A" in rows[row_id]["extra"])
        curves[row_id] = Curve(measured, found[case.key].times, found[case.key].kernels)
    fits: dict[str, Fit] = {}
    left_out: dict[str, float] = {}
    for family in FAMILIES:
        mine = [c for c in curves.values() if c.measurement.chip.family == family]
        fits[family] = fit_curves(mine)
        left_out |= {c.measurement.name: e for c, e in leave_one_model_out(mine)}
    lines = []
    for row_id, c in curves.items():
        chip = known[row_id].chip
        constants = fits[chip.family] if chip.family in fits else chip
        seconds = c.seconds(constants.kernel_seconds, constants.traffic_share)
        lines.append(Line(rows[row_id], known[row_id], c.measurement.seconds, seconds, left_out.get(row_id)))
    return fits, lines, [row for row in rows.values() if row["id"] not in known]


def page(fits: Mapping[str, Fit], lines: list[Line], others: list[Mapping[str, str]]) -> str:
    """docs/accuracy.md."""
    graded = [abs(line.error) for line in lines if line.grade == "A"]
    left = [abs(line.left_out) for line in lines if line.left_out is not None]
    constants = 2 * len(fits)
    text = [
        "# How far off the modelled times are",
        "",
        "Made by `python -m bench.accuracy --fit`; do not edit. Measured rows are published figures, each with its source, in",
        "`bench/measured_steps.csv`; grade A rows are fully specified, in grade B rows one item was inferred. A row is modelled by",
        "compiling the very step and timing its Program on the chip's row. What joins several chips is not modelled yet, nor is the",
        "host's input pipeline.",
        "",
        f"{len(lines)} rows modelled; {constants} constants fitted, {len(graded)} rows of grade A. **Median absolute error over grade A: "
        f"{statistics.median(graded):.0%}; with the row's model left out of the fit: {statistics.median(left):.0%}.**",
        "",
        "| family | constants | fit |",
        "|---|---|---|",
    ]
    text += [
        f"| {family} | `kernel_seconds` {fit.kernel_seconds * 1e6:.2f} us, `traffic_share` {fit.traffic_share:.2f} | {fit.text} |"
        for family, fit in fits.items()
    ]
    text += [
        "",
        "`kernel_seconds` is what passes between two kernels. `traffic_share` is how many bytes the maker's compiler moves to and from",
        "HBM for each byte that this compiler moves: it fuses further (batch normalisation into its neighbours, above all), and a",
        "published time is that of its program, not of ours. A share far below one is work left for this compiler's fusion, not a",
        "property of the chip; the fit looks no lower than 0.10, and where it stops there, something else is too slow in the model or in",
        "our program. Constants of a family whose models disagree are a compromise: read the rows, not the median.",
        "",
        "| row | model | batch | chip | grade | measured ms | modelled ms | error | model left out | remarks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    text += [_line(line) for line in lines]
    text += ["", "## Order within each series", "", *_orders(lines), "", "## Rows without a model", ""]
    text += [f"{len(others)} rows are of models, chips or tasks that are not built here yet:", ""]
    text += [", ".join(sorted({f"{row['model']} ({row['chip']})" for row in others})) + "."]
    return "\n".join(text) + "\n"


def _line(line: Line) -> str:
    left = "" if line.left_out is None else f"{line.left_out:+.0%}"
    batch = str(int(float(line.row["batch_per_chip"]))) if line.row["batch_per_chip"] else ""
    return (
        f"| {line.row['id']} | {line.row['model'][:60]} | {batch} | {line.case.chip.name} | {line.grade} | {line.measured * 1e3:.4g} | "
        f"{line.modelled * 1e3:.4g} | {line.error:+.0%} | {left} | {line.case.note} |"
    )


def _orders(lines: list[Line]) -> list[str]:
    """For every model and chip with several batch sizes, and every model and batch on several chips: is the order right?"""
    series: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        batch = line.row["batch_per_chip"]
        if line.case.model == "matmul":
            series.setdefault("matmul over sizes", {}).setdefault(line.row["model"], []).append(line)
            continue
        series.setdefault(f"{line.case.model} on {line.case.chip.name} over batch sizes", {}).setdefault(batch, []).append(line)
        series.setdefault(f"{line.case.model}, batch {float(batch):.0f}, over chips", {}).setdefault(line.case.chip.name, []).append(line)
        if line.case.chip.name == "ascend910" and float(batch) == 32:
            series.setdefault("models at batch 32 on ascend910", {}).setdefault(line.case.model, []).append(line)
    found = []
    for name, points in series.items():
        if len(points) > 1:
            pairs = [(statistics.median(x.measured for x in p), statistics.median(x.modelled for x in p)) for p in points.values()]
            right = [m for _, m in sorted(pairs)] == sorted(m for _, m in pairs)
            found.append(f"- {name}: {'right' if right else 'WRONG'} ({len(points)} points)")
    return found


def fits_module(fits: Mapping[str, Fit]) -> str:
    """tpuflow/chips/fits.py."""
    rows = "".join(
        f'    "{family}": {{"kernel_seconds": {fit.kernel_seconds:.4g}, "traffic_share": {fit.traffic_share}, "fit": "{fit.text}"}},\n'
        for family, fit in fits.items()
    )
    return (
        '"""Efficiency constants by chip family; written by `python -m bench.accuracy --fit` from published times '
        '(docs/accuracy.md)."""\n\n'
        "from __future__ import annotations\n\nfrom collections.abc import Mapping\nfrom typing import Any\n\n"
        f"FITS: Mapping[str, Mapping[str, Any]] = {{\n{rows}}}\n"
    )


def main() -> int:
    """Fit, model, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="write the fitted constants into the chips' rows")
    parser.add_argument("--stored", action="store_true", help="use the times of the last run, kept in bench/results: only fit and write")
    args = parser.parse_args()
    fits, lines, others = run(stored=args.stored)
    text = page(fits, lines, others)
    print(text)
    PAGE.write_text(text)
    if args.fit:
        FITS.write_text(fits_module(fits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
