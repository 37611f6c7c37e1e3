"""Logging of compilation stages: to a callback, and as the environment variables TPUFLOW_DEBUG and TPUFLOW_DUMP ask."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tpuflow.errors import ConfigError
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.program import Program
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.verify import verify

Watch = Callable[[str, Graph], None]
"""A callback(stage name, graph), called after import and after every pass."""

DEBUG = "TPUFLOW_DEBUG"
DUMP = "TPUFLOW_DUMP"


def is_shown() -> bool:
    """Whether the environment asks for stages."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in (DEBUG, DUMP))


@dataclass(slots=True)
class StageLog:
    """Prints to stderr: from level 1 a line a compile, 2 time and nodes of every pass, 3 the last graph, 4 the assembly, 5 every graph.

    From level 1 on every graph is verified. `dump` is a directory for files of every stage, numbered by compile and by stage.
    """

    name: str
    began: float
    level: int
    dump: Path | None
    last: float
    watch: Watch | None
    number: int = field(default_factory=itertools.count().__next__)
    stages: int = 0

    @classmethod
    def from_environment(cls, name: str, began: float, watch: Watch | None) -> StageLog:
        level, dump = os.environ.get(DEBUG, "0"), os.environ.get(DUMP)
        if level not in ("", *"012345"):
            raise ConfigError(f"{DEBUG}={level!r}; expected a level from 0 to 5.")
        return cls(name, began, int(level or 0), Path(dump) if dump else None, began, watch)

    @property
    def shows(self) -> bool:
        """Whether anybody looks at stages."""
        return self.watch is not None or self.level > 0 or self.dump is not None

    def stage(self, name: str, graph: Graph) -> None:
        """After import and after every pass."""
        if self.watch is not None:
            self.watch(name, graph)
        if self.level == 0 and self.dump is None:
            return
        self.lap(name, f"{sum(1 for _ in graph.walk()):6d} nodes")
        if self.level >= 1:
            verify(graph)
        if self.level >= 5:
            print(graph, file=sys.stderr)
        self._write(name, "graph", graph)
        self.last = time.perf_counter()

    def lap(self, name: str, text: str) -> None:
        """The time since the last stage."""
        now = time.perf_counter()
        if self.level >= 2:
            print(f"tpuflow: {self.name}: {name:<16} {(now - self.last) * 1e3:8.1f} ms  {text}", file=sys.stderr)
        self.last = now

    def note(self, text: str) -> None:
        """What is worth a line of its own from level 1 on."""
        if self.level >= 1:
            print(f"tpuflow: {self.name}: {text}", file=sys.stderr)

    def finish(self, graph: Graph, program: Program) -> None:
        """After assembly."""
        kernels = sum(1 for _ in program.kernels())
        self.lap("assemble", f"{kernels:6d} kernels")
        self.note(f"{kernels} kernels, {len(program.buffers)} buffers in {time.perf_counter() - self.began:.3f} s")
        if self.level in (3, 4):
            print(graph, file=sys.stderr)
        if self.level >= 4:
            print(disassemble(program), file=sys.stderr)
        self._write("program", "tpxs", program)

    def _write(self, stage: str, suffix: str, content: Graph | Program) -> None:
        if self.dump is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        text = str(content) if isinstance(content, Graph) else disassemble(content)
        name = re.sub(r"[^\w.-]+", "_", self.name)
        (self.dump / f"{self.number:03d}-{name}-{self.stages:02d}-{stage}.{suffix}").write_text(text)
        self.stages += 1
