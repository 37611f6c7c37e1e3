"""Commands of the command line that compile: `tpuflow estimate` and `tpuflow calibrate`."""

from __future__ import annotations

import csv
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import linen, nnx

from tpuflow.api.calibrating import Curve, Fit, Measurement, curve, fit_curves
from tpuflow.api.estimating import Estimate, estimate, estimate_training
from tpuflow.api.result import write_json
from tpuflow.device.timing.result import seconds_text
from tpuflow.errors import ConfigError

MEASURED = ("target", "batch", "chip", "milliseconds")


def run_estimate(
    target: str,
    batch: int,
    chip: str,
    policy: str | None,
    sink_size: int,
    kernels: int,
    json: Path | None = None,
    trace: Path | None = None,
    page: Path | None = None,
) -> None:
    """Estimate `module:function`, print the report, and write the files that are asked for.

    Raises:
      ConfigError: there is no such function, or it does not give what can be estimated.
    """
    found = estimate_target(target, batch, chip, policy, sink_size)
    print(found.report(kernels))
    if json is not None:
        write_json(json, {**found.as_dict(), "profile": found.profile().to_dict()})
    if trace is not None:
        found.trace(trace)
    if page is not None:
        found.html(page)


def estimate_target(target: str, batch: int, chip: str, policy: str | None, sink_size: int) -> Estimate:
    """The estimate of what `module:function` gives for a batch size: (function, *shapes) or (Flax module, inputs, labels).

    Raises:
      ConfigError: there is no such function, or it gives something else.
    """
    if batch < 1:
        raise ConfigError(f"--batch: expected at least 1, got {batch}.")
    made = _load(target)(batch)
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise ConfigError(f"{target}({batch}) gave {type(made).__name__}; expected (function, *shapes) or (Flax module, inputs, labels).")
    first, *shapes = made
    if not isinstance(first, linen.Module | nnx.Module):
        return estimate(first, *shapes, chip=chip, policy=policy)
    if len(shapes) != 2:
        raise ConfigError(f"{target}({batch}) gave a Flax module and {len(shapes)} shapes; expected those of inputs and labels.")
    return estimate_training(first, *shapes, chip=chip, policy=policy or "fp32", sink_size=sink_size)


def run_calibrate(path: Path, output: Path | None) -> None:
    """Fit the constants of the chips in a CSV of measured steps, print rows and errors, and write a .toml row for each chip.

    Columns: target (module:function, as for estimate), batch, chip, milliseconds; optional: policy, sink_size, model (rows of one model
    are left out together; the target if absent).

    Raises:
      ConfigError: a column is missing, a number is none, chips are of several families, or there are too few rows.
    """
    curves = [_curve(row, f"{path}, row {number}") for number, row in enumerate(_rows(path), 1)]
    families = sorted({c.measurement.chip.family for c in curves})
    if len(families) > 1:
        raise ConfigError(
            f"{path}: chips of the families {', '.join(families)}; the constants are of one family: give it files of its own."
        )
    found = fit_curves(curves)
    print(f"{'model':32} {'chip':12} {'measured':>12} {'modelled':>12} {'error':>7}")
    for c in curves:
        m, modelled = c.measurement, c.seconds(found.kernel_seconds, found.traffic_share)
        error = modelled / m.seconds - 1
        print(f"{m.name[:32]:32} {m.chip.name:12} {seconds_text(m.seconds):>12} {seconds_text(modelled):>12} {error:+7.0%}")
    print(f"kernel_seconds {found.kernel_seconds:.3g}, traffic_share {found.traffic_share}: {found.text}")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for name in sorted({c.measurement.chip.name for c in curves}):
            (output / f"{name}-fitted.toml").write_text(_chip_file(name, found))


def _chip_file(name: str, found: Fit) -> str:
    """A row like the named one with fitted constants, as TOML."""
    lines = (
        f'base = "{name}"',
        f"kernel_seconds = {found.kernel_seconds!r}",
        f"traffic_share = {found.traffic_share!r}",
        f'fit = "{found.text}"',
    )
    return "\n".join(lines) + "\n"


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
    return Curve(Measurement(f"{model}, batch {batch}", model, found.chip, seconds), *curve(found.program, found.chip, found.steps))


def _load(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise ConfigError(f"{target!r}: expected module:function, for example models.resnet:resnet50_step.")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: models and recipes lie in the folder one works in
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{target!r}: {error}. Run the command in the folder that holds the module, or install it.") from error
    finally:
        sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"{target!r}: module {module_name} has no function {name!r}.")
    return getattr(module, name)
