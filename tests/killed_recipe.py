"""`python -m tests.killed_recipe ARGUMENTS`: `python -m train ARGUMENTS`, which SIGKILL ends when its first checkpoint is written."""

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
from train.trainer.folders import ModelFolders

REPOSITORY = Path(__file__).parents[1]


def kill_training(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run such a process, and see that it was killed."""
    command = [sys.executable, "-m", "tests.killed_recipe", *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def _killing() -> None:
    """Have the process killed behind the first folder checkpoint-N, in the middle of everything else."""
    write = ModelFolders.on_checkpoint

    def on_checkpoint(self: ModelFolders, run: tpuflow.Run) -> None:
        before = self._last
        write(self, run)
        if self._last != before:
            os.kill(os.getpid(), signal.SIGKILL)

    ModelFolders.on_checkpoint = on_checkpoint


if __name__ == "__main__":
    _killing()
    with quickly_compiled():  # as the tests are that compare its bits
        sys.exit(main(sys.argv[1:]))
