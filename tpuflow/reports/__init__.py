"""Reports of what a Program costs: tables, memory over time, Chrome traces, HTML pages. All from the Program and its modelled time."""

from tpuflow.reports.differences import Differences, diff
from tpuflow.reports.memory import MemoryMap, memory_map
from tpuflow.reports.page import page, write_page
from tpuflow.reports.profile import Profile, profile
from tpuflow.reports.reported import Reported
from tpuflow.reports.trace import trace, write_trace

__all__ = [
    "Differences",
    "MemoryMap",
    "Profile",
    "Reported",
    "diff",
    "memory_map",
    "page",
    "profile",
    "trace",
    "write_page",
    "write_trace",
]
