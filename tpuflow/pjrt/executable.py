"""PJRT executables: Programs loaded on a device, launched on buffers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Sequence
from typing import Any

from tpuflow.errors import HostMemoryError
from tpuflow.jaxprs.plugins import assigned
from tpuflow.pjrt.buffer import COMPLEX, EXTERNAL_REFERENCES, SHARED_BY, BufferType, BufferTypes, array_of, arrays_of, delete
from tpuflow.pjrt.cells import NamedValues, Numbers, Text
from tpuflow.pjrt.device import Device
from tpuflow.pjrt.envelope import ProgramMetadata, pack
from tpuflow.pjrt.failures import PjrtError, Unimplemented
from tpuflow.pjrt.handles import ApiObject
from tpuflow.pjrt.shim import LAUNCH, Launch, shim
from tpuflow.pjrt.types import CODES, TOKEN


class Loaded(ApiObject):
    """A `PJRT_LoadedExecutable`: a Program loaded on a device, or on several (`meshes.LoadedOnMesh`), in the order of the partitions.

    The cached properties are what C asks of an executable. Header: name, devices, outputs, partitions, its launch in C.
    """

    def __init__(self, program: Any, metadata: ProgramMetadata, devices: Sequence[Device]):
        from tpuflow.device.runtime import Executable

        self.program, self.metadata, self.devices, self.runs = program, metadata, devices, 0
        self.device = device = devices[0]
        host = device.client.host
        self.executable = Executable(program, fidelity=device.client.settings.fidelity, device=host.device)
        self.executable.compile()
        self._name = Text(program.name or "program")
        self._handles = Numbers([d.handle for d in devices], ctypes.c_uint64)
        super().__init__(*self._name.pair, *self._handles.pair, len(program.outputs), len(devices))
        self._outputs = [(*self._type(i, p), program.buffers[p.buffer].bytes) for i, p in enumerate(program.outputs)]
        there = [program.is_host(p.buffer) for p in program.outputs]
        self._donated = [i for i, p in enumerate(program.inputs) if p.donated]
        self._shared = _shared(program)
        self._fresh_bytes, self._call = _fresh_bytes(program), f"a call of {program.name!r}"
        self._given = [
            BufferTypes([BufferType(d.memories[at_host], *facts) for at_host, facts in zip(there, self._outputs, strict=True)])
            for d in devices
        ]
        if device.client.settings.report is not None:
            device.client.loaded.append(self)

    def _type(self, i: int, port: Any) -> tuple[int, tuple[int, ...]]:
        """Code and shape of an output as C knows them."""
        is_complex, is_token, is_stacked = (i in numbers for numbers in self.metadata.output_indices)
        code = TOKEN if is_token else CODES[COMPLEX if is_complex else port.dtype.numpy]
        return code, port.shape[is_complex + is_stacked :]

    def launch(self, arguments: Sequence[Sequence[int]], kept: Collection[int]) -> Sequence[Sequence[int]]:
        """Run once. arguments: for each device the handles of its argument buffers, which JAX has checked. kept: the positions of donated
        arguments that are not to be donated this time. Returns for each device the handles of its results, which are computed: the client
        underneath is synchronous.

        Raises:
          LaunchError: an argument has been deleted.
          OutOfMemoryError: HBM has no room for the Program beside the arrays that are there.
        """
        for device in self.devices:
            device.memory.usage.check(self._fresh_bytes, self._call)
        arrays = self._joined(arguments)
        consumed = self._consumed(arguments, arrays, kept)
        try:
            results = self.executable.launch_fitting(arrays)
            results = self._unshared(results, arrays)
        finally:
            delete(consumed)
        self.runs += 1
        if self.runs == 1:
            self._hand_over(arrays)
        return self._spread(results)

    def _hand_over(self, arrays: Sequence[Any]) -> None:
        """Let C launch from now on, where it can: a launch has shown that none has to be checked."""
        direct = self.executable.direct(arrays) if len(self.devices) == 1 else None
        if direct is None or shim() is None:
            return
        check = functools.partial(self.device.memory.usage.check, self._fresh_bytes, self._call)
        calls = check, self._finish, self._fail
        self._in_c = Launch(direct.execute, direct.handlers, direct.zero, *calls, order=direct.order, donated=self._donated)
        self.header[LAUNCH] = ctypes.addressof(self._in_c)

    def _finish(self, results: list[Any]) -> int:
        """The first handle of the results of a launch in C."""
        self.runs += 1
        return self._given[0].new(results).first

    def _fail(self, error: BaseException) -> int:
        """The handle of the error of a launch in C."""
        from tpuflow.device.host_memory import refuse_memory

        try:
            refuse_memory(self.program, error)
        except HostMemoryError as refused:
            error = refused
        return PjrtError(error).handle

    def _joined(self, arguments: Sequence[Sequence[int]]) -> list[Any]:
        """The whole arrays that the Program takes, from the devices' argument buffers."""
        (only,) = arguments
        return arrays_of(only)

    def _spread(self, results: list[Any]) -> Sequence[Sequence[int]]:
        """For each device the result buffers, from the whole arrays that the Program returns."""
        return [self._given[0].new(results).handles]

    def _consumed(self, arguments: Sequence[Sequence[int]], arrays: list[Any], kept: Collection[int]) -> list[int]:
        """The donated buffers, which the launch consumes. Where a donated array must not be overwritten, `arrays` gets a copy of it."""
        if not (kept or EXTERNAL_REFERENCES or SHARED_BY):
            return [own[i] for own in arguments for i in self._donated]
        consumed: list[int] = []
        for i in self._donated:
            pieces = [own[i] for own in arguments]
            stays = i in kept or not EXTERNAL_REFERENCES.keys().isdisjoint(pieces)
            if stays or _is_shared(pieces, arrays[i]):
                arrays[i] = self.device.client.host.copy(arrays[i])
            if not stays:
                consumed += pieces
        return consumed

    def _unshared(self, results: list[Any], arrays: list[Any]) -> list[Any]:
        """The results, copied where one has the memory of an argument or of another result."""
        if not self._shared:
            return results
        seen, own = {id(x) for x in arrays}, list(results)
        for i in self._shared:
            if id(own[i]) in seen:
                own[i] = self.device.client.host.copy(own[i])
            seen.add(id(own[i]))
        return own

    # ---- what C asks of an executable

    @functools.cached_property
    def fingerprint(self) -> Text:
        """The hash of its code."""
        from tpuflow.isa.file import code_hash

        return Text(code_hash(self.program))

    @functools.cached_property
    def serialized(self) -> Text:
        """What `load_bytes` takes.

        Raises:
          Unimplemented: it calls functions of this process.
        """
        from tpuflow.isa.file import to_bytes

        if self.program.host_lines:
            raise Unimplemented(f"{self.program.name!r} calls functions of this process (callbacks); a file cannot hold them.")
        return Text(pack(self.metadata, to_bytes(self.program)))

    @functools.cached_property
    def assignment(self) -> Text:
        """The devices that it is for, as a `DeviceAssignmentProto`."""
        return Text(assigned([d.number for d in self.devices]))

    @functools.cached_property
    def logical_ids(self) -> Numbers:
        """Of each device its replica and its partition, two ints."""
        return Numbers([partition << 32 for partition in range(len(self.devices))])

    @functools.cached_property
    def costs(self) -> NamedValues:
        """Figures of `tpuflow.stages.analysis.cost_analysis`."""
        from tpuflow.stages.analysis import cost_analysis

        return NamedValues(cost_analysis(self.program, self.executable.time()))

    @functools.cached_property
    def memory(self) -> Any:
        """Figures of `tpuflow.stages.analysis.memory_analysis`."""
        from tpuflow.stages.analysis import memory_analysis

        return memory_analysis(self.program)

    @functools.cached_property
    def output_types(self) -> Numbers:
        """PJRT's code of each output's element type."""
        return Numbers([code for code, _, _ in self._outputs], ctypes.c_int)

    @functools.cached_property
    def output_dimensions(self) -> tuple[Numbers, Numbers]:
        """All outputs' dimensions one after the other, and how many each has."""
        shapes = [shape for _, shape, _ in self._outputs]
        return Numbers([n for shape in shapes for n in shape]), Numbers([len(shape) for shape in shapes])

    @functools.cached_property
    def output_memories(self) -> tuple[Numbers, Numbers]:
        """The kind of memory of each output, as addresses and sizes."""
        return self._kinds(self.program.outputs)

    @functools.cached_property
    def parameter_memories(self) -> tuple[Numbers, Numbers]:
        """The kind of memory of each input, likewise."""
        return self._kinds(self.program.inputs)

    def _kinds(self, ports: Sequence[Any]) -> tuple[Numbers, Numbers]:
        kinds = [self.device.memories[self.program.is_host(p.buffer)].kind for p in ports]
        return Numbers([kind.address for kind in kinds], ctypes.c_uint64), Numbers([kind.size for kind in kinds])


class Unloaded(ApiObject):
    """A `PJRT_Executable`: another handle of a loaded Program, since both kinds of executables are one object here. Header: as `Loaded`."""

    def __init__(self, loaded: Loaded):
        self.loaded = loaded
        super().__init__(*loaded.header[1:])


def _shared(program: Any) -> list[int]:
    """The indices of outputs whose buffer is that of an input or of an earlier output."""
    seen, found = {p.buffer for p in program.inputs}, []
    for i, p in enumerate(program.outputs):
        if p.buffer in seen:
            found.append(i)
        seen.add(p.buffer)
    return found


def _is_shared(pieces: Sequence[int], array: Any) -> bool:
    """Whether buffers other than these share an array."""
    if SHARED_BY.keys().isdisjoint(pieces):
        return False
    owners = [handle for handle in pieces if array_of(handle) is array]
    return any(SHARED_BY.get(handle, 1) > len(owners) for handle in owners)


def _fresh_bytes(program: Any) -> int:
    """Bytes of HBM that a launch needs beside its arguments."""
    from tpuflow.device.limits import occupied_bytes

    given = {p.buffer for p in program.inputs if not program.is_host(p.buffer)}
    return max(0, occupied_bytes(program, ("hbm",)) - sum(program.buffers[b].bytes for b in given))
