"""A policy for programs that are differentiated already (`tpuflow.lower.autocast`), beside `tpuflow.amp.autocast` of the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tpuflow import amp
from tpuflow.amp import rules as amp_rules
from tpuflow.compiler import compile_graph, compile_jaxpr
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import BF16, F16, F32, DType
from tpuflow.isa.elementwise import BINARY, UNARY
from tpuflow.lower.autocast import FULL_PRECISION, autocast
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.importers.jaxpr.importer import lower_with_calls

POLICIES = {"mixed": F16, "mixed_bf16": BF16}


def draw(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    return jax.nn.relu(x @ w + b) @ v


def norm(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    y = x @ w
    mean = y.mean(-1, keepdims=True)
    variance = jnp.square(y).mean(-1, keepdims=True) - jnp.square(mean)
    return (y - mean) * lax.rsqrt(variance + 1e-6) * scale + bias


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k) / 8, -1) @ v


def convolution(x: Any, kernel: Any, b: Any) -> Any:
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + b).max((1, 2))


def recurrent(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3)


def branches(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: (x @ w).sum(), lambda x: jnp.sin(x @ w).sum(), x)


def cross_entropy(x: Any, w: Any, b: Any) -> Any:
    return -(jax.nn.log_softmax(x @ w + b) * jnp.eye(8)).sum(-1).mean()


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "mlp": (mlp, draw((8, 32), (32, 64), (64,), (64, 8))),
    "norm": (norm, draw((8, 32), (32, 64), (64,), (64,))),
    "attention": (attention, draw((16, 64), (16, 64), (16, 64))),
    "convolution": (convolution, draw((2, 8, 8, 4), (3, 3, 4, 8), (8,))),
    "recurrent": (recurrent, draw((8, 8), (8, 8))),
    "branches": (branches, draw((8, 8), (8, 8))),
    "cross entropy": (cross_entropy, draw((8, 32), (32, 8), (8,))),
}


def cast(f: Callable[..., Any], arguments: list[np.ndarray], compute: DType) -> Graph:
    return autocast(lower_with_calls(jax.make_jaxpr(f)(*arguments), "f")[0], compute)


def values(program: Any, arguments: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x) for x in Executable(program, fidelity="bitexact").launch(arguments)[0]]


def nodes_of(graph: Graph) -> list[str]:
    """Each node's operation with the types of its result and operands."""
    return [f"{n.result.dtype} = {' '.join([n.op, *(str(v.dtype) for v in n.inputs)])}" for n in graph.nodes]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_gives_the_bits_of_the_cast_function(name: str, policy: str) -> None:
    f, arguments = FUNCTIONS[name]
    graph = cast(f, arguments, POLICIES[policy])
    expected = compile_jaxpr(jax.make_jaxpr(amp.autocast(f, policy))(*arguments), name="f")
    for got, wanted in zip(values(compile_graph(graph), arguments), values(expected, arguments), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_a_graph_are_near_those_of_the_cast_function(name: str, policy: str) -> None:
    f, arguments = FUNCTIONS[name]

    def total(g: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *given: sum(jnp.tanh(0.02 * x).sum() for x in jax.tree.leaves(g(*given))), tuple(range(len(arguments))))

    graph = cast(total(f), arguments, POLICIES[policy])
    products = [n for n in graph.walk() if n.op in ("dot", "conv")]
    assert products and all(v.dtype == POLICIES[policy] for n in products for v in n.inputs)
    expected = jax.jit(total(amp.autocast(f, policy)))(*arguments)
    for got, wanted in zip(values(compile_graph(graph), arguments), expected, strict=True):
        size = np.abs(wanted).max() + 1e-3
        np.testing.assert_allclose(got / size, wanted / size, atol=2e-2 if policy == "mixed_bf16" else 4e-3)


def test_what_is_summed_squared_or_asked_for_is_f32() -> None:
    def f(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return y, y * y, y.sum(0), y.max(0), jnp.exp(y), lax.dot(y, w, precision="highest"), y.astype(jnp.bfloat16)

    assert nodes_of(cast(f, draw((8, 8), (8, 8)), BF16)) == [
        "bf16 = convert f32", "bf16 = convert f32", "f32 = dot bf16 bf16", "bf16 = convert f32", "bf16 = tanh bf16", "f32 = convert bf16",
        "f32 = mul f32 f32", "f32 = reduce f32", "bf16 = reduce bf16", "f32 = exp f32", "f32 = dot f32 f32", "f32 = convert bf16",
    ]  # fmt: skip


def test_the_operations_in_full_precision_are_those_of_the_policy_for_functions() -> None:
    assert {*UNARY, *BINARY}.intersection(amp_rules.FULL_PRECISION) == FULL_PRECISION - {"bitcast"}


def test_types_that_a_program_chooses_stay() -> None:
    def f(x: Any, n: Any) -> Any:
        h = x.astype(jnp.float16)
        return h @ h, n @ n, lax.sort((x @ x, n), num_keys=1)

    arguments = [*draw((4, 4)), np.ones((4, 4), np.int32)]
    graph = cast(f, arguments, BF16)
    assert [v.dtype for v in graph.outputs] == [v.dtype for v in lower_with_calls(jax.make_jaxpr(f)(*arguments), "f")[0].outputs]
    assert {n.inputs[0].dtype.name for n in graph.nodes if n.op == "dot"} == {"f16", "s32", "bf16"}
    assert next(v.dtype for n in graph.nodes if n.op == "sort" for v in n.results) == BF16
    values(compile_graph(graph), arguments)


def test_a_graph_without_products_stays_as_it_is() -> None:
    graph = lower_with_calls(jax.make_jaxpr(lambda x: jnp.exp(x).sum())(np.ones(4, np.float32)), "f")[0]
    assert autocast(graph, F16).nodes == graph.nodes and F32 == graph.outputs[0].dtype
