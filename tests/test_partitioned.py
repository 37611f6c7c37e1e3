"""Programs with shardings: partitioned by XLA, brought back, and run on every chip of a mesh with the values of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import tpuflow
from tests.tolerances import sum_bound
from tpuflow.compiler import compile_jaxpr, compile_stablehlo
from tpuflow.device.runtime import Executable
from tpuflow.errors import CompileError, ConfigError, UnsupportedPrimitiveError
from tpuflow.isa.assembler import assemble
from tpuflow.isa.collectives import MeshAxis, chips_of
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import from_bytes, to_bytes
from tpuflow.isa.meshes import axes_grouped, axes_numbered, axes_ordered, divided, places
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.stablehlo import lower_stablehlo
from tpuflow.lower.join_sums import join_sums
from tpuflow.lower.reduce_scatter import scatter_sums
from tpuflow.lower.shards import Cuts

P = PartitionSpec
RNG = np.random.default_rng(0)
SIZES = {"data": 2, "model": 4}
MESH = AbstractMesh((2, 4), ("data", "model"))
EXPLICIT = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
CLOSE = {"rtol": sum_bound(128), "atol": sum_bound(128)}


def cut(*entries: Any, mesh: AbstractMesh = MESH) -> NamedSharding:
    """A sharding of an array over the mesh."""
    return NamedSharding(mesh, P(*entries))


def kept(x: Any, *entries: Any, mesh: AbstractMesh = MESH) -> Any:
    """x, which lies so."""
    return lax.with_sharding_constraint(x, cut(*entries, mesh=mesh))


def floats(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 4).astype(np.float32)


def kinds(compiled: Any) -> Counter[str]:
    """How many collectives of each kind a call makes, as its time says."""
    return Counter(row.kind for row in compiled.time().collectives for _ in range(row.count))


class Row(NamedTuple):
    """A function of arrays, how its arguments and results lie, and which collectives that must make."""

    name: str
    fn: Callable[..., Any]
    inputs: Any
    outputs: Any
    arguments: tuple[Any, ...]
    kinds: str


X, W = floats(16, 32), floats(32, 64)


def _layers(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.gelu(x @ w) @ v


def _deep(x: Any, ws: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(kept(x @ w, "data", "model")), jnp.sum(x)), x, ws)


def _image_gradient(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))))

    return jax.grad(loss)(w)


def _embedded(table: Any, tokens: Any) -> Any:
    return jax.grad(lambda table: jnp.sum(jnp.take(table, tokens, axis=0).sum(1) ** 2))(table)


def _noise(key: Any, x: Any) -> Any:
    return x * jax.random.bernoulli(key, 0.5, x.shape) + jax.random.normal(key, x.shape)


def _chosen(x: Any, w: Any) -> Any:
    return lax.cond(jnp.sum(x) > 0, lambda x: x @ w, lambda x: (x * 2) @ w, x)


ROWS = (
    Row("Megatron's two products", _layers, (cut("data"), cut(None, "model"), cut("model")), cut("data"), (X, W, floats(64, 32)),
        "all_reduce"),
    Row("a constraint alone", lambda x, w: kept(x @ w, "data", "model").sum(0), None, None, (X, W), "all_reduce"),
    Row("a scan", _deep, (cut("data"), cut(None, None, "model")), None, (X, floats(3, 32, 32)), "all_gather all_reduce"),
    Row("pictures cut by rows", lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (cut(None, "model"), None), cut(None, "model"), (floats(2, 16, 8, 3), floats(3, 3, 3, 8)), "permute"),
    Row("a kernel's gradient", _image_gradient, (None, cut("data")), None, (floats(3, 3, 3, 8), floats(8, 8, 8, 3)), "all_reduce"),
    Row("a table cut by rows", _embedded, (cut("model"), cut("data")), cut("model"),
        (floats(64, 16), RNG.integers(0, 64, (8, 5)).astype(np.int32)), "all_reduce"),
    Row("random numbers", _noise, (None, cut("data", "model")), None, (jax.random.key(0), X), ""),
    Row("orders and places", lambda x: (jnp.sort(x, 1), jnp.argmax(x, 1), lax.top_k(x, 3), jnp.cumsum(x, 0)), cut("data"), None, (X,),
        "all_gather"),
    Row("rows for columns", lambda x: x * 2, cut("model"), cut(None, "model"), (floats(16, 16),), "all_to_all"),
    Row("neighbours", lambda x: jnp.roll(x, 1, 0) + x[::-1], cut("model"), cut("model"), (floats(16, 16),), "permute"),
    Row("parts of unequal length", lambda x: kept(x[:13], "model").sum(0) + x.max(), cut("model"), None, (floats(16, 16),), "all_reduce"),
    Row("truth, products and bits", lambda x: (jnp.any(x > 0.5, 0), jnp.all(x > -9, 0), jnp.min(x), jnp.prod(x + 1, 0),
        lax.reduce_xor(lax.bitcast_convert_type(x, jnp.int32), (0,))), cut("model"), None, (floats(16, 16),), "all_gather all_reduce"),
    Row("what XLA's passes rename", lambda x: lax.erf(x) + jnp.exp2(x) + jax.nn.sigmoid(x), cut("data"), None, (X,), ""),
    Row("a branch", _chosen, (cut("data"), cut(None, "model")), None, (X, W), "all_reduce"),
    Row("complex numbers", lambda x: jnp.abs(jnp.fft.rfft(x, axis=0)), cut("data"), None, (X,), "all_gather"),
    Row("a matrix's factors", lambda x: jnp.linalg.inv(x[:, :16] + 3 * jnp.eye(16)), cut("data"), None, (X,), "all_gather"),
    Row("two axes for one", lambda x: x - jnp.mean(x, 0), cut(("model", "data")), cut(("data", "model")), (floats(16, 3),),
        "all_reduce permute"),
)  # fmt: skip


def words(x: Any) -> np.ndarray:
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def both_engines(program: Any, arguments: Any) -> list[np.ndarray]:
    """What the fast engine gives, which the reference engine gives bit for bit."""
    leaves = [words(x) for x in jax.tree.leaves(arguments)]
    reference, exact = (Executable(program, *engine).launch(leaves)[0] for engine in (("reference",), ("fast", "bitexact")))
    for one, other in zip(reference, exact, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    return [np.asarray(x) for x in exact]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_partitioned_program_gives_what_one_device_gives_and_the_same_bits_on_both_engines(row: Row) -> None:
    program = tpuflow.jit(row.fn, in_shardings=row.inputs, out_shardings=row.outputs).program(*row.arguments)
    assert [(axis.name, axis.size) for axis in program.mesh] == [*SIZES.items()]
    assert {row.kind for row in Executable(program).time().collectives} == set(row.kinds.split())
    found, expected = both_engines(program, row.arguments), jax.tree.leaves(jax.jit(row.fn)(*row.arguments))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


ROW = AbstractMesh((8,), ("data",))
ALONG_PARTS = (
    Row("a row of chips as rows and columns", lambda x: x.reshape(4, 4) * 2, cut("data", mesh=ROW), None, (floats(16),), ""),
    Row("sums over its parts", lambda x: (x.reshape(4, 4).sum(0), x.reshape(2, 4, 2).max(1)), cut("data", mesh=ROW), None, (floats(16),),
        "all_reduce"),
    Row("gathered over its parts", lambda x: kept(x.reshape(4, 4, 3), "data", mesh=AbstractMesh((4, 2), ("data", "other"))) + 1,
        cut("data", mesh=ROW), None, (floats(16, 3),), "all_gather"),
    Row("products over another mesh", lambda x, w: kept(kept(x @ w, "data", "model").T, "data", mesh=ROW),
        (cut("data"), cut(None, "model")), None, (X, W), "all_to_all"),
)  # fmt: skip


@pytest.mark.parametrize("row", ALONG_PARTS, ids=lambda row: row.name)
def test_arrays_and_groups_may_go_over_parts_of_an_axis_and_then_that_is_divided(row: Row) -> None:
    program = tpuflow.jit(row.fn, in_shardings=row.inputs, out_shardings=row.outputs).program(*row.arguments)
    assert (
        chips_of(program.mesh) == 8
        and len(program.mesh) > 1
        and all(axis.joined == axis.name.endswith((".1", ".2")) for axis in program.mesh)
    )
    assert {row.kind for row in Executable(program).time().collectives} >= set(row.kinds.split())
    assert from_bytes(to_bytes(program)).mesh == assemble(disassemble(program)).mesh == program.mesh
    found, expected = both_engines(program, row.arguments), jax.tree.leaves(jax.jit(row.fn)(*row.arguments))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_a_state_may_lie_over_parts_of_an_axis_from_step_to_step() -> None:
    def step(state: Any, x: Any) -> Any:
        return kept(state + x, "data", mesh=AbstractMesh((4, 2), ("data", "other"))), x.sum()

    batches, begin = floats(3, 8, 4), np.zeros((8, 4), np.float32)
    loop = tpuflow.sink(jax.jit(step, in_shardings=(None, cut("data", "model"))), list(batches), 3, state=begin, epochs=1)
    assert len(list(loop)) == 1
    np.testing.assert_allclose(np.asarray(loop.state), batches.sum(0), **CLOSE)
    program = loop.executables[0].program
    assert [axis.name for axis in program.mesh] == ["data", "model.0", "model.1"]
    (new,) = program.outputs
    assert program.inputs[1].cut == new.cut and new.cut


def test_some_axes_may_be_mapped_by_hand_and_the_others_left_to_the_partitioner() -> None:
    axes: Any = {"model"}
    specs: Any = {"in_specs": (P(None, "model"), P("model")), "out_specs": P()}
    mapped = jax.shard_map(lambda x, w: lax.psum(x @ w, "model"), mesh=MESH, axis_names=axes, **specs)
    program = tpuflow.jit(lambda x, w: mapped(x, w) * 2, in_shardings=(cut("data"), cut("model"))).program(X, W)
    assert [port.cut for port in (*program.inputs, *program.outputs)] == [((0,), ()), ((1,), ()), ((0,), ())]
    np.testing.assert_allclose(both_engines(program, (X, W))[0], X @ W * 2, **CLOSE)


def test_what_is_mapped_by_hand_alone_is_not_partitioned_whatever_its_arguments_bring_along() -> None:
    mapped = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=MESH, in_specs=P("data"), out_specs=P())
    brought = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=cut("model"))
    assert str(tpuflow.jit(mapped).lower(brought).jaxpr) == str(jax.make_jaxpr(mapped)(X))


def test_a_program_may_be_partitioned_for_more_chips_than_xla_counts_as_one_process() -> None:
    mesh = AbstractMesh((4, 1024), ("slice", "data"))
    by_rows = cut(("slice", "data"), mesh=mesh)
    summed = tpuflow.jit(lambda x: x.sum(0), in_shardings=by_rows, chip="tpu-v5e").lower(jax.ShapeDtypeStruct((8192, 8), jnp.float32))
    (row,) = summed.compile().time().collectives
    assert row.kind == "all_reduce" and row.axes == ("slice", "data")


# --- ways to say it


def test_explicit_axes_are_part_of_types_and_bring_their_sharding_to_the_results() -> None:
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cut(*spec, mesh=EXPLICIT)) for a, spec in ((X, ("data",)), (W, (None, "model")))
    ]
    jitted = tpuflow.jit(lambda x, w: jnp.tanh(x @ w))
    program = jitted.program(*types)
    assert jitted.lower(*types).out_info.shape == (16, 64)
    assert [port.cut for port in (*program.inputs, *program.outputs)] == [((0,), ()), ((), (1,)), ((0,), (1,))]
    np.testing.assert_allclose(both_engines(program, (X, W))[0], np.tanh(X @ W), **CLOSE)


def test_a_partitioned_function_is_differentiated_batched_and_called_by_others() -> None:
    product = tpuflow.jit(lambda x, w: jnp.tanh(x @ w), in_shardings=(cut("data"), cut(None, "model")), out_shardings=cut("data"))
    found = jax.grad(lambda w: jnp.sum(product(X, w) ** 2))(W)
    np.testing.assert_allclose(found, jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w) ** 2))(W), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.vmap(lambda x: product(x, W))(X.reshape(2, 8, 32)).reshape(16, 64), np.tanh(X @ W), **CLOSE)
    outer = tpuflow.jit(lambda x, w: product(x, w) + 1)
    np.testing.assert_allclose(outer(X, W), np.tanh(X @ W) + 1, **CLOSE)
    assert len(outer.program(X, W).mesh) == 2


def test_shardings_of_one_device_or_of_none_change_nothing() -> None:
    one = NamedSharding(AbstractMesh((1,), ("data",)), P("data"))
    for given in (None, one, (one, None), SingleDeviceSharding(jax.devices()[0]), cut()):
        jitted = tpuflow.jit(lambda x, w: x @ w, in_shardings=given)
        assert jitted.program(X, W).mesh == ()


def test_arguments_with_other_shardings_are_another_program() -> None:
    jitted = tpuflow.jit(lambda x: x.sum(0))
    cuts = [
        jitted.program(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=s)).inputs[0].cut for s in (None, cut("data"), cut(None, "model"))
    ]
    assert cuts == [(), ((0,), ()), ((), (1,))]


ON_HOST_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, tpuflow
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
explicit = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

def loss(w, x):
    return jnp.mean(jnp.tanh(lax.with_sharding_constraint(x @ w, P("data", "model"))) ** 2)

x, w = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((16, 32), (32, 64)))
with jax.set_mesh(mesh):
    arguments = jax.device_put(w, P(None, "model")), jax.device_put(x, P("data"))
    ours = tpuflow.jit(jax.value_and_grad(loss), out_shardings=(None, P("model")))
    theirs = jax.jit(jax.value_and_grad(loss), out_shardings=(None, P("model")))
    for one, other in zip(jax.tree.leaves(ours(*arguments)), jax.tree.leaves(theirs(*arguments))):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    program = ours.program(*arguments)
    assert [p.cut for p in (*program.inputs, *program.outputs)] == [((), (1,)), ((0,), ()), (), ((1,), ())]

with jax.set_mesh(explicit):
    arguments = jax.device_put(x, P("data")), jax.device_put(w, P(None, "model"))
    layer = lambda x, w: jax.nn.relu(x @ w)
    np.testing.assert_allclose(tpuflow.jit(layer)(*arguments), jax.jit(layer)(*arguments), rtol=1e-5, atol=1e-5)
    assert tpuflow.jit(layer).program(*arguments).outputs[0].cut == ((0,), (1,))

with jax.set_mesh(mesh):
    state = jax.device_put(w, P(None, "model"))
    loop = tpuflow.sink(lambda w, x: (w - jax.grad(loss)(w, x), loss(w, x)), [x] * 3, state=state, epochs=1)
    (sunk,) = loop
    assert sunk.metrics[0] > sunk.metrics[-1] and loop.executables[0].program.inputs[1].cut == ((), (1,))
"""


@pytest.mark.slow
def test_arrays_on_eight_host_devices_bring_their_shardings_and_give_what_these_devices_give() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", ON_HOST_DEVICES], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# --- training steps


def _parameters() -> dict[str, np.ndarray]:
    shapes = {"embed": (32, 16), "qkv": (16, 3, 4, 4), "out": (4, 4, 16), "up": (16, 64), "down": (64, 16), "scale": (16,)}
    return {name: floats(*shape) for name, shape in shapes.items()}


def _transformer_loss(p: Any, tokens: Any, lie: Callable[[Any], Any]) -> Any:
    def norm(x: Any) -> Any:
        return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * (1 + p["scale"])

    x = lie(jnp.take(p["embed"], tokens, axis=0))
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dkhc->btkhc", norm(x), p["qkv"]), 2, 0)
    weights = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", q, k) / 2)
    x = lie(x + jnp.einsum("bhts,bshc,hcd->btd", weights, v, p["out"]))
    x = lie(x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"])
    logits = norm(x) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


_TENSOR_PARALLEL = {
    "embed": (), "qkv": (None, None, "model"), "out": ("model",), "up": (None, "model"), "down": ("model",), "scale": (),
}  # fmt: skip
_BOTH = ("data", "model")
STRATEGIES: dict[str, tuple[Callable[[str], NamedSharding], NamedSharding]] = {
    "data parallel": (lambda name: cut(), cut(_BOTH)),
    "fully sharded": (lambda name: cut(*((None, _BOTH) if name == "up" else (_BOTH,) if name in ("embed", "scale", "down") else ("model",)))
                      if name != "qkv" else cut(_BOTH), cut(_BOTH)),
    "tensor parallel": (lambda name: cut(*_TENSOR_PARALLEL[name]), cut("data")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(1e-2, eps=1e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_transformers_step_is_that_of_one_device(strategy: str, optimizer: optax.GradientTransformation) -> None:
    of, batch = STRATEGIES[strategy]
    parameters, tokens = _parameters(), RNG.integers(0, 32, (8, 6)).astype(np.int32)

    def step(parameters: Any, state: Any, tokens: Any, lie: Any = lambda x: x) -> Any:
        loss, gradients = jax.value_and_grad(_transformer_loss)(parameters, tokens, lie)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    state = optimizer.init(parameters)
    named = {name: of(name) for name in parameters}
    states = optax.tree_map_params(optimizer, lambda _, s: s, state, named, transform_non_params=lambda _: cut())
    partitioned = tpuflow.jit(
        lambda *args: step(*args, lie=lambda x: lax.with_sharding_constraint(x, batch)),
        in_shardings=(named, states, batch), out_shardings=(named, states, cut()), donate_argnums=(0, 1),
    )  # fmt: skip
    made = kinds(partitioned.lower(parameters, state, tokens).compile())
    expected = jax.jit(step)(parameters, state, tokens)
    found = partitioned(parameters, state, tokens)  # which takes the parameters and the state
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=3e-3)
    assert set(made) == {"all_reduce", "all_gather", "reduce_scatter"} if strategy == "fully sharded" else set(made) == {"all_reduce"}
    assert made["reduce_scatter"] >= len(parameters) if strategy == "fully sharded" else made["all_reduce"] >= len(parameters)


def _two_layers(state: Any, batch: Any) -> Any:
    """A step of Adam."""
    x, y = batch
    value, gradient = jax.value_and_grad(lambda p: jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"] - y) ** 2))(state[0])
    updates, adam = ADAM.update(gradient, state[1])
    return (optax.apply_updates(state[0], updates), adam), value


ADAM = optax.adam(1e-2, eps=1e-3)
_BATCHES = [(floats(8, 16), floats(8, 16)) for _ in range(4)]


def _sunk(step: Callable[..., Any], **options: Any) -> tuple[list[np.ndarray], tpuflow.Sink]:
    """The losses of two sinks of three steps and the last parameters; the loop."""
    params = {"up": np.ones((16, 32), np.float32) / 8, "down": np.ones((32, 16), np.float32) / 8}
    loop = tpuflow.sink(step, _BATCHES, 3, state=(params, ADAM.init(params)), epochs=2, **options)
    losses = [sunk.metrics for sunk in loop]
    return [*losses, *jax.tree.leaves(loop.state[0])], loop


@pytest.mark.slow
def test_steps_of_a_sink_are_partitioned_and_what_is_not_said_to_be_cut_stays_as_the_partitioner_has_it_after_a_step() -> None:
    lies = {"up": cut(None, "model"), "down": cut("model")}, None
    step = jax.jit(_two_layers, in_shardings=(lies, cut("data")), out_shardings=(lies, None))
    (wanted, _), (found, loop) = _sunk(_two_layers), _sunk(step)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)
    program = loop.executables[0].program
    cuts = {port.name: port.cut for port in program.inputs}
    columns, rows = ((), (1,)), ((1,), ())
    assert cuts == {
        "trips": (), "0/up": columns, "0/down": rows, "1/0/count": (), "1/0/mu/up": columns, "1/0/mu/down": rows, "1/0/nu/up": columns,
        "1/0/nu/down": rows,
    }  # fmt: skip
    assert [port.cut for port in program.outputs] == list(cuts.values())[1:]
    assert [port.cut for port in program.infeeds] == [((0,), ()), ((0,), ())]
    exact, reference = (_sunk(step, **options)[0] for options in ({"fidelity": "bitexact"}, {"engine": "reference"}))
    assert all(np.array_equal(one, other) for one, other in zip(exact, reference, strict=True))


class Layers(nn.Module):
    """Two layers with dropout between them."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dropout(0.2, deterministic=not train)(nn.gelu(nn.Dense(32, name="up")(x)))
        return nn.Dense(12, name="down")(x)


SAMPLES = floats(62, 16), RNG.integers(0, 12, 62).astype(np.int32)
BY_TENSOR = {"up/kernel": P(None, "model"), "up/bias": P("model"), "down/kernel": P("model")}


def _trained(**options: Any) -> tpuflow.TrainResult:
    return tpuflow.train(
        Layers(),
        SAMPLES,
        optimizer=ADAM,
        loss="softmax_cross_entropy",
        batch_size=16,
        epochs=2,
        eval_data=SAMPLES,
        progress=False,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rules", [BY_TENSOR, {"*/kernel": P("data")}], ids=["tensor parallel", "fully sharded"])
def test_a_training_by_rules_is_that_of_one_chip_and_averages_and_moments_lie_as_their_parameters(rules: Any) -> None:
    one, several = _trained(ema=0.9), _trained(ema=0.9, mesh={"data": 4, "model": 2}, sharding=rules)
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-6)
    assert [epoch["accuracy"] for epoch in several.history] == [epoch["accuracy"] for epoch in one.history]
    cuts = {port.name: port.cut for port in several.executables[0].program.inputs}
    for pattern in rules:
        of_parameters = [name for name in cuts if name.startswith("params/") and fnmatchcase(name.removeprefix("params/"), pattern)]
        for name in of_parameters:
            assert cuts[name] and {cuts[n] for n in cuts if n.endswith(name.removeprefix("params/"))} == {cuts[name]}, name
    exact, reference = (
        _trained(mesh={"data": 4, "model": 2}, sharding=rules, **options).losses
        for options in ({"fidelity": "bitexact"}, {"engine": "reference"})
    )
    assert exact == reference


@pytest.mark.parametrize(("options", "text"), [
    ({"sharding": BY_TENSOR}, "give one, such as mesh={'data': 4}"),
    ({"mesh": {"data": 2}, "sharding": {"*/kernel": "data"}}, "expected patterns of parameter paths with jax.sharding.PartitionSpecs"),
    ({"mesh": {"data": 2}, "sharding": {"across/*": P("data")}}, r"'across/\*' matches no parameter; there are down/bias"),
    ({"mesh": {"data": 2}, "sharding": BY_TENSOR}, r"down/kernel float32\[32, 12\]: .* names the axis 'model', and the mesh has 'data'"),
    ({"mesh": {"data": 5}, "sharding": {"*/kernel": P("data")}}, "a batch of 16 samples does not divide over the 5 chips"),
    ({"mesh": {"data": 2, "model": 5}, "sharding": {"down/kernel": P(None, "model")}}, r"axis 1 of 12 .* over 5 chips \(model\)"),
    ({"mesh": {"data": 2}, "sharding": {"*": P(None, "data")}}, "parameter down/bias .* has 1 axes, and .* is for 2"),
])  # fmt: skip
def test_rules_that_do_not_fit_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _trained(**options)


def test_gradients_of_what_is_cut_are_scattered_with_the_users_lines_and_modules() -> None:
    """Data parallel, parameters cut: the sum of a gradient of which a chip keeps a part; flax's own names of axes say which."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            cut_by_columns = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(16, kernel_init=cut_by_columns, use_bias=False, name="first")(x)

    model = Model()
    boxed = jax.eval_shape(model.init, jax.random.key(0), X)
    lies = jax.tree.map(lambda spec: cut(*spec), nn.get_partition_spec(boxed))
    gradient = jax.grad(lambda p, x: jnp.mean(jnp.square(model.apply(p, x))))  # type: ignore[arg-type]
    step = tpuflow.jit(gradient, in_shardings=(lies, cut("model")), out_shardings=lies)
    parameters = {"params": {"first": {"kernel": floats(32, 16)}}}
    rows = step.lower(parameters, X).compile().time().collectives
    assert [(row.kind, row.scope) for row in rows] == [
        ("all_gather", "jvp(Model)/first"),
        ("reduce_scatter", "transpose(jvp(Model))/first"),
    ]
    assert all(row.source.startswith("test_partitioned.py:") for row in rows)
    expected = jax.jit(gradient)(parameters, X)
    np.testing.assert_allclose(step(parameters, X)["params"]["first"]["kernel"], expected["params"]["first"]["kernel"], **CLOSE)


# --- axes, places and sums


def test_axes_are_known_by_the_groups_and_the_numbers_of_their_devices() -> None:
    sizes = {"a": 2, "one": 1, "b": 3, "c": 2}
    for count in range(4):
        for names in permutations("abc", count):
            numbers = places(sizes, names)
            others = places(sizes, [name for name in sizes if name not in names])
            groups = np.lexsort((numbers, others)).reshape(-1, int(numbers.max()) + 1)
            assert axes_numbered(numbers, sizes) == names == axes_grouped(groups, sizes)


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1, 2, 3], [5, 4, 6, 7]], [[0, 1], [2, 3]], [[0, 0], [1, 1]]])
def test_groups_that_are_no_axes_are_told_from_those_that_are(groups: list[list[int]]) -> None:
    assert axes_grouped(np.array(groups), SIZES) is None


@pytest.mark.parametrize("members", list(permutations(range(4))))
def test_groups_go_over_axes_whatever_order_their_members_are_in(members: tuple[int, ...]) -> None:
    rows = np.arange(8).reshape(2, 4)
    for groups in (rows[:, members], np.stack([rows[0, members], rows[1]])):
        found = axes_ordered(groups, SIZES)
        assert found is not None and found[0] == ("model",)
        np.testing.assert_array_equal(found[1], rows)
    assert axes_ordered(np.array([[0, 1], [2, 5], [4, 3], [6, 7]]), SIZES) is None


@pytest.mark.parametrize(("sizes", "groups", "parts"), [
    ({"a": 8}, [[[0, 1], [2, 3], [4, 5], [6, 7]]], {"a": {"a.0": 4, "a.1": 2}}),
    ({"a": 8}, [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]], {"a": {"a.0": 2, "a.1": 2, "a.2": 2}}),
    ({"a": 2, "b": 4}, [[[0, 2, 4, 6], [1, 3, 5, 7]]], {"a": {"a": 2}, "b": {"b.0": 2, "b.1": 2}}),
    ({"a": 2, "b": 4}, [[[0, 4], [1, 5], [2, 6], [3, 7]]], {"a": {"a": 2}, "b": {"b": 4}}),
    ({"a": 12, "one": 1}, [np.arange(12).reshape(3, 4).tolist()], {"a": {"a.0": 3, "a.1": 4}, "one": {"one": 1}}),
    ({"a": 12}, [np.arange(12).reshape(4, 3).tolist()], {"a": {"a.0": 4, "a.1": 3}}),
    ({"a": 12}, [np.arange(12).reshape(3, 4).tolist(), np.arange(12).reshape(4, 3).tolist()], None),
    ({"a": 4}, [[[0, 3], [1, 2]]], None),
])  # fmt: skip
def test_axes_are_divided_into_as_few_parts_as_groups_of_devices_need(sizes: Any, groups: Any, parts: Any) -> None:
    found = divided(sizes, lambda finer: all(axes_grouped(np.array(g), finer) is not None for g in groups))
    wanted = parts and ({n: size for own in parts.values() for n, size in own.items()}, {name: tuple(own) for name, own in parts.items()})
    assert found == wanted


def imported(fn: Any, x: Any) -> Graph:
    """The graph that the chips start from."""
    found: list[Graph] = []
    compile_jaxpr(jax.make_jaxpr(fn)(x), name="step", watch=lambda stage, graph: found.append(graph))
    return found[0]


def test_a_sum_is_scattered_over_the_axes_that_its_part_is_cut_over_and_summed_over_the_others() -> None:
    def step(x: Any) -> Any:
        total = lax.psum(lax.psum(x, "model"), "data")
        return lax.dynamic_slice_in_dim(total, lax.axis_index("model") * 3, 3, 1)

    mapped = jax.shard_map(step, mesh=MESH, in_specs=P("data", "model"), out_specs=P(None, "model"), check_vma=False)
    graph = imported(mapped, floats(16, 48))
    found = [node for node in scatter_sums(graph, SIZES).nodes if node.op == "collective"]
    assert [(n.attrs["kind"], n.attrs["axes"], n.result.shape) for n in found] == [
        ("reduce_scatter", ("model",), (8, 3)), ("all_reduce", ("data",), (8, 3)),
    ]  # fmt: skip
    assert scatter_sums(scatter_sums(graph, SIZES), SIZES).outputs[0].type == graph.outputs[0].type


@pytest.mark.parametrize("start", ["axis_index * 2", "axis_index * 3, and the sum is used twice", "0"])
def test_sums_of_which_another_piece_is_taken_stay_as_they_are(start: str) -> None:
    def step(x: Any) -> Any:
        total = lax.psum(x, "model")
        at = 0 if start == "0" else lax.axis_index("model") * (2 if "2" in start else 3)
        piece = lax.dynamic_slice_in_dim(total, at, 3, 1)
        return piece + total[:, :3] if "twice" in start else piece

    mapped = jax.shard_map(step, mesh=MESH, in_specs=P("data", "model"), out_specs=P("data", "model"), check_vma=False)
    graph = imported(mapped, floats(16, 48))
    assert str(scatter_sums(graph, SIZES)) == str(graph)


JOINED: dict[str, tuple[Callable[..., Any], int]] = {
    "three": (lambda one, two, x: (one + two) + lax.psum(x * 5, "model"), 1),
    "one read twice": (lambda one, two, x: (one + two) * one, 2),
    "over other chips": (lambda one, two, x: one + lax.psum(x, "data") * two, 3),
    "a whole array": (lambda one, two, x: (one + x) * two, 2),
    "its own double": (lambda one, two, x: (one + one) * two, 2),
}
"""Of two sums over the chips of one axis and what is summed, and how many are sent."""


@pytest.mark.parametrize("name", JOINED)
def test_sums_over_the_same_chips_that_are_added_are_sent_as_one(name: str) -> None:
    fn, sums = JOINED[name]

    def step(x: Any) -> Any:
        return fn(lax.psum(x * 2, "model"), lax.psum(x * 3, "model"), x)

    graph = imported(
        jax.shard_map(step, mesh=MESH, in_specs=P("data", "model"), out_specs=P("data", "model"), check_vma=False), floats(16, 48)
    )
    found = verify(join_sums(graph))
    assert sum(node.op == "collective" for node in found.nodes) == sums
    assert str(join_sums(found)) == str(found)


@pytest.mark.parametrize(("rest", "kind"), [((), "all_reduce"), (("model",), "reduce_scatter")])
def test_tensor_parallel_products_of_one_array_send_its_gradient_once(rest: tuple[str, ...], kind: str) -> None:
    """Queries, keys and values, or a gate and what it gates: whole, or in the pieces that it lies in."""

    def loss(x: Any, weights: Any, lies: Callable[..., Any] = lambda x, *_: x) -> Any:
        one, two, three = (jnp.sin(lies(lies(x, "data", *rest), "data") @ w) for w in weights)
        return jnp.sum(one * two + three)

    def step(x: Any, weights: Any) -> Any:
        return jax.grad(loss)(x, weights, kept)

    x, weights = floats(16, 32), tuple(floats(32, 48) for _ in range(3))
    jitted = tpuflow.jit(step, in_shardings=(cut("data"), (cut(None, "model"),) * 3), out_shardings=cut("data", *rest))
    assert kinds(jitted.lower(x, weights).compile())[kind] == 1
    np.testing.assert_allclose(jitted(x, weights), jax.grad(loss)(x, weights), **CLOSE)


# --- errors

OTHER = AbstractMesh((4,), ("data",))
WRONG: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
    "an axis that does not divide": (ConfigError, lambda: tpuflow.jit(jnp.sin, in_shardings=cut(None, "model"))(np.ones((4, 30))),
        r"in_shardings: x float32\[4, 30\]: axis 1 of 30 elements is cut over 4 chips \(model\)"),
    "a result's axis that does not divide": (ConfigError, lambda: tpuflow.jit(lambda x: x[:3], out_shardings=cut("data"))(X),
        r"out_shardings: result float32\[3, 32\]: axis 0 of 3 elements is cut over 2"),
    "more axes than there are": (ConfigError, lambda: tpuflow.jit(jnp.sin, in_shardings=cut(None, None, "data"))(X), "has 2 axes, and P"),
    "too few shardings": (ConfigError, lambda: tpuflow.jit(jnp.add, in_shardings=(cut("data"),))(X, X), "a tuple of 1 does not fit"),
    "no mesh": (ConfigError, lambda: tpuflow.jit(jnp.sin, in_shardings=P("data"))(X), "none is set where the function is called"),
    "no sharding": (ConfigError, lambda: tpuflow.jit(jnp.sin, out_shardings="data"), "out_shardings: expected jax.sharding.NamedShardings"),
    "a state that is cut otherwise after a step": (CompileError, lambda: next(tpuflow.sink(jax.jit(
        lambda w, x: (w * x, x), in_shardings=(cut("data"), None), out_shardings=(cut(None, "data"), None)), [X], state=X)),
        r"is given '?.*' cut as .*'data'.* and gives it back cut as .*None, 'data'.*Give both the same"),
    "two meshes": (UnsupportedPrimitiveError, lambda: tpuflow.jit(
        lambda x: lax.with_sharding_constraint(x, NamedSharding(OTHER, P("data"))), in_shardings=cut("data"))(X),
        r"test_partitioned\.py:\d+.*mesh \{'data': 4\} in a program that has one over \{'data': 2, 'model': 4\}"),
    "a call of the host": (UnsupportedPrimitiveError, lambda: tpuflow.jit(
        lambda x: jax.pure_callback(np.sin, x, x), in_shardings=cut("data"))(X), r"test_partitioned\.py:\d+.*'pure_callback' in a program"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_where_it_is_said(name: str) -> None:
    kind, call, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()


def test_members_of_groups_in_any_order_send_and_receive_by_their_number_in_it() -> None:
    groups = np.array([[1, 2, 3, 0], [5, 7, 6, 4]])
    options = f"""channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
        replica_groups = dense<{groups.tolist()}> : tensor<2x4xi64>"""
    module = f"""module {{ func.func @main(%x: tensor<1x4xf32>) -> (tensor<4x4xf32>, tensor<4x1xf32>, tensor<1x1xf32>) {{
      %0 = "stablehlo.all_gather"(%x) <{{{options}, all_gather_dim = 0 : i64, use_global_device_ids}}>
        : (tensor<1x4xf32>) -> tensor<4x4xf32>
      %1 = "stablehlo.all_to_all"(%x) <{{{options}, split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 4 : i64}}>
        : (tensor<1x4xf32>) -> tensor<4x1xf32>
      %2 = "stablehlo.reduce_scatter"(%x) <{{{options}, scatter_dimension = 1 : i64, use_global_device_ids}}> ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32>
      }}) : (tensor<1x4xf32>) -> tensor<1x1xf32>
      return %0, %1, %2 : tensor<4x4xf32>, tensor<4x1xf32>, tensor<1x1xf32> }} }}"""
    cut_rows = (("data", "model"), ())
    imported = replace(
        lower_stablehlo(module, mesh=SIZES), mesh=(MeshAxis("data", 2), MeshAxis("model", 4)), cuts=Cuts((cut_rows,), (cut_rows,) * 3)
    )
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    found, _ = Executable(compile_stablehlo(imported), engine="reference").launch([x])
    of = {int(device): (group, k) for group in groups for k, device in enumerate(group)}
    gathered, sent, summed = ([row(*of[device]) for device in range(8)] for row in (
        lambda group, k: x[group], lambda group, k: x[group, k, None], lambda group, k: x[group, k].sum(keepdims=True)[None],
    ))  # fmt: skip
    for got, wanted in zip(found, (gathered, sent, summed), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(wanted))


@pytest.mark.parametrize(("groups", "mesh", "text"), [
    ("[[0, 3], [1, 2]]", {"a": 4}, "are neither axes of the mesh"), ("[[0, 1, 2, 3]]", None, "mesh that the module does not name"),
])  # fmt: skip
def test_a_modules_groups_must_be_axes_of_a_mesh(groups: str, mesh: Any, text: str) -> None:
    members = len(groups.split("]")[0].split(","))
    rows = groups.count("[") - 1
    module = f"""module {{ func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {{
      %0 = "stablehlo.all_reduce"(%a) <{{channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
        replica_groups = dense<{groups}> : tensor<{rows}x{members}xi64>, use_global_device_ids}}> ({{
        ^bb0(%x: tensor<f32>, %y: tensor<f32>): %s = stablehlo.add %x, %y : tensor<f32> stablehlo.return %s : tensor<f32>
      }}) : (tensor<2xf32>) -> tensor<2xf32> return %0 : tensor<2xf32> }} }}"""
    with pytest.raises(UnsupportedPrimitiveError, match=text):
        lower_stablehlo(module, mesh=mesh)
