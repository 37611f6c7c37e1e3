"""XLA's executables of earlier runs of the tests, for `pytest --warm`: in .pytest_cache, which `make clean` removes."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from pathlib import Path

import pytest

MOST_BYTES = 4 * 2**30
"""So much is kept; what is beyond that is compiled anew."""
_CPUINFO = Path("/proc/cpuinfo")
_PROCESSOR = ("model name", "flags", "Features", "CPU part")


def is_warm(config: pytest.Config) -> bool:
    """Whether this run is to use them."""
    return bool(config.getoption("--warm", default=False))


def compiled_earlier(config: pytest.Config) -> Path:
    """Their folder. JAX names them after the module, the options, its own version and XLA_FLAGS; the folder is named after what else there
    is in machine code: the processor's instructions, and how many cores share a loop."""
    host = hashlib.sha256("\n".join((*_processor(), str(os.cpu_count()))).encode()).hexdigest()[:16]
    return config.cache.mkdir(f"xla-{host}")


def _processor() -> list[str]:
    """What it is and can do."""
    if not _CPUINFO.exists():
        return [platform.processor()]
    return sorted({line for line in _CPUINFO.read_text(encoding="utf-8").splitlines() if line.startswith(_PROCESSOR)})


def forget_if_many(config: pytest.Config) -> None:
    """Before a run, by one of its processes."""
    folder = compiled_earlier(config)
    if sum(file.stat().st_size for file in folder.iterdir()) > MOST_BYTES:
        shutil.rmtree(folder)
