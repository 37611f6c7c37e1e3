"""The package's entry points for processes that find no installed tpuflow, or that are to find no other."""

from __future__ import annotations

import tomllib
from pathlib import Path

DECLARED = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]


def installed(folder: Path, group: str) -> str:
    """The folder, in which Python finds a group of entry points as pyproject.toml declares them."""
    info = folder / "tpuflow_entry_points-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tpuflow-entry-points\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in DECLARED[group].items()))
    return str(folder)
