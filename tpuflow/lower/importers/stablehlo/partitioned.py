"""From a partitioned module to the graph that each chip of its mesh runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpuflow.isa.collectives import MeshAxis
from tpuflow.jaxprs.partitioner import Partitioned
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.importers.stablehlo.importer import Imported, lower_stablehlo
from tpuflow.lower.operations.collectives import NamedCut, Names
from tpuflow.lower.scatter_sums import scatter_sums
from tpuflow.lower.shards import WHOLE, Cuts


def lower_partitioned(
    found: Partitioned, name: str, *, input_names: Sequence[str] = (), output_names: Sequence[str] = (), complex_ports: bool = False
) -> Imported:
    """A partitioned module, imported for its mesh: without the result that only its partitioner needed, and with its sums scattered. Names
    and `complex_ports` are as `lower_stablehlo` takes them; results without a name are numbered. A port that is unreduced over mesh axes
    has one more axis, the first: its whole array is that of the summands.

    Raises:
      What `lower_stablehlo` raises.
    """
    imported = lower_stablehlo(found.module, name, input_names=input_names, mesh=found.mesh, trusted=True, complex_ports=complex_ports)
    graph = scatter_sums(imported.graph, found.mesh)
    graph = replace(graph, outputs=graph.outputs[:-1], output_names=tuple(output_names))
    graph = _stacked(graph, found.unreduced_inputs, found.unreduced_outputs)
    return replace(
        imported,
        graph=graph,
        output_types=imported.output_types[:-1],
        complex_outputs=imported.complex_outputs[:-1],
        mesh=tuple(MeshAxis(axis, size) for axis, size in found.mesh.items() if size > 1),
        cuts=Cuts(
            _of_ports(graph.inputs, found.inputs, found.unreduced_inputs), _of_ports(graph.outputs, found.outputs, found.unreduced_outputs)
        ),
        unreduced_outputs=tuple(map(bool, found.unreduced_outputs)),
    )


def _of_ports(values: Sequence[Value], cuts: Sequence[NamedCut], unreduced: Sequence[Names]) -> tuple[NamedCut, ...]:
    """How ports are cut. What is unreduced has an axis before its own for its summands; a complex array is two planes, with an axis before
    its own that is not cut."""
    return tuple(map(_of_port, values, cuts, unreduced))


def _of_port(value: Value, cut: NamedCut, unreduced: Names) -> NamedCut:
    if not cut and not unreduced:
        return WHOLE
    summands = (unreduced,) if unreduced else ()
    return (*summands, *((),) * (len(value.type.shape) - len(cut) - len(summands)), *cut)


def _stacked(graph: Graph, inputs: Sequence[Names], outputs: Sequence[Names]) -> Graph:
    """The graph whose unreduced ports have one more axis, the first, of one element: of whole arrays it is that of the summands."""
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
