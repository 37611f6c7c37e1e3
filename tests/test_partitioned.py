"""Programs with shardings: partitioned by XLA, brought back, and run on every chip of a mesh with the values of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding

import tpuflow
from tests.partitioning import CLOSE, MESH, RNG, SIZES, P, both_engines, cut, floats, kept
from tpuflow.device.runtime import Executable
from tpuflow.errors import CompileError, ConfigError, UnsupportedPrimitiveError
from tpuflow.isa.assembler import assemble
from tpuflow.isa.collectives import chips_of
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import from_bytes, to_bytes

EXPLICIT = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


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
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_where_it_is_said(name: str) -> None:
    kind, call, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()
