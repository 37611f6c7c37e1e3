"""From a partitioned module to the graph that each chip of its mesh runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tpuflow.isa.collectives import MeshAxis
from tpuflow.isa.meshes import Parts, Sizes, axes_ordered, divided
from tpuflow.jaxprs.partitioner import Partitioned
from tpuflow.lower.create_reduce_scatters import create_reduce_scatters
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.importers.stablehlo.importer import Imported, lower_stablehlo, read_stablehlo
from tpuflow.lower.importers.stablehlo.module import Block, Module
from tpuflow.lower.operations.collectives import NamedCut, Names
from tpuflow.lower.operations.memories import HOST_KINDS
from tpuflow.lower.reassociate_all_reduces import reassociate_all_reduces
from tpuflow.lower.shards import WHOLE, Cuts


def lower_partitioned(
    found: Partitioned,
    name: str,
    *,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    complex_ports: bool = False,
) -> Imported:
    """A partitioned module, imported for its mesh: without the result that only its partitioner needed, its all-reduces reassociated or
    turned into reduce-scatters where possible. Names and `complex_ports` are as `lower_stablehlo` takes them; results without a name
    are numbered. A port that is stacked along mesh axes has one more axis, the first: its whole array is that of the
    devices' own ones. Where groups of devices are parts of axes, these are divided.

    Raises:
      What `lower_stablehlo` raises.
    """
    read = read_stablehlo(found.module, trusted=True)
    mesh, parts = _divided(found.mesh, read)
    imported = lower_stablehlo(
        read, name, input_names=input_names, host_functions=found.host_functions, mesh=mesh, complex_ports=complex_ports
    )
    graph = reassociate_all_reduces(create_reduce_scatters(reassociate_all_reduces(imported.graph), mesh))
    graph = replace(graph, outputs=graph.outputs[:-1], output_names=tuple(output_names))
    graph = _stacked(graph, found.stacked_inputs, found.stacked_outputs)
    return replace(
        imported,
        graph=graph,
        output_types=imported.output_types[:-1],
        complex_outputs=imported.complex_outputs[:-1],
        token_outputs=imported.token_outputs[:-1],
        mesh=tuple(_axes(mesh, parts)),
        cuts=Cuts(
            _of_ports(graph.inputs, found.inputs, found.stacked_inputs, parts),
            _of_ports(graph.outputs, found.outputs, found.stacked_outputs, parts),
        ),
        stacked_outputs=tuple(map(bool, found.stacked_outputs)),
        host_inputs=tuple(kind in HOST_KINDS for kind in found.input_memories),
        host_outputs=tuple(kind in HOST_KINDS for kind in found.output_memories),
    )


def _divided(mesh: Sizes, read: Module) -> tuple[Sizes, Parts]:
    """The mesh with its axes divided so that every group of devices that a module has goes over whole ones; if no division does that, as it
    is: the rules of collectives refuse what they cannot do."""
    groups = {(g.shape, g.tobytes()): g for f in read.functions.values() for g in _groups(f.body)}
    fits = functools.partial(_fits, list(groups.values()))
    return divided(mesh, fits) or (mesh, {name: (name,) for name in mesh})


def _fits(groups: Sequence[np.ndarray], mesh: Sizes) -> bool:
    return all(axes_ordered(g, mesh) is not None for g in groups)


def _groups(block: Block) -> Iterator[np.ndarray]:
    """The groups of devices of every collective, nested ones included."""
    for operation in block.operations:
        found = operation.attributes.get("replica_groups")
        if isinstance(found, np.ndarray) and found.size > 1:
            yield found
        for inner in operation.blocks:
            yield from _groups(inner)


def _axes(mesh: Sizes, parts: Parts) -> Iterator[MeshAxis]:
    """The axes of several chips; parts of one are joined."""
    for names in parts.values():
        own = [name for name in names if mesh[name] > 1]
        yield from (MeshAxis(name, mesh[name], joined=name != own[0]) for name in own)


def _of_ports(values: Sequence[Value], cuts: Sequence[NamedCut], stacked: Sequence[Names], parts: Parts) -> tuple[NamedCut, ...]:
    """How ports are cut. What is stacked has an axis before its own for the devices' own arrays; a complex array is two planes,
    with an axis before its own that is not cut."""
    rows = zip(values, cuts, stacked, strict=True)
    return tuple(_of_port(v, tuple(_parts_of(names, parts) for names in cut), _parts_of(axes, parts)) for v, cut, axes in rows)


def _parts_of(names: Names, parts: Parts) -> Names:
    return tuple(part for name in names for part in parts[name])


def _of_port(value: Value, cut: NamedCut, stacked: Names) -> NamedCut:
    if not cut and not stacked:
        return WHOLE
    first = (stacked,) if stacked else ()
    return (*first, *((),) * (len(value.type.shape) - len(cut) - len(first)), *cut)


def _stacked(graph: Graph, inputs: Sequence[Names], outputs: Sequence[Names]) -> Graph:
    """The graph whose stacked ports have one more axis, the first, of one element: of whole arrays it is that of the devices' own ones."""
    if not any((*inputs, *outputs)):
        return graph
    types = [_one_of(v.type) if axes else v.type for v, axes in zip(graph.inputs, inputs, strict=True)]
    b = Builder(graph.name, types, graph.input_names)
    own = [b.reshape(port, v.type.shape) for v, port in zip(graph.inputs, b.inputs, strict=True)]
    results = b.inline(graph, own)
    ends = [b.reshape(x, (1, *x.shape)) if axes else x for x, axes in zip(results, outputs, strict=True)]
    return b.finish(ends, graph.output_names)


def _one_of(kind: TensorType) -> TensorType:
    return TensorType(kind.dtype, (1, *kind.shape))
