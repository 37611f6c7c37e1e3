"""Translated Programs of this process, by the hash of their code: the same bytes are translated and compiled once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.host import DEFAULT, Host
from tpuflow.isa.file import code_hash
from tpuflow.isa.program import Program

CAPACITY = 256

_engines: OrderedDict[tuple[str, str, Any], FastEngine] = OrderedDict()
_lock = threading.Lock()


def engine_for(program: Program, fidelity: str, host: Host = DEFAULT) -> FastEngine:
    """The engine of a verified Program in a fidelity on a host; the least recently used of more than `CAPACITY` is forgotten. One that
    calls functions of this process is not known by its code, and has an engine of its own."""
    if program.functions:
        return FastEngine(program, fidelity=fidelity, verified=True, host=host)
    key = (code_hash(program), fidelity, host.key)
    with _lock:
        if key not in _engines:
            _engines[key] = FastEngine(program, fidelity=fidelity, verified=True, host=host, code=key[0])
        _engines.move_to_end(key)
        while len(_engines) > CAPACITY:
            _engines.popitem(last=False)
        return _engines[key]


def clear() -> None:
    """Forget every engine."""
    with _lock:
        _engines.clear()
