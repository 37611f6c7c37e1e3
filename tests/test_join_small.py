"""Small kernels of different shapes as one: which ones, where they run, what that saves, and that no bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emit_cases import GENERIC, SMALL
from tests.graphs import kinds
from tests.test_emit import assert_close
from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.device.timing.calibration import Calibration
from tpuflow.device.timing.program import time_program
from tpuflow.dtypes import F16, F32, DType
from tpuflow.errors import GraphError
from tpuflow.isa.dma import Load
from tpuflow.isa.program import Program
from tpuflow.lower.assemble import Interface, assemble
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.memory_plan import MemoryPlan
from tpuflow.lower.passes.fuse import Fuse
from tpuflow.lower.passes.join_small import SMALL_BYTES, JoinSmall
from tpuflow.lower.passes.merge_kernels import MergeKernels
from tpuflow.lower.passes.schedule import Schedule
from tpuflow.lower.passes.simplify import Simplify

CHIP, CALIBRATION = get_chip("ascend910"), Calibration(kernel_seconds=5e-6)


def T(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype, shape)


def fused(b: Builder, outputs: Sequence[Value]) -> Graph:
    return verify(MergeKernels()(Fuse()(Simplify()(b.finish(outputs)))))


def joined(graph: Graph) -> Graph:
    return verify(Schedule()(verify(JoinSmall()(graph))))


def planned(graph: Graph, chip: Chip, donated: Sequence[bool] = ()) -> tuple[Program, MemoryPlan]:
    plan = plan_memory(graph, chip, donated)
    return assemble(graph, plan, chip, Interface(donated=tuple(donated))), plan


def microseconds(graph: Graph) -> int:
    return round(time_program(planned(graph, CHIP)[0], calibration=CALIBRATION).device_seconds * 1e6)


SHAPES = ((64,), (3, 3, 3, 16), (128,), (10,), (7, 5), (1000,), (16, 32), (2, 2))


def layerwise(shapes: Sequence[tuple[int, ...]]) -> Graph:
    """Parameters less their gradients over the gradients' norms, each of a shape of its own: what LARS does to small ones."""
    types = [T(F32, *shape) for shape in shapes]
    b = Builder("layerwise", [*types, *types])
    old, gradients = b.inputs[: len(types)], b.inputs[len(types) :]
    norms = [b.reduce("add", b.mul(g, g), tuple(range(len(g.shape)))) for g in gradients]
    steps = [b.div(g, b.splat(b.sqrt(n), g.shape)) for g, n in zip(gradients, norms, strict=True)]
    return fused(b, [b.sub(p, s) for p, s in zip(old, steps, strict=True)])


def test_norms_and_updates_of_parameters_of_all_shapes_are_two_kernels() -> None:
    graph = layerwise(SHAPES)
    assert kinds(graph).count("reduce") == kinds(graph).count("map") == len(SHAPES)
    assert kinds(joined(graph)) == ["several", "several"]
    assert (microseconds(graph), microseconds(joined(graph))) == (114, 16)


def test_updates_that_run_together_are_made_in_place() -> None:
    graph = joined(layerwise(SHAPES))
    n = len(SHAPES)
    program, plan = planned(graph, CHIP, (True,) * n + (False,) * n)
    assert [p.buffer for p in program.outputs] == [p.buffer for p in program.inputs[:n]]
    assert len(list(program.kernels())) == 2 and not any(plan.assigned_at_end.values())


def test_what_two_kernels_would_overwrite_for_one_another_keeps_them_apart() -> None:
    """Swapped, with work: each result takes the place of what the other kernel reads."""
    b = Builder("swap", [T(F32, 6), T(F32, 2, 3)])
    x, y = b.inputs
    graph = fused(b, [b.neg(b.reshape(y, (6,))), b.neg(b.reshape(x, (2, 3)))])
    program, _ = planned(joined(graph), GENERIC, (True, True))
    arrays = [np.arange(6, dtype=np.float32), np.arange(6, 12, dtype=np.float32).reshape(2, 3)]
    found, _ = Executable(program, engine="reference").launch([a.copy() for a in arrays])
    for got, want in zip(found, interpret(graph, *arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


def test_all_loads_of_a_joined_kernel_come_first() -> None:
    program, _ = planned(joined(layerwise(SHAPES)), CHIP)
    for kernel in program.kernels():
        works = [i for i in kernel.body if type(i).__name__ not in ("Wait", "Signal")]
        loads = [isinstance(i, Load) for i in works]
        assert kernel.grid == () and loads == sorted(loads, reverse=True)


def test_a_joined_kernel_stands_before_what_needs_it_and_others_wait_on() -> None:
    """The products need the sum and the largest; nothing needs the updates until the end."""
    b = Builder("waiting", [T(F32, 512, 512), T(F32, 64), T(F32, 100)])
    x, bias, other = b.inputs
    big = b.dot(x, b.mul(x, b.splat(b.reduce("add", bias, (0,)), x.shape)), (1,), (0,))
    early = b.reduce("max", other, (0,))
    again = b.dot(big, b.mul(x, b.splat(early, x.shape)), (1,), (0,))
    graph = verify(JoinSmall()(fused(b, [again, b.mul(bias, 2.0), b.mul(other, 2.0)])))
    assert kinds(graph) == ["several", "map", "dot", "dot", "several"]


def test_pooling_and_its_gradient_stay_apart() -> None:
    """Each of their windows is a move: work for many cores, where a kernel of one step has one."""

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        pooled, back = jax.vjp(lambda x: nn.max_pool(x, (2, 2), strides=(2, 2)), x)
        return pooled, *back(pooled), jnp.sum(y), jnp.max(y, 1)

    x, y = jax.ShapeDtypeStruct((8, 8, 8, 16), jnp.float32), jax.ShapeDtypeStruct((64, 10), jnp.float32)
    (together,) = [k for k in compile_function(step, (x, y), chip=CHIP).kernels() if "several" in k.name]
    assert {w.buffer for i in together.body for role, w in i.windows() if role == "read"} == {1}


def words(words: int) -> Graph:
    """The words of a key apart, each with its neighbour in a row, and all of these stacked."""
    b = Builder("words", [T(F32, words)])
    (x,) = b.inputs
    parts = [b.neg(b.concatenate([b.slice(x, (i,), (i + 1,)), b.slice(x, (j,), (j + 1,))], 0)) for i, j in pairwise(range(words))]
    return fused(b, [b.concatenate(parts, 0)])


def test_small_moves_and_all_parts_of_a_concatenation_run_together() -> None:
    graph = words(6)
    assert kinds(joined(graph)) == ["several", "several", "map", "several"], "slices, pairs of them, all of one shape negated, stacked"
    assert len(list(planned(joined(graph), CHIP)[0].kernels())) == 4
    assert (microseconds(graph), microseconds(joined(graph))) == (155, 29)


def test_kernels_of_large_arrays_do_not_wait() -> None:
    elems = SMALL_BYTES // 4
    for n, expected in ((elems, ["several"]), (elems + 1, ["map", "map"])):
        b = Builder("large", [T(F32, n), T(F32, 3, 5)])
        assert kinds(joined(fused(b, [b.neg(x) for x in b.inputs]))) == expected


def test_kernels_run_apart_where_the_memory_of_a_chip_asks_for_it() -> None:
    graph = joined(layerwise([(40, 5), (30, 7), (11, 16), (130,)]))
    assert kinds(graph) == ["several", "several"]
    assert len(list(planned(graph, GENERIC)[0].kernels())) == 2
    assert len(list(planned(graph, SMALL)[0].kernels())) > 2


def test_a_kernel_that_reads_its_neighbour_is_refused() -> None:
    graph = joined(layerwise([(4,), (5,)]))
    first, second = graph.nodes
    inner = first.regions[0]
    reader = replace(second.regions[0].nodes[0], inputs=(*second.regions[0].nodes[0].inputs[:-1], inner.outputs[0]))
    broken = replace(first, regions=(replace(inner, nodes=(*inner.nodes, reader), outputs=(*inner.outputs, *reader.results)),))
    broken = replace(broken, results=(*first.results, Value(T(F32, 4))))
    with pytest.raises(GraphError, match="nothing of one another|not defined"):
        verify(replace(graph, nodes=(broken,), outputs=broken.results))


# --- any small kernels ------------------------------------------------------------------------------------------------

shapes = st.lists(st.sampled_from((1, 2, 3, 5, 8, 17)), max_size=3).map(tuple)
moves = st.tuples(st.sampled_from(("map", "sum", "row", "scalar", "half", "slice", "turn", "stack")), st.integers(0, 9), st.integers(0, 9))


def random_kernels(types: Sequence[tuple[int, ...]], choices: Sequence[tuple[str, int, int]]) -> Graph:
    """Work on arrays of several shapes, chained at random: maps, sums, rows broadcast, scalars that enter maps, changes of type, moves."""
    b = Builder("random", [T(F32, *shape) for shape in types])
    pool = list(b.inputs)
    for move, of, other in choices:
        x = pool[of % len(pool)]
        scalar = next((v for v in reversed(pool) if not v.shape), None)
        if move == "sum" and x.shape:
            pool.append(b.reduce(("add", "max")[other % 2], b.mul(x, x), tuple(range(other % len(x.shape), len(x.shape)))))
        elif move == "row" and x.shape:
            pool.append(b.add(x, b.broadcast(b.reduce("add", x, tuple(range(len(x.shape) - 1))), x.shape, (len(x.shape) - 1,))))
        elif move == "slice" and x.shape:
            low = other % x.shape[0]
            pool.append(b.slice(x, (low, *(0 for _ in x.shape[1:])), x.shape, (1 + other % 2, *(1 for _ in x.shape[1:]))))
        elif move == "turn" and x.shape:
            pool.append(b.transpose(x, tuple(reversed(range(len(x.shape))))) if other % 2 else b.reverse(x, (0,)))
        elif move == "stack" and x.shape:
            pool.append(b.concatenate([x, *(v for v in pool[:3] if v.shape[1:] == x.shape[1:] and v.shape)], 0))
        elif move == "half":
            pool.append(b.convert(b.convert(x, F16), F32))
        elif scalar is not None:
            pool.append(b.sub(x, b.splat(b.tanh(scalar), x.shape)))
        else:
            pool.append(b.add(b.mul(x, 0.5), 1.0))
    return fused(b, pool[-5:])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=4), st.lists(moves, min_size=2, max_size=12), st.booleans(), st.sampled_from((GENERIC, SMALL)))
def test_any_small_kernels_give_the_bits_that_they_give_apart(types, choices, donate: bool, chip: Chip) -> None:
    graph = random_kernels(types, choices)
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.standard_normal(shape), np.float32) for shape in types]
    donated = (donate,) * len(types)
    apart, together = (planned(g, chip, donated)[0] for g in (graph, joined(graph)))
    want, _ = Executable(apart, engine="reference").launch([a.copy() for a in arrays])
    found, _ = Executable(together, engine="reference").launch([a.copy() for a in arrays])
    exact, _ = Executable(together, engine="fast", fidelity="bitexact").launch(arrays)
    native, _ = Executable(together, engine="fast").launch(arrays)
    for w, f, e, n in zip(want, found, exact, native, strict=True):
        assert np.asarray(w).tobytes() == np.asarray(f).tobytes() == np.asarray(e).tobytes()
        assert_close(np.asarray(n), np.asarray(f), F32)
    assert len(list(together.kernels())) <= len(list(apart.kernels()))
