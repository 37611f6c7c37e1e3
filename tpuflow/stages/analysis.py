"""What a Program costs, in the words of jax.stages: `cost_analysis` and `memory_analysis`, both from its instructions and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tpuflow.device.timing import time_program
from tpuflow.device.timing.result import ProgramTime
from tpuflow.isa.file import code_bytes
from tpuflow.isa.program import Program


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """Bytes of HBM, and of the host's memory, that a Program takes; the fields are named as in jax.stages."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    constant_size_in_bytes: int
    peak_memory_in_bytes: int
    host_argument_size_in_bytes: int
    host_output_size_in_bytes: int
    host_alias_size_in_bytes: int
    host_temp_size_in_bytes: int
    program: Program = field(repr=False, compare=False)

    @property
    def generated_code_size_in_bytes(self) -> int:
        """Size of the Program's file without names and constants. Found when asked for: it takes as long as saving the Program."""
        return code_bytes(self.program)

    def as_dict(self) -> dict[str, int]:
        """Every figure by name."""
        return {name: getattr(self, name) for name in MEMORY_FIGURES}


MEMORY_FIGURES = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "constant_size_in_bytes",
    "generated_code_size_in_bytes",
    "peak_memory_in_bytes",
    "host_argument_size_in_bytes",
    "host_output_size_in_bytes",
    "host_alias_size_in_bytes",
    "host_temp_size_in_bytes",
)


def cost_analysis(program: Program, time: ProgramTime | None = None) -> dict[str, float]:
    """Work and modelled time of a launch; loops whose trips are not constants count once.

    "flops" (of all units) and "matrix flops", "bytes accessed" in HBM, "kernels"; "optimal_seconds" is the roofline (no chip with these
    peaks does it faster), "modelled_seconds" what the timing engine finds, of which "device_seconds" without host and infeed.
    """
    time = time or time_program(program)
    return {
        "flops": float(time.work.flops),
        "matrix flops": float(2 * sum(time.work.macs.values())),
        "bytes accessed": float(time.work.hbm_bytes),
        "kernels": float(sum(row.count for row in time.kernels)),
        "optimal_seconds": time.roofline_seconds,
        "device_seconds": time.device_seconds,
        "modelled_seconds": time.seconds,
    }


def memory_analysis(program: Program) -> MemoryAnalysis:
    """How HBM and the host's memory are used by a Program."""
    buffers = program.buffers
    arguments, results = {p.buffer for p in program.inputs}, {p.buffer for p in program.outputs}
    at_host = {n for n, b in enumerate(buffers) if b.space == "host"}
    inputs, outputs = arguments - at_host, results - at_host
    constants = {c.buffer for c in program.constants}
    peak = program.hbm_bytes

    def size(indices: Iterable[int]) -> int:
        return sum(buffers[i].bytes for i in indices)

    return MemoryAnalysis(
        argument_size_in_bytes=size(inputs),
        output_size_in_bytes=size(outputs),
        alias_size_in_bytes=size(inputs & outputs),
        temp_size_in_bytes=max(0, peak - size(inputs | outputs | constants)),
        constant_size_in_bytes=size(constants),
        peak_memory_in_bytes=peak,
        host_argument_size_in_bytes=size(arguments & at_host),
        host_output_size_in_bytes=size(results & at_host),
        host_alias_size_in_bytes=size(arguments & results & at_host),
        host_temp_size_in_bytes=max(0, program.host_bytes - size((arguments | results) & at_host)),
        program=program,
    )
