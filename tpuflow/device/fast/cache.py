"""Translated Programs of this process: those of the same code are translated and compiled once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.host import DEFAULT, Host
from tpuflow.isa.file import code_hash
from tpuflow.isa.program import Program

CAPACITY = 256

_engines: OrderedDict[Hashable, list[FastEngine]] = OrderedDict()
"""Those of Programs with the same buffers together; what is longest unused comes first, in both."""
_lock = threading.Lock()


def engine_for(program: Program, fidelity: str, host: Host = DEFAULT) -> FastEngine:
    """The engine of a verified Program in a fidelity on a host. Of more than `CAPACITY` one is forgotten, of the Programs whose buffers are
    longest unused the one that is. A Program that calls functions of this process is not known by its code, and has an engine of its own.
    """
    if program.functions:
        return FastEngine(program, fidelity=fidelity, verified=True, host=host)
    key = (program.chip, program.buffers, program.inputs, program.outputs, fidelity, host.key)
    with _lock:
        alike = _engines.setdefault(key, [])
        _engines.move_to_end(key)
        found = _taken(program, alike) or FastEngine(program, fidelity=fidelity, verified=True, host=host, keeps=True)
        alike.append(found)
        if sum(map(len, _engines.values())) > CAPACITY:
            _forget_one()
        return found


def _taken(program: Program, engines: list[FastEngine]) -> FastEngine | None:
    """The engine of a Program of the same code, out of a list. Hashes take a while, so there are none until two Programs have the same
    buffers."""
    code = code_hash(program) if engines else ""
    at = next((n for n, engine in enumerate(engines) if engine.code == code), None)
    return None if at is None else engines.pop(at)


def _forget_one() -> None:
    key, unused = next(iter(_engines.items()))
    del unused[0]
    if not unused:
        del _engines[key]


def clear() -> None:
    """Forget every engine."""
    with _lock:
        _engines.clear()
