"""Every error that tpuflow raises on purpose, from one root."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class TpuflowError(Exception):
    """Root of all tpuflow errors; its message says where, what was found, what was expected and what to do."""


class UnsupportedPrimitiveError(TpuflowError, NotImplementedError):
    """A jaxpr primitive, or a form of one, has no lowering rule."""


class UnsupportedDtypeError(TpuflowError, TypeError):
    """An element type that the device does not have."""


class ModuleError(TpuflowError, ValueError):
    """A StableHLO module is damaged, or none at all."""


class GraphError(TpuflowError):
    """A graph breaks one of its own rules (a defect of a pass, not of the user's program)."""


class CompileError(TpuflowError):
    """The program cannot be put on the chip."""


class OutOfMemoryError(CompileError):
    """The chip's HBM or VMEM is too small for the program. `needed_bytes`: the HBM that it needs; None if another memory is too small."""

    def __init__(self, message: str, needed_bytes: int | None = None):
        super().__init__(message)
        self.needed_bytes = needed_bytes


class ProgramError(TpuflowError):
    """A Program is not valid: the load-time verifier refuses it."""


class ProgramFileError(ProgramError):
    """A .tpx file or its text form is cut short, damaged, of another version, or not one at all."""


class HazardError(TpuflowError):
    """The reference engine saw a machine-level fault: a race, a read before write, an access out of bounds, a deadlock."""


class LaunchError(TpuflowError, ValueError):
    """An executable was called with arguments that do not fit its signature."""


class PeerError(TpuflowError, RuntimeError):
    """Another process of a computation under `jax.distributed` has died or hangs, so that its chips are lost."""


class HostMemoryError(TpuflowError, MemoryError):
    """The host that simulates the device has not as much memory as a launch asks for."""


class LaunchAbandoned(KeyboardInterrupt):
    """Ctrl-C in the middle of a launch that cannot be stopped: it goes on in the background."""


class LimitError(TpuflowError, ValueError):
    """A launch would take, or has taken, more work or memory than its limits allow."""


class ConfigError(TpuflowError, ValueError):
    """A user-given option is unknown or does not fit (policy, chip, loss, batch size, ...)."""


class DataError(TpuflowError, ValueError):
    """The training data are empty, damaged, or do not fit the model."""


class WeightsError(TpuflowError, ValueError):
    """A file of weights is damaged, or its tensors do not fit the model's parameters."""


class ArchiveError(TpuflowError, ValueError):
    """An archive of arrays (.npz) is damaged or forged, or cannot hold what should be written."""


class CheckpointError(TpuflowError, ValueError):
    """A checkpoint is damaged, cannot be written, or was saved by a training that is not this one."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint cannot be written at this moment: the disk is full, the directory is gone, or another training writes there."""


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" with the known name nearest to a wrong one, or nothing if none is near."""
    close = difflib.get_close_matches(str(value), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, value: object, known: Iterable[str], instead: str = "", alias: str | None = None) -> ConfigError:
    """The error for a name that is not in a table: what was given, what there is, and what else may be given `instead`.

    alias: the known name that is meant, where another one is usual; else the nearest one is asked for.
    """
    names = list(known)
    also = f"; or pass {instead}" if instead else ""
    near = did_you_mean(value, names) if alias is None else f" Did you mean {alias!r}?"
    return ConfigError(f"unknown {what} {shown(value)}.{near} Choose one of: {', '.join(names)}{also}.")


def short(name: str, most: int = 80) -> str:
    """A name for an error message: quoted, and cut to `most` characters."""
    return repr(name) if len(name) <= most else f"{name[:most]!r}... ({len(name)} characters)"


def shown(value: object, most: int = 80) -> str:
    """A value for an error message: its repr, or its type if the repr is long or has nothing but an address."""
    text = repr(value)
    plain = len(text) <= most and "\n" not in text and " at 0x" not in text
    return text if plain else a_thing(value)


def a_thing(value: object) -> str:
    """The kind of a value: "float32[3, 4]", "a tuple of 2", "a Net"."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and isinstance(shape, tuple):
        return f"{dtype}{list(shape)}"
    name = type(value).__name__
    count = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}{count}"


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for an error message, in brackets: the first `most`, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"[{', '.join(map(short, names[:most]))}{rest}]"


def nothing_at(path: str | os.PathLike[str]) -> str:
    """ "PATH: no such file or folder", followed by a similar name in the deepest folder that exists, or by what that folder holds."""
    path = Path(path)
    folder = next(parent for parent in Path(os.path.abspath(path)).parents if parent.is_dir())
    wanted = Path(os.path.abspath(path)).relative_to(folder).parts[0]
    there = sorted(entry.name for entry in folder.iterdir())
    near = did_you_mean(wanted, there) or (f" There are: {listed(there)}." if there else " It is empty.")
    return f"{path}: no such file or folder: {folder} has no {wanted!r}.{near}"


def one_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's message, or its class's name if it has none."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:most].rstrip(".")
