"""The output folder: checkpoints to go on from, the model as it was at each, results; every file whole or not there."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tpuflow
from tpuflow.errors import ConfigError
from train.trainer.options import TrainerOptions

CHECKPOINTS = "checkpoints"
"""The folder in the output folder from which a training goes on; beside it `checkpoint-N` are folders of the model as it was then."""

LATEST = "latest"


class ModelFolders(tpuflow.Callback):
    """Beside every checkpoint that is saved, a folder `checkpoint-N` with the model as it is after N updates."""

    def __init__(self, checkpoints: tpuflow.ModelCheckpoint, write: Callable[[Path, Path], None], options: TrainerOptions):
        self._checkpoints, self._write, self._options = checkpoints, write, options
        self._last: Path | None = None

    def on_train_begin(self, run: tpuflow.Run) -> None:
        """What is there already was written by an earlier run, unless that was killed behind its checkpoint."""
        if not folder_of(self._options, run.steps // self._options.gradient_accumulation_steps).exists():
            self._write_newest(run)
        self._last = self._checkpoints.last

    def on_checkpoint(self, run: tpuflow.Run) -> None:
        """Write it if there is a new checkpoint; forget the oldest."""
        self._write_newest(run)

    def _write_newest(self, run: tpuflow.Run) -> None:
        saved, accumulate = self._checkpoints.last, self._options.gradient_accumulation_steps
        if saved is None or saved == self._last or run.steps % accumulate:
            return
        self._last = saved
        self._write(saved, folder_of(self._options, run.steps // accumulate))
        keep = self._options.save_total_limit
        for number in _updates_saved(self._options)[: -keep if keep else 0]:
            shutil.rmtree(folder_of(self._options, number))


def folder_of(options: TrainerOptions, updates: int) -> Path:
    """Where the model after so many updates lies."""
    return output_folder(options) / f"checkpoint-{updates}"


def output_folder(options: TrainerOptions) -> Path:
    """The output folder, which `check` asks for."""
    assert options.output_dir is not None
    return options.output_dir


def beginning(options: TrainerOptions) -> Path | None:
    """The checkpoint, or folder of them, to go on from; None for a new training. Makes the output folder.

    Raises:
      ConfigError: a training lies there and it is not said what is to become of it, or there is no such checkpoint.
    """
    folder = output_folder(options)
    there = folder / CHECKPOINTS
    if options.resume_from_checkpoint is not None:
        return _resumed(options, there)
    if (there.is_dir() and any(there.iterdir())) and not options.overwrite_output_dir:
        raise ConfigError(
            f"--output_dir {folder}: a training lies there. Go on with it by --resume_from_checkpoint latest, begin anew by "
            "--overwrite_output_dir, or give another folder."
        )
    try:
        for old in (there, *(folder_of(options, number) for number in _updates_saved(options))):
            shutil.rmtree(old, ignore_errors=not old.exists())
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot be written ({error.strerror}).") from error
    return None


def _resumed(options: TrainerOptions, there: Path) -> Path:
    given = str(options.resume_from_checkpoint)
    if given == LATEST:
        found = there
    else:
        number = Path(given).name.removeprefix("checkpoint-")
        steps = int(number) * options.gradient_accumulation_steps if number.isdecimal() else -1
        found = there / f"step_{steps:08d}"
    if not found.is_dir():
        saved = ", ".join(f"checkpoint-{number}" for number in _updates_saved(options)) or "none"
        raise ConfigError(
            f"--resume_from_checkpoint {given}: no such checkpoint in {output_folder(options)}; there are: {saved}. "
            f"Give one of them, or {LATEST}."
        )
    return found


def _updates_saved(options: TrainerOptions) -> list[int]:
    numbers = (path.name.removeprefix("checkpoint-") for path in output_folder(options).glob("checkpoint-*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Have a folder written under another name, and give it its own when it is whole; what was there before goes then."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(made)
        if target.exists():
            shutil.rmtree(target)
        made.chmod(0o755)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def replace_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Have files, and folders of them, written elsewhere, and put each in the folder when all are whole."""
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as made:
        write(Path(made))
        for path in Path(made).iterdir():
            if path.is_dir() and (folder / path.name).is_dir():
                shutil.rmtree(folder / path.name)
            path.replace(folder / path.name)


def report(options: TrainerOptions, kind: str, figures: Mapping[str, Any]) -> None:
    """Print the figures of "train" or "eval", and write them into `{kind}_results.json` and `all_results.json`."""
    width = max(map(len, figures))
    lines = [f"  {name:<{width}} = {_shown(value):>12}" for name, value in sorted(figures.items())]
    print("\n".join([f"***** {kind} metrics *****", *lines]), flush=True)
    if options.output_dir is not None:
        everything = options.output_dir / "all_results.json"
        before = json.loads(everything.read_text()) if everything.is_file() else {}
        for path, content in ((options.output_dir / f"{kind}_results.json", figures), (everything, before | dict(figures))):
            write_json(path, content)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
