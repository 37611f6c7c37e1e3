"""Arguments and results in the host's memory: they are there before and after a program, keep their bits, and are replaced in place."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import tpuflow
from models.mlp import MLP
from tests.test_residency import without_a_place
from tpuflow.compiler import compile_function, compile_sink, compile_stablehlo
from tpuflow.device.runtime import Executable
from tpuflow.device.timing import time_program
from tpuflow.device.verify import verify
from tpuflow.errors import ConfigError
from tpuflow.isa.program import Loop, Program, walk
from tpuflow.stages.analysis import memory_analysis

SIZE, CHIP = 32, without_a_place("generic")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
THERE = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
RNG = np.random.default_rng(0)
STACK = RNG.normal(size=(4, SIZE, SIZE)).astype(np.float32) / 4
X = RNG.normal(size=(SIZE, SIZE)).astype(np.float32)


def _fetched(x: Any) -> Any:
    return jax.device_put(x, DEVICE)


def _put(x: Any) -> Any:
    return jax.device_put(x, HOST)


def _update(weights: Any, momentum: Any, x: Any) -> tuple[Any, Any]:
    gradients = jax.grad(lambda ws: ((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2).sum())(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - 0.01 * m, weights, momentum), momentum


def _step(weights: Any, momentum: Any, x: Any) -> tuple[Any, Any]:
    """A step of training whose momentum lives at the host."""
    weights, momentum = _update(weights, jax.tree.map(_fetched, momentum), x)
    return weights, jax.tree.map(_put, momentum)


def _state(*, at_host: bool) -> tuple[Any, Any, Any]:
    weights, momentum = [jnp.asarray(w) for w in STACK[:2]], [np.zeros((SIZE, SIZE), np.float32)] * 2
    return weights, [jax.device_put(m, THERE) if at_host else jnp.asarray(m) for m in momentum], jnp.asarray(X)


def _run(program: Program, arguments: Any, engine: str) -> list[np.ndarray]:
    leaves = [np.asarray(a) for a in jax.tree.leaves(arguments)]
    return [np.asarray(x) for x in Executable(program, engine=engine, fidelity="bitexact").launch(leaves)[0]]


def _spaces(program: Program) -> tuple[list[str], list[str]]:
    inputs, outputs = ([program.buffers[p.buffer].space for p in ports] for ports in (program.inputs, program.outputs))
    return inputs, outputs


@pytest.mark.parametrize("importer", ["jaxpr", "stablehlo"])
def test_a_state_at_the_host_is_replaced_in_place_with_the_bits_of_one_in_hbm(importer: str) -> None:
    donated = (True,) * 4 + (False,)
    programs = []
    for function, at_host in ((_step, True), (_update, False)):
        arguments = _state(at_host=at_host)
        if importer == "jaxpr":
            programs.append(compile_function(function, arguments, chip=CHIP, donated=donated))
        else:
            lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
            programs.append(compile_stablehlo(lowered.as_text(), chip=CHIP, donated=donated))
    offloaded, plain = programs
    verify(offloaded)
    size = STACK[:2].nbytes
    assert _spaces(offloaded) == (["hbm", "hbm", "host", "host", "hbm"], ["hbm", "hbm", "host", "host"])
    assert offloaded.host_bytes == size, "new momentum takes the place of the old"
    for engine in ("reference", "fast"):
        both = [_run(program, _state(at_host=False), engine) for program in programs]
        assert [x.tobytes() for x in both[0]] == [x.tobytes() for x in both[1]], engine
    found = memory_analysis(offloaded)
    assert found.host_argument_size_in_bytes == found.host_output_size_in_bytes == found.host_alias_size_in_bytes == size
    assert found.argument_size_in_bytes == memory_analysis(plain).argument_size_in_bytes - size and not found.host_temp_size_in_bytes


def test_time_has_both_ways_over_the_link() -> None:
    found = time_program(compile_function(_step, _state(at_host=True), chip=CHIP, donated=(True,) * 4 + (False,)))
    assert sorted(row.ends for row in found.copies) == [("hbm", "host")] * 2 + [("host", "hbm")] * 2
    assert all(row.bytes == SIZE * SIZE * 4 for row in found.copies)


def _two_in_turn(h: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 5, lambda i, hs: (hs[1], _put(_fetched(hs[0]) * 0.5 + x)), (h, _put(_fetched(h) + 1)))


def _layers(x: Any, w: Any) -> tuple[Any, Any]:
    w = _fetched(w)
    y = jnp.tanh(x @ w)
    return y, _put(w * 0.9 + 0.1 * y)


FORMS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "returned as it is": (lambda h, x: (h, x + 1), 2, 1),
    "returned twice": (lambda h, x: (h, h, _fetched(h) + x), 3, 2),
    "nobody reads it": (lambda h, x: x + 1, 1, 1),
    "put there again": (lambda h, x: _put(h), 2, 1),
    "under another shape": (lambda h, x: _fetched(h.reshape(2, -1)) * 2, 1, 1),
    "rewritten by a loop": (lambda h, x: jax.lax.fori_loop(0, 5, lambda i, h: _put(_fetched(h) * 0.5 + x), h), 2, 1),
    "written by a loop": (lambda h, x: jax.lax.fori_loop(0, 5, lambda i, hx: (_put(hx[1] + x), hx[1] * 2), (h, STACK))[0], 2, 1),
    "two in turn": (_two_in_turn, 4, 3),
    "items of a loop": (lambda h, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ _fetched(w)), None), x, h)[0], 1, 1),
    "items both ways": (lambda h, x: jax.lax.scan(_layers, x, h), 2, 2),
}
"""Functions of an array at the host and one in HBM; arrays at the host if the first is kept, and if it is given away."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [False, True])
def test_forms(form: str, *, given: bool) -> None:
    function, *arrays = FORMS[form]
    arguments = jax.device_put(STACK, THERE), X
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = compile_function(function, arguments, chip=CHIP, donated=(given, False))
    verify(program)
    assert program.host_bytes == arrays[given] * STACK.nbytes
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    there = [x.sharding.memory_kind == "pinned_host" for x in expected]
    assert [space == "host" for space in _spaces(program)[1]] == there
    for engine in ("reference", "fast"):
        for ours, theirs in zip(_run(program, arguments, engine), expected, strict=True):
            np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=1e-5)


def test_what_is_read_at_the_host_is_moved_first_and_said() -> None:
    arguments = jax.device_put(STACK, THERE), X
    with pytest.warns(UserWarning, match=r"input '0': 1 array of 0.02 MiB that should be in the host's memory is in HBM"):
        program = compile_function(lambda h, x: _fetched(jnp.cumsum(h, 0)) + x, arguments, chip=CHIP)
    assert _spaces(program)[0] == ["host", "hbm"] and len(time_program(program).copies) == 1
    (found,) = _run(program, arguments, "reference")
    np.testing.assert_allclose(found, np.cumsum(STACK, 0) + X, rtol=1e-5, atol=1e-5)


def test_the_carries_of_a_sink_may_be_at_the_host() -> None:
    """Format, bits and copies of a training loop: both ways in every step."""
    _, momentum, _ = _state(at_host=True)

    def step(weights: Any, *rest: Any) -> Any:
        *momentum, x = rest
        weights, momentum = _step(weights, list(momentum), x)
        return *weights, *momentum

    def flat(w0: Any, w1: Any, m0: Any, m1: Any, x: Any) -> Any:
        return (*step([w0, w1], m0, m1, x), x.sum())

    closed = jax.make_jaxpr(flat)(*STACK[:2], *momentum, X)
    program = compile_sink(closed, carries=4, chip=CHIP)
    verify(program)
    assert program.host_bytes == STACK[:2].nbytes and _spaces(program) == (
        ["hbm", "hbm", "hbm", "host", "host"],
        ["hbm"] * 2 + ["host"] * 2,
    )
    expected = _state(at_host=False)[:2]
    for _ in range(3):
        expected = jax.jit(_update)(*expected, X)
    loop = next(place for place, block in walk(program.code) if isinstance(block, Loop))
    assert (
        sorted((row.ends, row.count) for row in time_program(program, {loop: 3}).copies)
        == [(("hbm", "host"), 3)] * 2 + [(("host", "hbm"), 3)] * 2
    )
    trips, inputs = np.int32(3), [*STACK[:2], *(np.asarray(m) for m in momentum)]
    for engine in ("reference", "fast"):
        found, _ = Executable(program, engine=engine).launch([trips, *inputs], infeeds=[np.stack([X] * 3)])
        for ours, theirs in zip(found, jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-4)


# --- through tpuflow.jit


def _kinds(tree: Any) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_jit_takes_and_gives_arrays_at_the_host_as_jax_does(engine: str) -> None:
    ours, theirs = tpuflow.jit(_step, donate_argnums=1, engine=engine, chip=CHIP), jax.jit(_step)
    found = expected = _state(at_host=True)[:2]
    for _ in range(3):
        found, expected = ours(*found, X), theirs(*expected, X)
    assert _kinds(found) == _kinds(expected) == ["device", "device", "pinned_host", "pinned_host"]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_shardings_say_what_is_at_the_host() -> None:
    def step(weights: Any, momentum: Any, x: Any) -> Any:
        return _update(weights, jax.tree.map(_fetched, momentum), x)

    jitted = tpuflow.jit(step, chip=CHIP, donate_argnums=1, in_shardings=(None, THERE, None), out_shardings=(None, THERE))
    weights, _, x = _state(at_host=False)
    momentum = [np.zeros((SIZE, SIZE), np.float32)] * 2
    assert _spaces(jitted.program(weights, momentum, x)) == (["hbm", "hbm", "host", "host", "hbm"], ["hbm", "hbm", "host", "host"])
    first = jitted(weights, momentum, x)
    assert _kinds(jitted(*first, x)) == ["device", "device", "pinned_host", "pinned_host"]
    shapes = jax.ShapeDtypeStruct((SIZE, SIZE), np.float32, sharding=THERE)
    assert _spaces(tpuflow.jit(_fetched).program(shapes)) == (["host"], ["hbm"])


def test_every_chip_of_a_mesh_has_its_piece_at_the_host() -> None:
    mesh = AbstractMesh((4,), ("data",))
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    there = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")

    def step(weights: Any, momentum: Any, x: Any) -> Any:
        return _update(weights, jax.tree.map(_fetched, momentum), x)

    jitted = tpuflow.jit(step, chip=CHIP, donate_argnums=1, in_shardings=(whole, there, cut), out_shardings=(whole, there))
    weights, momentum, x = _state(at_host=True)
    program = jitted.program(weights, momentum, x)
    verify(program)
    assert program.mesh[0].size == 4 and program.host_bytes == STACK[:2].nbytes / 4
    found, expected = jitted(weights, momentum, x), jax.jit(_step)(weights, momentum, x)
    assert _kinds(found)[2:] == ["pinned_host"] * 2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.arange(3, dtype=np.complex64), jax.random.key(0)])
def test_complex_numbers_and_keys_may_be_at_the_host(value: Any) -> None:
    """JAX's types of keys do not say where they are: they come back to the device."""
    there = jax.device_put(value, THERE)
    found, expected = (jit(lambda v: (_fetched(v), v))(there) for jit in (tpuflow.jit, jax.jit))
    assert _kinds(found) == _kinds(expected) and all(bool((_fetched(x) == value).all()) for x in found)


def test_transformations_keep_it() -> None:
    function = tpuflow.jit(lambda w, h: (w * _fetched(h)).sum())
    there = jax.device_put(X, THERE)
    np.testing.assert_array_equal(jax.grad(function)(X, there), X)
    np.testing.assert_array_equal(jax.grad(function, 1)(X, there), X)
    assert jax.vmap(function)(X, there).shape == (SIZE,)


def test_operations_one_by_one_take_and_give_it() -> None:
    with jax.disable_jit():
        found = tpuflow.jit(lambda h: _put(_fetched(h) + 1))(jax.device_put(X, THERE))
    assert _kinds(found) == ["pinned_host"] and np.array_equal(found, X + 1)


# --- the optimizer's state


TRAININGS: dict[str, dict[str, Any]] = {
    "one chip": {},
    "loss scale": {"policy": "mixed"},
    "accumulated": {"accumulate_steps": 2},
    "zero1": {"mesh": {"data": 4}, "sharding": "zero1"},
    "zero3": {"mesh": {"data": 4}, "sharding": "zero3", "policy": "mixed_bf16"},
}


FIELDS = {"offload_optimizer": "opt_state", "offload_params": "params"}


@pytest.mark.parametrize(
    ("training", "option"), [*((t, "offload_optimizer") for t in TRAININGS), ("loss scale", "offload_params"), ("zero3", "offload_params")]
)
def test_a_training_is_the_same_with_some_of_its_state_at_the_host(training: str, option: str) -> None:
    network = MLP((SIZE, SIZE))
    images, labels = RNG.normal(size=(64, SIZE)).astype(np.float32), RNG.integers(0, 10, 64).astype(np.int32)
    first, second = (
        tpuflow.train(
            network, (images, labels), optimizer=optax.adam(1e-3), epochs=2, batch_size=16, progress=False,
            eval_data=(images, labels) if option == "offload_params" else None, **{option: offloads}, **TRAININGS[training],
        )
        for offloads in (False, True)
    )  # fmt: skip
    for ours, theirs in zip(*(jax.tree.leaves((r.params, r.opt_state)) for r in (first, second)), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    plain, offloaded = (next(e.program for e in r.executables if e.program.outputs) for r in (first, second))
    there = {p.name for p in offloaded.inputs if offloaded.is_host(p.buffer)}
    assert there == {p.name for p in offloaded.inputs if p.shape and p.name.startswith(FIELDS[option])} and not plain.host_bytes
    assert offloaded.host_bytes >= sum(offloaded.buffers[p.buffer].bytes for p in offloaded.inputs if p.name in there)


def test_an_estimate_has_the_copies_of_the_optimizer_s_state() -> None:
    network, batch = MLP((SIZE, SIZE)), (jax.ShapeDtypeStruct((64, SIZE), np.float32), jax.ShapeDtypeStruct((64,), np.int32))
    plain, offloaded = (
        tpuflow.estimate_training(network, batch, optimizer=optax.adam(1e-3), offload_optimizer=offloads) for offloads in (False, True)
    )
    moved = offloaded.memory.host_argument_size_in_bytes
    assert plain.memory.argument_size_in_bytes - offloaded.memory.argument_size_in_bytes == moved > 0
    assert sum(row.count * row.bytes for row in offloaded.time.copies) == 2 * moved * offloaded.steps and not plain.time.copies
    assert re.search(r"copies between HBM and the host[^|]*; at the host 0\.0", offloaded.report()) and "at the host" not in plain.report()
    assert offloaded.step_seconds > plain.step_seconds


def _descent(weights: list[Any], x: Any) -> list[Any]:
    """A step of gradient descent whose weights live at the host."""
    fetched = [_fetched(w) for w in weights]
    gradients = jax.grad(lambda ws: (functools.reduce(lambda y, w: jnp.tanh(y @ w), ws, x) ** 2).sum())(fetched)
    return [_put(w - 0.1 * g) for w, g in zip(fetched, gradients, strict=True)]


def test_what_has_come_from_the_host_does_so_again_for_the_backward_pass_where_memory_has_no_room_for_it() -> None:
    layers, side = 6, 128
    weights = [RNG.normal(size=(side, side)).astype(np.float32) / 16 for _ in range(layers)]
    x = np.ones((8, side), np.float32)
    given, donated = ([jax.device_put(w, THERE) for w in weights], x), (True,) * layers + (False,)
    roomy = compile_function(_descent, given, chip=CHIP, donated=donated)
    peak = memory_analysis(roomy).peak_memory_in_bytes
    small = compile_function(_descent, given, chip=replace(CHIP, hbm_bytes=peak * 3 // 4), donated=donated)
    assert memory_analysis(small).peak_memory_in_bytes <= peak * 3 // 4 and peak > sum(w.nbytes for w in weights)
    copied = [sum(row.count for row in time_program(program).copies) for program in (roomy, small)]
    assert copied[0] == 2 * layers < copied[1] < 3 * layers, "the last layer's weights are used at once"
    for engine in ("reference", "fast"):
        for ours, theirs in zip(_run(small, (weights, x), engine), _run(roomy, (weights, x), engine), strict=True):
            assert ours.tobytes() == theirs.tobytes()


def _scanned_descent(weights: list[Any], x: Any, parts: int) -> list[Any]:
    """A step of gradient descent through a scan over layers, whose weights [layers, n, n] live at the host; x: [parts * rows, n], whose
    gradients are summed in a loop over the parts."""
    fetched = [_fetched(w) for w in weights]

    def layer(y: Any, layer_weights: list[Any]) -> tuple[Any, None]:
        return functools.reduce(lambda y, w: jnp.tanh(y @ w), layer_weights, y), None

    def gradients(x: Any) -> list[Any]:
        return jax.grad(lambda ws: (jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).sum())(fetched)

    def add(total: list[Any], x: Any) -> tuple[list[Any], None]:
        return [t + g for t, g in zip(total, gradients(x), strict=True)], None

    if parts == 1:
        summed = gradients(x)
    else:
        summed, _ = jax.lax.scan(add, [jnp.zeros_like(w) for w in weights], x.reshape(parts, -1, x.shape[-1]))
    return [_put(w - 0.1 * g) for w, g in zip(fetched, summed, strict=True)]


@pytest.mark.parametrize("parts", [1, 2])
def test_layers_of_a_scan_come_from_the_host_one_by_one_where_memory_has_no_room_for_all(parts: int) -> None:
    layers, side, kinds = 6, 128, 3
    weights = [RNG.normal(size=(layers, side, side)).astype(np.float32) / 16 for _ in range(kinds)]
    x, whole = np.ones((8, side), np.float32), sum(w.nbytes for w in weights)
    step = functools.partial(_scanned_descent, parts=parts)
    given, donated = ([jax.device_put(w, THERE) for w in weights], x), (True,) * kinds + (False,)
    roomy = compile_function(step, given, name="step", chip=CHIP, donated=donated)
    fits = memory_analysis(roomy).peak_memory_in_bytes - whole // 2
    small = compile_function(step, given, name="step", chip=replace(CHIP, hbm_bytes=fits), donated=donated)
    verify(small)
    assert memory_analysis(small).peak_memory_in_bytes <= fits
    copied = [sum(row.count * row.bytes for row in time_program(program).copies) for program in (roomy, small)]
    assert copied[0] == 2 * whole, "in for all readers, and out"
    least = 2 * (parts + 1) * whole
    assert least <= copied[1] <= least + 2 * parts * whole // layers, "in for each loop, which may fetch one item more, and the update"
    for engine in ("reference", "fast"):
        for ours, theirs in zip(_run(small, (weights, x), engine), _run(roomy, (weights, x), engine), strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_a_step_of_one_s_own_says_itself_what_is_at_the_host() -> None:
    with pytest.raises(ConfigError, match="does by itself what offload_optimizer would ask for"):
        tpuflow.train(lambda s, b: (s, {"loss": s}), (X, X), state=np.float32(0), offload_optimizer=True)
