"""The device's settings, from environment variables: chip, fidelity, policy, number of devices, report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tpuflow.chips import Chip, get_chip
from tpuflow.dtypes import DType, from_numpy
from tpuflow.errors import ConfigError, TpuflowError, unknown

CHIP, FIDELITY, DEVICES, REPORT, POLICY = "TPUFLOW_CHIP", "TPUFLOW_FIDELITY", "TPUFLOW_DEVICES", "TPUFLOW_REPORT", "TPUFLOW_POLICY"
SHIM, ON, OFF = "TPUFLOW_SHIM", "on", "off"
"""Whether launches may be C's (`shim.py`)."""
FIDELITIES = ("native", "bitexact")
AS_WRITTEN = "fp32"
"""The policy that changes no type."""
MOST_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the simulated devices. compute: the type that products of f32 take their operands in, if the policy wants another.
    fault: the error in an environment variable, if there is one.

    It is raised by the first use of a device and not before: JAX initialises every backend, and a program that uses another one must not
    fail because of our variables.
    """

    chip: Chip
    fidelity: str
    devices: int
    report: Path | None = None
    policy: str = AS_WRITTEN
    compute: DType | None = None
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
        """`TPUFLOW_CHIP` (generic), `TPUFLOW_FIDELITY` (native), `TPUFLOW_DEVICES` (1), `TPUFLOW_REPORT` (none), `TPUFLOW_POLICY` (fp32);
        the defaults if one of them, or `TPUFLOW_SHIM`, is wrong."""
        try:
            if (shim := os.environ.get(SHIM) or ON) not in (ON, OFF):
                raise unknown(f"value of {SHIM},", shim, (ON, OFF))
            return cls(_chip(), _fidelity(), _devices(), _report(), *_policy())
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


def _policy() -> tuple[str, DType | None]:
    """A policy that chooses types by operation, and its compute type."""
    name = os.environ.get(POLICY) or AS_WRITTEN
    if name == AS_WRITTEN:
        return name, None
    from tpuflow.amp.policy import POLICIES, get_policy

    possible = (AS_WRITTEN, *(row.name for row in POLICIES.values() if row.casts == "list"))
    try:
        row = get_policy(name)
    except ConfigError as error:
        raise ConfigError(f"{POLICY}={name!r}: {error}") from None
    if row.name not in possible:
        raise ConfigError(
            f"{POLICY}={name!r}: this policy gives parameters, activations and optimizer types of their own, and a program that JAX hands "
            f"over does not say which is which; expected {', '.join(possible)}. tpuflow.train and tpuflow.amp take it."
        )
    return row.name, from_numpy(row.compute)


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
