"""Entries about devices that are more than fields."""

from __future__ import annotations

import ctypes

from tpuflow.pjrt.cells import Args, words
from tpuflow.pjrt.handles import OBJECTS, collect
from tpuflow.pjrt.table import FIELDS, NO_OPERATION, entry

_STATISTICS = 26
"""Words of `PJRT_Device_MemoryStats_Args`; an older caller has fewer."""


@entry("Device_GetAttributes")
def _attributes(args: Args) -> None:
    header = OBJECTS[args[2]].header
    args[4], args[3] = (header[field] for field in FIELDS["DeviceDescription_Attributes"])
    args[5], args[6] = args[2], NO_OPERATION


@entry("Device_MemoryStats")
def _statistics(args: Args) -> None:
    collect()
    usage = OBJECTS[args[2]].memory.usage
    count = min(_STATISTICS, args[0] // 8)
    figures = [usage.in_use, usage.peak, 1, usage.allocations, 1, usage.largest, 1, usage.limit, 1]
    words(ctypes.addressof(args.contents), count)[3:count] = (figures + [0] * count)[: count - 3]
