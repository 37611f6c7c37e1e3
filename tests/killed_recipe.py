"""`python -m tests.killed_recipe ARGUMENTS`: `python -m train ARGUMENTS`, which SIGKILL ends when its first checkpoint is written.

What is done up to there is compiled as in the tests that compare its bits (`tests.quick`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tpuflow
from tests.quick import quickly_compiled
from train.__main__ import main
from train.detection.run_files import WeightFiles
from train.trainer.folders import ModelFolders

REPOSITORY = Path(__file__).parents[1]
WRITERS = {ModelFolders: "_last", WeightFiles: "_written"}
"""What writes for a checkpoint, and its field that says for which one it did last."""


def kill_training(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run such a process, and see that it was killed."""
    command = [sys.executable, "-m", "tests.killed_recipe", *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def _kill_behind(writer: type[tpuflow.Callback], last: str) -> None:
    """Have the process killed once this has written something, in the middle of everything else."""
    write = writer.on_checkpoint

    def on_checkpoint(self: tpuflow.Callback, run: tpuflow.Run) -> None:
        before = getattr(self, last)
        write(self, run)
        if getattr(self, last) != before:
            os.kill(os.getpid(), signal.SIGKILL)

    writer.on_checkpoint = on_checkpoint


if __name__ == "__main__":
    for writer, last in WRITERS.items():
        _kill_behind(writer, last)
    with quickly_compiled():
        sys.exit(main(sys.argv[1:]))
