"""From a partitioned module to the graph that each chip of its mesh runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpuflow.isa.collectives import MeshAxis
from tpuflow.jaxprs.partitioner import Partitioned
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.stablehlo.importer import Imported, lower_stablehlo
from tpuflow.lower.operations.collectives import NamedCut
from tpuflow.lower.scatter_sums import scatter_sums
from tpuflow.lower.shards import WHOLE, Cuts


def lower_partitioned(
    found: Partitioned, name: str, *, input_names: Sequence[str] = (), output_names: Sequence[str] = (), complex_ports: bool = False
) -> Imported:
    """A partitioned module, imported for its mesh: without the result that only its partitioner needed, and with its sums scattered. Names
    and `complex_ports` are as `lower_stablehlo` takes them; results without a name are numbered.

    Raises:
      What `lower_stablehlo` raises.
    """
    imported = lower_stablehlo(found.module, name, input_names=input_names, mesh=found.mesh, trusted=True, complex_ports=complex_ports)
    graph = scatter_sums(imported.graph, found.mesh)
    graph = replace(graph, outputs=graph.outputs[:-1], output_names=tuple(output_names))
    return replace(
        imported,
        graph=graph,
        output_types=imported.output_types[:-1],
        complex_outputs=imported.complex_outputs[:-1],
        mesh=tuple(MeshAxis(axis, size) for axis, size in found.mesh.items() if size > 1),
        cuts=Cuts(_of_ports(graph.inputs, found.inputs), _of_ports(graph.outputs, found.outputs)),
    )


def _of_ports(values: Sequence[Value], cuts: Sequence[NamedCut]) -> tuple[NamedCut, ...]:
    """How ports are cut: a complex array is two planes there, with an axis before its own that is not cut."""
    return tuple((*((),) * (len(v.type.shape) - len(cut)), *cut) if cut else WHOLE for v, cut in zip(values, cuts, strict=True))
