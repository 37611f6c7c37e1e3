"""How a comparison ends as a command: its exit status, and what is said when it cannot finish."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tpuflow.errors import TpuflowError
from tpuflow.reports.files import write_json

FAILED, INTERRUPTED = 2, 130


def exit_status(publish: Callable[[], int], path: Path) -> int:
    """What `publish`, which writes `path`, returns: 0 or 1 by its bounds; 2 for bad data or files; 130 after Ctrl-C."""
    try:
        return publish()
    except (TpuflowError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"interrupted: {path} is not written", file=sys.stderr)
        return INTERRUPTED


def judged(figures: Mapping[str, Any], table: Callable[[Mapping[str, Any]], str], path: Path) -> int:
    """Write the figures as JSON (what is no number in it as a string) and print them as a table: 1 if a bound "failed", else 0."""
    write_json(path, figures)
    print(table(figures))
    return 1 if figures["failed"] else 0
