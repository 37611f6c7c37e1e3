"""The warning for a `resume` that names no checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from tpuflow.errors import listed, nothing_at
from tpuflow.training.callbacks.base import Callback
from tpuflow.training.callbacks.checkpointing import ModelCheckpoint


def warn_no_checkpoint(resume: str | os.PathLike[str], callbacks: Sequence[Callback]) -> None:
    """Warn that `resume` names no checkpoint, unless this training saves its own there, so that this is its first run."""
    path = Path(resume)
    if any(isinstance(c, ModelCheckpoint) and c.directory.resolve() == path.resolve() for c in callbacks):
        return
    holds = f"{path}: holds no checkpoint; it has {listed(sorted(os.listdir(path)))}." if path.is_dir() else nothing_at(path)
    warnings.warn(
        f"resume: {holds} The training starts from the beginning. If it is meant to, leave resume out, or save checkpoints there with "
        f"callbacks=[tpuflow.ModelCheckpoint({os.fspath(resume)!r})].",
        RuntimeWarning,
        stacklevel=3,
    )
