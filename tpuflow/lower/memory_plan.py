"""What a plan of HBM says: buffers with addresses, where values lie, and what is copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpuflow.isa.program import Buffer, Constant
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.out_of_memory import Held


@dataclass(frozen=True, slots=True)
class Assignment:
    """Buffer `target` = buffer `source`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of HBM by purpose, alignment included. `peak_bytes` is the highest address in use; temporaries share the rest of it."""

    peak_bytes: int
    donated_bytes: int
    input_bytes: int
    constant_bytes: int
    output_bytes: int

    @property
    def temporary_bytes(self) -> int:
        """What is neither input nor constant nor an output of its own."""
        return self.peak_bytes - self.donated_bytes - self.input_bytes - self.constant_bytes - self.output_bytes

    def __str__(self) -> str:
        parts = (
            ("donated inputs", self.donated_bytes), ("other inputs", self.input_bytes), ("constants", self.constant_bytes),
            ("outputs", self.output_bytes), ("temporaries", self.temporary_bytes),
        )  # fmt: skip
        return f"{self.peak_bytes:,} bytes of HBM ({', '.join(f'{name} {n:,}' for name, n in parts if n)})"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Buffers with addresses; the buffer of every value; copies around nodes and at the end of regions, in order.

    `block_buffer_of`: the buffer that a node's block itself reads or writes, in exactly its shape: a loop's trip count, a while's
    predicate, a switch's index, the item of an infeed or outfeed. `replaced`: pairs of buffers that
    may be one, in the order of the program: the later is written where the earlier is read for the last time, and has its address.
    `overflowing`: where HBM is too small for the plan, unless arrays stay in VMEM, what is needed at the peak.
    """

    buffers: tuple[Buffer, ...]
    names: tuple[str, ...]
    buffer_of: Mapping[Value, int]
    block_buffer_of: Mapping[Node, int]
    outputs: tuple[int, ...]
    constants: tuple[Constant, ...]
    assigned_before: Mapping[Node, tuple[Assignment, ...]]
    assigned_after: Mapping[Node, tuple[Assignment, ...]]
    assigned_at_end: Mapping[Graph, tuple[Assignment, ...]]
    use: MemoryUse
    replaced: tuple[tuple[int, int], ...] = ()
    overflowing: tuple[Held, ...] = ()
