"""jax.debug.print and jax.debug.callback in what runs on the device: every call, in the order of the program, step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.experimental import io_callback

import tpuflow
from tpuflow.device.runtime import Executable
from tpuflow.errors import ProgramFileError, UnsupportedPrimitiveError
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.file import to_bytes

X = np.arange(4, dtype=np.float32)


def several(x: Any) -> Any:
    jax.debug.print("x {} and {total:.1f}", x, total=x.sum())
    y = 2 * x
    jax.debug.print("no operands")
    jax.debug.callback(lambda a, b: print("called with", a, b), y, "plain data")
    jax.debug.print("done", ordered=True)
    return y


def in_scan(x: Any, *, reverse: bool = False) -> Any:
    def body(carry: Any, row: Any) -> Any:
        jax.debug.print("carry {} row {}", carry, row)
        jax.debug.print("the second of a trip")
        return carry + row, carry * row

    return lax.scan(body, jnp.float32(1), x, reverse=reverse)


def in_nested_scans(x: Any) -> Any:
    def inner(carry: Any, row: Any) -> Any:
        jax.debug.print("inner {} {}", carry, row)
        return carry + row, None

    def outer(carry: Any, row: Any) -> Any:
        jax.debug.print("outer {}", row)
        return lax.scan(inner, carry, x)[0], None

    return lax.scan(outer, jnp.float32(0), x[:3])[0]


def in_branches(x: Any) -> Any:
    def trip(i: Any, x: Any) -> Any:
        names = ("none", "one", "more")
        branches = [lambda x, n=n: (jax.debug.print(n + " {}", x[0]), x + len(n))[1] for n in names]
        x = lax.switch(i, branches, x)
        return lax.cond(x[0] > 6, lambda x: (jax.debug.print("large"), x)[1], lambda x: x, x)

    return lax.fori_loop(0, 5, trip, x)


def in_a_called_function(x: Any) -> Any:
    shared = tpuflow.jit(several)
    return jax.jit(several)(x) + shared(x) + jax.checkpoint(several)(x)


def of_no_use(x: Any) -> None:
    jax.debug.print("{}", x + 1)


def of_other_types(x: Any) -> Any:
    jax.debug.print("{} {} {} {}", x > 1, x.astype(jnp.int32), x.astype(jnp.bfloat16), x.reshape(2, 2))
    return x


ROWS: dict[str, Callable[[Any], Any]] = {
    "several in a row": several,
    "in a scan": in_scan,
    "in a scan that runs backwards": lambda x: in_scan(x, reverse=True),
    "in nested scans": in_nested_scans,
    "in branches": in_branches,
    "in called functions": in_a_called_function,
    "of no use": of_no_use,
    "of other types": of_other_types,
    "under grad": jax.grad(lambda x: several(x * x).sum()),
    "in a shard": jax.pmap(lambda x: several(x) + lax.axis_index("i"), axis_name="i"),
}


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("name", ROWS)
def test_every_call_is_made_in_the_order_of_the_program(name: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is the order in which JAX makes them without jit."""
    fn, x = ROWS[name], X[None] if "shard" in name else X
    if "shard" in name or "called" in name:
        expected, lines = jax.tree.map(lambda x: 2 * x, x), several_lines(x) * (1 if "shard" in name else 3)
        expected = expected if "shard" in name else 3 * expected
    else:
        with jax.disable_jit():
            expected, lines = fn(jnp.asarray(x)), capsys.readouterr().out
    found = tpuflow.jit(fn, engine=engine)(x)
    assert capsys.readouterr().out == lines
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def several_lines(x: np.ndarray) -> str:
    """What `several` prints."""
    x = x.reshape(4)
    return f"x {x} and {x.sum():.1f}\nno operands\ncalled with {2 * x} plain data\ndone\n"


@pytest.mark.parametrize("around", [jax.jit, lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), lambda f: f], ids=["jit", "grad", "none"])
def test_a_plain_program_that_calls_the_device_prints_too(around: Any, capsys: pytest.CaptureFixture[str]) -> None:
    np.asarray(around(tpuflow.jit(several))(X))
    jax.effects_barrier()
    assert capsys.readouterr().out == several_lines(X)


def test_under_vmap_every_lane_calls(capsys: pytest.CaptureFixture[str]) -> None:
    tpuflow.jit(jax.vmap(lambda x: jax.debug.print("lane {}", x)))(X)
    assert capsys.readouterr().out.split("\n")[:4] == [f"lane {x}" for x in X]


def test_an_unknown_number_of_calls_is_refused_with_their_lines() -> None:
    def until(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: (jax.debug.print("{}", x), x + 1)[1], x)

    with pytest.raises(UnsupportedPrimitiveError, match=r"'while'.*calls the host at.*test_host_calls\.py:\d+.*lax\.scan"):
        tpuflow.jit(until)(X)


def test_calls_change_no_value() -> None:
    def fn(x: Any, w: Any, *, told: bool) -> Any:
        def body(carry: Any, row: Any) -> Any:
            carry = jnp.tanh(carry @ w) + row
            if told:
                jax.debug.callback(lambda *_: None, carry, carry.sum())
            return carry, jax.nn.softmax(carry).sum(0)

        return lax.scan(body, x[0], x)

    x, w = np.random.default_rng(0).normal(size=(2, 5, 8, 8)).astype(np.float32)
    for fidelity in ("native", "bitexact"):
        run = [jax.tree.leaves(tpuflow.jit(lambda x, w, t=t: fn(x, w, told=t), fidelity=fidelity)(x, w[0])) for t in (False, True)]
        for quiet, loud in zip(*run, strict=True):
            assert np.asarray(quiet).tobytes() == np.asarray(loud).tobytes()


def test_a_program_with_calls_runs_and_is_measured_but_not_saved(tmp_path: Any) -> None:
    compiled = tpuflow.jit(several).lower(X).compile()
    with pytest.raises(ProgramFileError, match=r"calls Python on the host.*test_host_calls\.py"):
        compiled.save(tmp_path / "step.tpx")
    assert compiled.memory_analysis().generated_code_size_in_bytes > 0
    assert compiled.cost_analysis()["modelled_seconds"] > 0
    (output,) = compiled.executable.run({"x": X}).values()
    np.testing.assert_array_equal(output, 2 * X)


def counted_step(state: Any, batch: Any) -> Any:
    jax.debug.print("step {} sum {}", state["step"], batch.sum())
    lax.fori_loop(0, 2, lambda i, _: jax.debug.print("part {}", i), None)
    return {"step": state["step"] + 1, "total": state["total"] + batch}, {"sum": batch.sum()}


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("size", [-1, 0, 4, 12])
def test_a_sink_calls_step_after_step_whatever_its_size(size: int, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    batches = [np.full(3, i, np.float32) for i in range(12)]
    loop = tpuflow.sink(counted_step, batches, size, state={"step": 0, "total": np.zeros(3, np.float32)}, epochs=1, engine=engine)
    steps, lines = 0, ""
    for sunk in loop:
        lines += "".join(f"step {i} sum {3.0 * i}\npart 0\npart 1\n" for i in range(steps, steps + sunk.steps))
        steps += sunk.steps
        assert sunk.metrics["sum"].tolist() == [3.0 * i for i in range(steps - sunk.steps, steps)]
    assert steps == (4 if size == 4 else 12)
    assert capsys.readouterr().out == lines


def test_calls_come_while_a_round_trip_is_under_way() -> None:
    """After every slice of it, once its steps are counted."""
    counted: list[int] = []

    def step(state: Any, batch: Any) -> Any:
        jax.debug.callback(lambda _: counted.append(loop.step), batch[0])
        return state + batch, {}

    loop = tpuflow.sink(step, [X] * 200, -1, state=X, epochs=1)
    next(loop)
    assert len(counted) == 200 and counted == sorted(counted) and len(set(counted)) >= 3
    assert all(steps > i for i, steps in enumerate(counted))


class Told(nn.Module):
    """[B, 6] -> [B, 3], and the batch's mean on the host."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(4)(x)
        if train:
            jax.debug.callback(TOLD.append, x.mean())
        return nn.Dense(3)(x)


TOLD: list[Any] = []


@pytest.mark.slow
def test_a_models_calls_come_from_every_step_of_training_once() -> None:
    """Whatever the size of the sinks, and if numbers are measured beside it."""
    data = (np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32), np.arange(10) % 3)
    told, losses = [], []
    for options in ({"sink_size": 0}, {"sink_size": 5, "numerics": True}):
        TOLD.clear()
        result = tpuflow.train(Told(), data, "fp32", optax.sgd(0.1), batch_size=2, progress=False, **options)
        told.append([float(x) for x in TOLD])
        losses.append(result.history[-1]["losses"])
    assert told[0] == told[1] and len(set(told[0][-5:])) == 5
    assert losses[0] == losses[1]


def test_what_a_callback_raises_ends_the_round_trip_after_its_steps_are_kept() -> None:
    def complain(n: Any) -> None:
        if n == 3:
            raise ValueError("three")

    def step(state: Any, batch: Any) -> Any:
        jax.debug.callback(complain, state)
        return state + 1, {}

    loop = tpuflow.sink(step, [X] * 8, -1, state=np.int32(0), epochs=1)
    with pytest.raises(ValueError, match="three"):
        next(loop)
    assert loop.step >= 4
    assert int(loop.state) == loop.step


def test_a_program_without_calls_has_none() -> None:
    program = tpuflow.jit(lambda x: x + 1).program(X)
    assert program.calls == () and program.outfeeds == ()
    assert Executable(to_bytes(program)).program.calls == ()


@pytest.mark.parametrize("ordered", [True, False])
def test_what_only_tells_the_host_is_a_call_too(ordered: bool) -> None:
    told: list[float] = []

    def step(carry: Any, row: Any) -> Any:
        io_callback(lambda value: told.append(float(value)), None, carry, ordered=ordered)
        return carry + row, None

    assert tpuflow.jit(lambda x: lax.scan(step, jnp.float32(0), x)[0])(X) == 6
    assert told == [0, 0, 1, 3]


# --- calls whose results the step needs

ASKED: list[float] = []
NUMBER = jax.ShapeDtypeStruct((), np.float32)


def asked(x: Any) -> Any:
    """How many calls there were."""

    def count(x: Any) -> Any:
        ASKED.append(float(x))
        return np.float32(len(ASKED))

    return io_callback(count, NUMBER, x, ordered=True)


def told(x: Any) -> None:
    io_callback(lambda x: ASKED.append(-float(x)), None, x, ordered=True)


def sorted_by_host(x: Any) -> Any:
    return jax.pure_callback(np.sort, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def of_several_types(x: Any) -> Any:
    types = (jax.ShapeDtypeStruct((2,), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2), np.bool_), jax.ShapeDtypeStruct((), np.int32))

    def host(a: Any, b: Any, c: Any) -> Any:
        return np.asarray(a).reshape(4)[1:3], np.asarray(b) > 1, np.asarray(c).sum()

    return jax.pure_callback(host, types, x.astype(jnp.bfloat16), x.reshape(2, 2), x.astype(jnp.float16) > 2)


def of_complex_numbers(x: Any) -> Any:
    z = lax.complex(x, -x)
    jax.debug.callback(lambda z: ASKED.append(float(np.imag(z).sum())), z)
    return jax.pure_callback(lambda z: (z * 2j, z.real), (z, x), z)


def of_stored_types(x: Any) -> Any:
    arrays = (x.astype(jnp.int4), x.astype(jnp.float8_e4m3fn), x.astype(jnp.uint2))
    return jax.pure_callback(lambda *arrays: [np.asarray(x)[::-1] for x in arrays], arrays, *arrays)


def asked_in_loops(x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        told(carry)
        return asked(row) + carry, lax.fori_loop(0, 2, lambda i, y: asked(y) * 2, row)

    return lax.scan(body, x[0], x)


def asked_until(x: Any) -> Any:
    return lax.while_loop(lambda x: asked(x.sum()) < 9, lambda x: (told(x[0]), sorted_by_host(-x))[1], x)


def asked_in_branches(x: Any) -> Any:
    def trip(i: Any, x: Any) -> Any:
        return lax.switch(i, [lambda x: x + asked(x[1]), lambda x: (told(x[2]), x)[1], lambda x: sorted_by_host(-x)], x)

    return lax.fori_loop(0, 4, trip, x)


@jax.custom_jvp
def square_by_host(x: Any) -> Any:
    return jax.pure_callback(lambda x: x * x, x, x)


square_by_host.defjvp(lambda x, t: (square_by_host(*x), 2 * x[0] * t[0]))


def checked(x: Any) -> Any:
    import equinox

    return equinox.error_if(2 * x, x.sum() > 100, "too large")


ANSWERED: dict[str, Callable[[Any], Any]] = {
    "in a row": lambda x: (asked(x[1]), told(x[0]), sorted_by_host(-x) + asked(x[3])),
    "of several types": of_several_types,
    "of complex numbers": of_complex_numbers,
    "of types that are only stored": of_stored_types,
    "in loops": asked_in_loops,
    "until": asked_until,
    "in branches": asked_in_branches,
    "under vmap": lambda x: jax.vmap(sorted_by_host)(jnp.stack([-x, x])),
    "under grad": jax.value_and_grad(lambda x: square_by_host(x).sum()),
    "in a called function": lambda x: tpuflow.jit(asked_in_loops)(x),
    "in a check of Equinox's": checked,
    "of nothing": lambda x: (asked(3.0), jax.pure_callback(lambda x: x, x[:0], x[:0]), jax.pure_callback(lambda: 2.0, NUMBER)),
}


@pytest.mark.parametrize("options", [{}, {"fidelity": "bitexact"}, {"engine": "reference"}], ids=["fast", "bitexact", "reference"])
@pytest.mark.parametrize("name", ANSWERED)
def test_what_the_host_answers_is_as_under_jax(name: str, options: Any) -> None:
    found = []
    for jit in (jax.jit, lambda f: tpuflow.jit(f, **options)):
        ASKED.clear()
        results = jax.tree.map(np.asarray, jit(ANSWERED[name])(X))
        jax.effects_barrier()
        found.append(([(x.dtype, x.shape, x.tobytes()) for x in jax.tree.leaves(results)], [*ASKED]))
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("returned", ["an error", "another type"])
def test_what_a_function_raises_is_raised_at_the_caller_and_the_next_call_runs(engine: str, returned: str) -> None:
    good: list[bool] = [False]

    def host(x: Any) -> Any:
        if not good[0] and returned == "an error":
            raise ValueError("three")
        return x if good[0] else np.asarray(x)[1:]

    message = "three" if returned == "an error" else r"test_host_calls\.py:\d+.*returned \(float32\[3\]\); expected \(float32\[4\]\)"
    step = tpuflow.jit(lambda x: io_callback(host, x, x + 1, ordered=True), engine=engine)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(step(X))
    good[0] = True
    np.testing.assert_array_equal(step(X), X + 1)


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("size", [-1, 0, 3])
def test_a_sink_asks_in_every_step(size: int, engine: str) -> None:
    ASKED.clear()
    batches = [np.full(3, i, np.float32) for i in range(6)]
    epochs = 6 // size if size > 0 else 1

    def step(state: Any, batch: Any) -> Any:
        return state + asked(batch[0]), {"n": state}

    loop = tpuflow.sink(step, batches, size, state=np.float32(0), epochs=epochs, engine=engine)
    assert sum(sunk.steps for sunk in loop) == 6
    assert ASKED == [0, 1, 2, 3, 4, 5] and float(loop.state) == 21


def test_the_chip_waits_for_what_crosses_the_link_and_a_round_trip_of_the_host() -> None:
    x = np.zeros(1 << 20, np.float32)
    compiled = tpuflow.jit(lambda x: sorted_by_host(x), chip="tpu-v4").lower(x).compile()
    chip, time = compiled.executable.program.chip, compiled.executable.time()
    expected = 2 * x.nbytes / chip.host_bytes_per_second + chip.launch_seconds
    assert time.feed_picoseconds * 1e-12 == pytest.approx(expected + time.machine.calibration.step_seconds)
    program = compiled.executable.program
    assert assemble(disassemble(program)) == program
    with pytest.raises(ProgramFileError, match=r"calls Python on the host.*test_host_calls\.py"):
        to_bytes(program)
