"""Commands of the command line that compile: `tpuflow estimate` and `tpuflow calibrate`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path

from tpuflow.device.timing.calibration import Calibration
from tpuflow.device.timing.result import seconds_text
from tpuflow.errors import ConfigError
from tpuflow.estimating.calibrating import Curve, Measurement, curve, fit_curves
from tpuflow.estimating.pareto import front
from tpuflow.estimating.plots import plot_pareto, plot_sweep
from tpuflow.estimating.sweeping import Sweep, run_sweep, table
from tpuflow.estimating.targets import estimate_target
from tpuflow.reports.files import write_json
from tpuflow.training.plotting import matplotlib_figures

MEASURED = ("target", "batch", "chip", "milliseconds")


def run_estimate(
    sweep: Sweep,
    kernels: int,
    json: Path | None = None,
    trace: Path | None = None,
    page: Path | None = None,
    plot: Path | None = None,
    pareto: Path | None = None,
) -> None:
    """Estimate the points of a sweep, write the files that are asked for, and print the report of one or the table of several.

    The files come first: of what is printed a reader may want the beginning only (`| head`). Of several points, each gets a trace and a
    page of its own, with the point in the file's name.

    Raises:
      ConfigError: there is no such function, it does not give what can be estimated, or a file cannot be written.
    """
    if plot is not None or pareto is not None:
        matplotlib_figures()  # that it is missing is told before the work
    points = run_sweep(sweep)
    single = points[0].estimate if len(points) == 1 else None
    if len(points) == 1 and points[0].error is not None:
        raise points[0].error
    best = front(points)
    if json is not None:
        write_json(
            json,
            {**single.as_dict(), "profile": single.profile().as_dict()} if single else [{**p.as_dict(), "best": p in best} for p in points],
        )
    for point in points:
        if point.estimate is not None and trace is not None:
            point.estimate.trace(trace if single else point.file(trace))
        if point.estimate is not None and page is not None:
            point.estimate.html(page if single else point.file(page))
    if plot is not None:
        plot_sweep(points, plot)
    if pareto is not None:
        plot_pareto(points, pareto)
    print(single.report(kernels) if single else table(points, best))


def run_calibrate(path: Path, output: Path | None) -> None:
    """Fit the constants of the chips in a CSV of measured steps, print rows and errors, and write a .toml file with them.

    Columns: target (module:function, as for estimate), batch, chip, milliseconds; optional: policy, sink_size, model (rows of one model
    are left out together; the target if absent).

    Raises:
      ConfigError: a column is missing, a number is none, chips are of several families, or there are too few rows.
    """
    curves = [_curve(row, f"{path}, row {number}") for number, row in enumerate(_rows(path), 1)]
    families = sorted({c.measurement.family for c in curves})
    if len(families) > 1:
        raise ConfigError(
            f"{path}: chips of the families {', '.join(families)}; the constants are of one family: give it files of its own."
        )
    found = fit_curves(curves)
    print(f"{'model':32} {'chip':12} {'measured':>12} {'modelled':>12} {'error':>7}")
    for c in curves:
        m, modelled = c.measurement, c.seconds(found.constants)
        error = modelled / m.seconds - 1
        print(f"{m.name[:32]:32} {m.chip.name:12} {seconds_text(m.seconds):>12} {seconds_text(modelled):>12} {error:+7.0%}")
    print(f"{', '.join(f'{name} {value:.3g}' for name, value in found.constants.items())}: {found.text}")
    if output is not None:
        output.write_text(calibration_toml(found.calibration(families[0])))


def calibration_toml(calibration: Calibration) -> str:
    """A calibration as TOML, which `get_calibration` reads."""
    rows = asdict(calibration)
    texts = {name: dumps(value) if isinstance(value, str) else repr(value) for name, value in rows.items()}  # JSON strings are TOML
    return "".join(f"{name} = {text}\n" for name, text in texts.items())


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in MEASURED if not rows or name not in rows[0]]
    if missing:
        raise ConfigError(f"{path}: expected a CSV with the columns {', '.join(MEASURED)}; missing: {', '.join(missing)}.")
    return rows


def _curve(row: Mapping[str, str], where: str) -> Curve:
    try:
        batch, seconds, sink = int(row["batch"]), float(row["milliseconds"]) / 1e3, int(row.get("sink_size") or 100)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; batch and sink_size are whole numbers, milliseconds a number.") from error
    if not seconds > 0:
        raise ConfigError(f"{where}: milliseconds is {row['milliseconds']!r}; expected a positive number.")
    found = estimate_target(row["target"], batch, row["chip"], row.get("policy") or None, sink)
    model = row.get("model") or row["target"]
    return Curve(Measurement(f"{model}, batch {batch}", model, found.chip, seconds), *curve(found.program, found.steps))
