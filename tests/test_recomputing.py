"""`jax.checkpoint` trades time for memory, and a program that does not fit says what would make it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import tpuflow
from tests.tolerances import SMALL_STEP
from tpuflow.chips import get_chip
from tpuflow.compiler import PIPELINE
from tpuflow.errors import OutOfMemoryError
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.jaxpr.importer import lower_with_calls
from tpuflow.lower.memory import plan_memory
from tpuflow.lower.passes.rematerialize import Rematerialize
from tpuflow.reports.layers import BACKWARD

Arrays = list[jax.Array]


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    """Two products: what is made of one element by element, the compiler computes again by itself where that saves memory."""
    return jnp.sin(jnp.tanh(x @ w) @ w)


def loss(params: Arrays, x: jax.Array, layer: Callable[..., jax.Array]) -> jax.Array:
    for w in params:
        x = layer(x, w)
    return jnp.sum(x * x)


def step(params: Arrays, x: jax.Array, layer: Callable[..., jax.Array]) -> Arrays:
    return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params, x, layer), strict=True)]


def plain_step(params: Arrays, x: jax.Array) -> Arrays:
    return step(params, x, block)


def checkpointed_step(params: Arrays, x: jax.Array) -> Arrays:
    return step(params, x, jax.checkpoint(block))


def shapes(rows: int, width: int = 256, layers: int = 6) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers, jax.ShapeDtypeStruct((rows, width), jnp.float32)


@pytest.mark.parametrize(
    ("chip", "least"),
    [("tpu-v2", 1.1), ("tpu-v4", 1.1), ("tpu-v5e", 1.1), ("ascend910", 1.05), ("tpu-v3", 1.0)],  # v3 has room for what is made again
)
def test_checkpoint_trades_time_for_memory(chip: str, least: float):
    kept, again = (tpuflow.estimate(f, *shapes(8192), chip=chip, donate_argnums=0) for f in (plain_step, checkpointed_step))
    assert again.memory.peak_memory_in_bytes < 0.7 * kept.memory.peak_memory_in_bytes
    assert least * kept.step_seconds < again.step_seconds < 1.5 * kept.step_seconds
    forward = 6 * 2 * 8192 * 256 * 256
    assert again.time.work.macs["f32"] - kept.time.work.macs["f32"] in range(5 * forward // 6, forward + 1)


def test_what_is_computed_again_is_told_apart():
    found = tpuflow.estimate(checkpointed_step, *shapes(8192), chip="tpu-v3", donate_argnums=0).profile()
    again = {r.place for r in found.time.kernels if "rematted" in r.time.scope}
    assert again
    assert {k.phase for k in found.kernels if k.place in again} == {BACKWARD}
    kept = tpuflow.estimate(plain_step, *shapes(8192), chip="tpu-v3", donate_argnums=0).profile()
    assert max(found.memory.live_bytes["activations"]) < max(kept.memory.live_bytes["activations"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_checkpoint_changes_no_value(engine: str):
    rng = np.random.default_rng(0)
    params = [jnp.asarray(0.25 * rng.normal(size=(16, 16)), jnp.float32) for _ in range(3)]  # of a norm that keeps values in range
    x = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    ours, kept = (tpuflow.jit(f, engine=engine, fidelity="bitexact")(params, x) for f in (checkpointed_step, plain_step))
    for ours_w, plain_w in zip(ours, kept, strict=True):
        assert (np.asarray(ours_w) == np.asarray(plain_w)).all()
    for ours_w, jax_w in zip(ours, jax.jit(plain_step)(params, x), strict=True):
        np.testing.assert_allclose(ours_w, jax_w, **SMALL_STEP)


def test_remat_of_flax_layers_is_seen_through_a_policy():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.sin(jnp.tanh(nn.Dense(256)(x)))

    class Net(nn.Module):
        remat: bool

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            kind = nn.remat(Block) if self.remat else Block
            for i in range(4):
                x = kind(name=f"block{i}")(x)
            return x

    x, y = jax.ShapeDtypeStruct((4096, 256), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    kept, again = (tpuflow.estimate_training(Net(remat), (x, y), policy="mixed", chip="tpu-v3") for remat in (False, True))
    assert again.time.work.macs["f16"] > kept.time.work.macs["f16"]


# --- out of memory ------------------------------------------------------------------------------------------------------


def test_out_of_memory_names_what_is_missing_the_largest_and_what_would_help():
    with pytest.raises(OutOfMemoryError) as caught:
        tpuflow.estimate(plain_step, *shapes(2**23), chip="tpu-v3", donate_argnums=0)
    text = str(caught.value)
    assert "GiB" in text and "more than the" in text and "'tpu-v3'" in text
    assert "8.00 GiB  f32[8388608,256]" in text and "test_recomputing.py" in text and "jvp" in text
    assert "jax.checkpoint" in text and "a smaller batch" in text
    assert "donate_argnums" not in text


def test_arguments_that_fill_the_memory_call_for_other_remedies():
    big = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)  # 16 GiB
    with pytest.raises(OutOfMemoryError, match="donate_argnums") as caught:
        tpuflow.estimate(lambda params: params * 2.0, big, chip="tpu-v5e")
    assert "sharding" in str(caught.value) and "jax.checkpoint" not in str(caught.value)


def test_what_a_maker_reserves_is_not_there_to_use():
    chip = tpuflow.get_chip("ascend910")
    n = (chip.available_hbm_bytes // 4 // 1024 + 1) * 1024
    assert 4 * n <= chip.hbm_bytes
    with pytest.raises(OutOfMemoryError):
        tpuflow.estimate(lambda x: x + 1, jax.ShapeDtypeStruct((n,), jnp.float32), chip=chip, donate_argnums=0)


# --- computed again by the compiler -------------------------------------------------------------------------------------


def attention(x: jax.Array, w: jax.Array, out: jax.Array) -> jax.Array:
    """Three layers of attention, softmax in f32: x [T, D], w [D, D], out [D, D]."""
    for _ in range(3):
        scores = jnp.einsum("td,sd->ts", x @ w, x, preferred_element_type=x.dtype)
        x = x + jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ x @ out
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def compiled_graph(*, again: bool) -> Graph:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 16), (16, 16), (16, 16))]
    graph, _ = lower_with_calls(jax.make_jaxpr(jax.grad(attention, (0, 1, 2)))(*arguments), "attention")
    for step in PIPELINE:
        graph = step(graph) if again or not isinstance(step, Rematerialize) else graph
    return verify(graph)


def test_softmax_is_not_kept_for_the_backward_pass_and_no_bit_changes():
    again, kept = (compiled_graph(again=again) for again in (True, False))
    plans = [plan_memory(graph, get_chip("generic")) for graph in (again, kept)]
    assert plans[0].use.temporary_bytes < 0.9 * plans[1].use.temporary_bytes
    rng = np.random.default_rng(0)
    arrays = [(0.3 * rng.standard_normal(v.shape)).astype(v.dtype.numpy) for v in again.inputs]
    for one, other in zip(interpret(again, *arrays), interpret(kept, *arrays), strict=True):
        np.testing.assert_array_equal(one, other)
