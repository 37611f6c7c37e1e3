"""Programs on the device: compiled from StableHLO, or read again from the bytes of a .tpx file; launched on buffers."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from tpuflow.errors import ConfigError, ProgramFileError
from tpuflow.jaxprs.plugins import assigned, partitions
from tpuflow.pjrt.buffer import COMPLEX, Buffer, Headers
from tpuflow.pjrt.cells import NamedValues, Numbers, Text
from tpuflow.pjrt.device import Client, Device
from tpuflow.pjrt.failures import Unimplemented
from tpuflow.pjrt.things import WORDS, Thing
from tpuflow.pjrt.types import CODES

STACK_BYTES = 256 * 2**20


class Loaded(Thing):
    """A Program loaded on a device; `complex_outputs`: the results that are planes of complex numbers. What C reads of it lies here, made
    when it is first asked for. Header: name, devices, outputs."""

    def __init__(self, program: Any, complex_outputs: Collection[int], device: Device):
        from tpuflow.device.runtime import Executable

        self.program, self.device, self.runs = program, device, 0
        host = device.client.host
        self.executable = Executable(program, fidelity=device.client.settings.fidelity, device=host.device)
        self.executable.compile()
        self._name = Text(program.name or "program")
        self._devices = Numbers([device.handle], ctypes.c_uint64)
        super().__init__(*self._name.pair, *self._devices.pair, len(program.outputs))
        self._complex = frozenset(complex_outputs)
        self._outputs = [(*self._kind(i, p), program.buffers[p.buffer].bytes) for i, p in enumerate(program.outputs)]
        self._donated = [i for i, p in enumerate(program.inputs) if p.donated]
        self._shared = _shared(program)
        self._fresh_bytes = _fresh_bytes(program)
        sizes = [size for _, _, size in self._outputs]
        self._taken = (sum(sizes), len(sizes), max(sizes, default=0))
        self._headers = Headers(device, self._outputs)
        self._places = [(shape, size, i * WORDS, 8 * i * WORDS) for i, (_, shape, size) in enumerate(self._outputs)]

        if device.client.settings.report is not None:
            device.client.loaded.append(self)

    def _kind(self, i: int, port: Any) -> tuple[int, tuple[int, ...]]:
        """Code and shape of an output as C knows them."""
        return (CODES[COMPLEX], port.shape[1:]) if i in self._complex else (CODES[port.dtype.numpy], port.shape)

    def destroyed(self) -> None:
        """What it holds goes with it."""

    def launch(self, arguments: Sequence[Buffer], kept: Collection[int]) -> list[Buffer]:
        """Run once; returns when the results are there. Donated arguments are gone then, but for those whose places are in `kept`.

        Raises:
          LaunchError: an argument has been deleted.
          OutOfMemoryError: HBM has no room for the Program beside the arrays that are there.
        """
        self.device.usage.check(self._fresh_bytes, f"a call of {self.program.name!r}")
        arrays = [b.array if b.array is not None else b.live() for b in arguments]
        consumed = self._consumed(arguments, arrays, kept)
        try:
            results, _ = self.executable.launch(arrays)
            for x in results:
                x.block_until_ready()
            results = self._own(results, arrays)
        finally:
            for buffer in consumed:
                buffer.delete()
        self.runs += 1
        self.device.usage.take(*self._taken)
        return self._buffers(results)

    def _buffers(self, results: list[Any]) -> list[Buffer]:
        headers, device = self._headers.new(), self.device
        base = ctypes.addressof(headers)
        return [
            Buffer(x, device, shape, size, headers, start, base + offset)
            for x, (shape, size, start, offset) in zip(results, self._places, strict=True)
        ]

    def _consumed(self, arguments: Sequence[Buffer], arrays: list[Any], kept: Collection[int]) -> list[Buffer]:
        """The arguments that the launch takes over; what it may not, it gets a copy of."""
        consumed = []
        for i in self._donated:
            if i in kept or arguments[i].holds:
                arrays[i] = self.device.client.host.copy(arrays[i])
            else:
                consumed.append(arguments[i])
        return consumed

    def _own(self, results: list[Any], arrays: list[Any]) -> list[Any]:
        """The results in memory of their own: an output can be an input that nothing has changed, or another output."""
        if not self._shared:
            return results
        seen, own = {id(x) for x in arrays}, list(results)
        for i in self._shared:
            if id(own[i]) in seen:
                own[i] = self.device.client.host.copy(own[i])
            seen.add(id(own[i]))
        return own

    # ---- what it says of itself

    @functools.cached_property
    def fingerprint(self) -> Text:
        """The hash of its code."""
        from tpuflow.isa.file import code_hash

        return Text(code_hash(self.program))

    @functools.cached_property
    def serialized(self) -> Text:
        """Which results are complex, and the bytes of its .tpx file.

        Raises:
          Unimplemented: it calls functions of this process.
        """
        from tpuflow.isa.file import to_bytes

        if self.program.calls:
            raise Unimplemented(f"{self.program.name!r} calls functions of this process (callbacks); a file cannot hold them.")
        return Text(_enveloped(self._complex, to_bytes(self.program)))

    @functools.cached_property
    def assignment(self) -> Text:
        """The device that it is for, as a `DeviceAssignmentProto`."""
        return Text(assigned(self.device.number))

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
        return self._kinds(len(self._outputs))

    @functools.cached_property
    def parameter_memories(self) -> tuple[Numbers, Numbers]:
        """The kind of memory of each input, likewise."""
        return self._kinds(len(self.program.inputs))

    def _kinds(self, count: int) -> tuple[Numbers, Numbers]:
        kind = self.device.memory.kind
        return Numbers([kind.address] * count, ctypes.c_uint64), Numbers([kind.size] * count)


class Unloaded(Thing):
    """A loaded Program by another handle, for what C asks of Programs that are not loaded. Header: as `Loaded`."""

    def __init__(self, loaded: Loaded):
        self.loaded = loaded
        super().__init__(*loaded.header[1:])

    def destroyed(self) -> None:
        """The Program lives on."""


HOST_FUNCTIONS: list[Callable[..., Any]] = []
"""What programs print and call (`jax.debug.print`, `jax.debug.callback`), by the number that their custom calls have."""


def compile_module(client: Client, module: bytes, options: bytes) -> Loaded:
    """Compile a module of StableHLO.

    Raises:
      Unimplemented: it is for several partitions or replicas.
      What `tpuflow.compiler.compile_stablehlo` raises.
    """
    client.settings.check()
    return apart(functools.partial(_compile, client, module, options))


def load_bytes(client: Client, data: bytes, options: bytes) -> Loaded:
    """Load a serialised Program.

    Raises:
      ProgramFileError: it is damaged.
    """
    client.settings.check()
    return apart(functools.partial(_load, client, data, options))


def _compile(client: Client, module: bytes, options: bytes) -> Loaded:
    from tpuflow.compiler import compile_stablehlo
    from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo

    device = _device(client, options)
    imported = lower_stablehlo(module, host_functions=HOST_FUNCTIONS, trusted=True, complex_ports=True)
    complex_outputs = [i for i, found in enumerate(imported.complex_outputs) if found]
    return Loaded(compile_stablehlo(imported, chip=client.settings.chip), complex_outputs, device)


def _load(client: Client, data: bytes, options: bytes) -> Loaded:
    from tpuflow.isa.file import from_bytes

    complex_outputs, program = _opened(data)
    device = _device(client, options) if options else client.devices[0]
    return Loaded(from_bytes(program, name=_CACHE), complex_outputs, device)


_CACHE = "the compilation cache"
_ENVELOPE = b"tpusim\x01"


def _enveloped(complex_outputs: Collection[int], program: bytes) -> bytes:
    """The bytes of a Program, with what only PJRT knows of it before them: a count and numbers of results, 32 bits each."""
    return _ENVELOPE + np.array([len(complex_outputs), *sorted(complex_outputs)], "<u4").tobytes() + program


def _opened(data: bytes) -> tuple[list[int], bytes]:
    """What `_enveloped` put together."""
    begin = len(_ENVELOPE) + 4
    end = begin + 4 * int.from_bytes(data[len(_ENVELOPE) : begin], "little")
    if not data.startswith(_ENVELOPE) or end > len(data):
        raise ProgramFileError(f"{_CACHE}: no Program of this version of tpuflow; delete the cache's directory.")
    return np.frombuffer(data[begin:end], "<u4").tolist(), data[end:]


def _device(client: Client, options: bytes) -> Device:
    """The one device that a compilation is for."""
    replicas, parts, number = partitions(options)
    if replicas * parts != 1:
        raise Unimplemented(
            f"a program for {replicas * parts} devices ({replicas} replicas x {parts} partitions): multi-chip programs are not supported "
            "yet. Devices of TPUFLOW_DEVICES run single-device programs side by side: jit without a mesh, data on one device at a time."
        )
    if not 0 <= number < len(client.devices):
        raise ConfigError(f"a program for device {number}; there are {len(client.devices)} (TPUFLOW_DEVICES).")
    return client.devices[number]


def apart(task: Callable[[], Any]) -> Any:
    """The result of a task on a thread of its own: JAX's settings and traces are a thread's, and those of the caller are not to be seen
    when the engine traces its own functions. jaxlib's threads have little stack besides."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((task(), None))
        except BaseException as error:
            outcome.append((None, error))

    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="tpuflow compile")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


_starting = threading.Lock()
"""The size of new threads' stacks is the process's."""


def _shared(program: Any) -> list[int]:
    """Outputs that lie where an input or an earlier output lies."""
    seen, found = {p.buffer for p in program.inputs}, []
    for i, p in enumerate(program.outputs):
        if p.buffer in seen:
            found.append(i)
        seen.add(p.buffer)
    return found


def _fresh_bytes(program: Any) -> int:
    """HBM that a launch takes beside its arguments."""
    from tpuflow.device.limits import occupied_bytes

    return max(0, occupied_bytes(program) - sum(program.buffers[b].bytes for b in {p.buffer for p in program.inputs}))
