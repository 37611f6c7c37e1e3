"""Translated Programs of this process: those of the same code are translated and compiled once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.host import DEFAULT, Host
from tpuflow.isa.file import code_hash
from tpuflow.isa.program import Program

CAPACITY = 256

_engines: OrderedDict[Hashable, list[FastEngine]] = OrderedDict()
_lock = threading.Lock()


def engine_for(program: Program, fidelity: str, host: Host = DEFAULT) -> FastEngine:
    """The engine of a verified Program in a fidelity on a host; the least recently used of more than `CAPACITY` are forgotten. One that
    calls functions of this process is not known by its code, and has an engine of its own."""
    if program.functions:
        return FastEngine(program, fidelity=fidelity, verified=True, host=host)
    key = (program.chip, program.buffers, program.inputs, program.outputs, fidelity, host.key)
    with _lock:
        alike = _engines.setdefault(key, [])
        _engines.move_to_end(key)
        found = _of_code(program, alike)
        if found is None:
            found = FastEngine(program, fidelity=fidelity, verified=True, host=host, keeps=True)
            alike.append(found)
        while sum(map(len, _engines.values())) > CAPACITY:
            _engines.popitem(last=False)
        return found


def _of_code(program: Program, engines: Sequence[FastEngine]) -> FastEngine | None:
    """The engine of a Program of the same code. Hashes take a while, so there are none until two Programs have the same buffers."""
    if not engines:
        return None
    code = code_hash(program)
    return next((engine for engine in engines if engine.code == code), None)


def clear() -> None:
    """Forget every engine."""
    with _lock:
        _engines.clear()
