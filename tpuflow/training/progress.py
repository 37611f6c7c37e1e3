"""The progress bar of a training, on standard error if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A bar over steps, or nothing at all."""

    def __init__(self, progress: Progress | None):
        self._progress = progress
        self._task = progress.add_task("", total=None, loss="") if progress else None

    def begin(self, text: str, total: int | None) -> None:
        """Start again from zero under a new text."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, total=total, description=text, loss="")

    def advance(self, steps: int, loss: float | None = None) -> None:
        """Move on, and show a loss."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=steps, loss="" if loss is None else f"loss {loss:.4f}")


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[Bar]:
    """A bar that is drawn while the block runs; nothing if not `shown` or if standard error is not a terminal."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield Bar(None)
        return
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    # Lines printed meanwhile go above the bar; if they go to a file, they are left alone.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as progress:
        yield Bar(progress)
