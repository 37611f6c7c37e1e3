"""`StepFigures`: the part of a profile, or of a profile's JSON file, that `tpuflow.diff` compares."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuflow.device.timing.result import seconds_text
from tpuflow.errors import ConfigError
from tpuflow.reports.profile import Profile
from tpuflow.reports.reported import Reported

Report = Reported | Profile | str | os.PathLike[str]
"""What can be compared: an estimate, a training or something compiled, a profile, or the path of a file (`WRITTEN`)."""
Place = tuple[str, str]
"""A layer and a phase."""
WRITTEN = "a file that `tpuflow estimate ... --json FILE` or `Profile.to_json` writes of one step"


@dataclass(frozen=True, slots=True)
class KernelTotals:
    """The sums of some kernels over one step. kernels: executions. bounds: seconds by the queue that bounds them. busy: seconds that each
    queue works, with the time between kernels as "launch"."""

    kernels: float = 0.0
    seconds: float = 0.0
    macs: float = 0.0
    hbm_bytes: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: KernelTotals) -> KernelTotals:
        return KernelTotals(
            self.kernels + other.kernels,
            self.seconds + other.seconds,
            self.macs + other.macs,
            self.hbm_bytes + other.hbm_bytes,
            _added(self.bounds, other.bounds),
            _added(self.busy, other.busy),
        )

    @property
    def bound(self) -> str:
        """What bounds most of the time; "" of nothing."""
        return max(self.bounds, key=self.bounds.__getitem__, default="")


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One side of a comparison, everything of one step.

    facts: settings, chip and version, as text. rates: the chip's rates by name, as text. seconds: the step's time and its parts by name.
    memory: bytes of HBM at the peak by category. places: sums by layer and phase.
    """

    title: str
    facts: Mapping[str, str]
    rates: Mapping[str, str]
    seconds: Mapping[str, float]
    mfu: float
    planned_bytes: int
    memory: Mapping[str, int]
    places: Mapping[Place, KernelTotals]

    @property
    def total(self) -> KernelTotals:
        """All kernels."""
        return sum(self.places.values(), KernelTotals())

    @property
    def batch(self) -> int | None:
        """The batch size; None if the report does not have it."""
        return int(self.facts["batch"]) if "batch" in self.facts else None


def _added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}


def figures_of(report: Report) -> StepFigures:
    """The figures of a report, or of a file with one.

    Raises:
      ConfigError: the file cannot be read, or is none of these.
    """
    if isinstance(report, Reported):
        report = report.profile()
    if isinstance(report, Profile):
        return _figures(report.as_dict())
    plain = _read(Path(report))
    try:
        return _figures(plain.get("profile", plain))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{os.fspath(report)}: no profile of this version ({_lack(error)}); expected {WRITTEN}.") from error


def _lack(error: Exception) -> str:
    """Why JSON data are no profile, in words: a missing key, or the error's text."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give {WRITTEN}.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); expected {WRITTEN}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a list, as of a sweep; expected {WRITTEN}.")
    return found


def _figures(plain: Mapping[str, Any]) -> StepFigures:
    policy = plain["settings"].get("policy")
    return StepFigures(
        title=f"{plain['name']} on {plain['chip']}{f' in {policy}' if policy else ''}",
        facts={
            **plain["settings"],
            "chip": plain["chip"],
            "fit": plain["fit"],
            "steps a round trip": str(plain["steps"]),
            "tpuflow": plain["version"],
        },
        rates={
            "products": ", ".join(f"{name} at {rate / 1e12:.1f} TFLOP/s" for name, rate in plain["peak_flops"].items()),
            "HBM bandwidth": f"{plain['hbm_bytes_per_second'] / 1e9:.0f} GB/s",
            "time between kernels": seconds_text(plain["kernel_seconds"]),
            "host round trip": seconds_text(plain["launch_seconds"]),
        },
        seconds={
            "time": plain["seconds"],
            "device": plain["device_seconds"],
            "waiting for data": plain["feed_seconds"],
            "host": plain["host_seconds"],
        },
        mfu=plain["mfu"],
        planned_bytes=plain["memory"]["planned_bytes"],
        memory=plain["memory"]["peak_by_category"],
        places=_places(plain["kernels"]),
    )


def _places(kernels: Iterable[Mapping[str, Any]]) -> dict[Place, KernelTotals]:
    found: dict[Place, KernelTotals] = {}
    for k in kernels:
        one = KernelTotals(k["count"], k["seconds"], k["macs"], k["hbm_bytes"], {k["bound"]: k["seconds"]}, k["busy_seconds"])
        found[k["layer"], k["phase"]] = found.get((k["layer"], k["phase"]), KernelTotals()) + one
    return found


def signed_seconds(seconds: float) -> str:
    """A difference of times."""
    return f"{'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"
