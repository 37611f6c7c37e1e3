"""The rules that every graph keeps: single definition before use, operations as their rows say, fused regions of a known form."""

from __future__ import annotations

from collections.abc import Iterable

from tpuflow.errors import GraphError
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import is_several, verify_kernel
from tpuflow.lower.graph.ops import infer
from tpuflow.lower.graph.text import node_text


def verify(graph: Graph) -> Graph:
    """The graph itself, once it is known to be well formed; regions included.

    Raises:
      GraphError: naming the node, what is wrong with it and its source line.
    """
    _verify_names(graph)
    _verify_region(graph, set())
    return graph


def _verify_names(graph: Graph) -> None:
    for kind, names, values in (("input", graph.input_names, graph.inputs), ("output", graph.output_names, graph.outputs)):
        if names and len(names) != len(values):
            raise GraphError(f"graph {graph.name!r} has {len(values)} {kind}s but {len(names)} {kind} names")


def _verify_region(graph: Graph, elsewhere: set[Value]) -> None:
    """`elsewhere`: every value defined so far anywhere, to find a value defined twice."""
    visible: set[Value] = set()
    _define(graph.inputs, visible, elsewhere, f"input of graph {graph.name!r}")
    for node in graph.nodes:
        _verify_node(node, visible)
        for region in node.regions:
            _verify_region(region, elsewhere)
        _define(node.results, visible, elsewhere, node_text(node))
    for i, value in enumerate(graph.outputs):
        if value not in visible:
            raise GraphError(f"output {i} ({value.type}) of graph {graph.name!r} is not defined in it")


def _define(values: Iterable[Value], visible: set[Value], elsewhere: set[Value], where: str) -> None:
    for value in values:
        if value in elsewhere:
            raise GraphError(f"{where}: a value is defined twice")
        elsewhere.add(value)
        visible.add(value)


def _verify_node(node: Node, visible: set[Value]) -> None:
    for i, value in enumerate(node.inputs):
        if value not in visible:
            raise GraphError(f"{node_text(node)}: operand {i} ({value.type}) is not defined before its use")
    results = tuple(v.type for v in node.results)
    try:
        types = infer(node.op, tuple(v.type for v in node.inputs), node.attrs, node.regions, results)
    except GraphError as error:
        raise GraphError(f"{node_text(node)}: {error}") from error
    if types != results:
        raise GraphError(f"{node_text(node)}: its results should be of type {', '.join(map(str, types))}")
    if node.op == "fused":
        verify_kernel(node)
    _verify_accesses(node)


def _verify_accesses(node: Node) -> None:
    """The accesses in a node's tilings refer to its operands and results, and together they write every result."""
    elems = [v.type.elems for v in (*node.inputs, *node.results)]
    for tiling in node.tilings:
        for access in (*tiling.reads, *tiling.writes):
            if problem := access.problem(tiling.sizes, elems):
                raise GraphError(f"{node_text(node)}: the access to operand {access.operand} of a kernel: {problem}")
    written = {access.operand for tiling in node.tilings for access in tiling.writes}
    missing = [i for i in range(len(node.inputs), len(elems)) if i not in written]
    if written and missing and not is_several(node):
        raise GraphError(f"{node_text(node)}: result {missing[0] - len(node.inputs)} is written by no kernel")
