"""What a Program costs in time, found from its instructions, its chip's row and a calibration; data are never looked at."""

from tpuflow.device.timing.calibration import Calibration, calibration_of, get_calibration
from tpuflow.device.timing.program import time_program
from tpuflow.device.timing.result import KernelTime, ProgramTime

__all__ = ["Calibration", "KernelTime", "ProgramTime", "calibration_of", "get_calibration", "time_program"]
