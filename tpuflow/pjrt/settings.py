"""The device's settings, from environment variables: chip, fidelity, number of devices, report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tpuflow.chips import Chip, get_chip
from tpuflow.errors import ConfigError, TpuflowError, unknown

CHIP, FIDELITY, DEVICES, REPORT = "TPUFLOW_CHIP", "TPUFLOW_FIDELITY", "TPUFLOW_DEVICES", "TPUFLOW_REPORT"
FIDELITIES = ("native", "bitexact")
MOST_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the simulated devices. `fault` is the error in an environment variable, if there is one.

    It is raised by the first use of a device and not before: JAX initialises every backend, and a program that uses another one must not
    fail because of our variables.
    """

    chip: Chip
    fidelity: str
    devices: int
    report: Path | None = None
    fault: TpuflowError | None = None

    def check(self) -> None:
        """Raise `fault`, if there is one.

        Raises:
          ConfigError: an environment variable has a value that it cannot have.
        """
        if self.fault is not None:
            raise self.fault

    @classmethod
    def from_environment(cls) -> Settings:
        """`TPUFLOW_CHIP` (generic), `TPUFLOW_FIDELITY` (native), `TPUFLOW_DEVICES` (1), `TPUFLOW_REPORT` (none); the defaults if one of
        them is wrong."""
        try:
            return cls(_chip(), _fidelity(), _devices(), _report())
        except TpuflowError as fault:
            return cls(get_chip("generic"), FIDELITIES[0], 1, fault=fault)


def _chip() -> Chip:
    name = os.environ.get(CHIP) or "generic"
    try:
        return get_chip(name)
    except ConfigError as error:
        raise ConfigError(f"{CHIP}={name!r}: {error}") from None


def _fidelity() -> str:
    name = os.environ.get(FIDELITY) or FIDELITIES[0]
    if name not in FIDELITIES:
        raise unknown(f"fidelity in {FIDELITY},", name, FIDELITIES)
    return name


def _devices() -> int:
    text = os.environ.get(DEVICES) or "1"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_DEVICES:
        raise ConfigError(f"{DEVICES}={text!r}; expected how many devices there are to be, from 1 to {MOST_DEVICES}.")
    return int(text)


def _report() -> Path | None:
    name = os.environ.get(REPORT)
    if not name:
        return None
    path = Path(name).absolute()
    if path.suffix not in (".html", ".json") or not path.parent.is_dir():
        raise ConfigError(f"{REPORT}={name!r}; expected a file .html or .json in a folder that exists.")
    return path
