"""PJRT buffers: each is an array of the CPU client underneath, counted as bytes of the memory that it stands for.

A call returns hundreds of buffers, so none has a Python object of its own: a buffer is a handle, the address of its header. The headers of
buffers that were made together, their arrays and their types are in one `BufferGroup`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuflow.errors import LaunchError
from tpuflow.pjrt.cells import dimensions
from tpuflow.pjrt.device import Memory, Usage
from tpuflow.pjrt.handles import ARRAYS, HEADER_BYTES, INDEX, OBJECT, OBJECTS, WORDS
from tpuflow.pjrt.types import CODES, PACKED

DEVICE, MEMORY, CODE, DELETED, DIMENSIONS, RANK, BYTES, ZERO = range(1, 9)
"""The numbers of the words of a buffer's header."""

COMPLEX = np.dtype(np.complex64)

EXTERNAL_REFERENCES: dict[int, tuple[int, Any]] = {}
"""Handle -> (the count of external references to the buffer's memory, such as dlpack's; its array). The table keeps the memory alive when
the buffer is deleted, and nothing may overwrite it."""

SHARED_BY: dict[int, int] = {}
"""Handle -> how many buffers share its array: those of one replicated result of a launch, one a device. Buffers that share nothing are not
in the table."""


@dataclass(frozen=True, slots=True)
class BufferType:
    """The type of a buffer: its memory, PJRT's code of its element type, its shape, and its bytes there."""

    memory: Memory
    code: int
    shape: tuple[int, ...]
    bytes: int


class BufferTypes:
    """The types of the buffers that are made together, such as the results of an executable, with a template of their headers."""

    def __init__(self, kinds: Sequence[BufferType]):
        self.rows = kinds
        sizes: dict[Usage, list[int]] = defaultdict(list)
        for kind in kinds:
            sizes[kind.memory.usage].append(kind.bytes)
        self._taken = [(usage, sum(own), len(own), max(own)) for usage, own in sizes.items()]
        self._shapes = [dimensions(kind.shape) for kind in kinds]
        words = []
        for kind, shape in zip(kinds, self._shapes, strict=True):
            fields = (0, kind.memory.device.handle, kind.memory.handle, kind.code, 0, *shape.pair, kind.bytes)
            words += fields + (0,) * (WORDS - len(fields))
            words[INDEX - WORDS] = len(words) // WORDS - 1
        self._type: Any = ctypes.c_uint64 * len(words)
        self._template = self._type(*words)

    def new(self, arrays: list[Any]) -> BufferGroup:
        """Make buffers for these arrays, whose list becomes the group's."""
        for usage, size, count, largest in self._taken:
            usage.allocate(size, count, largest)
        return BufferGroup(self, self._type.from_buffer_copy(self._template), arrays)

    def free(self) -> None:
        """Count the bytes of one buffer of each type less."""
        for usage, size, _, _ in self._taken:
            usage.free(size)


class BufferGroup:
    """Buffers that were made together: the memory of their headers, which C reads until it has destroyed them all, and their arrays. None
    stands for the array of a buffer that is deleted, donated or destroyed. A complex array is two planes, f32[2, *shape], as Programs take
    and return them (`ComplexType.port`). first: the handle of the first buffer."""

    __slots__ = ("_headers", "_kinds", "arrays", "first", "handles")

    def __init__(self, kinds: BufferTypes, headers: Any, arrays: list[Any]):
        self._kinds, self._headers, self.arrays, self.first = kinds, headers, arrays, ctypes.addressof(headers)
        if arrays:
            headers[OBJECT], headers[ARRAYS] = id(self), id(arrays)
        self.handles = list(range(self.first, self.first + HEADER_BYTES * len(arrays), HEADER_BYTES))
        for handle in self.handles:
            OBJECTS[handle] = self

    def indices(self, handles: Iterable[int]) -> list[int]:
        """The numbers of buffers."""
        first = self.first
        return [(handle - first) // HEADER_BYTES for handle in handles]

    def kind(self, index: int) -> BufferType:
        """The type of one of them."""
        return self._kinds.rows[index]

    def drop(self, indices: Sequence[int]) -> list[int]:
        """Drop the arrays of some of them; returns those that had one."""
        arrays, held = self.arrays, []
        for i in indices:
            if arrays[i] is not None:
                arrays[i] = None
                self._headers[i * WORDS + DELETED] = 1
                held.append(i)
        return held

    def deleted(self, indices: Sequence[int], held: Sequence[int]) -> None:
        """Count the bytes of buffers as free, after `drop`, which returned `held`."""
        if len(held) == len(self.arrays):
            self._kinds.free()
        else:
            for i in held:
                kind = self._kinds.rows[i]
                kind.memory.usage.free(kind.bytes)
        if SHARED_BY:
            for i in indices:
                SHARED_BY.pop(self.handles[i], None)

    def destroyed(self, indices: Sequence[int], held: Sequence[int]) -> None:
        """Called when C has destroyed some of them, after `drop`, which returned `held`."""
        self.deleted(indices, held)
        if EXTERNAL_REFERENCES:
            for i in indices:
                EXTERNAL_REFERENCES.pop(self.handles[i], None)


def type_of(handle: int) -> BufferType:
    """The type of a buffer."""
    group = OBJECTS[handle]
    return group.kind(*group.indices((handle,)))


def delete(handles: Iterable[int]) -> None:
    """Free the memory of buffers. Deleting a buffer again does nothing."""
    for group, own in itertools.groupby(handles, OBJECTS.__getitem__):
        indices = group.indices(own)
        group.deleted(indices, group.drop(indices))


def add_external_reference(handle: int) -> None:
    """Count one more external reference to a buffer's memory, which keeps it alive."""
    count, array = EXTERNAL_REFERENCES.get(handle) or (0, array_of(handle))
    EXTERNAL_REFERENCES[handle] = count + 1, array


def drop_external_reference(handle: int) -> None:
    """Count one external reference less."""
    count, array = EXTERNAL_REFERENCES.pop(handle)
    if count > 1:
        EXTERNAL_REFERENCES[handle] = count - 1, array


def array_of(handle: int) -> Any:
    """The array of a buffer.

    Raises:
      LaunchError: the buffer was deleted or donated.
    """
    (array,) = arrays_of((handle,))
    return array


def arrays_of(handles: Iterable[int]) -> list[Any]:
    """The arrays of buffers.

    Raises:
      LaunchError: one was deleted or donated.
    """
    arrays = []
    for handle in handles:
        group = OBJECTS[handle]
        array = group.arrays[(handle - group.first) // HEADER_BYTES]
        if array is None:
            raise LaunchError("the array was deleted, or donated to a call that has overwritten it; it cannot be read any more.")
        arrays.append(array)
    return arrays


def new_buffer(array: Any, memory: Memory, code: int, shape: tuple[int, ...], size: int) -> int:
    """Make a single buffer, and return its handle."""
    return _alone(memory, code, shape, size).new([array]).first


@functools.lru_cache(4096)
def _alone(memory: Memory, code: int, shape: tuple[int, ...], size: int) -> BufferTypes:
    return BufferTypes([BufferType(memory, code, shape, size)])


def from_host(memory: Memory, address: int, dtype: np.dtype, shape: tuple[int, ...], strides: Sequence[int] | None) -> int:
    """Copy an array at an address of the host to a memory, and return the new buffer's handle. strides: in bytes; None: row-major.

    Raises:
      OutOfMemoryError: the device's HBM has no room for it.
    """
    view: Any = _view(address, dtype, shape, strides)
    memory.usage.check(view.nbytes, f"an array {dtype}{list(shape)}")
    planes = np.stack([view.real, view.imag]) if dtype == COMPLEX else view
    return new_buffer(memory.device.client.host.array(planes), memory, CODES[dtype], shape, view.nbytes)


def to_host(handle: int, address: int, strides: Sequence[int] | None) -> None:
    """Copy an array of a device to memory of the host that has room for it."""
    array, kind = array_of(handle), type_of(handle)
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


def copy_to(handle: int, memory: Memory) -> int:
    """Copy a buffer to a memory, and return the new buffer's handle.

    Raises:
      OutOfMemoryError: the device's HBM has no room for it.
    """
    kind = type_of(handle)
    memory.usage.check(kind.bytes, "a copy of an array")
    return new_buffer(memory.device.client.host.copy(array_of(handle)), memory, kind.code, kind.shape, kind.bytes)


def _view(address: int, dtype: np.dtype, shape: tuple[int, ...], strides: Sequence[int] | None) -> np.ndarray:
    """A NumPy view of memory of the caller's. Strides can be negative: the address is that of the first element."""
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
