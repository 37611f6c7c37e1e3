"""The client, its devices and their memories: what JAX finds, and how much of each device's HBM is in use."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import tpuflow
from tpuflow.errors import OutOfMemoryError
from tpuflow.pjrt import PLATFORM
from tpuflow.pjrt.cells import NamedValues, Numbers, Text
from tpuflow.pjrt.freed_memory import keep_freed_memory
from tpuflow.pjrt.handles import OBJECTS, ApiObject
from tpuflow.pjrt.settings import Settings


class Device(ApiObject):
    """One simulated chip. It is its own description; `memory` is its HBM, and `host_memory` what the host lends it.

    Header: number, kind, name, memory, memories, attributes, its handle.
    """

    def __init__(self, client: Client, number: int):
        chip, settings = client.settings.chip, client.settings
        self.client, self.number = client, number
        self._kind = Text(f"tpuflow {chip.name}")
        self._name = Text(f"TpuSimDevice(id={number}, chip={chip.name})")
        facts = {"chip": chip.name, "cores": chip.cores, "fidelity": settings.fidelity, "policy": settings.policy}
        self._attributes = NamedValues(facts)
        super().__init__()
        self.memory = Memory(self, DEVICE_MEMORY, number, Usage(chip.hbm_bytes))
        self.host_memory = Memory(self, HOST_MEMORY, client.settings.devices + number, Usage(sys.maxsize))
        self._memories = Numbers([m.handle for m in self.memories], ctypes.c_uint64)
        fields = (number, *self._kind.pair, *self._name.pair, self.memory.handle, *self._memories.pair, *self._attributes.pair, self.handle)
        self.header[1 : 1 + len(fields)] = fields

    @property
    def memories(self) -> tuple[Memory, Memory]:
        """All that it addresses."""
        return self.memory, self.host_memory


DEVICE_MEMORY, HOST_MEMORY = KINDS = "device", "pinned_host"
"""JAX's names of a device's own memory, and of the host's."""


class Memory(ApiObject):
    """A memory that a device addresses. Header: number, kind, name, devices, number of the kind."""

    def __init__(self, device: Device, kind: str, number: int, usage: Usage):
        self.device, self.kind, self.usage = device, Text(kind), usage
        self._name = Text(f"TpuSimMemory(device={device.number}, kind={kind})")
        self._devices = Numbers([device.handle], ctypes.c_uint64)
        super().__init__(number, *self.kind.pair, *self._name.pair, *self._devices.pair, KINDS.index(kind))


class Usage:
    """The bytes of a memory that buffers take now, and took at most (PJRT's memory statistics)."""

    __slots__ = ("_lock", "allocations", "in_use", "largest", "limit", "peak")

    def __init__(self, limit: int):
        self.limit = limit
        self.in_use = self.peak = self.largest = self.allocations = 0
        self._lock = threading.Lock()

    def allocate(self, size: int, count: int, largest: int) -> None:
        """Count `count` new buffers of `size` bytes in all, the largest of `largest` bytes."""
        with self._lock:
            self.in_use += size
            self.allocations += count
            if self.in_use > self.peak:
                self.peak = self.in_use
            if largest > self.largest:
                self.largest = largest

    def free(self, size: int) -> None:
        """Count `size` bytes less."""
        with self._lock:
            self.in_use -= size

    def check(self, size: int, what: str) -> None:
        """Check that so many more bytes fit; `what` needs them, for the message.

        Raises:
          OutOfMemoryError: they do not fit beside the buffers that exist.
        """
        if self.in_use + size > self.limit:
            raise OutOfMemoryError(
                f"{what} needs {size:,} bytes of HBM; {self.in_use:,} of the chip's {self.limit:,} bytes are in use by arrays. Delete "
                "arrays that are not needed, donate arguments, use a smaller batch, or choose a chip with more memory (TPUFLOW_CHIP).",
                self.in_use + size,
            )


class Client(ApiObject):
    """What JAX calls a backend: its devices, and the CPU client underneath that computes for them. It is its own topology.

    `loaded`: every Program that was loaded, if there is to be a report of them. Header: its handle, platform, version, devices, memories,
    attributes.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._platform = Text(PLATFORM)
        self._version = Text(f"tpuflow {tpuflow.__version__}, chip {settings.chip.name}, {settings.fidelity}, {settings.policy}")
        self.devices = [Device(self, number) for number in range(settings.devices)]
        self._devices = Numbers([d.handle for d in self.devices], ctypes.c_uint64)
        self._memories = Numbers([m.handle for d in self.devices for m in d.memories], ctypes.c_uint64)
        self._attributes = NamedValues({})
        self.loaded: list[Any] = []
        super().__init__()
        lists = (self._platform, self._version, self._devices, self._memories, self._attributes)
        fields = (self.handle, *(word for found in lists for word in found.pair))
        self.header[1 : 1 + len(fields)] = fields

    def destroyed(self, indices: Sequence[int], held: Sequence[int]) -> None:
        """Its devices and memories go with it."""
        for thing in (*self.devices, *(memory for device in self.devices for memory in device.memories)):
            OBJECTS.pop(thing.handle, None)

    @functools.cached_property
    def host(self) -> Any:
        """Where the device's arrays really are, and its Programs run (`tpuflow.device.fast.host.PinnedHost`).

        Raises:
          ConfigError: the environment is wrong.
        """
        self.settings.check()
        from tpuflow.device.fast.host import PinnedHost
        from tpuflow.jaxprs.plugins import cpu_device

        keep_freed_memory()
        return PinnedHost(cpu_device())
