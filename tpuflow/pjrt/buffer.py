"""Arrays on the device: an array of the CPU client underneath, counted as bytes of the device's HBM."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuflow.errors import LaunchError
from tpuflow.pjrt.cells import dimensions
from tpuflow.pjrt.device import Device
from tpuflow.pjrt.handles import OBJECTS, WORDS
from tpuflow.pjrt.types import CODES, PACKED

DEVICE, MEMORY, CODE, DELETED, DIMENSIONS, RANK, BYTES, ZERO = range(1, 9)
"""Words of a buffer's header."""


COMPLEX = np.dtype(np.complex64)


class Headers:
    """The headers of buffers that come to be together, each the same every time: made at once, from a template."""

    def __init__(self, device: Device, facts: Sequence[tuple[int, tuple[int, ...], int]]):
        self._shapes = [dimensions(shape) for _, shape, _ in facts]
        words = []
        for (code, _, size), shape in zip(facts, self._shapes, strict=True):
            fields = (0, device.handle, device.memory.handle, code, 0, *shape.pair, size)
            words += fields + (0,) * (WORDS - len(fields))
        self._type: Any = ctypes.c_uint64 * len(words)
        self._template = self._type(*words)

    def new(self) -> Any:
        """Memory with one header after the other."""
        return self._type.from_buffer_copy(self._template)


class Buffer:
    """An array on a device, until it is deleted, donated or destroyed: `array` is None then. Whoever makes it tells the device's usage.

    Complex numbers lie there as two planes, f32[2, *shape], as programs take and give them (`ComplexType.port`).
    Its header begins at word `start` of `headers`. holds: how many others (dlpack) look at its memory; while there are any, what deletes
    it does not free it and nothing overwrites it. sharers: how many buffers of one launch, on as many devices, have the array.
    """

    __slots__ = ("_headers", "_held", "_start", "array", "bytes", "device", "handle", "holds", "shape", "sharers")

    def __init__(self, array: Any, device: Device, shape: tuple[int, ...], size: int, headers: Any, start: int, handle: int):
        self.array, self.device, self.shape, self.bytes = array, device, shape, size
        self._headers, self._start, self.handle = headers, start, handle
        self.holds, self.sharers, self._held = 0, 1, None
        OBJECTS[handle] = self

    @property
    def code(self) -> int:
        """PJRT's code of its element type."""
        return self._headers[self._start + CODE]

    def delete(self) -> None:
        """Free the memory. Once is as good as twice."""
        if self.array is not None:
            self._held = self.array if self.holds else None
            self.array = None
            self._headers[self._start + DELETED] = 1
            self.device.usage.give(self.bytes)

    destroyed = delete

    def hold(self) -> None:
        """Somebody else looks at the memory from now on."""
        self.holds += 1

    def release(self) -> None:
        """And does so no more."""
        self.holds -= 1
        if self.holds <= 0:
            self._held = None

    def live(self) -> Any:
        """The array underneath.

        Raises:
          LaunchError: there is none any more.
        """
        if self.array is None:
            raise LaunchError("the array was deleted, or donated to a call that has overwritten it; it cannot be read any more.")
        return self.array


def one(array: Any, device: Device, code: int, shape: tuple[int, ...], size: int) -> Buffer:
    """A buffer that comes to be by itself."""
    device.usage.take(size, 1, size)
    headers = _headers(device, code, shape, size).new()
    return Buffer(array, device, shape, size, headers, 0, ctypes.addressof(headers))


@functools.lru_cache(4096)
def _headers(device: Device, code: int, shape: tuple[int, ...], size: int) -> Headers:
    return Headers(device, [(code, shape, size)])


def from_host(device: Device, address: int, dtype: np.dtype, shape: tuple[int, ...], strides: Sequence[int] | None) -> Buffer:
    """Copy an array of the host, of whatever strides in bytes (None: row-major), to a device.

    Raises:
      OutOfMemoryError: the device's HBM has no room for it.
    """
    view: Any = _view(address, dtype, shape, strides)
    device.usage.check(view.nbytes, f"an array {dtype}{list(shape)}")
    planes = np.stack([view.real, view.imag]) if dtype == COMPLEX else view
    return one(device.client.host.array(planes), device, CODES[dtype], shape, view.nbytes)


def to_host(buffer: Buffer, address: int, strides: Sequence[int] | None) -> None:
    """Copy an array of a device to memory of the host that has room for it."""
    array = buffer.live()
    if not buffer.bytes:
        return
    if buffer.code == CODES[COMPLEX]:
        view = _view(address, COMPLEX, buffer.shape, strides)
        view.real, view.imag = np.asarray(array)
        return
    if strides is None and buffer.code not in PACKED:
        array.block_until_ready()
        ctypes.memmove(address, array.unsafe_buffer_pointer(), buffer.bytes)
        return
    values = np.asarray(array)
    np.copyto(_view(address, values.dtype, buffer.shape, strides), values)


def copied(buffer: Buffer, device: Device) -> Buffer:
    """The same values on a device, in memory of their own.

    Raises:
      OutOfMemoryError: the device's HBM has no room for it.
    """
    device.usage.check(buffer.bytes, "a copy of an array")
    return one(device.client.host.copy(buffer.live()), device, buffer.code, buffer.shape, buffer.bytes)


def _view(address: int, dtype: np.dtype, shape: tuple[int, ...], strides: Sequence[int] | None) -> np.ndarray:
    """An array over memory that is there for the time of a call. Strides can be negative: the address is that of the first element."""
    if 0 in shape:
        return np.empty(shape, dtype)
    if strides is None:
        strides = _row_major(shape, dtype.itemsize)
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0) + dtype.itemsize
    memory: Any = (ctypes.c_char * (high - low)).from_address(address + low)
    return np.ndarray(shape, dtype, memory, -low, tuple(strides))


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def strides_of(minor_to_major: Sequence[int], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a dense array whose axes lie in memory in this order, the fastest first."""
    strides, step = [0] * len(shape), itemsize
    for axis in minor_to_major:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)
