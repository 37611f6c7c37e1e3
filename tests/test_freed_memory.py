"""The memory of dropped results stays with the process, so that the next results do not take it from the system page by page."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tpuflow.pjrt import device, freed_memory
from tpuflow.pjrt.device import Client
from tpuflow.pjrt.settings import Settings

CALLS, PAGES = 20, 2048
SCRIPT = f"""
import resource, runpy, sys
runpy.run_path(sys.argv[1])["keep_freed_memory"]()
def make():
    first, second = (bytearray(b"x") * (4096 * {PAGES}) for _ in range(2))
make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({CALLS}):
    make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**chosen: str) -> int:
    """Page faults of a process that again and again makes two arrays of 8 MB and drops them."""
    kept = {name: value for name, value in os.environ.items() if name not in freed_memory.SETTINGS}
    command = [sys.executable, "-c", SCRIPT, freed_memory.__file__]
    return int(subprocess.run(command, env=kept | chosen, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc than glibc's")
def test_arrays_that_are_made_and_dropped_again_and_again_are_not_fetched_page_by_page():
    dropped = faults()
    assert dropped < PAGES
    assert faults(MALLOC_TRIM_THRESHOLD_="0") > dropped  # whoever asks malloc for something else gets that


def test_the_device_keeps_the_memory_of_its_results(monkeypatch: pytest.MonkeyPatch):
    asked: list[None] = []
    monkeypatch.setattr(device, "keep_freed_memory", lambda: asked.append(None))
    assert Client(Settings.from_environment()).host.device.platform == "cpu"
    assert asked
