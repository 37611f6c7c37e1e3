"""SPMD partitioning by the partitioner in jaxlib (Shardy and XLA's; jaxlib 0.8 to 0.10): the module that each device of a mesh runs.

XLA's CPU compiler partitions a module first of all, for any number of devices, and can dump the result. The module ends in a custom call of
`LAST`, a target that does not exist, so that XLA fails before it generates machine code. That saves three quarters of the time, and needs
none of the devices: no fake devices are created, and JAX's own backends and the process's environment do not matter.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxlib import xla_client
from jaxlib.mlir import ir

from tpuflow.errors import CompileError
from tpuflow.isa.meshes import Sizes, axes_numbered, divided
from tpuflow.jaxprs import versions
from tpuflow.jaxprs.batches import cut_batches
from tpuflow.jaxprs.compat import ClosedJaxpr
from tpuflow.jaxprs.host_calls import HostFunction, custom_calls, map_calls_by_hand
from tpuflow.jaxprs.protobuf import fields
from tpuflow.jaxprs.shardings import Asked, Cut, lowered

Names = tuple[str, ...]
Chosen = tuple[Sequence[bool], Sequence[bool]]
"""Of each argument, and of each result of the program, whether the partitioner may choose how it lies."""

_xla: Any = xla_client._xla


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What each device runs, as StableHLO bytecode of pieces of arrays, and how the arrays of the whole program are cut into these.

    The module has one more result than the program, that of the call of `LAST`. stacked_inputs, stacked_outputs: the mesh axes along which
    the devices have arrays of their own: summands of one that is still to be summed over these (JAX's `PartitionSpec(unreduced=...)`), or,
    along all axes, the pieces of one that is cut in an order of the devices that is none of the axes. input_memories, output_memories:
    JAX's names of the memories that they are in, empty where the module names none. host_functions: what its calls of the host call, by
    their numbers.
    """

    module: bytes
    mesh: Mapping[str, int]
    inputs: tuple[Cut, ...]
    outputs: tuple[Cut, ...]
    stacked_inputs: tuple[Names, ...]
    stacked_outputs: tuple[Names, ...]
    input_memories: tuple[str, ...]
    output_memories: tuple[str, ...]
    host_functions: tuple[HostFunction, ...] = ()


def partition(closed: ClosedJaxpr, asked: Asked, name: str) -> Partitioned:
    """A jaxpr partitioned as it asks for.

    Raises:
      UnsupportedPrimitiveError: it calls the host in order, or with the pieces of arrays that devices have outside of a `shard_map`.
      CompileError: XLA cannot partition it, or cuts arguments or results otherwise than over axes of the mesh or parts of them; or one of
        them is not an array but its summands.
    """
    functions: list[HostFunction] = []
    found = partition_module(lowered(closed, name, asked, functions), asked.mesh, name)
    for kind, ports in (("argument", found.stacked_inputs), ("result", found.stacked_outputs)):
        for i, axes in enumerate(ports):
            if axes:
                raise CompileError(
                    f"{name}: {kind} {i} is unreduced over {axes}: each chip would have a summand of its own, where whole arrays go in and "
                    "out. Sum it within the function: jax.reshard(x, PartitionSpec(...)) without `unreduced`."
                )
    return replace(found, host_functions=tuple(functions))


def partition_module(
    module: Any, mesh: Mapping[str, int], name: str, chosen: Chosen | None = None, *, any_order: bool = False
) -> Partitioned:
    """A module (MLIR) with shardings over a mesh, partitioned. Its last result is that of a call of `LAST`. chosen: as JAX
    says it of a compilation; None: XLA's defaults. any_order: whether arguments and results may be cut in orders of the devices that are
    none of the mesh's axes.

    Raises:
      CompileError: as `partition`.
    """
    _keep_placements(module)
    map_calls_by_hand(module, mesh)
    cut_batches(module)
    memories = _taken_memories(module)
    proto = _partitioned(module, math.prod(mesh.values()), name, chosen)
    found = versions.hlo.HloModule.from_serialized_hlo_module_proto(proto)
    inputs = [versions.hlo.HloSharding.from_proto(s) for s in found.spmd_parameters_shardings or ()]
    outputs = [versions.hlo.HloSharding.from_proto(s) for s in found.spmd_output_sharding.tuple_shardings[:-1]]  # none if `LAST` is alone
    over_axes = [[s for s in of if not any_order or _could_fit(s, mesh)] for of in (inputs, outputs)]
    mesh = _divided(mesh, over_axes[0], over_axes[1], name)
    ports = [[_cut(s, mesh) for s in shardings] for shardings in (inputs, outputs)]
    cuts = [tuple(cut for cut, _ in of) for of in ports]
    stacked = [tuple(axes for _, axes in of) for of in ports]
    return Partitioned(_xla.mlir.hlo_to_stablehlo(proto), mesh, cuts[0], cuts[1], stacked[0], stacked[1], memories[0], memories[1][:-1])


OF_A_PROCESS = 2048
"""Devices that XLA's CPU client counts as one process's; it compiles for no others. Beyond, all parts are assigned to the same device."""
_PASS = "spmd-partitioning"
PLACEMENT, FRONTEND, MEMORY_KIND = "annotate_device_placement", "mhlo.frontend_attributes", "mhlo.memory_kind"
"""The target of the custom call that is JAX's `device_put` within a program, the attribute that says to which memory, and the one that says
it of an argument or result."""
_MODULE = 1
"""The field of an `HloProto` that is the module."""


def _keep_placements(module: Any) -> None:
    """XLA's CPU compiler drops what says into which memory an array is put, before it partitions; barriers it keeps, with what they say."""
    with module.context:
        for op in custom_calls(module, PLACEMENT):
            said = {FRONTEND: op.attributes[FRONTEND]}
            types, point = [result.type for result in op.results], ir.InsertionPoint(op)
            barrier = ir.Operation.create("stablehlo.optimization_barrier", types, list(op.operands), said, loc=op.location, ip=point)
            op.results[0].replace_all_uses_with(barrier.results[0])
            op.erase()


def _taken_memories(module: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The memories of the arguments and results of a module's `main`, which says no more of them afterwards: XLA's CPU compiler can crash
    on what is at the host."""
    main = next(op.operation for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")
    return _taken(main, "arg_attrs", len(main.attributes["function_type"].value.inputs)), _taken(
        main, "res_attrs", len(main.attributes["function_type"].value.results)
    )


def _taken(main: Any, name: str, count: int) -> tuple[str, ...]:
    if name not in main.attributes:
        return ("",) * count
    with main.context:
        ports = [{entry.name: entry.attr for entry in port} for port in main.attributes[name]]
        found = tuple(port.pop(MEMORY_KIND).value if MEMORY_KIND in port else "" for port in ports)
        main.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(port) for port in ports])
    return found


def _partitioned(module: Any, devices: int, name: str, chosen: Chosen | None) -> bytes:
    """A serialised `HloModuleProto`: the module (MLIR) after XLA's partitioner."""
    here = _devices(versions.partitioner_devices(devices))
    with tempfile.TemporaryDirectory() as directory:
        failure = ""
        try:
            here[0].client.compile_and_load(module, _xla.DeviceList(here), _options(devices, directory, chosen))
        except jax.errors.JaxRuntimeError as error:  # of the call of `LAST`, unless XLA did not come so far
            failure = str(error)
        written = sorted(Path(directory).glob(f"*.after_{_PASS}*.hlo.pb"))
        if not written:
            raise CompileError(
                f"{name}: XLA cannot partition this program over {devices} chips: {' '.join(failure.split())[:400]}. Say with "
                "jax.lax.with_sharding_constraint how the arrays of that operation lie, or map it by hand with jax.shard_map."
            )
        return next(value for number, value in fields(written[-1].read_bytes()) if number == _MODULE and isinstance(value, bytes))


@functools.cache
def _devices(count: int) -> tuple[Any, ...]:
    """The devices of a client of its own: in newer ones, one that finds as many as the module is for goes on to what crashes it."""
    return tuple(xla_client.make_cpu_client(num_devices=count).local_devices())


def _options(devices: int, directory: str, chosen: Chosen | None) -> Any:
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, devices
    build = options.executable_build_options
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    if devices > OF_A_PROCESS:
        options.device_assignment = xla_client.DeviceAssignment.create(np.zeros((1, devices), np.int32))
    if chosen is not None:
        build.allow_spmd_sharding_propagation_to_parameters = list(chosen[0])
        build.allow_spmd_sharding_propagation_to_output = [*chosen[1], False]
    options.env_option_overrides = [
        ("xla_dump_to", directory),
        ("xla_dump_hlo_pass_re", f"{_PASS}.*"),
        ("xla_dump_hlo_as_proto", True),
        ("xla_backend_optimization_level", 0),  # of the machine code that nobody runs
        *versions.PARTITIONER_OPTIONS,
    ]
    return options


def _divided(mesh: Sizes, inputs: Sequence[Any], outputs: Sequence[Any], name: str) -> Sizes:
    """The mesh with its axes divided, where an array is cut over parts of them.

    Raises:
      CompileError: no division makes whole axes of how an array is cut.
    """
    found = divided(mesh, lambda sizes: all(_fits(s, sizes) for s in (*inputs, *outputs)))
    if found is not None:
        return found[0]
    for kind, shardings in (("argument", inputs), ("result", outputs)):
        for i, sharding in enumerate(shardings):
            if not _could_fit(sharding, mesh):
                raise CompileError(f"{name}: {kind} {i} {_UNFIT.format(sharding=sharding, mesh=dict(mesh))}")
    raise CompileError(f"{name}: its arguments and results together {_UNFIT.format(sharding='they are', mesh=dict(mesh))}")


_UNFIT = (
    "would be cut as {sharding}, which is not over axes of the mesh {mesh}, nor over parts into which they divide. Say how it lies in "
    "in_shardings or out_shardings."
)


def _could_fit(sharding: Any, mesh: Sizes) -> bool:
    """Whether an array is cut over whole axes of a mesh, once these are divided."""
    return divided(mesh, functools.partial(_fits, sharding)) is not None


def _fits(sharding: Any, mesh: Sizes) -> bool:
    """Whether an array is cut over whole axes of a mesh."""
    names, unreduced = _along(sharding, mesh)
    return None not in (*names, *unreduced)


def _cut(sharding: Any, mesh: Sizes) -> tuple[Cut, Names]:
    """How an array is cut, () if every device has all of it; and the axes along which devices have arrays of their own: those over which
    it is unreduced, or all, if it does not fit."""
    if not _fits(sharding, mesh):
        return (), _of_several(mesh)
    names, unreduced = _along(sharding, mesh)
    return tuple(axes or () for axes in names), tuple(name for axes in unreduced for name in axes or ())


def _of_several(mesh: Sizes) -> Names:
    return tuple(name for name, size in mesh.items() if size > 1)


def _along(sharding: Any, mesh: Sizes) -> tuple[list[Names | None], list[Names | None]]:
    """The axes that each dimension of an array is cut over, and those over which it is unreduced; None where these are no axes."""
    if sharding.is_replicated():
        return [], []
    if sharding.is_unreduced():
        return [], [_of_several(mesh)]
    shape = sharding.tile_assignment_dimensions()
    devices = np.array(sharding.tile_assignment_devices())
    numbers = np.empty((len(shape), devices.size), np.int64)
    numbers[:, devices] = np.indices(shape).reshape(len(shape), -1)
    found = [axes_numbered(along, mesh) for along in numbers]
    kinds = sharding.subgroup_types() or [_REPLICATED] * sharding.replicate_on_last_tile_dim()
    names, last = found[: len(found) - len(kinds)], found[len(found) - len(kinds) :]
    return names, [axes for axes, kind in zip(last, kinds, strict=True) if kind == _UNREDUCED]


_REPLICATED, _UNREDUCED = xla_client.OpSharding.Type.REPLICATED, xla_client.OpSharding.Type.UNREDUCED
