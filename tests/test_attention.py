"""JoinProducts: attention without stored scores: what joins, what it saves, and that it changes no bit on any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import attention
from tests import golden_attention
from tests.golden_attention import APART, attend, causal, gradients
from tests.tolerances import ATTENTION
from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import PIPELINE, compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.device.timing.program import time_program
from tpuflow.errors import OutOfMemoryError
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Program
from tpuflow.lower.importers.jaxpr.importer import lower_with_calls
from tpuflow.lower.passes import join_products
from tpuflow.lower.passes.base import Pass

EAGER = replace(get_chip("tpu-v5e"), name="slow-memory", hbm_bytes_per_second=819e2)
"""A chip whose memory is so slow that whatever can stay on the chip had better do so."""
FEW_ACCUMULATORS = replace(EAGER, name="few-accumulators", acc_bytes=128 * 1024)
"""The same, without room for as many rows of 160 as a block of their sum has."""


def compiled(function: Callable[..., Any], arguments: Any, chip: Chip, passes: Sequence[Pass] = PIPELINE) -> Program:
    """The Program that some passes make."""
    graph, _ = lower_with_calls(jax.make_jaxpr(function)(*arguments), "attention")
    return compile_graph(graph, chip=chip, passes=passes)


SAVING = tuple(step.saving_memory() for step in PIPELINE)
"""The passes of a program that does not fit otherwise."""


def products(program: Program) -> list[int]:
    """How many products each kernel over rows has in a step."""
    kernels = [k for k in program.kernels() if k.name.startswith("rows")]
    return [sum(isinstance(i, MatmulAccumulate) for i in k.instructions) for k in kernels]


def assert_same_bits(
    function: Callable[..., Any], arguments: Sequence[np.ndarray], chip: Chip, *, kernels: int | None = None, joining: Any = PIPELINE
) -> None:
    """Joined or apart, on both engines, and nearly what JAX computes; so many kernels over rows are all that has products, if said."""
    one, apart = (compiled(function, arguments, chip, passes) for passes in (joining, APART))
    if kernels is not None:
        assert len([n for n in products(one) if n > 1]) == kernels
        assert not any(k.name.startswith("dot") for k in one.kernels())
    want = Executable(apart, engine="reference").launch(arguments)[0]
    for way in (Executable(one, engine="reference"), Executable(one, fidelity="bitexact")):
        for expected, found in zip(want, way.launch(arguments)[0], strict=True):
            assert np.asarray(expected).tobytes() == np.asarray(found).tobytes()
    for expected, found in zip(jax.jit(function)(*arguments), Executable(one).launch(arguments)[0], strict=True):
        size = max(1.0, float(np.abs(np.asarray(expected, np.float32)).max()))
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0, atol=ATTENTION * size)


def operands(shape: tuple[int, int, int, int, int], dtype: Any, *, masked: bool = False, dropped: bool = False) -> list[np.ndarray]:
    """q [B, H, T, D]; k, v [B, H, S, D]; who sees whom [B, 1, 1, S]; what dropout leaves [B, H, T, S]."""
    batch, heads, rows, columns, width = shape
    rng = np.random.default_rng(sum(shape))
    arrays = [rng.standard_normal((batch, heads, n, width)).astype(dtype) for n in (rows, columns, columns)]
    masks = [rng.random((batch, 1, 1, columns)) < 0.7] * masked + [rng.random((batch, heads, rows, columns)) < 0.9] * dropped
    return [*arrays, *masks]


def test_layers_that_share_a_mask_are_compared_once(monkeypatch: pytest.MonkeyPatch):
    """Every two of them read it; that they cannot be one kernel is found out for all layers that are alike at once."""
    regions: list[Any] = []
    own = join_products.RegionBuilder.fused
    monkeypatch.setattr(join_products.RegionBuilder, "fused", lambda *args: regions.append(args) or own(*args))

    def layers(x: jax.Array, seen: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        for w in weights:
            x = attend(jnp.tanh(x @ w), x, x, seen)
        return x

    def tried(count: int) -> int:
        regions.clear()
        assert len([n for n in products(compiled(layers, (x, seen, [w] * count), get_chip("tpu-v4"))) if n > 1]) == count
        return len(regions)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 2, 2048, 128), (128, 128)))
    seen = jax.ShapeDtypeStruct((2048, 2048), jnp.bool_)
    two, four, eight = map(tried, (2, 4, 8))
    assert eight - four <= 2 * (four - two)


def test_gradients_of_layers_that_share_a_mask_are_not_put_in_order_with_each_other(monkeypatch: pytest.MonkeyPatch):
    """One kernel of two layers would be worth it, but depends on itself: that is known without an order of all nodes."""
    orders: list[Any] = []
    own = join_products.dataflow_order
    monkeypatch.setattr(join_products, "dataflow_order", lambda nodes: orders.append(nodes) or own(nodes))

    def step(x: jax.Array, seen: jax.Array, weights: Sequence[jax.Array]) -> Sequence[jax.Array]:
        def total(weights: Sequence[jax.Array]) -> jax.Array:
            y = x
            for w in weights:
                y = y + attend(jnp.tanh(y @ w), y, y, seen)
            return y.astype(jnp.float32).sum()

        return jax.grad(total)(weights)

    def sought(count: int) -> int:
        orders.clear()
        assert len([n for n in products(compiled(step, (x, seen, [w] * count), get_chip("tpu-v4"))) if n > 1]) >= 2 * count
        return len(orders)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 4, 128, 32), (32, 32)))
    seen = jax.ShapeDtypeStruct((128, 128), jnp.bool_)
    two, four, eight = map(sought, (2, 4, 8))
    assert eight - four <= 2 * (four - two)


def with_masks(function: Callable[..., Any], *, masked: bool, dropped: bool) -> Callable[..., Any]:
    """A function of q, k, v, seen, kept as one of those of them that there are."""

    def taking(*arrays: jax.Array) -> Any:
        rest = list(arrays[3:])
        return function(*arrays[:3], rest.pop(0) if masked else None, rest.pop(0) if dropped else None)

    return taking


SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(2, 40), st.integers(2, 50), st.sampled_from([2, 8, 33]))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from([jnp.bfloat16, np.float32, np.float16]), masked=st.booleans(), dropped=st.booleans())
def test_attention_has_the_same_bits_joined_or_apart(shape, dtype, masked, dropped) -> None:
    function = with_masks(lambda *x: (attend(*x),), masked=masked, dropped=dropped)
    assert_same_bits(function, operands(shape, dtype, masked=masked, dropped=dropped), EAGER, kernels=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "masked", "dropped"),
    [((2, 3, 20, 30, 8), jnp.bfloat16, False, False), ((1, 2, 24, 24, 24), np.float32, True, True)],
    ids=["bf16", "f32, masks, as many rows as columns as features"],
)
def test_its_gradients_have_the_same_bits_in_two_kernels(shape, dtype, masked, dropped) -> None:
    function = with_masks(gradients, masked=masked, dropped=dropped)
    assert_same_bits(function, operands(shape, dtype, masked=masked, dropped=dropped), EAGER, kernels=2)


def test_sums_in_blocks_have_the_same_bits_in_one_kernel() -> None:
    """Weights with values over 1,100 keys: three blocks."""
    assert_same_bits(lambda *x: (attend(*x),), operands((1, 1, 9, 1100, 8), jnp.bfloat16), EAGER, kernels=1)


@pytest.mark.slow
def test_where_sums_over_all_rows_find_no_room_their_rows_are_made_again() -> None:
    assert_same_bits(gradients, operands((1, 2, 200, 160, 8), jnp.bfloat16), FEW_ACCUMULATORS, kernels=3)


def test_queries_that_share_keys_are_rows_of_one_head() -> None:
    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        groups = q.reshape(2, 2, 2, 12, 8).reshape(2, 2, 24, 8)  # [B, K * G, T, D] -> [B, K, G * T, D]
        return (attend(groups, k, v, jnp.tile(causal(12), (2, 1))),)

    q, k, v = operands((2, 4, 12, 12, 8), jnp.bfloat16)
    assert_same_bits(function, [q, k[:, :2], v[:, :2]], EAGER, kernels=1)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention as the language models have it: q [B, T, K * G, D]; k, v [B, S, K, D] -> [B, T, K * G * D]."""
    return attention.attend(q, k, v, jnp.tril(jnp.ones((q.shape[1], k.shape[1]), jnp.bool_))[None, None])


def grouped_gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """What it gives, and the gradients of its operands."""
    mixed, back = jax.vjp(grouped, q, k, v)
    return mixed, *back(jnp.sin(mixed))


def test_batches_are_divided_beside_a_mask_that_is_the_same_for_all() -> None:
    """Two heads of keys in two parts of a step, though what is masked depends on the place in the rows: through a view, or by positions."""

    def by_place(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return (grouped(q, k, v),)

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 16, heads, 8)).astype(jnp.bfloat16) for heads in (4, 2, 2))
    assert max(products(compiled(by_place, [q, k, v], EAGER))) == 4
    assert_same_bits(by_place, [q, k, v], EAGER, kernels=1)


def test_queries_that_share_keys_take_no_more_room_than_as_many_of_one_head() -> None:
    """Eight to a key, 65,536 rows of a head: they come and go with the rows, so nothing of the size of the scores is stored."""
    shapes = [jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16) for heads in (16, 2, 2)]
    program = compiled(grouped_gradients, shapes, get_chip("tpu-v5e"))
    assert all(b.elems < 16 * 8192**2 for b in program.buffers)


def projected_gradients(wq: jax.Array, wk: jax.Array, wv: jax.Array, x: jax.Array, out: jax.Array) -> tuple[jax.Array, ...]:
    """Those of weights [D, H, E] and of their operand [B, T, D]: what reads the gradients of values precedes those of keys."""

    def layer(wq: jax.Array, wk: jax.Array, wv: jax.Array, x: jax.Array) -> jax.Array:
        return grouped(*(jnp.einsum("btd,dhe->bthe", x, w) for w in (wq, wk, wv)))

    return jax.vjp(layer, wq, wk, wv, x)[1](out)


def projection_shapes(length: int, width: int, head_width: int) -> list[tuple[int, ...]]:
    """Of the operands of `projected_gradients`: four heads of queries, two of keys."""
    weights = [(width, heads, head_width) for heads in (4, 2, 2)]
    return [*weights, (1, length, width), (1, length, 4 * head_width)]


def test_what_reads_a_gradient_moves_so_that_kernels_of_the_same_rows_join() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in projection_shapes(2048, 256, 128)]
    assert len([n for n in products(compiled(projected_gradients, shapes, EAGER)) if n > 1]) == 2


@pytest.mark.slow
def test_nodes_that_move_change_no_bit() -> None:
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in projection_shapes(256, 16, 8)]
    assert [n for n in products(compiled(projected_gradients, arguments, FEW_ACCUMULATORS)) if n > 1] == [6]
    assert_same_bits(projected_gradients, arguments, FEW_ACCUMULATORS)


def test_a_program_that_does_not_fit_recomputes_its_weights_instead_of_storing_them(capfd, monkeypatch) -> None:
    monkeypatch.setenv("TPUFLOW_DEBUG", "1")
    chip = get_chip("tpu-v3")
    roomy = golden_attention.program(2048, "tpu-v3", PIPELINE)
    assert "again" not in capfd.readouterr().err
    tight = golden_attention.program(2048, replace(chip, hbm_bytes=roomy.hbm_bytes - 1), PIPELINE)
    assert f"needs {roomy.hbm_bytes:,} bytes of HBM, {roomy.hbm_bytes - 1:,} are there: again" in capfd.readouterr().err
    assert tight.hbm_bytes < roomy.hbm_bytes / 4
    assert time_program(roomy).device_picoseconds < time_program(tight).device_picoseconds < 1.2 * time_program(roomy).device_picoseconds


def test_a_program_whose_arguments_alone_do_not_fit_is_compiled_once(capfd, monkeypatch) -> None:
    monkeypatch.setenv("TPUFLOW_DEBUG", "1")
    with pytest.raises(OutOfMemoryError):
        golden_attention.program(2048, replace(get_chip("tpu-v3"), hbm_bytes=2**20), PIPELINE)
    assert "again" not in capfd.readouterr().err


def test_a_program_that_does_not_fit_has_the_same_bits() -> None:
    chip = replace(get_chip("tpu-v3"), name="slower-memory", hbm_bytes_per_second=225e9)
    arguments = operands((1, 2, 64, 64, 8), jnp.bfloat16)
    programs = [compiled(gradients, arguments, chip, passes) for passes in (PIPELINE, SAVING)]
    assert [sum(b.elems >= 2 * 64**2 for b in program.buffers) for program in programs] == [2, 0]
    assert_same_bits(gradients, arguments, chip, joining=SAVING)


def test_where_keys_find_no_room_on_the_chip_products_stay_apart() -> None:
    small = replace(EAGER, name="small-vmem", vmem_bytes=1024 * 1024)
    shapes = [jax.ShapeDtypeStruct((1, 2, n, 64), jnp.bfloat16) for n in (256, 4096, 4096)]
    found = {chip.name: max(products(compiled(lambda *x: (attend(*x),), shapes, chip)), default=0) for chip in (small, EAGER)}
    assert found == {"small-vmem": 0, "slow-memory": 4}


def test_a_gradient_that_outgrows_the_accumulators_stays_apart() -> None:
    """Of a classifier's weights: 8 MB over 32 rows, which are one block of the sum."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(x @ w)[:, 0].mean()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 1000), (32, 2048))]
    program = compiled(jax.grad(loss), shapes, EAGER)
    assert any(k.name.startswith("dot") for k in program.kernels())


@pytest.mark.parametrize("chip", ["tpu-v3", "tpu-v5e", "tpu-v6e"])
def test_a_classifier_joins_its_loss_and_update_no_further_than_the_chip_holds_them(chip: str) -> None:
    """Weights and their momentum of 16 MB each, in two slots as they come and as they go."""

    def step(w: jax.Array, momentum: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        def loss(w: jax.Array) -> jax.Array:
            return -jax.nn.log_softmax((x @ w.astype(jnp.bfloat16)).astype(jnp.float32))[:, 0]

        losses, backward = jax.vjp(loss, w)
        momentum = 0.9 * momentum + backward(jnp.ones_like(losses))[0]
        return losses, w - 0.1 * momentum, momentum

    weights, x = jax.ShapeDtypeStruct((4096, 1000), jnp.float32), jax.ShapeDtypeStruct((32, 4096), jnp.bfloat16)
    assert compiled(step, (weights, weights, x), get_chip(chip)).kernels()


@pytest.mark.slow
def test_what_a_product_makes_beside_its_result_keeps_it_apart() -> None:
    """Of a feedforward layer and its norm: the gradient's product gives what it activates again as well, which has to do with neither it
    nor the rows."""

    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        into, bias, out, scale = weights
        y = x + jax.nn.gelu(x @ into + bias) @ out
        y = y - y.mean(-1, keepdims=True)
        return jnp.sum(jnp.sin(y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6) * scale))

    def step(into: jax.Array, bias: jax.Array, out: jax.Array, scale: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(loss)((into, bias, out, scale), x)

    rng = np.random.default_rng(0)
    assert_same_bits(step, [rng.standard_normal(s).astype(np.float32) for s in ((32, 64), (64,), (64, 32), (32,), (4, 16, 32))], EAGER)


@pytest.mark.parametrize("width", [24, 344])
def test_a_gate_and_what_it_lets_through_are_products_of_two_kernels(width: int) -> None:
    """Llama's feedforward layer behind its norm: what one product gives meets what the other does: neither rows nor made of one."""

    def layer(gate: jax.Array, up: jax.Array, scale: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale
        return (jax.nn.silu(x @ gate) * (x @ up),)

    rng = np.random.default_rng(0)
    assert_same_bits(layer, [rng.standard_normal(s).astype(np.float32) for s in ((32, width), (32, width), (32,), (4, 16, 32))], EAGER)


def test_self_attention_of_one_array_keeps_its_axes_apart() -> None:
    """Queries, keys and values are one array: its rows are rows of the scores, and columns."""
    (x,) = operands((1, 2, 16, 16, 8), np.float32)[:1]
    assert_same_bits(lambda x: (attend(x, x, x),), [x], EAGER, kernels=1)


@pytest.mark.slow
def test_long_attention_stores_no_scores_and_takes_less_time_and_memory() -> None:
    path = Path(golden_attention.PATH)
    assert golden_attention.text() == path.read_text(encoding="utf-8"), "python -m tests.golden_attention writes it"


@pytest.mark.parametrize("length", [2048, 8192])
def test_no_array_of_the_memory_plan_has_the_size_of_scores(length) -> None:
    program = golden_attention.program(length, "tpu-v5e", PIPELINE)
    assert all(b.elems < golden_attention.HEADS * length**2 for b in program.buffers)
