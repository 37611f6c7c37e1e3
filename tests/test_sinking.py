"""The sink of tpuflow.train: round trips, callbacks, progress, Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import threading
import time

import pytest

import tpuflow
from tests.test_training import Net, blobs, fit, same_bits

# --- the sink ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_final_parameters_do_not_depend_on_the_sink_size():
    """700 steps with a ragged last batch: as one sink, 7 sinks of 100, 100 sinks of 7, and step by step."""
    data = blobs(1399)
    epochs = {-1: 1, 100: 7, 7: 100, 0: 1}
    runs = {size: fit(data=data, batch_size=2, policy="mixed", sink_size=size, epochs=n) for size, n in epochs.items()}
    whole = runs[-1]
    assert whole.steps == 700
    for size, trips in ((-1, 1), (100, 7), (7, 100), (0, 700)):
        assert runs[size].round_trips == trips
        assert same_bits(runs[size].params, whole.params) and runs[size].losses == whole.losses


@pytest.mark.slow
def test_a_sink_that_crosses_the_ragged_batch_is_one_round_trip():
    result = fit(sink_size=4, epochs=3, eval_data=blobs())
    assert (result.round_trips, result.eval_round_trips, result.steps) == (3, 3, 12)
    assert [epoch["steps"] for epoch in result.history] == [4, 4, 4]
    assert result.losses[:6] == fit(epochs=2).losses


@pytest.fixture(scope="module")
def fifteen_losses():
    """Of five passes over three batches."""
    return fit(epochs=5).losses


@pytest.mark.parametrize(
    "sink_size, epochs, steps_of_epochs, round_trips",
    [
        (-1, 2, [3, 3], 2),  # each epoch sinks the whole data set
        (5, 3, [5, 5, 5], 3),  # the data are walked endlessly; epochs x sink_size altogether
        (1, 4, [1, 1, 1, 1], 4),
        (0, 2, [3, 3], 6),  # not sunk: an epoch is the data set, whatever sinks would have held
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_sink_size_means_what_the_training_guide_says(sink_size, epochs, steps_of_epochs, round_trips, stream, fifteen_losses):
    x, y = blobs()
    data = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 43, 16)] if stream else (x, y)
    result = fit(data=data, sink_size=sink_size, epochs=epochs)
    assert [epoch["steps"] for epoch in result.history] == steps_of_epochs
    assert result.round_trips == round_trips
    assert result.losses == fifteen_losses[: result.steps], "each sink goes on where the last one ended"


def test_one_program_serves_each_batch_shape():
    result = fit(epochs=2, eval_data=blobs(), sink_size=2)
    names = sorted((e.program.name, e.program.infeeds[0].shape[0]) for e in result.executables)
    assert names == [("eval_step", 11), ("eval_step", 16), ("train_step", 11), ("train_step", 16)]


# --- callbacks --------------------------------------------------------------------------------------------------------


class Recorder(tpuflow.Callback):
    """Writes down every event."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, run):
        self.events.append("begin")

    def on_train_end(self, run):
        self.events.append("end")

    def on_epoch_begin(self, run):
        self.events.append(f"epoch {run.epoch}")

    def on_epoch_end(self, run):
        self.events.append(f"metrics {sorted(run.metrics)}")

    def on_step_end(self, run):
        self.events.append((run.step, run.loss))

    def on_sink_end(self, run):
        self.events.append(f"sink of {len(run.losses)}")


@pytest.mark.parametrize("sink_size, sinks", [(-1, [3]), (0, [1, 1, 1])])
def test_callbacks_see_every_step_in_order(sink_size, sinks):
    recorder = Recorder()
    result = fit(sink_size=sink_size, callbacks=[recorder], eval_data=blobs())
    steps = [e for e in recorder.events if isinstance(e, tuple)]
    assert steps == list(enumerate(result.losses))
    assert [e for e in recorder.events if str(e).startswith("sink")] == [f"sink of {n}" for n in sinks]
    assert recorder.events[:2] == ["begin", "epoch 0"]
    assert recorder.events[-2:] == ["metrics ['accuracy', 'avg_loss']", "end"]


def test_a_callback_can_end_the_training():
    class Stop(tpuflow.Callback):
        def on_sink_end(self, run):
            run.stop = run.step >= 4

    result = fit(epochs=10, callbacks=[Stop()])
    assert result.steps == 6 and not result.interrupted


def test_monitors_print_losses_and_times():
    out = io.StringIO()
    result = fit(callbacks=[tpuflow.LossMonitor(2, out), tpuflow.TimeMonitor(out)])
    lines = out.getvalue().splitlines()
    assert lines[0] == f"epoch: 1 step: 1, loss is {result.losses[0]:.6f}"
    assert lines[1].startswith("epoch: 1 step: 3, loss is")
    assert lines[2].startswith("epoch time: ") and lines[2].endswith("(host)")


def test_the_progress_bar_moves_within_a_long_sink(monkeypatch):
    moves = []
    monkeypatch.setattr("tpuflow.training.progress.Bar.advance", lambda self, steps, loss=None: moves.append(steps))
    fit(data=blobs(1600))
    assert len(moves) >= 3 and sum(moves) == 100


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_inside_a_long_sink_answers_at_the_next_slice_and_keeps_what_was_trained(monkeypatch):
    sent, moves = [], []

    def press_ctrl_c():
        time.sleep(0.3)
        sent.append(len(moves))
        os.kill(os.getpid(), signal.SIGINT)

    def advance(bar, steps, loss=None):
        moves.append(steps)
        if len(moves) == 3:
            threading.Thread(target=press_ctrl_c, daemon=True).start()

    before = signal.getsignal(signal.SIGINT)
    x, y = blobs(2_000_000)
    with monkeypatch.context() as patched:
        patched.setattr("tpuflow.training.progress.Bar.advance", advance)
        result = fit(Net(4096), data=(x, y))  # a quarter of a minute in one sink
    assert len(moves) - sent[0] <= 1, "the slice under way ends, no other begins"
    assert result.interrupted and sum(moves) == result.steps < 125_000
    assert len(result.history) == 1 and not result.history[0]["complete"]
    assert f"interrupted by Ctrl-C after {result.steps} steps" in result.report()
    assert signal.getsignal(signal.SIGINT) is before
    again = fit(Net(4096), data=(x[: 16 * result.steps], y[: 16 * result.steps]))
    assert same_bits(again.params, result.params)


def test_ctrl_c_in_a_callback_keeps_the_state():
    class Press(tpuflow.Callback):
        def on_sink_end(self, run):
            if run.step == 1:
                raise KeyboardInterrupt

    result = fit(callbacks=[Press()], sink_size=0)
    assert result.interrupted and result.losses == fit().losses[:2]
