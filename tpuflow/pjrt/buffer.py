"""Arrays on the device: arrays of the CPU client underneath, counted as bytes of the device's HBM.

A call gives hundreds of them, so none has an object of its own: a buffer is its handle. Its array is in `ARRAYS`, what never changes of it
in the `Group` that it came to be with.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuflow.errors import LaunchError
from tpuflow.pjrt.cells import dimensions
from tpuflow.pjrt.device import Device
from tpuflow.pjrt.handles import OBJECTS, WORDS
from tpuflow.pjrt.types import CODES, PACKED

DEVICE, MEMORY, CODE, DELETED, DIMENSIONS, RANK, BYTES, ZERO = range(1, 9)
"""Words of a buffer's header."""

HEADER_BYTES = 8 * WORDS

COMPLEX = np.dtype(np.complex64)

ARRAYS: dict[int, Any] = {}
"""Handle -> array, of buffers that are not deleted, donated or destroyed. Complex numbers lie there as two planes, f32[2, *shape], as
programs take and give them (`ComplexType.port`)."""

HOLDS: dict[int, tuple[int, Any]] = {}
"""Handle -> how many others (dlpack) look at a buffer's memory, and its array: what deletes the buffer then does not free the memory, and
nothing overwrites it."""

SHARERS: dict[int, int] = {}
"""Handle -> how many buffers of one launch, on as many devices, have the array; of those that do not have it alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a buffer is: its device, PJRT's code of its element type, its shape, and its bytes of HBM."""

    device: Device
    code: int
    shape: tuple[int, ...]
    bytes: int


class Kinds:
    """What buffers that come to be together are, each time the same, and their headers as a template."""

    def __init__(self, device: Device, kinds: Sequence[Kind]):
        self.device, self.rows = device, kinds
        self.sizes = [kind.bytes for kind in kinds]
        self._taken = sum(self.sizes), len(kinds), max(self.sizes, default=0)
        self._shapes = [dimensions(kind.shape) for kind in kinds]
        words = []
        for kind, shape in zip(kinds, self._shapes, strict=True):
            fields = (0, device.handle, device.memory.handle, kind.code, 0, *shape.pair, kind.bytes)
            words += fields + (0,) * (WORDS - len(fields))
        self._type: Any = ctypes.c_uint64 * len(words)
        self._template = self._type(*words)

    def new(self, arrays: Sequence[Any]) -> Sequence[int]:
        """The handles of buffers with these arrays, which come to be."""
        self.device.usage.take(*self._taken)
        return Group(self, self._type.from_buffer_copy(self._template), arrays).handles


class Group:
    """Buffers that came to be together, and the memory with their headers, one after the other, until the last of them is destroyed."""

    __slots__ = ("_first", "_headers", "_kinds", "handles")

    def __init__(self, kinds: Kinds, headers: Any, arrays: Sequence[Any]):
        self._kinds, self._headers, self._first = kinds, headers, ctypes.addressof(headers)
        self.handles = range(self._first, self._first + HEADER_BYTES * len(arrays), HEADER_BYTES)
        OBJECTS.update(dict.fromkeys(self.handles, self))
        ARRAYS.update(zip(self.handles, arrays, strict=True))

    def kind(self, handle: int) -> Kind:
        """What one of them is."""
        return self._kinds.rows[(handle - self._first) // HEADER_BYTES]

    def delete(self, handles: Sequence[int]) -> None:
        """Free the memory of some of them. Once is as good as twice."""
        self._free(handles)
        for handle in handles:
            self._headers[(handle - self._first) // 8 + DELETED] = 1

    def destroyed(self, handles: Sequence[int]) -> None:
        """C knows some of them no more."""
        self._free(handles)
        if HOLDS:
            _forget(HOLDS, handles)

    def _free(self, handles: Sequence[int]) -> None:
        sizes, first = self._kinds.sizes, self._first
        freed = [sizes[(handle - first) // HEADER_BYTES] for handle in handles if ARRAYS.pop(handle, None) is not None]
        self._kinds.device.usage.give(sum(freed))
        if SHARERS:
            _forget(SHARERS, handles)


def _forget(table: dict[int, Any], handles: Iterable[int]) -> None:
    for handle in handles:
        table.pop(handle, None)


def kind_of(handle: int) -> Kind:
    """What a buffer is."""
    return OBJECTS[handle].kind(handle)


def delete(handles: Iterable[int]) -> None:
    """Free the memory of buffers. Once is as good as twice."""
    for group, own in itertools.groupby(handles, OBJECTS.__getitem__):
        group.delete(list(own))


def hold(handle: int) -> None:
    """Somebody else looks at a buffer's memory from now on."""
    count, array = HOLDS.get(handle) or (0, live(handle))
    HOLDS[handle] = count + 1, array


def release(handle: int) -> None:
    """And does so no more."""
    count, array = HOLDS.pop(handle)
    if count > 1:
        HOLDS[handle] = count - 1, array


def live(handle: int) -> Any:
    """The array underneath.

    Raises:
      LaunchError: there is none any more.
    """
    if handle not in ARRAYS:
        raise LaunchError("the array was deleted, or donated to a call that has overwritten it; it cannot be read any more.")
    return ARRAYS[handle]


def one(array: Any, device: Device, code: int, shape: tuple[int, ...], size: int) -> int:
    """The handle of a buffer that comes to be by itself."""
    return _alone(device, code, shape, size).new([array])[0]


@functools.lru_cache(4096)
def _alone(device: Device, code: int, shape: tuple[int, ...], size: int) -> Kinds:
    return Kinds(device, [Kind(device, code, shape, size)])


def from_host(device: Device, address: int, dtype: np.dtype, shape: tuple[int, ...], strides: Sequence[int] | None) -> int:
    """Copy an array of the host, of whatever strides in bytes (None: row-major), to a device: a new buffer's handle.

    Raises:
      OutOfMemoryError: the device's HBM has no room for it.
    """
    view: Any = _view(address, dtype, shape, strides)
    device.usage.check(view.nbytes, f"an array {dtype}{list(shape)}")
    planes = np.stack([view.real, view.imag]) if dtype == COMPLEX else view
    return one(device.client.host.array(planes), device, CODES[dtype], shape, view.nbytes)


def to_host(handle: int, address: int, strides: Sequence[int] | None) -> None:
    """Copy an array of a device to memory of the host that has room for it."""
    array, kind = live(handle), kind_of(handle)
    if not kind.bytes:
        return
    if kind.code == CODES[COMPLEX]:
        view = _view(address, COMPLEX, kind.shape, strides)
        view.real, view.imag = np.asarray(array)
        return
    if strides is None and kind.code not in PACKED:
        array.block_until_ready()
        ctypes.memmove(address, array.unsafe_buffer_pointer(), kind.bytes)
        return
    values = np.asarray(array)
    np.copyto(_view(address, values.dtype, kind.shape, strides), values)


def copied(handle: int, device: Device) -> int:
    """The same values on a device, in memory of their own: a new buffer's handle.

    Raises:
      OutOfMemoryError: the device's HBM has no room for it.
    """
    kind = kind_of(handle)
    device.usage.check(kind.bytes, "a copy of an array")
    return one(device.client.host.copy(live(handle)), device, kind.code, kind.shape, kind.bytes)


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
