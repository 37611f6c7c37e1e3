"""Programs come onto devices: compiled from StableHLO, or read again from the bytes of a .tpx file."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tpuflow.errors import ConfigError
from tpuflow.isa.calls import HOST_CALL
from tpuflow.jaxprs.plugins import check_options, placement_of
from tpuflow.pjrt.device import Client, Device
from tpuflow.pjrt.ending import ENDING, Ended
from tpuflow.pjrt.envelope import CACHE, Own, opened
from tpuflow.pjrt.executable import Loaded
from tpuflow.pjrt.failures import Unimplemented

STACK_BYTES = 256 * 2**20

HOST_FUNCTIONS: list[Callable[..., Any]] = []
"""What programs call on the host (`jax.debug.print`, `pure_callback` and the like), by the number that their custom calls have."""


def compile_module(client: Client, module: bytes, options: bytes) -> Loaded:
    """Compile a module of StableHLO, for the devices that a serialised `CompileOptionsProto` says.

    Raises:
      Unimplemented: it is for several replicas.
      ConfigError: there are no such devices, or no such options.
      What `tpuflow.compiler.compile_stablehlo`, and for several devices `tpuflow.jaxprs.modules.partition_artifact`, raise.
    """
    client.settings.check()
    return apart(functools.partial(_compile, client, module, options))


def load_bytes(client: Client, data: bytes, options: bytes) -> Loaded:
    """Load a serialised Program.

    Raises:
      ProgramFileError: it is damaged.
      ConfigError: there are not as many devices.
    """
    client.settings.check()
    return apart(functools.partial(_load, client, data, options))


def _compile(client: Client, module: bytes, options: bytes) -> Loaded:
    from tpuflow.compiler import compile_stablehlo
    from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo

    check_options(options)
    devices = _devices(client, options)
    if len(devices) > 1:
        return _compile_for_mesh(client, module, options, devices)
    imported = lower_stablehlo(module, host_functions=HOST_FUNCTIONS, trusted=True, complex_ports=True)
    return Loaded(compile_stablehlo(imported, chip=client.settings.chip), _own(imported), devices)


def _compile_for_mesh(client: Client, module: bytes, options: bytes, devices: Sequence[Device]) -> Loaded:
    from tpuflow.compiler import compile_stablehlo
    from tpuflow.jaxprs.modules import partition_artifact
    from tpuflow.lower.importers.stablehlo.partitioned import lower_partitioned

    found = partition_artifact(module, options, HOST_CALL)
    imported = lower_partitioned(found.partitioned, found.name, complex_ports=True)
    donated = _usable(found.donated, [v.type for v in imported.graph.inputs], [v.type for v in imported.graph.outputs])
    program = compile_stablehlo(imported, chip=client.settings.chip, donated=donated)
    return _loaded(program, _own(imported, found.partitioned.module), devices)


def _usable(donated: Sequence[bool], inputs: Sequence[Hashable], outputs: Sequence[Hashable]) -> list[bool]:
    """Of each argument whether it is donated to any purpose: to a result of its type, each to another one. JAX finds that out itself only
    where it knows how results are cut."""
    left = Counter(outputs)
    found = []
    for is_donated, kind in zip(donated, inputs, strict=True):
        found.append(is_donated and left[kind] > 0)
        left[kind] -= found[-1]
    return found


def _loaded(program: Any, own: Own, devices: Sequence[Device]) -> Loaded:
    """On one device or on several."""
    from tpuflow.pjrt.meshes import LoadedOnMesh

    return LoadedOnMesh(program, own, devices) if program.mesh else Loaded(program, own, devices)


def _own(imported: Any, module: bytes = b"") -> Own:
    """What only PJRT knows of an imported module."""
    return Own(_numbers(imported.complex_outputs), _numbers(imported.token_outputs), _numbers(imported.stacked_outputs), module)


def _numbers(found: Sequence[bool]) -> list[int]:
    return [i for i, is_so in enumerate(found) if is_so]


def _load(client: Client, data: bytes, options: bytes) -> Loaded:
    from tpuflow.isa.collectives import chips_of
    from tpuflow.isa.file import from_bytes

    own, code = opened(data)
    program = from_bytes(code, name=CACHE)
    numbers = placement_of(options).devices if options else ()
    return _loaded(program, own, _numbered(client, numbers or range(chips_of(program.mesh))))


def _devices(client: Client, options: bytes) -> list[Device]:
    """The devices that a compilation is for, in the order of its partitions.

    Raises:
      Unimplemented: it has several replicas.
    """
    placement = placement_of(options)
    if placement.replicas != 1:
        raise Unimplemented(
            f"a program of {placement.replicas} replicas x {placement.partitions} partitions: several devices run one replica of as many "
            "partitions here, as jax.jit, jax.shard_map and jax.pmap of JAX compile them."
        )
    return _numbered(client, placement.devices or range(placement.partitions))


def _numbered(client: Client, numbers: Sequence[int]) -> list[Device]:
    missing = [n for n in numbers if not 0 <= n < len(client.devices)]
    if missing:
        raise ConfigError(f"a program for device {missing[0]}; there are {len(client.devices)} (TPUFLOW_DEVICES).")
    return [client.devices[n] for n in numbers]


def apart(task: Callable[[], Any]) -> Any:
    """The result of a task on a thread of its own: JAX's settings and traces are a thread's, and those of the caller are not to be seen
    when the engine traces its own functions. jaxlib's threads have little stack besides."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            with ENDING.compiling():
                result = task()
            outcome.append((result, None))
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
    result, error = outcome[0] if outcome else (None, Ended())
    if error is not None:
        raise error
    return result


_starting = threading.Lock()
"""The size of new threads' stacks is the process's."""
