"""Loaded executables: compiled from a StableHLO module, or deserialised."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from tpuflow.errors import ConfigError
from tpuflow.garbage import undisturbed
from tpuflow.jaxprs.plugins import check_options, placement_of
from tpuflow.pjrt.device import Client, Device
from tpuflow.pjrt.envelope import CACHE, ProgramMetadata, unpack
from tpuflow.pjrt.executable import Loaded
from tpuflow.pjrt.failures import Unimplemented
from tpuflow.pjrt.shutdown import SHUTDOWN, ShutdownError

STACK_BYTES = 256 * 2**20

HOST_FUNCTIONS: list[Callable[..., Any]] = []
"""The host functions that programs call (`jax.debug.print`, `pure_callback`, ...), by the numbers that their custom calls carry."""


def compile_module(client: Client, module: bytes, options: bytes) -> Loaded:
    """Compile a module of StableHLO, for the devices that a serialised `CompileOptionsProto` says.

    Raises:
      Unimplemented: it is for several replicas.
      ConfigError: there are no such devices, or no such options.
      What `tpuflow.compiler.compile_stablehlo`, and for several devices `tpuflow.jaxprs.modules.partition_artifact`, raise.
    """
    client.settings.check()
    return on_own_thread(functools.partial(_compile, client, module, options))


def load_bytes(client: Client, data: bytes, options: bytes) -> Loaded:
    """Load a serialised Program.

    Raises:
      ProgramFileError: it is damaged.
      ConfigError: there are not as many devices.
    """
    client.settings.check()
    return on_own_thread(functools.partial(_load, client, data, options))


@undisturbed()
def _compile(client: Client, module: bytes, options: bytes) -> Loaded:
    from tpuflow.compiler import compile_stablehlo
    from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo

    check_options(options)
    devices = _devices(client, options)
    if len(devices) > 1:
        return _compile_for_mesh(client, module, options, devices)
    imported = _cast(client, lower_stablehlo(module, host_functions=HOST_FUNCTIONS, trusted=True, complex_ports=True))
    return Loaded(compile_stablehlo(imported, chip=client.settings.chip), _metadata(imported), devices)


def _compile_for_mesh(client: Client, module: bytes, options: bytes, devices: Sequence[Device]) -> Loaded:
    from tpuflow.compiler import compile_stablehlo
    from tpuflow.jaxprs.modules import partition_artifact
    from tpuflow.lower.importers.stablehlo.partitioned import lower_partitioned

    found = partition_artifact(module, options)
    partitioned = replace(found.partitioned, host_functions=tuple(HOST_FUNCTIONS))
    imported = _cast(client, lower_partitioned(partitioned, found.name, complex_ports=True))
    donated = _usable(found.donated, [v.type for v in imported.graph.inputs], [v.type for v in imported.graph.outputs])
    program = compile_stablehlo(imported, chip=client.settings.chip, donated=donated)
    return _loaded(program, _metadata(imported, found.partitioned.module), devices)


def _cast(client: Client, imported: Any) -> Any:
    """An imported module by the policy of the environment."""
    from tpuflow.lower.autocast import autocast

    compute = client.settings.compute
    return imported if compute is None else replace(imported, graph=autocast(imported.graph, compute))


def _usable(donated: Sequence[bool], inputs: Sequence[Hashable], outputs: Sequence[Hashable]) -> list[bool]:
    """For each argument, whether its donation is of use: there must be a result of its type that no earlier argument was donated for. (JAX
    finds that out itself only where it knows the shardings of results.)"""
    left = Counter(outputs)
    found = []
    for is_donated, kind in zip(donated, inputs, strict=True):
        found.append(is_donated and left[kind] > 0)
        left[kind] -= found[-1]
    return found


def _loaded(program: Any, metadata: ProgramMetadata, devices: Sequence[Device]) -> Loaded:
    """A Program loaded on one device or on several."""
    from tpuflow.pjrt.meshes import LoadedOnMesh

    return LoadedOnMesh(program, metadata, devices) if program.mesh else Loaded(program, metadata, devices)


def _metadata(imported: Any, module: bytes = b"") -> ProgramMetadata:
    """PJRT's metadata of an imported module."""
    return ProgramMetadata(_numbers(imported.complex_outputs), _numbers(imported.token_outputs), _numbers(imported.stacked_outputs), module)


def _numbers(found: Sequence[bool]) -> list[int]:
    return [i for i, is_so in enumerate(found) if is_so]


def _load(client: Client, data: bytes, options: bytes) -> Loaded:
    from tpuflow.isa.collectives import chips_of
    from tpuflow.isa.file import from_bytes

    metadata, code = unpack(data)
    program = from_bytes(code, name=CACHE)
    numbers = placement_of(options).devices if options else ()
    return _loaded(program, metadata, _devices_numbered(client, numbers or range(chips_of(program.mesh))))


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
    return _devices_numbered(client, placement.devices or range(placement.partitions))


def _devices_numbered(client: Client, numbers: Sequence[int]) -> list[Device]:
    missing = [n for n in numbers if not 0 <= n < len(client.devices)]
    if missing:
        raise ConfigError(f"a program for device {missing[0]}; there are {len(client.devices)} (TPUFLOW_DEVICES).")
    return [client.devices[n] for n in numbers]


def on_own_thread(task: Callable[[], Any]) -> Any:
    """Run a task on a new thread, and return its result. JAX's settings and traces are thread-local, and the caller's must not affect the
    functions that the engine traces; besides, jaxlib's own threads have small stacks."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            with SHUTDOWN.compiling():
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
    result, error = outcome[0] if outcome else (None, ShutdownError())
    if error is not None:
        raise error
    return result


_starting = threading.Lock()
"""Held while a thread is started: the stack size of new threads is a setting of the whole process."""
