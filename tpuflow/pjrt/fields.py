"""Tables of the entries that only copy fields of an object's header, or write a constant."""

from __future__ import annotations

from tpuflow.pjrt.buffer import BYTES, CODE, DELETED, DEVICE, DIMENSIONS, MEMORY, RANK, ZERO

READY = 16
"""The handle of every event, each of which is ready: a call returns only when its results are computed."""

FIELDS: dict[str, tuple[int, ...]] = {
    "Error_GetCode": (1,),
    "Error_Message": (2, 3),
    "Client_TopologyDescription": (1,),
    "Client_PlatformName": (2, 3),
    "TopologyDescription_PlatformName": (2, 3),
    "Client_PlatformVersion": (4, 5),
    "TopologyDescription_PlatformVersion": (4, 5),
    "Client_Devices": (6, 7),
    "Client_AddressableDevices": (6, 7),
    "TopologyDescription_GetDeviceDescriptions": (6, 7),
    "Client_AddressableMemories": (8, 9),
    "TopologyDescription_Attributes": (10, 11),
    "Device_GetDescription": (11,),
    "DeviceDescription_Id": (1,),
    "Device_LocalHardwareId": (1,),
    "DeviceDescription_Kind": (2, 3),
    "DeviceDescription_DebugString": (4, 5),
    "DeviceDescription_ToString": (4, 5),
    "Device_DefaultMemory": (6,),
    "Device_AddressableMemories": (7, 8),
    "DeviceDescription_Attributes": (10, 9),
    "Memory_Id": (1,),
    "Memory_Kind_Id": (8,),
    "Memory_Kind": (2, 3),
    "Memory_DebugString": (4, 5),
    "Memory_ToString": (4, 5),
    "Memory_AddressableByDevices": (6, 7),
    "Executable_Name": (1, 2),
    "LoadedExecutable_AddressableDevices": (3, 4),
    "Executable_NumOutputs": (5,),
    "Executable_NumPartitions": (6,),
    "Buffer_Device": (DEVICE,),
    "Buffer_Memory": (MEMORY,),
    "Buffer_ElementType": (CODE,),
    "Buffer_IsDeleted": (DELETED,),
    "Buffer_Dimensions": (DIMENSIONS, RANK),
    "Buffer_UnpaddedDimensions": (DIMENSIONS, RANK),
    "Buffer_OnDeviceSizeInBytes": (BYTES,),
    "Buffer_DynamicDimensionIndices": (ZERO, ZERO),
}
"""Entry -> the words, of the header of the object in its argument 2, that it copies into its arguments from 3 on."""

CONSTANTS: dict[str, int] = {
    "Event_IsReady": 1,
    "Client_ProcessIndex": 0,
    "DeviceDescription_ProcessIndex": 0,
    "Device_IsAddressable": 1,
    "Executable_NumReplicas": 1,
    "LoadedExecutable_IsDeleted": 0,
    "Buffer_IsOnCpu": 0,
    "Buffer_ReadyEvent": READY,
}
"""Entry -> the constant that it writes into its argument 3."""

NOTHING_TO_DO = (
    "Plugin_Initialize",
    "Event_Destroy",
    "Event_Error",
    "Event_Await",
    "Error_ForEachPayload",
    "TopologyDescription_Destroy",
    "LoadedExecutable_Delete",
)

DESTROY = ("Error_Destroy", "Client_Destroy", "Executable_Destroy", "LoadedExecutable_Destroy", "Buffer_Destroy")
