"""`tpuflow.estimate`: time and memory of a step from shapes alone, from Python and from the command line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tpuflow
from models.mlp import MLP
from tpuflow import cli
from tpuflow.errors import ConfigError, OutOfMemoryError
from tpuflow.estimating import plots
from tpuflow.estimating.pareto import OBJECTIVES, front
from tpuflow.estimating.sweeping import Point, Sweep, run_sweep
from tpuflow.estimating.targets import estimate_target
from tpuflow.training.config import StepConfig

IMAGES, LABELS = jax.ShapeDtypeStruct((64, 28, 28), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
WEIGHTS = 784 * 512 + 512 * 512 + 512 * 10


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A dense layer."""
    return jax.nn.relu(x @ w)


def matmul_step(batch: int):
    """What the command line is given."""
    return layer, jax.ShapeDtypeStruct((batch, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)


def mlp_step(batch: int):
    """What the command line is given, for a training step."""
    return MLP(), (jax.ShapeDtypeStruct((batch, 28, 28), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32))


def no_step(batch: int):
    """Not what the command line takes."""
    return batch


class Remembered(nn.Module):
    """A dense layer and dropout; `CALLS` learns in which mode it is traced."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        CALLS.append("train" if train else "init")
        return nn.Dropout(self.rate, deterministic=not train)(nn.Dense(10)(x.reshape(x.shape[0], -1)))


CALLS: list[str] = []


@pytest.mark.parametrize(
    ("rate", "calls"), [(0.0, ["init", "train"]), (0.5, ["init", "train", "train", "train"])], ids=["no random stream", "dropout"]
)
def test_a_model_is_traced_for_its_random_streams_only_where_it_has_some(rate: float, calls: list[str]):
    CALLS.clear()
    found = tpuflow.estimate_training(Remembered(rate), (IMAGES, LABELS))
    assert calls == CALLS
    assert any(port.key for port in found.program.inputs) == (rate > 0)


class Asking(nn.Module):
    """A dense layer, with noise beside it where the caller gives a random stream for that."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        if self.has_rng("noise"):
            x += jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(10)(x)


def test_a_model_that_asks_whether_it_has_a_random_stream_is_given_it_in_training_alone():
    found = tpuflow.estimate_training(Asking(), (IMAGES, LABELS))
    assert any(port.key for port in found.program.inputs)
    images = np.ones((8, 28, 28), np.float32)
    params = Asking().init(jax.random.key(0), images)["params"]
    options = {"optimizer": optax.sgd(0.0), "batch_size": 4, "params": params, "progress": False}
    first, second = (tpuflow.train(Asking(), (images, np.arange(8, dtype=np.int32)), seed=seed, **options) for seed in (0, 1))
    assert first.losses != second.losses
    np.testing.assert_allclose(first.predict(images, progress=False), Asking().apply({"params": params}, images), rtol=1e-5)


def test_a_function_is_estimated_from_shapes():
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (4096, 8192)))
    found = tpuflow.estimate(layer, x, w, chip="tpu-v5e")
    assert found.time.work.macs == {"bf16": 4096 * 4096 * 8192}
    assert found.time.roofline_seconds <= found.step_seconds < 4 * found.time.roofline_seconds
    assert 0.25 < found.time.mfu <= 1
    assert found.memory.argument_size_in_bytes == 2 * (4096 * 4096 + 4096 * 8192)
    assert "uncalibrated" in found.report() or "fit" in found.report()
    assert json.loads(json.dumps(found.as_dict()))["step_seconds"] == found.step_seconds


def test_energy_is_the_greatest_power_all_the_time_and_not_said_where_the_power_is_not_known():
    known, unknown = (tpuflow.estimate_training(MLP(), (IMAGES, LABELS), chip=chip, sink_size=10) for chip in ("tpu-v4", "tpu-v5e"))
    assert known.step_joules_at_most == pytest.approx(192 * known.step_seconds)
    assert known.time.joules_at_most == pytest.approx(192 * 10 * known.step_seconds)
    assert known.as_dict()["step_joules_at_most"] == known.step_joules_at_most and known.as_dict()["power_watts"] == 192
    assert "J a step" in known.report() and "192 W, the chip's greatest power, all the time" in known.report()
    assert unknown.step_joules_at_most is None and unknown.as_dict()["power_watts"] is None and "energy" not in unknown.report()


def test_compiled_functions_say_what_they_cost():
    compiled = tpuflow.jit(layer, chip="tpu-v3").lower(jnp.ones((64, 32)), jnp.ones((32, 16))).compile()
    costs = compiled.cost_analysis()
    assert costs["matrix flops"] == 2 * 64 * 32 * 16
    assert 0 < costs["optimal_seconds"] <= costs["device_seconds"] < costs["modelled_seconds"]
    assert costs["modelled_seconds"] == compiled.time().seconds
    assert compiled.memory_analysis().generated_code_size_in_bytes > 0
    assert "modelled on tpu-v3" in compiled.time().summary()


@pytest.mark.slow
def test_a_training_step_is_the_one_that_train_runs():
    optimizer = optax.sgd(1e-3)
    found = tpuflow.estimate_training(MLP(), (IMAGES, LABELS), policy="mixed", optimizer=optimizer, sink_size=7)
    data = (np.zeros((128, 28, 28), np.float32), np.zeros(128, np.int32))
    result = tpuflow.train(MLP(), data, policy="mixed", optimizer=optimizer, batch_size=64, progress=False)
    (executable,) = result.executables
    assert executable.program.strip() == found.program.strip()
    assert found.steps == 7 and found.time.work.macs["f16"] == 7 * 64 * (2 * WEIGHTS + WEIGHTS - 784 * 512)
    assert "device time" in result.report() and "modelled on generic" in result.report()


def test_every_step_pays_what_its_chip_needs_between_steps_sunk_or_not():
    """Whether the host feeds a loop, launches step by step, or calls a function that is no step."""
    both = (tpuflow.Calibration(), tpuflow.Calibration(step_seconds=1e-3))
    for sink in (0, 1, 10, 100):
        found = [tpuflow.estimate_training(MLP(), (IMAGES, LABELS), chip="ascend910", sink_size=sink, calibration=c) for c in both]
        assert found[1].step_seconds - found[0].step_seconds == pytest.approx(1e-3)
    one, other = (tpuflow.estimate(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32), calibration=c) for c in both)
    assert other.time.seconds - one.time.seconds == pytest.approx(1e-3)


def test_a_step_takes_no_less_than_the_input_pipeline_takes_for_its_batch():
    """Which works beside the step before: the longer one counts."""
    slow = tpuflow.Calibration(input_bytes_per_second=1e6)
    made = 64 * (28 * 28 + 1) * 4 / 1e6
    for sink in (0, 1, 10):
        free, fed = (
            tpuflow.estimate_training(MLP(), (IMAGES, LABELS), chip="tpu-v3", sink_size=sink, calibration=c)
            for c in (tpuflow.Calibration(), slow)
        )
        body = fed.time.device_seconds / max(1, sink)
        assert free.time.feed_picoseconds == 0 and body < made
        assert fed.time.feed_picoseconds * 1e-12 / max(1, sink) == pytest.approx(made - body, rel=1e-3)
        quick = tpuflow.Calibration(input_bytes_per_second=made / body * 1e6 * 2)
        again = tpuflow.estimate_training(MLP(), (IMAGES, LABELS), chip="tpu-v3", sink_size=sink, calibration=quick)
        assert again.time.picoseconds == free.time.picoseconds


def test_a_longer_sink_hides_the_host():
    seconds = [tpuflow.estimate_training(MLP(), (IMAGES, LABELS), chip="tpu-v3", sink_size=n).step_seconds for n in (0, 1, 10, 100)]
    assert seconds[0] == seconds[1] > seconds[2] > seconds[3]


def test_what_does_not_fit_is_refused_before_anything_is_made():
    big = jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32)  # 32 GiB
    with pytest.raises(OutOfMemoryError, match=r"more than the .* of chip 'tpu-v5e'"):
        tpuflow.estimate(lambda a: a + 1, big, chip="tpu-v5e")


def test_the_command_line_prints_and_writes_an_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "estimate.json"
    assert cli.main(["estimate", "tests.test_estimating:matmul_step", "--batch", "256", "--chip", "tpu-v3", "--json", str(out)]) == 0
    assert "layer on tpu-v3" in capsys.readouterr().out
    assert json.loads(out.read_text())["matrix flops"] == 2 * 256 * 256 * 128
    assert cli.main(["estimate", "tests.test_estimating:mlp_step", "--policy", "mixed", "--sink-size", "10"]) == 0
    assert "10 steps a round trip" in capsys.readouterr().out


def configured_step(batch: int) -> StepConfig:
    """A training step with an optimizer and a policy of its own."""
    return StepConfig(*mlp_step(batch), "mixed", optax.sgd(1e-3), accumulate_steps=2)


def test_a_target_may_say_how_its_model_is_trained():
    found = estimate_target("tests.test_estimating:configured_step", 64, "generic", None, 7)
    model, batch = mlp_step(64)
    expected = tpuflow.estimate_training(model, batch, "mixed", optax.sgd(1e-3), accumulate_steps=2, sink_size=7)
    assert (found.policy, found.steps) == ("mixed", 7) and found.program.strip() == expected.program.strip()
    assert estimate_target("tests.test_estimating:configured_step", 64, "generic", "fp32", 7).policy == "fp32"


class Unread(io.StringIO):
    """A pipe whose reader has gone."""

    def __init__(self, descriptor: int):
        super().__init__()
        self._descriptor = descriptor

    def write(self, text: str, /) -> int:
        raise BrokenPipeError

    def fileno(self) -> int:
        return self._descriptor


def test_files_are_written_though_nobody_reads_what_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page, data, where = tmp_path / "report.html", tmp_path / "report.json", os.open(os.devnull, os.O_WRONLY)
    outputs = ["--html", str(page), "--json", str(data)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Unread(where))
        assert cli.main(["estimate", "tests.test_estimating:matmul_step", "--chip", "tpu-v3", *outputs]) == 1
        differences = ["--html", str(tmp_path / "diff.html"), "--json", str(tmp_path / "diff.json")]
        assert cli.main(["diff", str(data), str(data), *differences]) == 1
    os.close(where)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json", "diff.html", "diff.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests.test_estimating"], "expected module:function"),
        (["tests.no_such_module:step"], "No module named 'tests.no_such_module'"),
        (["tests.test_estimating:absent"], "has no function 'absent'"),
        (["tests.test_estimating:no_step"], "expected (function, *shapes)"),
        (["tests.test_estimating:matmul_step", "--batch", "0"], "at least 1"),
        (["tests.test_estimating:matmul_step", "--chip", "tpu-v33"], "Did you mean 'tpu-v3'"),
        (["tests.test_estimating:mlp_step", "--sink-size", "-1"], "add --steps-per-epoch N"),
        (["tests.test_estimating:mlp_step", "--sink-size", "-2"], "--sink-size: expected steps a round trip"),
        (["tests.test_estimating:mlp_step", "--steps-per-epoch", "0"], "--steps-per-epoch: expected at least 1"),
        (["tests.test_estimating:mlp_step", "--html", "absent/page.html"], "--html: absent/page.html: no such file or folder"),
    ],
)
def test_a_bad_command_line_is_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["estimate", *arguments]) == 2
    assert message in capsys.readouterr().err


BROKEN = """
import jax, jax.numpy as jnp


def product(x, y):
    return jnp.dot(x, y)


def called(batch):
    raise ValueError("no data here")


def traced(batch):
    return product, jax.ShapeDtypeStruct((batch, 3), jnp.float32), jax.ShapeDtypeStruct((4, 5), jnp.float32)
"""


@pytest.mark.parametrize(
    ("text", "name", "said", "line"),
    [
        (BROKEN, "called", "ValueError: no data here", 'in called at {file}:10: `raise ValueError("no data here")`'),
        (BROKEN, "traced", "TypeError: dot_general requires", "in product at {file}:6: `return jnp.dot(x, y)`"),
        ("def step(batch):\n  retrun batch", "step", "SyntaxError: invalid syntax", "{file}:2: `retrun batch`"),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "check"])
def test_an_error_of_the_users_own_function_is_told_with_its_line(
    command: str, text: str, name: str, said: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert cli.main([command, f"{file}:{name}"]) == 2
    written = capsys.readouterr().err
    assert written.startswith(f"tpuflow {command}: {said}") and line.format(file=file) in written and "Traceback" not in written


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tpuflow.estimating.targets.is_model", None)  # so that a line of tpuflow fails
    with pytest.raises(TypeError, match="not callable"):
        cli.main(["estimate", "tests.test_estimating:matmul_step"])


def test_a_negative_sink_is_refused():
    with pytest.raises(ConfigError, match="sink_size"):
        tpuflow.estimate_training(MLP(), (IMAGES, LABELS), sink_size=-1)


@pytest.mark.slow
def test_a_sweep_has_a_line_for_every_combination(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    files = {name: tmp_path / name for name in ("sweep.json", "step.json", "report.html", "sweep.png", "front.png")}
    axes = ["--batch", "8", "16", "--chip", "tpu-v3", "ascend910", "--sink-size", "0", "10"]
    outputs = [
        part
        for option, name in zip(("--json", "--trace", "--html", "--plot", "--pareto"), files, strict=True)
        for part in (option, str(files[name]))
    ]
    assert cli.main(["estimate", "tests.test_estimating:mlp_step", *axes, *outputs]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "mlp_step" in line]
    rows = json.loads(files["sweep.json"].read_text())
    assert len(lines) == len(rows) == 8
    assert {(r["batch"], r["chip"], r["sink_size"]) for r in rows} == {
        (b, c, s) for b in (8, 16) for c in ("tpu-v3", "ascend910") for s in (0, 10)
    }
    assert len(list(tmp_path.glob("report-*.html"))) == len(list(tmp_path.glob("step-*.json"))) == 8
    assert all(files[name].read_bytes().startswith(b"\x89PNG") for name in ("sweep.png", "front.png"))
    assert [line.endswith(" *") for line in lines] == [row["best"] for row in rows] and any(row["best"] for row in rows)


def points(*axes: str) -> list[Point]:
    """The points of a sweep of `mlp_step`, asked for as on the command line: "batch=8,16"."""
    named = dict(axis.split("=") for axis in axes)
    batches = tuple(map(int, named.get("batch", "32").split(",")))
    sinks = tuple(map(int, named.get("sink", "100").split(",")))
    sweep = Sweep(("tests.test_estimating:mlp_step",), batches, tuple(named.get("chip", "tpu-v3").split(",")), sink_sizes=sinks)
    return run_sweep(sweep)


def test_the_front_has_what_no_other_point_beats():
    found = points("batch=8,16,32", "chip=tpu-v3,tpu-v5e,generic", "sink=1,100")
    best = front(found)
    figures = {id(p): [o.value(p) for o in OBJECTIVES] for p in found}

    def beats(q: Point, p: Point) -> bool:
        pairs = [(a, b) for a, b in zip(figures[id(q)], figures[id(p)], strict=True) if a is not None and b is not None]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    for p in found:
        assert any(p is one for one in best) != any(beats(q, p) for q in found)
    assert 0 < len(best) < len(found) and all(p.sink_size == 100 for p in best), "the host's round trip is shared by more steps"
    assert {p.batch for p in best} >= {8, 32}, "the smallest takes the least memory, the largest the least time a sample"


def test_a_price_is_compared_where_it_was_said(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "sweep.json"
    chips = ["--chip", "tpu-v3", "tpu-v5e", "--price", "tpu-v3=36", "--json", str(out)]
    assert cli.main(["estimate", "tests.test_estimating:mlp_step", "--batch", "64", *chips]) == 0
    v3, v5e = json.loads(out.read_text())
    assert v3["sample_dollars"] == pytest.approx(36 / 3600 * v3["step_seconds"] / 64) and "sample_dollars" not in v5e
    assert "$ a million" in capsys.readouterr().out
    cheap, dear = (dataclasses.replace(points("batch=8")[0], dollars_an_hour=price) for price in (1.0, 2.0))
    assert front([cheap, dear]) == (cheap,) and front([cheap, dataclasses.replace(dear, dollars_an_hour=None)])[1:] != ()


@pytest.mark.parametrize(
    ("price", "message"),
    [("tpu-v4=1", "price of tpu-v4: expected one of"), ("tpu-v3", "such as tpu-v3=2.2"), ("tpu-v3=-1", "such as tpu-v3=2.2")],
)
def test_a_price_of_nothing_is_refused(price: str, message: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["estimate", "tests.test_estimating:mlp_step", "--chip", "tpu-v3", "--price", price]
    try:
        assert cli.main(arguments) == 2
    except SystemExit as stop:  # argparse's own way
        assert stop.code == 2
    assert message in capsys.readouterr().err


def test_of_several_models_each_has_its_front():
    few = points("batch=8,16")
    renamed = [dataclasses.replace(p, target=f"other:{i}") for i, p in enumerate(few)]
    assert set(map(id, front(renamed))) == set(map(id, renamed))


def labels(axis: Any) -> list[str]:
    axis.figure.canvas.draw()
    return [
        t.get_text()
        for t in (*axis.get_xticklabels(minor=True), *axis.get_yticklabels(minor=True), *axis.get_yticklabels())
        if t.get_text()
    ]


def test_the_axes_of_a_sweep_have_units_and_name_what_varies(monkeypatch: pytest.MonkeyPatch):
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    found = points("batch=8,16,512", "chip=tpu-v3,generic")
    plots.plot_sweep(found, "sweep.png")
    plots.plot_pareto(found, "front.png")
    steps, rates, memory = drawn[0].axes
    assert drawn[0].get_suptitle() == "mlp_step, in fp32, 100 steps a round trip"
    assert memory.get_xlabel() == "batch size" and [t.get_text() for t in memory.get_xticklabels()] == ["8", "16", "512"]
    assert sorted(line.get_label() for line in steps.get_lines()) == ["generic", "tpu-v3"]
    assert all(re.fullmatch(r"0|[\d.]+ (s|ms|us|ns)", text) for text in labels(steps)) and "samples" in rates.get_ylabel()
    panel = drawn[1].axes[0]
    named = [text.get_text() for text in panel.get_legend().get_texts()]
    assert named and {text.partition(": ")[2] for text in named} <= {f"batch {p.batch}, {p.chip}" for p in found}
    assert [text.get_text() for text in panel.texts] == [text.partition(": ")[0] for text in named]
    filled = [line for line in panel.get_lines() if line.get_fillstyle() == "full" and line.get_marker() == "o"]
    assert len(filled) == len(named)


def test_a_plot_of_nothing_that_fits_is_refused():
    too_large = run_sweep(Sweep(("tests.test_estimating:huge_step",), (65536,), ("tpu-v5e",)))
    for plot in (plots.plot_sweep, plots.plot_pareto):
        with pytest.raises(ConfigError, match="none of the points fits"):
            plot(too_large, "sweep.png")


def test_the_sink_study_shows_the_host_gap_shrink(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "sinks.json"
    sinks = ["--sink-size", "0", "1", "10", "100", "-1", "--steps-per-epoch", "1875"]
    assert cli.main(["estimate", "models.lenet:lenet_step", "--chip", "ascend910", *sinks, "--json", str(out)]) == 0
    assert "host gap" in capsys.readouterr().out
    rows = json.loads(out.read_text())
    assert [r["steps"] for r in rows] == [1, 1, 10, 100, 1875]
    gaps = [r["host_seconds_a_step"] for r in rows]
    assert gaps[0] == gaps[1] and [g * n for g, n in zip(gaps, (1, 1, 10, 100, 1875), strict=True)] == pytest.approx([gaps[0]] * 5)
    device = [r["step_seconds"] - r["host_seconds_a_step"] for r in rows]
    assert device == pytest.approx([device[-1]] * 5, rel=0.05), "the same but for what is done once, before the first step"


def test_what_does_not_fit_is_a_line_of_the_table(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["estimate", "tests.test_estimating:huge_step", "--batch", "4", "65536", "--chip", "tpu-v5e"]) == 0
    out = capsys.readouterr().out
    assert "does not fit" in out and "GiB" in out and len([line for line in out.splitlines() if "huge_step" in line]) == 2


def huge_step(batch: int):
    """A batch of 65536 of these is 32 GiB."""
    return layer, jax.ShapeDtypeStruct((batch, 2**18), jnp.bfloat16), jax.ShapeDtypeStruct((2**18, 128), jnp.bfloat16)
