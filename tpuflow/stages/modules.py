"""StableHLO modules out of files, compiled for the device."""

from __future__ import annotations

from pathlib import Path

from jax import export

from tpuflow.chips import Chip
from tpuflow.compiler import compile_stablehlo
from tpuflow.errors import ModuleError
from tpuflow.isa.program import Program
from tpuflow.lower.importers.stablehlo.parsing import BYTECODE


def compile_file(path: Path, chip: str | Chip = "generic") -> Program:
    """The Program of a file: MLIR text, MLIR bytecode, a portable artifact, or a serialized `jax.export.Exported`.

    Raises:
      ModuleError: it is none of these, or damaged.
      And what `compile_stablehlo` raises.
    """
    try:
        return compile_stablehlo(read_file(path), name=path.stem, chip=chip)
    except ModuleError as error:
        raise ModuleError(f"{path}: {error}") from error


def read_file(path: Path) -> bytes | str:
    """The module in a file, as `compile_stablehlo` takes it.

    Raises:
      ModuleError: it is an exported function that cannot be read.
    """
    data = path.read_bytes()
    if data.startswith(BYTECODE):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _exported(data)


def _exported(data: bytes) -> bytes:
    """The portable artifact in a serialized `jax.export.Exported`."""
    try:
        exported = export.deserialize(bytearray(data))
    except ImportError as error:
        raise ModuleError(
            "looks like a serialized jax.export.Exported, which JAX reads with the package flatbuffers: install it, or write "
            "exported.mlir_module_serialized instead of exported.serialize()."
        ) from error
    except Exception as error:  # whatever a flatbuffer that is damaged leads to
        raise ModuleError(
            f"neither MLIR nor a serialized jax.export.Exported, or a damaged one: {type(error).__name__}. Expected "
            "jax.jit(f).lower(...).as_text(), exported.mlir_module_serialized or exported.serialize()."
        ) from error
    return exported.mlir_module_serialized
