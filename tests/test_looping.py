"""tpuflow.sink: a training loop of the user's own, sunk as the training guide words it."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpuflow
from tests.test_training import same_bits
from tpuflow import amp
from tpuflow.data.batching import BatchStructure, to_array
from tpuflow.data.feeding import stream_feed
from tpuflow.device.fast.engine import FastEngine
from tpuflow.errors import ConfigError, DataError, UnsupportedDtypeError, UnsupportedPrimitiveError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype(np.float32)
Y = X @ np.arange(4, dtype=np.float32)
START = {"w": jnp.zeros(4), "n": 0}
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 50, 8)]


def step(state, batch):
    """One step of linear regression."""
    x, y = batch
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"loss": loss, "seen": x[0, 0]}


def loop(size=-1, data=None, step_fn=step, **options):
    """`tpuflow.sink` over the batches above."""
    return tpuflow.sink(step_fn, BATCHES if data is None else data, size, **{"state": START, **options})


def losses(sinks):
    return np.concatenate([sunk.metrics["loss"] for sunk in sinks]).tolist()


# --- the sentences of the training guide ------------------------------------------------------------------------------


def test_with_size_minus_1_each_sink_is_the_whole_data_set():
    sinks = list(loop(-1, epochs=2))
    assert [s.steps for s in sinks] == [7, 7]
    assert sinks[0].metrics["seen"].tolist() == sinks[1].metrics["seen"].tolist() == X[::8, 0].tolist()


def test_a_sink_of_a_given_size_goes_on_where_the_last_one_ended_and_the_data_are_walked_endlessly():
    sinks = list(loop(5, epochs=6))
    seen = np.concatenate([s.metrics["seen"] for s in sinks])
    assert seen.tolist() == list(itertools.islice(itertools.cycle(X[::8, 0].tolist()), 30))
    assert [(s.steps, s.step, s.epoch) for s in sinks] == [(5, 5 * n + 5, n) for n in range(6)]


def test_the_total_amount_of_data_is_epochs_times_size():
    for size, epochs in ((1, 3), (10, 2), (100, 1)):
        assert sum(s.steps for s in loop(size, epochs=epochs)) == size * epochs


def test_not_sunk_every_step_is_a_round_trip_and_an_epoch_the_data_set():
    sinks = list(loop(0, epochs=2))
    assert [(s.steps, s.epoch) for s in sinks] == [(1, n // 7) for n in range(14)]


def test_without_epochs_the_loop_goes_on_until_it_is_left():
    sinks = list(itertools.islice(loop(3), 10))
    assert sinks[-1].step == 30


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [BATCHES, lambda: iter(BATCHES)])
def test_values_do_not_depend_on_the_size(data):
    whole = loop(-1, data, epochs=2)
    expected = losses(whole)
    for size, epochs in ((0, 2), (1, 14), (3, 5), (14, 1)):
        other = loop(size, data, epochs=epochs)
        assert losses(other)[:14] == expected
        if size * epochs in (0, 14):
            assert same_bits(other.state, whole.state)


def test_arrays_are_cut_into_batches():
    assert losses(loop(5, (X, Y), batch_size=8, epochs=4)) == losses(loop(5, epochs=4))
    dropped = list(loop(-1, (X, Y), batch_size=8, epochs=2, drop_remainder=True))
    assert [s.steps for s in dropped] == [6, 6]
    shuffled = [loop(-1, (X, Y), batch_size=8, epochs=2, shuffle=True, seed=seed) for seed in (1, 1, 2)]
    first, again, other = map(losses, shuffled)
    assert first == again != other


def test_the_loop_computes_what_plain_jax_computes():
    state, expected = START, []
    for batch in BATCHES * 2:
        state, metrics = jax.jit(step)(state, batch)
        expected.append(metrics["loss"])
    np.testing.assert_allclose(losses(loop(-1, epochs=2)), expected, rtol=1e-5)


def test_batches_may_be_any_tree_and_the_state_may_hold_keys():
    def noisy(state, batch):
        key, now = jax.random.split(state)
        return key, batch["x"]["a"].sum() + jax.random.uniform(now)

    data = {"x": {"a": X, "b": None}, "y": Y}
    sinks = tpuflow.sink(noisy, data, 2, state=jax.random.key(3), batch_size=10, epochs=2, engine="reference")
    found = np.concatenate([s.metrics for s in sinks])
    key, expected = jax.random.key(3), []
    for i in range(4):
        key, now = jax.random.split(key)
        expected.append(X[10 * i : 10 * i + 10].sum() + jax.random.uniform(now))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert sinks.state == key


def test_the_engines_agree():
    exact = losses(loop(7, epochs=1, fidelity="bitexact"))
    assert exact == losses(loop(7, epochs=1, engine="reference"))


# --- the state --------------------------------------------------------------------------------------------------------


def test_the_state_of_a_sink_is_a_copy_and_is_not_there_when_later_steps_took_it():
    sinks = loop(2)
    first = next(sinks)
    kept = first.state
    next(sinks)
    assert int(kept["n"]) == 2
    with pytest.raises(RuntimeError, match="after step 2 was handed on"):
        first.state  # noqa: B018


def test_the_state_can_be_set_between_sinks():
    sinks = loop(7)
    before = next(sinks)
    sinks.state = START
    assert losses([next(sinks)]) == losses([before])
    with pytest.raises(ConfigError, match=r"w was float32\[4\] and is float32\[5\]"):
        sinks.state = {"w": jnp.zeros(5), "n": 0}


def test_the_users_state_survives_unless_it_is_donated():
    state = {"w": jnp.zeros(4), "n": jnp.zeros((), jnp.int32)}
    next(loop(1, state=state))
    assert not state["w"].is_deleted()
    next(loop(1, state=state, donate=True))
    assert state["w"].is_deleted()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, epochs", [(-1, 2), (10, 1), (3, 4), (0, 2)])
def test_after_ctrl_c_the_loop_goes_on_where_it_was_cut_short(size, epochs, monkeypatch):
    """Ctrl-C comes at every step in turn: at each, the launch under way ends, and no batch is lost or seen twice."""
    monkeypatch.setattr("tpuflow.device.fast.execution.SLICE_SECONDS", 0.0)
    monkeypatch.setattr("tpuflow.device.fast.execution.FIRST_SLICES", (1,))
    expected = losses(loop(size, epochs=epochs))
    interrupted = loop(size, epochs=epochs)
    run, pressed, found = FastEngine._run, set(), []

    def press_once_a_step(self, *args):
        result = run(self, *args)
        if interrupted.step not in pressed:
            pressed.add(interrupted.step)
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(FastEngine, "_run", press_once_a_step)
    for _ in range(2 * len(expected)):
        try:
            next(interrupted)
        except KeyboardInterrupt:
            pass
        except StopIteration:
            break
        found += interrupted.last.metrics["loss"].tolist()
    assert found == expected and len(pressed) == len(expected)


# --- errors -----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "size": ({"size": -2}, ConfigError, "size: expected a whole number of at least -1"),
    "epochs": ({"epochs": 0}, ConfigError, "epochs"),
    "engine": ({"engine": "fats"}, ConfigError, "Did you mean 'fast'"),
    "arrays without batch size": ({"data": (X, Y)}, ConfigError, "give batch_size"),
    "one array without batch size": ({"data": X}, ConfigError, "give batch_size"),
    "shuffling a stream": ({"shuffle": True}, ConfigError, "shuffle=True needs arrays"),
    "unequal arrays": ({"data": (X, Y[1:]), "batch_size": 8}, DataError, "equally many"),
    "no batches": ({"data": []}, DataError, "no batch"),
    "no arrays": ({"data": [()]}, DataError, "at least one array"),
    "text": ({"data": [(X, "a")]}, DataError, "data: 1: elements must be numbers"),
    "no data": ({"data": 3}, DataError, "iterable of batches"),
    "no pair": ({"step_fn": lambda state, batch: state}, ConfigError, r"must return \(state, metrics\)"),
    "another structure": ({"step_fn": lambda state, batch: (state["w"], 0)}, ConfigError, "its structure was"),
    "another type": (
        {"step_fn": lambda state, batch: ({**state, "n": state["n"] * 0.5}, 0)},
        ConfigError,
        r"n was int32\[\] and is float32\[\]",
    ),
    "a state of text": ({"state": {"w": object(), "n": 0}}, ConfigError, r"state: \['w'\] is no array"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_before_the_first_step(name):
    options, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        loop(**options)


def test_a_step_that_the_compiler_has_no_rule_for_is_named():
    with pytest.raises((UnsupportedDtypeError, UnsupportedPrimitiveError), match=r"test_looping\.py"):
        next(loop(step_fn=lambda state, batch: (state, jnp.linalg.eigvals(batch[0][:4]).real)))


def test_batches_of_another_structure_are_refused_after_the_steps_before_them():
    sinks = loop(-1, [*BATCHES[:2], {"x": X[:8]}])
    with pytest.raises(DataError, match="structure of the first"):
        next(sinks)
    assert sinks.step == sinks.last.steps == 2 and int(sinks.state["n"]) == 2


def test_metrics_that_depend_on_the_batch_size_cannot_be_stacked_over_a_smaller_batch():
    def of_samples(state, batch):
        return state, batch[1] * 2

    with pytest.raises(DataError, match=r"shapes \[2\] and \[8\]"):
        next(loop(step_fn=of_samples))
    (sunk,) = loop(-1, (X, Y), batch_size=8, drop_remainder=True, epochs=1, step_fn=of_samples)
    np.testing.assert_array_equal(sunk.metrics.ravel(), 2 * Y[:48])


def test_an_iterator_that_is_spent_says_so():
    sinks = loop(5, iter(BATCHES))
    next(sinks)
    with pytest.raises(DataError, match="can be walked once only"):
        next(sinks)


# --- threads ----------------------------------------------------------------------------------------------------------


def loading_threads():
    return [t for t in threading.enumerate() if t.name == "tpuflow-ahead"]


def test_no_loading_thread_is_left_when_the_loop_is_left_or_fails():
    def broken():
        yield from BATCHES[:3]
        raise ArithmeticError("broken loader")

    for sunk in loop(1):
        if sunk.step == 3:
            break
    sinks = loop(1)
    with sinks:
        next(sinks)
    assert not list(sinks)
    failing = loop(-1, broken)
    with pytest.raises(ArithmeticError, match="broken loader"):
        next(failing)
    assert failing.step == 3
    assert not loading_threads()


# --- precision -------------------------------------------------------------------------------------------------


def test_mixed_precision_and_loss_scaling_work_inside_a_step():
    """float16 gradients of a loss of about 10 overflow at a scale of 65536: the first updates are skipped, and the scale halves."""
    optimizer = amp.with_loss_scale(optax.sgd(0.1), amp.POLICIES["mixed"].loss_scale)
    forward = tpuflow.autocast(lambda w, x: x @ w, "mixed")

    def mixed(state, batch):
        w, opt_state = state

        def loss_of(w):
            return amp.scale_loss(jnp.mean((forward(w, batch[0]).astype(jnp.float32) - batch[1]) ** 2), opt_state)

        updates, opt_state = optimizer.update(jax.grad(loss_of)(w), opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), amp.find_state(opt_state).scale

    w = jnp.zeros(4)
    (sunk,) = loop(14, step_fn=mixed, state=(w, optimizer.init(w)), epochs=1)
    expected, state = [], (w, optimizer.init(w))
    for batch in BATCHES * 2:
        state, scale = jax.jit(mixed)(state, batch)
        expected.append(float(scale))
    assert sunk.metrics.tolist() == expected and expected[0] == 32768
    np.testing.assert_allclose(sunk.state[0], state[0], rtol=2e-3)


# --- loaders ----------------------------------------------------------------------------------------------------------


def test_grain_loaders_are_data():
    source = grain.MapDataset.source([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]).batch(8)
    for data in (source, source.to_iter_dataset()):
        assert losses(loop(5, data, lambda s, b: step(s, (b["x"], b["y"])), epochs=3)) == losses(loop(5, epochs=3))


@pytest.mark.torch
def test_pytorch_loaders_are_data(torch):
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    data = torch.utils.data.DataLoader(pairs, batch_size=8)
    assert losses(loop(5, data, epochs=3)) == losses(loop(5, epochs=3))


@pytest.mark.torch
def test_pytorch_tensors_of_every_kind_are_converted(torch):
    for values, dtype in (
        (torch.ones(2, dtype=torch.bfloat16), "bfloat16"),
        (torch.ones(2, dtype=torch.int64), "int32"),
        (torch.ones(2, requires_grad=True), "float32"),
        (torch.ones(2, dtype=torch.bool), "bool"),
    ):
        array = to_array(values, "data")
        assert str(array.dtype) == dtype and array.astype(np.float32).tolist() == [1.0, 1.0]


def test_any_object_that_can_be_iterated_is_data():
    class Generic:
        def __iter__(self):
            return iter(BATCHES)

    assert losses(loop(5, Generic(), epochs=3)) == losses(loop(5, epochs=3))


# --- made ahead -------------------------------------------------------------------------------------------------------


def test_a_chunk_is_made_while_the_one_before_it_is_used_and_never_more_than_one():
    made = []

    def batches():
        for i, batch in enumerate(BATCHES):
            made.append(i)
            yield batch

    sinks = loop(1, batches)
    for step_number in range(1, 7):
        next(sinks)
        assert len(made) <= step_number + 1
        sinks._iterator._prefetcher.join()
        assert len(made) == step_number + 1


def test_a_pass_is_not_begun_ahead_unless_the_data_are_walked_endlessly():
    begun = []

    def batches():
        begun.append(1)
        return iter(BATCHES)

    for size, expected in ((-1, 1), (7, 2)):
        begun.clear()
        sinks = loop(size, batches, epochs=2)
        next(sinks)
        sinks._iterator._prefetcher.join()
        assert len(begun) == expected
        sinks.close()
    begun.clear()
    list(loop(7, batches, epochs=2))
    assert len(begun) == 2, "nothing is begun for steps that will not be done"


def test_chunks_of_large_batches_hold_fewer_of_them(monkeypatch):
    monkeypatch.setattr("tpuflow.data.chunks.INFEED_BYTES", 3 * 8 * 5 * 4)
    feed = stream_feed(BATCHES, "data", BatchStructure(), sink_size=-1)
    assert [(c.count, c.samples, c.batches) for c in feed.epoch(0)] == [(3, 0, 0), (3, 24, 3), (1, 48, 6)]


def test_a_slow_loader_costs_no_time_beside_a_device_that_is_as_slow(monkeypatch):
    """Batches of 0.1 s each, on a device that takes 0.1 s a step: 0.1 s a sink one beside the other, 0.2 s one after the other."""
    launch = tpuflow.Executable.launch

    def slow_launch(self, *args, **kwargs):
        time.sleep(0.1)
        return launch(self, *args, **kwargs)

    def slow_batches():
        for batch in BATCHES[:5]:
            time.sleep(0.1)
            yield batch

    sinks = loop(1, BATCHES[:5], epochs=1)
    next(sinks)  # compiled
    monkeypatch.setattr(tpuflow.Executable, "launch", slow_launch)
    sinks = loop(1, slow_batches, epochs=5)
    seconds = [sunk.seconds for sunk in sinks]
    assert min(seconds[1:]) < 0.15, "the next batch was there when the step before it ended"
