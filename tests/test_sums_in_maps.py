"""SumInMap: maps whose kernels also reduce what they make: which do, what it saves, and that no bit changes."""

from __future__ import annotations

import pytest

from tests.emit_cases import assemble
from tests.graphs import T, kinds
from tests.test_traffic_passes import assert_same_bits, fused, microseconds
from tpuflow.chips import get_chip
from tpuflow.device.timing.program import sink_time
from tpuflow.dtypes import F32, PRED
from tpuflow.errors import GraphError
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, Node
from tpuflow.lower.graph.parse import parse
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.passes.sum_in_map import SumInMap


def masked(rows: int, columns: int, *, axis: int = 0) -> Graph:
    """A masked gradient, which a product reads, and two sums of it: batch normalisation's backward pass."""
    b = Builder("masked", [T(PRED, rows, columns), T(F32, rows, columns), T(F32, rows, columns), T(F32, columns, columns)])
    passed, gradient, x, w = b.inputs
    kept = b.select(passed, gradient, b.full_like(gradient, 0.0))
    sums = [b.reduce("add", kept, (axis,)), b.reduce("add", b.mul(kept, x), (axis,))]
    return fused(b, [*sums, b.dot(kept, w, (1,), (0,))])


def test_a_map_sums_its_results_while_they_are_on_the_chip() -> None:
    graph = masked(65536, 128)
    joined = verify(SumInMap()(graph))
    assert [kind for kind in kinds(graph) if kind != "dot"] == ["map", "reduce"]
    assert [kind for kind in kinds(joined) if kind != "dot"] == ["reduce"]
    assert microseconds(graph, SumInMap()) < 0.95 * microseconds(graph)
    read = [sink_time(assemble(g, get_chip("tpu-v3")), 1).work.read_bytes for g in (graph, joined)]
    assert read[0] - read[1] == 65536 * 128 * 4


@pytest.mark.parametrize("axis", [0, 1])
def test_no_bit_changes(axis: int) -> None:
    graph = masked(640, 128, axis=axis)
    assert len(SumInMap()(graph).nodes) < len(graph.nodes)
    assert_same_bits(graph, SumInMap()(graph))


def test_rows_that_leave_lanes_empty_stay_apart() -> None:
    graph = masked(65536, 16)
    assert kinds(SumInMap(get_chip("tpu-v5e"))(graph)) == kinds(graph)
    assert kinds(SumInMap(get_chip("ascend910"))(graph)) != kinds(graph)  # whose registers are shorter


def test_what_is_read_at_other_places_stays_apart() -> None:
    b = Builder("shifted", [T(F32, 4096, 128), T(F32, 128, 128)])
    x, w = b.inputs
    y = b.exp(x)
    first = b.slice(y, (0, 0), (2048, 128))
    graph = fused(b, [b.reduce("add", first, (0,)), b.dot(y, w, (1,), (0,))])
    assert kinds(SumInMap()(graph)) == kinds(graph)


def test_a_reduction_may_store_what_it_reduces_but_nothing_else_of_that_shape() -> None:
    def kernel(result: str) -> str:
        return f"""graph g(%0 'x': f32[8,8]) {{
  %1: f32[8], %2: f32[8,8] = fused{{kind=reduce}} %0 {{
    region reduce(%3: f32[8,8]) {{
      %4: f32[8,8] = exp %3
      %5: f32[8] = reduce{{axes=(0), op=add}} %4
      %6: f32[8,8] = broadcast{{axes=(1)}} %5
      return %5, {result}
    }}
  }}
  return %1, %2
}}
"""

    assert isinstance(parse(kernel("%4").replace("      %6: f32[8,8] = broadcast{axes=(1)} %5\n", "")).nodes[0], Node)
    with pytest.raises(GraphError, match="or the whole one"):
        parse(kernel("%6"))
