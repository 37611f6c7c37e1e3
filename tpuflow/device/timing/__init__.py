"""What a Program costs in time, found from its instructions and its chip's row alone; data are never looked at."""

from tpuflow.device.timing.program import time_program
from tpuflow.device.timing.result import KernelTime, ProgramTime

__all__ = ["KernelTime", "ProgramTime", "time_program"]
