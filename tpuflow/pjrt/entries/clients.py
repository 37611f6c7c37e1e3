"""Entries about the plugin, and about the client and its topology, which are one object."""

from __future__ import annotations

import ctypes
import functools

from tpuflow.jaxprs.plugins import stablehlo_versions
from tpuflow.pjrt.cells import INT, Args, NamedValues, text_at, words
from tpuflow.pjrt.device import Client
from tpuflow.pjrt.failures import Unimplemented
from tpuflow.pjrt.handles import OBJECTS, collect
from tpuflow.pjrt.loading import compile_module
from tpuflow.pjrt.report import write_at_exit
from tpuflow.pjrt.settings import Settings
from tpuflow.pjrt.table import entry


@functools.cache
def _attributes() -> NamedValues:
    current, least = stablehlo_versions()
    return NamedValues({"xla_version": 2, "stablehlo_current_version": current, "stablehlo_minimum_version": least})


@entry("Plugin_Attributes")
def _plugin_attributes(args: Args) -> None:
    args[2], args[3] = _attributes().pair


@entry("Client_Create")
def _create(args: Args) -> None:
    client = Client(Settings.from_environment())
    if client.settings.report is not None:
        write_at_exit(client, client.settings.report)
    args[8] = client.handle


@entry("Client_UpdateGlobalProcessInfo")
def _hear_of_processes(args: Args) -> None:
    """How the other processes of `jax.distributed` are, none of which has to do with these devices; jaxlib ends a process whose plugins do
    not want to know."""


@entry("Client_LookupDevice", "Client_LookupAddressableDevice")
def _lookup(args: Args) -> None:
    number, devices = args[3] & INT, OBJECTS[args[2]].devices
    if number >= len(devices):
        raise LookupError(f"there is no device {number}; there are {len(devices)} (TPUFLOW_DEVICES).")
    args[4] = devices[number].handle


@entry("Client_DefaultDeviceAssignment")
def _assignment(args: Args) -> None:
    replicas, partitions = args[3] & INT, args[3] >> 32
    numbers = (ctypes.c_int * (replicas * partitions)).from_address(args[5])
    numbers[:] = range(replicas * partitions)


@entry("Client_Compile")
def _compile(args: Args) -> None:
    collect()
    program = words(args[3], 6)
    form = text_at(program[4], program[5])
    if form != "mlir":
        raise Unimplemented(f"a program in the form {form!r}; the simulated device compiles StableHLO (mlir).")
    module, options = ctypes.string_at(program[2], program[3]), ctypes.string_at(args[4], args[5])
    args[6] = compile_module(OBJECTS[args[2]], module, options).handle
