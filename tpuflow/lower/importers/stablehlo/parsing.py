"""Reading MLIR with jaxlib's bindings (jaxlib 0.8 to 0.10): here, or for a trial in another process, which this file is the program of.

The bindings end the process, or worse, on bytecode that is damaged in some ways; text they check.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

BYTECODE = b"ML\xefR"
"""The magic number of MLIR bytecode, also of portable artifacts."""
_PRODUCER = b"StableHLO_v"
"""The producer string of a portable artifact, after the magic number."""
_TRIAL_SECONDS = 120


_OTHERS = ir.DialectRegistry()
_jax_mlir_ext.register_dialects(_OTHERS)  # func, among others


def parse(data: bytes | str) -> ir.Module:
    """Parse a portable artifact, MLIR bytecode or MLIR text.

    Raises:
      ValueError, ir.MLIRError: it is none of these.
    """
    context = ir.Context()
    context.append_dialect_registry(_OTHERS)
    for register in (stablehlo.register_dialect, chlo.register_dialect, sdy.register_dialect, mhlo.register_mhlo_dialect):
        register(context)
    said: list[str] = []
    handler: Any = context.attach_diagnostic_handler(lambda diagnostic: not said.append(diagnostic.message))
    try:
        if isinstance(data, bytes) and data.startswith(_PRODUCER, len(BYTECODE) + 1):
            return stablehlo.deserialize_portable_artifact(context, data)
        if isinstance(data, bytes) and data.startswith(BYTECODE):
            return ir.Module.parse(data, context=context)
        text = data if isinstance(data, str) else data.decode()
        _check_strings(text.encode())
        return ir.Module.parse(text, context=context)
    except (ir.MLIRError, ValueError) as error:
        raise ValueError("; ".join(said[:3]) or str(error)) from error
    finally:
        handler.detach()


def _check_strings(text: bytes) -> None:
    """Check that all strings in a module's text are UTF-8, which the bindings assume.

    Raises:
      ValueError: one is not.
    """
    _ESCAPE.sub(lambda match: b"\\" if match[1] == b"\\" else bytes.fromhex(match[1].decode()), text).decode()


_ESCAPE = re.compile(rb"\\(\\|[0-9A-Fa-f]{2})")


def try_elsewhere(data: bytes) -> str:
    """The problem that a trial process has with bytecode, empty if none: 0.3 s, once for the same bytes."""
    digest = hashlib.sha256(data).digest()
    if digest in _READ_BEFORE:
        return ""
    try:
        command = [sys.executable, "-P", __file__]
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"MLIR has not read it in {_TRIAL_SECONDS} s"
    if done.returncode < 0:
        return "MLIR crashes when it reads it"
    if done.returncode == 0:
        _READ_BEFORE.add(digest)
    return "" if done.returncode == 0 else done.stdout.decode(errors="replace") or done.stderr.decode(errors="replace")[-400:]


_READ_BEFORE: set[bytes] = set()


if __name__ == "__main__":
    try:
        text: Any = parse(sys.stdin.buffer.read()).operation.get_asm(binary=True, enable_debug_info=True)
        _check_strings(text)
    except (ir.MLIRError, ValueError) as problem:
        print(problem)
        sys.exit(1)
