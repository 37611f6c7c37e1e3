"""StableHLO modules for several devices, as JAX gives them to a backend: their partitioning, by way of jaxlib's MLIR bindings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax._src.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo

from tpuflow.jaxprs.partitioner import Partitioned, partition_module
from tpuflow.jaxprs.shardings import LAST

_SHARDINGS = "mhlo.spmd_output_sharding"
"""The attribute of a partitioned module with the shardings of its results, as text: {{of the first}, {of the second}, ...}."""

_ALIASES = "mhlo.input_output_alias"
"""The attribute that says which results may alias which arguments, by the results' numbers in the tuple."""


@dataclass(frozen=True, slots=True)
class PartitionedModule:
    """A module after the partitioner, with its name. donated: for each argument, whether the program may overwrite it."""

    name: str
    partitioned: Partitioned
    donated: tuple[bool, ...]


def partition_artifact(data: bytes, compile_options: bytes) -> PartitionedModule:
    """Partition a portable artifact for the devices of a serialised `CompileOptionsProto`, which also says where the partitioner may choose
    the shardings of arguments and results.

    Raises:
      CompileError: XLA cannot partition it.
    """
    options = xla_client.CompileOptions.ParseFromString(compile_options)
    build = options.executable_build_options
    context = mlir.make_ir_context()
    with context, ir.Location.unknown():
        module = stablehlo.deserialize_portable_artifact(context, data)
        name = ir.StringAttr(module.operation.attributes["sym_name"]).value.removeprefix("jit_")
        mesh = _mesh_of(module, options.num_partitions)
        main = _main(module)
        donated = tuple(_is_donated(a) for a in _dictionaries(main, "arg_attrs", len(main.type.inputs)))
        _call_last(main)
        chosen = (build.allow_spmd_sharding_propagation_to_parameters, build.allow_spmd_sharding_propagation_to_output)
        return PartitionedModule(name, partition_module(module, mesh, name, chosen, any_order=True), donated)


def without_last(module: bytes) -> bytes:
    """A partitioned module (StableHLO bytecode) without the call of `LAST`, and without the result that it adds to the program's."""
    context = mlir.make_ir_context()
    with context, ir.Location.unknown():
        read = ir.Module.parse(module)
        main = _main(read)
        results = len(main.type.results) - 1
        *_, end = main.regions[0].blocks[0].operations
        last = end.operands[results].owner
        _return(main, list(end.operands)[:results], main.type.results[:results])
        last.erase()
        attributes = read.operation.attributes
        if results == 1:  # which is no tuple: nothing has a number in it
            attributes[_ALIASES] = ir.Attribute.parse(
                str(attributes[_ALIASES]).replace("output_index = array<i64: 0>", "output_index = array<i64>")
            )
        attributes[_SHARDINGS] = ir.StringAttr.get(_without_last_sharding(ir.StringAttr(attributes[_SHARDINGS]).value))
        written: Any = read.operation.get_asm(binary=True)
        return written


def _without_last_sharding(shardings: str) -> str:
    """XLA's text of a tuple's shardings without the last one, that of a scalar which all devices have."""
    end = "{replicated}}"
    text = re.sub(r"/\*index=\d+\*/", "", shardings)
    assert text.endswith(end), text
    return text.removesuffix(end).removesuffix(", ") + "}"


def _main(module: Any) -> Any:
    return next(op for op in module.body.operations if isinstance(op, func.FuncOp) and op.name.value == "main")


def _dictionaries(main: Any, name: str, count: int) -> list[Any]:
    """The attributes of each argument (`arg_attrs`) or result (`res_attrs`)."""
    return list(main.attributes[name]) if name in main.attributes else [ir.DictAttr.get({})] * count


def _is_donated(argument: Any) -> bool:
    return "tf.aliasing_output" in argument or ("jax.buffer_donor" in argument and argument["jax.buffer_donor"].value)


def _call_last(main: Any) -> None:
    """Add a call of `LAST` to a function, whose result becomes one more result of the function."""
    *_, end = main.regions[0].blocks[0].operations
    kind = ir.RankedTensorType.get([], ir.F32Type.get())
    attributes = {
        "call_target_name": ir.StringAttr.get(LAST),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
        "backend_config": ir.DictAttr.get({}),
    }
    with ir.InsertionPoint(end):
        last = ir.Operation.create("stablehlo.custom_call", [kind], [], attributes)
    _return(main, [*end.operands, last.results[0]], [*main.type.results, kind])


def _return(main: Any, values: list[Any], types: list[Any]) -> None:
    """Let a function return these values, its first results as before."""
    *_, end = main.regions[0].blocks[0].operations
    said = _dictionaries(main, "res_attrs", len(main.type.results))
    with ir.InsertionPoint(end):
        func.ReturnOp(values)
    end.operation.erase()
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(main.type.inputs, types))
    main.attributes["res_attrs"] = ir.ArrayAttr.get([*said, ir.DictAttr.get({})][: len(types)])


def _mesh_of(module: Any, devices: int) -> Mapping[str, int]:
    """The axes of a module's mesh with their sizes; one axis of all devices if it has no mesh. Of several meshes it is the one with the
    most axes larger than one: shardings over the others are over products of its axes."""
    meshes = [sdy.MeshAttr(op.attributes["mesh"]) for op in module.body.operations if op.operation.name == "sdy.mesh"]
    found = [{axis.name: axis.size for axis in map(sdy.MeshAxisAttr, mesh.axes)} for mesh in meshes]
    whole = [mesh for mesh in found if math.prod(mesh.values()) == devices]
    return max(whole, key=lambda mesh: sum(size > 1 for size in mesh.values()), default={"device": devices})
