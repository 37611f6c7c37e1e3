"""Calls of NumPy functions that XLA finds by name (its foreign function interface), so that executables with them can be serialised.

What `python_calls` puts in an executable is an object of this process. Here the executable has a name and a string, and each process
registers the function of that name. The structures are those of `xla/ffi/api/c_api.h`, which is the same from jaxlib 0.8 to 0.10 as far as
they go.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[..., Array]
"""(text, *arrays) -> the result: arrays are read-only views of XLA's own, valid during the call."""

_METADATA = 1  # the type of the extension with which XLA asks what version a handler is for, instead of calling it
_VERSION = 0, 1  # of the interface: the least that XLA takes, which has all that is used here
_INTERNAL = 13  # the code of an error in the function
_TYPES = {1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 6: np.uint8, 7: np.uint16, 8: np.uint32, 10: np.float16, 11: np.float32}
"""XLA's element types that NumPy has, by number."""


def _structure(**fields: Any) -> Any:
    return type("structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


_HEAD = {"size": ctypes.c_size_t, "extension": ctypes.c_void_p}
_COUNTED = {**_HEAD, "count": ctypes.c_int64, "kinds": ctypes.c_void_p}
_Version = _structure(**_HEAD, major=ctypes.c_int, minor=ctypes.c_int)
_Failure = _structure(**_HEAD, message=ctypes.c_char_p, code=ctypes.c_int)
_Api = _structure(**_HEAD, version=_Version, internal=ctypes.c_void_p, failed=ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Failure)))
_Metadata = _structure(size=ctypes.c_size_t, version=_Version)
_Extension = _structure(size=ctypes.c_size_t, type=ctypes.c_int, next=ctypes.c_void_p, metadata=ctypes.POINTER(_Metadata))
_Buffer = _structure(**_HEAD, type=ctypes.c_int, data=ctypes.c_void_p, rank=ctypes.c_int64, shape=ctypes.POINTER(ctypes.c_int64))
_Buffers = _structure(**_COUNTED, each=ctypes.POINTER(ctypes.POINTER(_Buffer)))
_Text = _structure(data=ctypes.c_void_p, length=ctypes.c_size_t)
_Attributes = _structure(**_COUNTED, names=ctypes.c_void_p, each=ctypes.POINTER(ctypes.POINTER(_Text)))
_Frame = _structure(
    size=ctypes.c_size_t, extension=ctypes.POINTER(_Extension), api=ctypes.POINTER(_Api), context=ctypes.c_void_p, stage=ctypes.c_int,
    arguments=_Buffers, results=_Buffers, attributes=_Attributes,
)  # fmt: skip


_under_way: deque[Any] = deque()


def wait_at_exit(result: Any) -> None:
    """Have the process wait before it ends for the execution that this is a result of, if it has foreign calls: Python would end XLA's
    thread in such a call by unwinding its stack, which aborts the process. What is done is forgotten when this is called the next time."""
    if not _under_way:
        atexit.register(_wait)  # the first time, and so before JAX takes its devices down
    with contextlib.suppress(IndexError):  # another thread was here first
        while _under_way[0].is_ready():
            _under_way.popleft()
    _under_way.append(result)


def _wait() -> None:
    while _under_way:
        with contextlib.suppress(Exception):  # that it has failed is for whoever looks at its results
            _under_way.popleft().block_until_ready()


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
_functions: dict[str, Function] = {}
_handlers: list[Any] = []


def foreign_call(name: str, function: Function) -> Callable[..., Any]:
    """Registers a function under a name in this process; returns (text, type of the result, *arrays) -> the result, traced.

    An error in the function fails the execution, with its text. Under `vmap` it is one call to XLA, and one of the function for each lane.
    A function of the same name takes the place of the one before.
    """
    known = name in _functions
    _functions[name] = function
    if not known:
        handler = _Handler(lambda frame: _handle(name, frame.contents))
        _handlers.append(handler)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        jax.ffi.register_ffi_target(name, new(ctypes.cast(handler, ctypes.c_void_p), None, None), platform="cpu")

    def call(text: str, result: jax.ShapeDtypeStruct, *arrays: Any) -> Any:
        return jax.ffi.ffi_call(name, result, vmap_method="expand_dims")(*arrays, text=f"{len(result.shape)} {text}")

    return call


def _handle(name: str, frame: Any) -> int | None:
    """What XLA calls: the address of an error, or None."""
    if frame.extension and frame.extension.contents.type == _METADATA:
        version = frame.extension.contents.metadata.contents.version
        version.major, version.minor = _VERSION
        return None
    try:
        written = frame.attributes.each[0].contents
        rank, text = ctypes.string_at(written.data, written.length).decode().split(" ", 1)
        arrays = [_view(frame.arguments.each[n].contents) for n in range(frame.arguments.count)]
        for x in arrays:
            x.flags.writeable = False
        result = _view(frame.results.each[0].contents)
        for lane in np.ndindex(result.shape[: result.ndim - int(rank)]):
            result[lane] = _functions[name](text, *(x[_of_lane(lane, x.shape)] for x in arrays))
        return None
    except BaseException as problem:
        message = f"{type(problem).__name__}: {problem}".encode()
        return frame.api.contents.failed(ctypes.byref(_Failure(ctypes.sizeof(_Failure), None, message, _INTERNAL)))


def _of_lane(lane: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where a lane's part of an array is, whose leading axes are of length 1 where it is the same for all lanes."""
    return tuple(0 if n == 1 else at for at, n in zip(lane, shape, strict=False))


def _view(buffer: Any) -> Array:
    dtype = np.dtype(_TYPES[buffer.type])
    shape = tuple(buffer.shape[n] for n in range(buffer.rank))
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(buffer.data)).view(dtype).reshape(shape)
