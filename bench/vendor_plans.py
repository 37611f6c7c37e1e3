"""What XLA:TPU plans for a training step; in seconds where its compile is ended once every buffer has its place.

Schedule, memory spaces and places are decided by then, and a step that does not fit is refused. Code takes it ten times as long, and adds
one thing: which operands of products are read again and again. So a plan's HBM bytes are at least those ("at_least"). XLA writes what it
has as it goes, so the compile runs in a process of its own, which is ended.
"""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import time
from pathlib import Path

from bench.kept_rows import Figures
from bench.vendor_steps import VendorStep
from tpuflow.chips import get_chip
from tpuflow.comparing.comparing import vendor_costs, vendor_training
from tpuflow.comparing.hlo import parse
from tpuflow.comparing.trips import with_trips
from tpuflow.comparing.vendor import Compiled, topology_of
from tpuflow.errors import ConfigError

DOES_NOT_FIT, FAILS = "does not fit", "fails"
MODULE, BUFFERS, ERROR = "after_optimizations_after_buffer_assignment.txt", "after_optimizations-buffer-assignment.txt", "error"
"""The ends of the names of XLA's files, and ours with what it says where it refuses."""
POLL = 0.5
"""Seconds between two looks."""
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (?!color )(.*)", re.MULTILINE)


def temporaries(buffers: str) -> int:
    """Bytes of HBM that are neither arguments nor a thread's own, of a text that lists allocations; those elsewhere have a color."""
    return sum(int(size) for size, what in _ALLOCATION.findall(buffers) if "parameter " not in what and "thread-local" not in what)


def is_whole(module: str) -> bool:
    """Whether the text of a module is written to its end: the entry comes last."""
    return "\nENTRY " in module and module.rstrip().endswith("\n}")


def compiled(step: VendorStep, chip: str) -> Figures:
    """Bytes of a step's temporaries, and to and from HBM; or "refused": whether it does not fit, or the compile fails."""
    try:
        found = vendor_training(step.config, get_chip(chip))
    except (ConfigError, RuntimeError) as error:  # ConfigError: with its words; others are errors of its own reader of its results
        return _refused(str(error))
    return _figures(found, chip)


def plan(step: VendorStep, chip: str) -> Figures:
    """The same before there is code, what is read again left out."""
    with tempfile.TemporaryDirectory(prefix="tpuflow-") as name:
        process = multiprocessing.get_context("spawn").Process(target=_compile, args=(step, chip, name), daemon=True)
        process.start()
        folder, text = Path(name), ""
        while not is_whole(text) and process.is_alive():
            time.sleep(POLL)
            text = _text(folder, MODULE)
        process.kill()
        process.join()
        if not is_whole(text):
            if not (said := _text(folder, ERROR)):
                raise RuntimeError(f"{step.name} on {chip}: the process that compiles ended with {process.exitcode}")
            return _refused(said)
        held = temporaries(_text(folder, BUFFERS))
    return {**_figures(Compiled(with_trips(parse(text)), 0, held, topology_of(get_chip(chip))), chip), "at_least": True}


def _figures(found: Compiled, chip: str) -> Figures:
    return {"temporaries": found.temp_bytes, "hbm": vendor_costs(found, get_chip(chip)).hbm_bytes}


def _refused(said: str) -> Figures:
    return {"refused": DOES_NOT_FIT if "RESOURCE_EXHAUSTED" in said else FAILS}


def _text(folder: Path, end: str) -> str:
    return "".join(path.read_text() for path in folder.rglob(f"*{end}"))


def _compile(step: VendorStep, chip: str, folder: str) -> None:
    tempfile.tempdir = folder  # where the library has XLA write
    try:
        vendor_training(step.config, get_chip(chip))
    except (ConfigError, RuntimeError) as error:
        (Path(folder) / ERROR).write_text(str(error))
