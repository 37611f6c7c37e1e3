"""SplitEpilogues: products that waited for their epilogues with large operands: which run early, what it frees, and that no bit changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graphs import kinds
from tpuflow.chips import get_chip
from tpuflow.compiler import PIPELINE
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.jaxpr.importer import lower_with_calls
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.passes.split_epilogues import SplitEpilogues

AT = next(i for i, step in enumerate(PIPELINE) if isinstance(step, SplitEpilogues))


def loss(table: jax.Array, layers: Sequence[jax.Array], words: jax.Array, *, rows: int = 1) -> jax.Array:
    """A language model whose head has the weights of its embedding: words [N], table [V, D], layers of [D, 8 D]; its logits in `rows`."""
    x = table[words]

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(jnp.tanh(x @ w) @ w.T)

    for w in layers:
        x = layer(x, w)
    logits = (x @ table.T).astype(jnp.bfloat16)
    logits = logits if rows == 1 else logits.reshape(rows, -1, table.shape[0])
    return jnp.sum(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))


def step(table: jax.Array, layers: Sequence[jax.Array], words: jax.Array, rows: int = 1) -> tuple[jax.Array, Sequence[jax.Array]]:
    gradient, others = jax.grad(functools.partial(loss, rows=rows), (0, 1))(table, layers, words)
    return table - 0.01 * gradient, others


def lowered(function: Callable[..., object], rows: int, entries: int, width: int, through: int) -> Graph:
    """The step's graph after the passes up to a number."""
    shapes = jax.ShapeDtypeStruct((entries, width), jnp.bfloat16), [jax.ShapeDtypeStruct((width, 8 * width), jnp.bfloat16)] * 3
    graph, _ = lower_with_calls(jax.make_jaxpr(function)(*shapes, jax.ShapeDtypeStruct((rows,), jnp.int32)), "tied")
    for passed in PIPELINE[:through]:
        graph = passed(graph)
    return graph


def finished(graph: Graph) -> Graph:
    for passed in PIPELINE[AT + 1 :]:
        graph = passed(graph)
    return verify(graph)


def temporary_bytes(graph: Graph) -> int:
    return plan_memory(finished(graph), get_chip("generic")).use.temporary_bytes


@pytest.mark.parametrize("rows", [1, 4], ids=["as they are", "through a view"])
def test_the_gradient_of_the_logits_does_not_wait_for_that_of_the_embedding(rows: int) -> None:
    before = lowered(functools.partial(step, rows=rows), 2048, 1024, 64, AT)
    after = verify(SplitEpilogues()(before))
    assert kinds(after).count("dot") == kinds(before).count("dot")
    assert len(after.nodes) == len(before.nodes) + 1
    gradient = 2048 * 1024 * 2
    assert temporary_bytes(before) - temporary_bytes(after) > gradient // 2


def test_no_bit_changes() -> None:
    before = lowered(step, 64, 128, 8, AT)
    after = SplitEpilogues(saves_memory=True)(before)
    assert len(after.nodes) > len(before.nodes)
    rng = np.random.default_rng(0)
    arrays = [(0.3 * rng.standard_normal(v.shape)).astype(v.dtype.numpy) for v in before.inputs[:-1]]
    arrays.append(rng.integers(0, 128, before.inputs[-1].shape).astype(np.int32))
    for one, other in zip(interpret(finished(before), *arrays), interpret(finished(after), *arrays), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("rows", "entries"), [(128, 8192), (2048, 8192)], ids=["more would be held", "the peak is at the logits"])
def test_it_stays_one_kernel_where_that_frees_nothing(rows: int, entries: int) -> None:
    before = lowered(step, rows, entries, 128, AT)
    assert len(SplitEpilogues()(before).nodes) == len(before.nodes)
