"""Entries about executables, loaded or not: both are the same object by two handles."""

from __future__ import annotations

import ctypes

from tpuflow.pjrt.cells import Args, Numbers, Text, integers, words
from tpuflow.pjrt.executable import Loaded, Unloaded
from tpuflow.pjrt.failures import Unimplemented
from tpuflow.pjrt.fields import READY
from tpuflow.pjrt.handles import OBJECTS, collect
from tpuflow.pjrt.loading import load_bytes
from tpuflow.pjrt.meshes import LoadedOnMesh
from tpuflow.pjrt.table import NO_OPERATION, entry


@entry("LoadedExecutable_Execute")
def _execute(args: Args) -> None:
    collect()
    executable, options, given, devices, count, taken, events = args[2:9]
    kept = _kept(options)
    arguments = [words(row, count)[:] if count else [] for row in words(given, devices)]
    results = OBJECTS[executable].launch(arguments, kept)
    for row, handles in zip(words(taken, devices), results, strict=True):
        if handles:
            words(row, len(handles))[:] = handles
    if events:
        words(events, devices)[:] = [READY] * devices


def _kept(options: int) -> tuple[int, ...]:
    """The places of donated arguments that are not to be donated."""
    numbers, count = words(options, 9)[7:9]
    return integers(numbers, count) if count else ()


@entry("LoadedExecutable_GetExecutable")
def _executable(args: Args) -> None:
    args[3] = Unloaded(OBJECTS[args[2]]).handle


@entry("LoadedExecutable_AddressableDeviceLogicalIds")
def _logical(args: Args) -> None:
    args[3], args[4] = OBJECTS[args[2]].logical_ids.pair


@entry("LoadedExecutable_GetDeviceAssignment")
def _assignment(args: Args) -> None:
    args[3], args[4] = OBJECTS[args[2]].assignment.pair
    args[5], args[6] = args[2], NO_OPERATION


def _program(handle: int) -> Loaded:
    """What an executable is of, loaded or not."""
    found = OBJECTS[handle]
    return found.loaded if isinstance(found, Unloaded) else found


@entry("Executable_SizeOfGeneratedCodeInBytes")
def _code_size(args: Args) -> None:
    args[3] = _program(args[2]).memory.generated_code_size_in_bytes


@entry("Executable_Fingerprint", "LoadedExecutable_Fingerprint")
def _fingerprint(args: Args) -> None:
    args[3], args[4] = _program(args[2]).fingerprint.pair


@entry("Executable_GetCostAnalysis")
def _costs(args: Args) -> None:
    found = _program(args[2]).costs
    args[3], args[4] = found.size, found.address


_MEMORY = ("generated_code", "argument", "output", "alias", "temp")
_AT_HOST = tuple(f"host_{name}" for name in _MEMORY[1:])


@entry("Executable_GetCompiledMemoryStats")
def _memory(args: Args) -> None:
    found = _program(args[2]).memory
    own, at_host = ([getattr(found, f"{name}_size_in_bytes") for name in names] for names in (_MEMORY, _AT_HOST))
    figures = [*own, 0, *at_host, found.peak_memory_in_bytes]
    count = min(3 + len(figures), args[0] // 8)
    words(ctypes.addressof(args.contents), count)[3:count] = figures[: count - 3]


@entry("Executable_OutputElementTypes")
def _output_types(args: Args) -> None:
    args[3], args[4] = _program(args[2]).output_types.pair


@entry("Executable_OutputDimensions")
def _output_dimensions(args: Args) -> None:
    dimensions, counts = _program(args[2]).output_dimensions
    args[3], args[4], args[5] = counts.size, dimensions.address, counts.address


@entry("Executable_OutputMemoryKinds")
def _output_memories(args: Args) -> None:
    _give_kinds(args, *_program(args[2]).output_memories)


@entry("Executable_ParameterMemoryKinds")
def _parameter_memories(args: Args) -> None:
    _give_kinds(args, *_program(args[2]).parameter_memories)


def _give_kinds(args: Args, kinds: Numbers, sizes: Numbers) -> None:
    args[3], args[4], args[5] = sizes.size, kinds.address, sizes.address


@entry("Executable_Serialize")
def _serialize(args: Args) -> None:
    args[3], args[4] = _program(args[2]).serialized.pair
    args[5], args[6] = args[2], NO_OPERATION


@entry("Executable_DeserializeAndLoad")
def _deserialize(args: Args) -> None:
    data = ctypes.string_at(args[3], args[4])
    options = ctypes.string_at(args[6], args[7]) if args[6] else b""
    args[5] = load_bytes(OBJECTS[args[2]], data, options).handle


_FORM = Text("mlir")


@entry("Executable_OptimizedProgram")
def _optimized(args: Args) -> None:
    found = _program(args[2])
    if not isinstance(found, LoadedOnMesh):
        raise Unimplemented(
            "what runs is a Program of the simulated device, which XLA's text cannot show. TPUFLOW_DUMP=directory writes it in assembly "
            "language, with the graph after every pass."
        )
    program, code = words(args[3], 6), found.optimized
    if program[2]:  # the second of two calls: with room for what the first one gave the size of
        ctypes.memmove(program[2], code.address, code.size)
    program[3] = code.size
    program[4], program[5] = _FORM.pair
