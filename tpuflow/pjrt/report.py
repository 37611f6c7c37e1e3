"""`TPUFLOW_REPORT=file.html` (or .json): at the end of the process, what all Programs that ran would have cost on the device."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuflow.errors import TpuflowError

if TYPE_CHECKING:
    from tpuflow.pjrt.device import Client
    from tpuflow.pjrt.executable import Loaded

SHOWN = 40
"""Programs in the table of the page; the file of data has all."""


@dataclass(frozen=True, slots=True)
class Line:
    """What the runs of one Program cost: modelled seconds a run, with launch and transfers, and bytes of HBM at most."""

    name: str
    runs: int
    seconds: float
    device_seconds: float
    peak_bytes: int

    @property
    def whole_seconds(self) -> float:
        """Of all its runs."""
        return self.runs * self.seconds


def write_at_exit(client: Client, path: Path) -> None:
    """Write the report of a client's Programs when the process ends."""
    atexit.register(_write, client, path)


def _write(client: Client, path: Path) -> None:
    try:
        write(client, path)
    except TpuflowError as error:
        print(f"tpuflow: {error}", file=sys.stderr)


def write(client: Client, path: Path) -> None:
    """Write the report of what has run so far: a page with a table and the profile of the Program that took longest, or plain data.

    Raises:
      ConfigError: the file cannot be written.
    """
    from tpuflow.reports.files import write_json, write_text
    from tpuflow.reports.page import page, text_page
    from tpuflow.reports.profile import profile

    ran = sorted((x for x in client.loaded if x.runs), key=lambda x: -x.runs * x.executable.time().seconds)
    lines = [_line(x) for x in ran]
    if path.suffix == ".json":
        write_json(path, _data(client, lines))
    elif ran:
        longest = ran[0]
        write_text(path, page(profile(longest.program, longest.executable.time()), summary=table(client, lines)))
    else:
        write_text(path, text_page("tpusim", "no Program ran"))


def _line(loaded: Loaded) -> Line:
    time = loaded.executable.time()
    return Line(loaded.program.name, loaded.runs, time.seconds, time.device_seconds, loaded.memory.peak_memory_in_bytes)


def table(client: Client, lines: Sequence[Line]) -> str:
    """The Programs that took longest, all their runs together, as text."""
    whole = sum(line.whole_seconds for line in lines)
    rows = [
        f"{line.name[:40]:40} {line.runs:8} {1e6 * line.seconds:12.1f} {1e3 * line.whole_seconds:12.3f} {line.peak_bytes / 2**20:10.2f}"
        for line in lines[:SHOWN]
    ]
    left = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    peak = max((device.memory.usage.peak for device in client.devices), default=0)
    return "\n".join(
        (
            f"{sum(line.runs for line in lines)} launches of {len(lines)} Programs on {client.settings.chip.name}: modelled "
            f"{1e3 * whole:.3f} ms; arrays held {peak / 2**20:.2f} MiB of a device's HBM at most",
            f"{'Program':40} {'runs':>8} {'us a run':>12} {'ms in all':>12} {'peak MiB':>10}",
            *rows,
            *left,
            f"Below: {lines[0].name}, which took longest." if lines else "",
        )
    )


def _data(client: Client, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "chip": client.settings.chip.name,
        "fidelity": client.settings.fidelity,
        "policy": client.settings.policy,
        "seconds": sum(line.whole_seconds for line in lines),
        "array_peak_bytes": [device.memory.usage.peak for device in client.devices],
        "programs": [
            {
                "name": line.name,
                "runs": line.runs,
                "seconds": line.seconds,
                "device_seconds": line.device_seconds,
                "peak_bytes": line.peak_bytes,
            }
            for line in lines
        ],
    }
