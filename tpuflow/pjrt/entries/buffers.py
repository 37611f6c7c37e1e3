"""Entries about buffers."""

from __future__ import annotations

from tpuflow.pjrt.buffer import (
    COMPLEX,
    add_external_reference,
    array_of,
    copy_to,
    delete,
    drop_external_reference,
    from_host,
    strides_of,
    to_host,
    type_of,
)
from tpuflow.pjrt.cells import INT, Args, integers, words
from tpuflow.pjrt.device import Device
from tpuflow.pjrt.failures import Unimplemented
from tpuflow.pjrt.fields import READY
from tpuflow.pjrt.handles import OBJECTS, collect
from tpuflow.pjrt.table import entry
from tpuflow.pjrt.types import CODES, NUMPY, PACKED, numpy_type


@entry("Client_BufferFromHostBuffer")
def _from_host(args: Args) -> None:
    collect()
    shape = integers(args[5], args[6])
    strides = integers(args[7], args[8]) if args[8] else None
    dtype = numpy_type(args[4] & INT)
    if args[12] and (order := _order(args[12])) is not None and order != tuple(reversed(range(len(shape)))):
        raise Unimplemented(f"an array with its axes in the order {order} in the device's memory; they lie there row-major.")
    memory = OBJECTS[args[11]] if args[11] else OBJECTS[args[10]].memory
    args[14] = from_host(memory, args[3], dtype, shape, strides)
    args[13] = READY


def _order(layout: int) -> tuple[int, ...] | None:
    """The axes of a tiled layout from the fastest to the slowest; None if it is given by strides."""
    found = words(layout, 10)
    tiled = found[9] & INT == 0
    return integers(found[4], found[5]) if tiled else None


@entry("Buffer_ToHostBuffer")
def _to_host(args: Args) -> None:
    kind = type_of(args[2])
    args[6] = READY
    if not args[4]:
        args[5] = kind.bytes
        return
    if args[5] < kind.bytes:
        raise ValueError(f"{args[5]} bytes of room for an array of {kind.bytes}.")
    to_host(args[2], args[4], _strides(args[3], kind.shape, NUMPY[kind.code].itemsize) if args[3] else None)


def _strides(layout: int, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Strides of a layout; None if it is row-major."""
    order = _order(layout)
    if order is None:
        found = words(layout, 6)
        return integers(found[4], found[5])
    return None if order == tuple(reversed(range(len(shape)))) else strides_of(order, shape, itemsize)


@entry("Buffer_Delete")
def _delete(args: Args) -> None:
    delete((args[2],))


@entry("Buffer_CopyToDevice", "Buffer_CopyToMemory")
def _copy(args: Args) -> None:
    collect()
    place = OBJECTS[args[3]]
    args[4] = copy_to(args[2], place.memory if isinstance(place, Device) else place)


@entry("Buffer_UnsafePointer", "Buffer_OpaqueDeviceMemoryDataPointer")
def _pointer(args: Args) -> None:
    code = type_of(args[2]).code
    if code == CODES[COMPLEX]:
        raise Unimplemented("the memory of an array of complex numbers: it is two planes here. Read it with np.asarray(x).")
    if code in PACKED:
        raise Unimplemented(f"the memory of an array of {NUMPY[code]}: several lie in a byte there. Read it with np.asarray(x).")
    args[3] = array_of(args[2]).unsafe_buffer_pointer()


@entry("Buffer_IncreaseExternalReferenceCount")
def _hold(args: Args) -> None:
    add_external_reference(args[2])


@entry("Buffer_DecreaseExternalReferenceCount")
def _release(args: Args) -> None:
    drop_external_reference(args[2])
