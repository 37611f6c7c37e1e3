"""Verdicts of the verifier in the persistent compilation cache."""

from __future__ import annotations

from tpuflow.device.verify.program import verify
from tpuflow.errors import ProgramFileError
from tpuflow.isa.file import code_hash
from tpuflow.isa.program import Program
from tpuflow.jaxprs.persistent import kept_entries, key_of


def verify_once(program: Program) -> None:
    """`verify`, unless the persistent cache, if there is one, says that this tpuflow has verified a Program of the same code.

    A Program with functions of this process is not known by its code, and is verified each time.

    Raises:
      ProgramError: as `verify`.
    """
    entries = None if program.functions or program.calls else kept_entries()
    if entries is None:
        return verify(program)
    try:
        name = f"verified-{key_of(code_hash(program))}"
    except ProgramFileError:  # it has no bytes
        return verify(program)
    if entries.get(name) is None:
        verify(program)
        entries.put(name, b"")
