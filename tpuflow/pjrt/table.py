"""`PJRT_Api`, the function table of PJRT's C API: its entries in their order, and the function that each calls."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from tpuflow.pjrt.cells import Args, Pointer, words
from tpuflow.pjrt.failures import PjrtError, Unimplemented
from tpuflow.pjrt.fields import CONSTANTS, DESTROY, FIELDS, NOTHING_TO_DO
from tpuflow.pjrt.handles import NATIVE, WORDS, destroy
from tpuflow.pjrt.machine_code import MachineCode
from tpuflow.pjrt.shutdown import SHUTDOWN

VERSION = (0, 104)
"""The version of the API that is implemented. jaxlib 0.10 accepts 0.29 and later; from 0.105 on errors carry function tables of their own,
which handles cannot."""

ENTRIES = tuple(
    """
    Error_Destroy Error_Message Error_GetCode Plugin_Initialize Plugin_Attributes
    Event_Destroy Event_IsReady Event_Error Event_Await Event_OnReady
    Client_Create Client_Destroy Client_PlatformName Client_ProcessIndex Client_PlatformVersion Client_Devices Client_AddressableDevices
    Client_LookupDevice Client_LookupAddressableDevice Client_AddressableMemories Client_Compile Client_DefaultDeviceAssignment
    Client_BufferFromHostBuffer
    DeviceDescription_Id DeviceDescription_ProcessIndex DeviceDescription_Attributes DeviceDescription_Kind DeviceDescription_DebugString
    DeviceDescription_ToString
    Device_GetDescription Device_IsAddressable Device_LocalHardwareId Device_AddressableMemories Device_DefaultMemory Device_MemoryStats
    Memory_Id Memory_Kind Memory_DebugString Memory_ToString Memory_AddressableByDevices
    Executable_Destroy Executable_Name Executable_NumReplicas Executable_NumPartitions Executable_NumOutputs
    Executable_SizeOfGeneratedCodeInBytes Executable_GetCostAnalysis Executable_OutputMemoryKinds Executable_OptimizedProgram
    Executable_Serialize
    LoadedExecutable_Destroy LoadedExecutable_GetExecutable LoadedExecutable_AddressableDevices LoadedExecutable_Delete
    LoadedExecutable_IsDeleted LoadedExecutable_Execute Executable_DeserializeAndLoad LoadedExecutable_Fingerprint
    Buffer_Destroy Buffer_ElementType Buffer_Dimensions Buffer_UnpaddedDimensions Buffer_DynamicDimensionIndices Buffer_GetMemoryLayout
    Buffer_OnDeviceSizeInBytes Buffer_Device Buffer_Memory Buffer_Delete Buffer_IsDeleted Buffer_CopyToDevice Buffer_ToHostBuffer
    Buffer_IsOnCpu Buffer_ReadyEvent Buffer_UnsafePointer Buffer_IncreaseExternalReferenceCount Buffer_DecreaseExternalReferenceCount
    Buffer_OpaqueDeviceMemoryDataPointer
    CopyToDeviceStream_Destroy CopyToDeviceStream_AddChunk CopyToDeviceStream_TotalBytes CopyToDeviceStream_GranuleSize
    CopyToDeviceStream_CurrentBytes
    TopologyDescription_Create TopologyDescription_Destroy TopologyDescription_PlatformName TopologyDescription_PlatformVersion
    TopologyDescription_GetDeviceDescriptions TopologyDescription_Serialize TopologyDescription_Attributes
    Compile
    Executable_OutputElementTypes Executable_OutputDimensions Buffer_CopyToMemory Client_CreateViewOfDeviceBuffer Executable_Fingerprint
    Client_TopologyDescription Executable_GetCompiledMemoryStats Memory_Kind_Id ExecuteContext_Create ExecuteContext_Destroy
    Buffer_CopyRawToHost
    AsyncHostToDeviceTransferManager_Destroy AsyncHostToDeviceTransferManager_TransferData Client_CreateBuffersForAsyncHostToDevice
    AsyncHostToDeviceTransferManager_RetrieveBuffer AsyncHostToDeviceTransferManager_Device AsyncHostToDeviceTransferManager_BufferCount
    AsyncHostToDeviceTransferManager_BufferSize AsyncHostToDeviceTransferManager_SetBufferError
    AsyncHostToDeviceTransferManager_AddMetadata
    Client_DmaMap Client_DmaUnmap Client_CreateUninitializedBuffer Client_UpdateGlobalProcessInfo TopologyDescription_Deserialize
    Client_CreateAliasBuffer Client_FulfillAliasBuffer LoadedExecutable_GetDeviceAssignment Client_CreateErrorBuffer
    AsyncHostToDeviceTransferManager_TransferLiteral Buffer_CopyRawToHostFuture Device_PoisonExecution Device_CreateAsyncTrackingEvent
    AsyncTrackingEvent_Destroy Executable_GetCompileOptions Buffer_DonateWithControlDependency Event_Create Event_Set
    Device_GetAttributes Client_Load LoadedExecutable_AddressableDeviceLogicalIds Buffer_Bitcast Error_ForEachPayload
    TopologyDescription_Fingerprint Executable_ParameterMemoryKinds
    """.split()
)
"""The fields of `PJRT_Api` behind its version, without their prefix `PJRT_`."""

INFALLIBLE = frozenset(
    {"LoadedExecutable_GetExecutable", "LoadedExecutable_AddressableDeviceLogicalIds", "LoadedExecutable_GetDeviceAssignment"}
)
"""What jaxlib asks of an executable that it has just been given, to abort the process if it is told an error: answered to the end."""

UNHEARD = frozenset({"Device_MemoryStats"})
"""What jaxlib asks now and then without looking at errors: an interrupt in these is told to what it calls next in the same call."""

_HEAD = 5  # words: the table's size and extensions; the version's size, extensions, and two ints
_Entry = ctypes.CFUNCTYPE(ctypes.c_void_p, Pointer)
_Destroyer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

Function = Callable[[Args], Any]
FUNCTIONS: dict[str, Function] = {}
"""Entry -> its function, which takes the argument struct; an exception becomes the `PJRT_Error` that the entry returns."""


def entry(*names: str) -> Callable[[Function], Function]:
    """A decorator: the function implements these entries."""

    def register(function: Function) -> Function:
        for name in names:
            assert name in ENTRIES and name not in FUNCTIONS, name
            FUNCTIONS[name] = function
        return function

    return register


class Table:
    """The table in memory. It is never freed: jaxlib keeps its address, and calls through it until the process has ended."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._words = (ctypes.c_uint64 * (_HEAD + len(ENTRIES)))()
        self._words[0], self._words[2] = ctypes.sizeof(self._words), 24
        self._words[4] = VERSION[0] | VERSION[1] << 32
        known = _native()
        for name in ENTRIES:
            self[name] = known.get(name) or self._in_python(name)
        self.address = ctypes.addressof(self._words)
        TABLES.append(self)

    def __getitem__(self, name: str) -> int:
        """The address of an entry."""
        return self._words[_HEAD + ENTRIES.index(name)]

    def __setitem__(self, name: str, address: int) -> None:
        self._words[_HEAD + ENTRIES.index(name)] = address

    def _in_python(self, name: str) -> int:
        if name in DESTROY:
            function: Any = _Destroyer(lambda args: destroy((words(args, 3)[2],)))
        else:
            function = _Entry(_guarded(name, FUNCTIONS.get(name) or _known(name) or _missing(name)))
        self._kept.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def retire(self) -> None:
        """Replace the entries that destroy objects by ones that do nothing, at the end of the process.

        jaxlib's threads destroy executables late, and a callback into an interpreter that is shutting down ends its thread inside of a
        destructor, which aborts the process.
        """
        for name in ENTRIES:
            if name.endswith(("_Destroy", "_Delete")):
                self[name] = NO_OPERATION


TABLES: list[Table] = []
"""The table that JAX was given, once it was."""

NO_OPERATION = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
"""The address of a C function that does nothing: `sched_yield` ignores its arguments and returns 0."""


def _native() -> dict[str, int]:
    """The addresses of the entries in machine code: none where the host has none."""
    if NATIVE is None:
        return {}
    code = {name: made for name in ENTRIES if (made := _code(NATIVE.code, name)) is not None}
    return {**dict(zip(code, NATIVE.load(tuple(code.values())), strict=True)), **dict.fromkeys(DESTROY, NATIVE.destroy)}


def _code(code: MachineCode, name: str) -> bytes | None:
    """The machine code of an entry; None if it needs Python."""
    if name in FIELDS:
        return code.copy(FIELDS[name])
    if name in CONSTANTS:
        return code.constant(CONSTANTS[name])
    if name in NOTHING_TO_DO:
        return code.nothing
    return code.call_back if name == "Event_OnReady" else None


def _known(name: str) -> Function | None:
    """The same in Python, for hosts without machine code."""
    if name in FIELDS:
        return functools.partial(_copy, FIELDS[name])
    if name in CONSTANTS:
        return functools.partial(_constant, CONSTANTS[name])
    if name in NOTHING_TO_DO:
        return lambda args: None
    return _call_back if name == "Event_OnReady" else None


def _copy(fields: Sequence[int], args: Args) -> None:
    header = words(args[2], WORDS)
    for place, field in enumerate(fields):
        args[3 + place] = header[field]


def _constant(value: int, args: Args) -> None:
    args[3] = value


def _call_back(args: Args) -> None:
    _Callback(args[3])(None, args[4])


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def _guarded(name: str, function: Function) -> Callable[[Args], int | None]:
    """An entry that returns exceptions as `PJRT_Error`s: none may leave a C callback."""

    def call(args: Args) -> int | None:
        try:
            if SHUTDOWN.begun and name not in INFALLIBLE:
                SHUTDOWN.hold()
            if _untold and name not in INFALLIBLE | UNHEARD:
                _tell(_caller(sys._getframe().f_back))
            function(args)
        except BaseException as error:
            if name in UNHEARD and isinstance(error, KeyboardInterrupt):
                _untold[:] = [(error, _caller(sys._getframe().f_back))]
            return _told(error)
        return None

    return call


def _told(error: BaseException) -> int:
    """The handle of the `PJRT_Error` of an exception in an entry."""
    while True:
        try:
            return PjrtError(error).handle
        except KeyboardInterrupt as interrupt:
            error = interrupt


def _caller(frame: FrameType | None) -> tuple[int, int] | None:
    """The call into jaxlib that an entry is part of; None if a thread of jaxlib's own makes it."""
    return None if frame is None else (id(frame), frame.f_lasti)


def _tell(caller: tuple[int, int] | None) -> None:
    """Raise what an earlier entry of the same call could not tell; in another call it has been heard: only some ignore it."""
    if caller is not None and threading.current_thread() is threading.main_thread():
        error, where = _untold.pop()
        if caller == where:
            raise error


_untold: list[tuple[KeyboardInterrupt, tuple[int, int] | None]] = []
"""Ctrl-C in an entry of which perhaps nobody hears errors, and the call that it was in."""


def _missing(name: str) -> Function:
    def refuse(args: Args) -> None:
        raise Unimplemented(f"the simulated device does not implement PJRT_{name}.")

    return refuse
