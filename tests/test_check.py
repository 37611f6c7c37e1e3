"""`tpuflow.check`: does a step fit, what do its numbers do, how long is it, and what would help, from Python and from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import tpuflow
from models.mlp import MLP
from tpuflow import cli
from tpuflow.errors import ConfigError

BATCH = jax.ShapeDtypeStruct((64, 28, 28), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
RNG = np.random.default_rng(0)
W, X = RNG.standard_normal((256, 128), np.float32), RNG.standard_normal((64, 256), np.float32)
HUGE = jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32)  # 32 GiB


class Deep(linen.Module):
    """Small parameters, large activations."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.tanh(linen.Dense(64)(x))
        return linen.Dense(4)(x.mean(1))


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """A dense layer."""
    return jax.nn.relu(x @ w)


def update(w: jax.Array, x: jax.Array) -> jax.Array:
    """A step of plain SGD: the result can take the place of the first argument."""
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def loud(x: jax.Array) -> jax.Array:
    """Overflows in float32."""
    return jnp.exp(1000 * jnp.abs(x) + 100)


def faint(x: jax.Array) -> jax.Array:
    """Underflows in float32."""
    return jnp.exp(-1000 * jnp.abs(x) - 200)


def options(verdict: tpuflow.Verdict) -> dict[str, Any]:
    return {option.what: option for option in verdict.options}


def flat(verdict: tpuflow.Verdict) -> str:
    """The page without its line breaks."""
    return " ".join(str(verdict).split())


# --- a training -------------------------------------------------------------------------------------------------------


def test_a_training_is_judged_from_shapes_with_the_figures_of_its_estimate():
    verdict = tpuflow.check(MLP(), BATCH, chip="tpu-v3", sink_size=1)
    found = tpuflow.estimate_training(MLP(), BATCH, chip="tpu-v3", sink_size=1)
    assert verdict.ok and verdict.fits and verdict.overflows is None and verdict.numerics is None
    assert verdict.estimate == found
    text = flat(verdict)
    for part in (
        f"MLP on tpu-v3 in fp32: fits, {found.step_seconds * 1e6:.3f} us a step, ",
        "% of it bound by host launch fits yes: ",
        "of 32.00 GiB",
        "params/Dense_0/kernel",
        "not checked: shapes have no numbers",
        "1 step a round trip (modelled on tpu-v3, fit to",
        "f32 products enter the arrays of tpu-v3 as bf16",
    ):
        assert part in text, part
    plain = json.loads(json.dumps(verdict.as_dict()))
    assert plain["ok"] and plain["estimate"]["step_seconds"] == found.step_seconds
    assert sum(plain["bounds"].values()) == pytest.approx(1, abs=0.01)


def test_any_training_is_judged_as_it_is_estimated():
    """Other batches than pairs, other options than the usual: what `tpuflow.train` takes."""

    def loss_fn(apply: Any, params: Any, batch: Any, rngs: Any) -> jax.Array:
        return jnp.mean(batch["weight"] * (apply(params, batch["x"]) ** 2).sum(-1))

    batch = {"x": jax.ShapeDtypeStruct((8, 64), jnp.float32), "weight": jax.ShapeDtypeStruct((8,), jnp.float32)}
    given = {"inputs": "x", "loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "frozen": ("bias",), "sink_size": 7}
    model = linen.Dense(4)
    verdict = tpuflow.check(model, batch, compare=(), **given)
    assert verdict.estimate == tpuflow.estimate_training(model, batch, **given)


def test_what_would_help_is_estimated_and_not_guessed():
    verdict = tpuflow.check(MLP(), BATCH, chip="tpu-v3", sink_size=1, compare=("bf16", "mixed", "fp32"))
    assert list(options(verdict)) == ["sink_size=100", "policy bf16", "policy mixed"]
    for what, option in options(verdict).items():
        kind, _, value = what.replace("=", " ").partition(" ")
        changed = {"policy": value} if kind == "policy" else {"sink_size": int(value)}
        found = tpuflow.estimate_training(MLP(), BATCH, **{"chip": "tpu-v3", "sink_size": 1, **changed})
        assert option.cost.seconds == found.step_seconds and option.cost.peak_bytes == found.memory.peak_memory_in_bytes
        assert option.cost.traffic_bytes == found.time.work.hbm_bytes / found.steps
        assert option.helps(verdict.cost) == any(what in line for line in verdict.advice) == all(what not in t for t in verdict.tried)
    assert "host's share" in flat(verdict) and "HBM traffic" in flat(verdict)
    assert options(verdict)["policy bf16"].helps(verdict.cost) and not options(verdict)["policy mixed"].helps(verdict.cost)


def test_an_input_pipeline_that_the_chip_waits_for_is_named_with_what_it_would_have_to_make():
    slow, quick = (tpuflow.Calibration(input_bytes_per_second=rate) for rate in (1e7, 1e15))
    verdict = tpuflow.check(MLP(), BATCH, chip="tpu-v3", compare=(), calibration=slow)
    (option,) = (option for option in verdict.options if "input pipeline" in option.what)
    found = tpuflow.estimate_training(MLP(), BATCH, chip="tpu-v3", calibration=tpuflow.Calibration())
    batch = sum(math.prod(x.shape) * x.dtype.itemsize for x in BATCH)
    assert option.what == f"an input pipeline that makes {batch / found.step_seconds / 1e9:.2f} GB/s"
    assert option.cost.seconds == found.step_seconds and "it is assumed to make 0.01" in option.note
    assert next(iter(verdict.as_dict()["bounds"])) == "waiting for data" and option.helps(verdict.cost)
    for other in (quick, tpuflow.Calibration()):
        assert not any("input" in what for what in options(tpuflow.check(MLP(), BATCH, chip="tpu-v3", compare=(), calibration=other)))


def test_a_sink_that_hides_the_host_is_left_as_it_is():
    assert not any("sink_size" in what for what in options(tpuflow.check(MLP(), BATCH, chip="tpu-v3", compare=())))


def test_activations_that_fill_the_memory_are_a_case_for_checkpoint():
    inputs, labels = jax.ShapeDtypeStruct((256, 64, 64), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.int32)
    verdict = tpuflow.check(Deep(), (inputs, labels), compare=())
    (advice,) = verdict.advice
    assert advice.startswith("jax.checkpoint (nn.remat): ") and "(most: Deep " in advice and "us a step" in advice
    kept = verdict.estimate.profile().memory.peak_by_category["activations"]
    assert f"{kept / 2**20:.2f} MiB of the" in advice
    assert tpuflow.check(MLP(), BATCH, compare=()).advice == [], "mostly parameters"


@pytest.mark.slow
def test_the_numbers_of_a_training_are_looked_at_if_there_are_data():
    class Tiny(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(3)(x)

    labels = np.arange(16, dtype=np.int32) % 3
    inputs = RNG.standard_normal((16, 8), np.float32)

    def of(scale: float, policy: str) -> tpuflow.Verdict:
        return tpuflow.check(Tiny(), (np.float32(scale) * inputs, labels), policy=policy, optimizer=optax.sgd(0.1), compare=())

    fine, skipping, bad = of(1, "fp32"), of(1, "mixed"), of(3e4, "fp16")
    assert fine.ok and fine.overflows is False and "does not overflow" in str(fine)
    assert skipping.numerics.skipped[0] and not skipping.numerics.skipped[-1]
    assert skipping.ok, "a loss scale that finds its place is no fault"
    assert bad.overflows and not bad.ok and ", overflows," in str(bad).splitlines()[0] and "first non-finite operation: " in str(bad)


# --- a function -------------------------------------------------------------------------------------------------------


def test_a_function_is_called_with_its_data_and_judged():
    verdict = tpuflow.check(layer, W, X, chip="tpu-v4")
    assert verdict.ok and verdict.overflows is False and verdict.underflows is False
    assert "layer on tpu-v4: fits, does not overflow, " in str(verdict) and "one call a round trip" in str(verdict)
    assert verdict.numerics.rows[0].tensor == "activation" and all(o.phase == "forward" for o in verdict.numerics.operations)
    assert "one call" in str(verdict.numerics) and json.dumps(verdict.as_dict())


def test_a_function_that_overflows_or_underflows_is_told_where():
    verdict = tpuflow.check(loud, X)
    assert verdict.overflows and not verdict.ok and verdict.fits
    assert "loud on generic: fits, overflows, " in str(verdict)
    assert "first non-finite operation: exp -> float32[64,256]" in str(verdict) and "test_check.py:" in str(verdict)
    verdict = tpuflow.check(faint, X)
    assert verdict.ok and verdict.underflows and "25.00% of the activations underflow to zero; most of them in exp" in flat(verdict)
    narrow = tpuflow.check(lambda x: x * x, 1e4 * X[:8], policy="fp16")
    assert narrow.overflows and not tpuflow.check(lambda x: x * x, 1e4 * X[:8]).overflows


def test_gradients_of_a_function_are_told_from_activations():
    tensors = {o.tensor for o in tpuflow.check(update, W, X).numerics.operations}
    assert {"activation", "activation gradient", "optimizer"} <= tensors


def test_arguments_whose_place_results_can_take_are_found():
    verdict = tpuflow.check(update, W, X, compare=())
    option = options(verdict)["donate_argnums=(0,)"]
    donated = tpuflow.estimate(update, W, X, donate_argnums=0)
    assert option.cost.peak_bytes == donated.memory.peak_memory_in_bytes == verdict.cost.peak_bytes - W.nbytes
    assert option.helps(verdict.cost) and "not needed after the call" in flat(verdict)
    for given in (
        tpuflow.check(update, W, X, donate_argnums=0, compare=()),
        tpuflow.check(update, W, X, donate_argnums=-2, compare=()),
        tpuflow.check(layer, W, X, compare=()),
        tpuflow.check(lambda n, w: w[:n], 8, W, static_argnums=0, compare=()),
    ):
        assert not any("donate" in what for what in options(given))


def test_a_function_of_nothing_is_judged_too():
    assert tpuflow.check(lambda: jnp.ones(())).ok and tpuflow.check(lambda x: None, X).ok


def test_the_hosts_share_of_a_call_is_what_a_loop_on_the_device_hides():
    verdict = tpuflow.check(layer, W, X, compare=())
    option = options(verdict)["100 calls in one round trip (tpuflow.sink)"]
    launch = verdict.estimate.time.launch_picoseconds / 1e12
    assert option.cost.seconds == pytest.approx(verdict.cost.seconds - 0.99 * launch)
    long = tpuflow.check(layer, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 8192), (8192, 4096))), compare=())
    assert not long.options, "it runs for longer than the host shows"


def test_an_nnx_step_is_judged_with_its_updates():
    def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    model = nnx.Linear(256, 128, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])
    verdict = tpuflow.check(step, model, optimizer, X, compare=())
    assert verdict.estimate.time.work.macs == {"f32": 2 * 64 * 256 * 128}, "forward, and the gradient of the kernel"
    assert verdict.ok and verdict.overflows is False and "donate_argnums=(0, 1)" in options(verdict)
    assert tpuflow.estimate(tpuflow.nnx.jit(step), model, optimizer, X).time.work == verdict.estimate.time.work
    assert (np.asarray(model.kernel[...]) == before).all(), "nothing was trained"


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_a_verdict_with_its_facts(tmp_path: Path):
    verdict = tpuflow.check(lambda a: (a.astype(jnp.float32) + 1).sum(0), HUGE, chip="tpu-v5e")
    assert not verdict.fits and not verdict.ok and verdict.cost is None
    text = flat(verdict)
    assert "does not fit" in text and "16.00 GiB (17,180,131,328 bytes) more than the 17,179,869,184 of chip 'tpu-v5e'" in text
    assert "32.00 GiB f32[131072,65536]" in text and "a chip with more memory" in text
    assert "policy bf16: would not fit either: it needs " in text
    plain = json.loads(json.dumps(verdict.as_dict()))
    assert plain["fits"] is False and plain["needed_bytes"] > 2**35 and plain["estimate"] is None
    verdict.html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "does not fit" in page and "<script" not in page and "@" not in page.partition("<main>")[2]


def test_another_policy_that_fits_helps_what_does_not():
    inputs, labels = jax.ShapeDtypeStruct((2**17, 64, 64), jnp.float32), jax.ShapeDtypeStruct((2**17,), jnp.int32)
    verdict = tpuflow.check(Deep(), (inputs, labels), chip="tpu-v5e", compare=("bf16",))
    assert not verdict.fits
    found = tpuflow.estimate_training(Deep(), (inputs, labels), chip="tpu-v5e", policy="bf16")
    peak = found.memory.peak_memory_in_bytes / 2**30
    assert verdict.advice[0] == f"policy bf16: would fit in {peak:.2f} GiB, {1e3 * found.step_seconds:.3f} ms a step"
    assert "jax.checkpoint (nn.remat) on the layers above" in verdict.advice[1]


# --- options ----------------------------------------------------------------------------------------------------------


WRONG = {
    "not a step": ((3,), {}, "expected a function or a model, got int"),
    "a model without a batch": ((MLP(),), {}, "expected one batch, such as (inputs, labels), arrays or shapes, got 0 arguments"),
    "a batch in pieces": ((MLP(), *BATCH), {}, "got 2 arguments"),
    "a function's option for a model": ((MLP(), BATCH), {"donate_argnums": 0}, "donate_argnums and static_argnums are a function's"),
    "an option that is none": ((MLP(), BATCH), {"sink_sise": 3}, "Did you mean 'sink_size'"),
    "a policy that is none": ((layer, W, X), {"compare": ("fp17",)}, "unknown policy 'fp17'"),
    "a chip that is none": ((layer, W, X), {"chip": "tpu-v33"}, "Did you mean 'tpu-v3'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_do_not_belong_are_refused(case: str):
    args, given, message = WRONG[case]
    with pytest.raises(ConfigError) as error:
        tpuflow.check(*args, **given)
    assert message in str(error.value)


# --- the command line -------------------------------------------------------------------------------------------------


def mlp_step(batch: int):
    return MLP(), (jax.ShapeDtypeStruct((batch, 28, 28), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32))


def loud_step(batch: int):
    return loud, np.ones((batch, 8), np.float32)


def huge_step(batch: int):
    return layer, jax.ShapeDtypeStruct((2**18, 128), jnp.bfloat16), jax.ShapeDtypeStruct((batch, 2**18), jnp.bfloat16)


TRAIN_PY = """
from __future__ import annotations
from dataclasses import dataclass
import jax
from neighbour import WIDTH

@dataclass
class Sizes:
    width: int = WIDTH

def layer(x, w):
    return jax.nn.relu(x @ w)

def step(batch):
    import late_neighbour
    shape = jax.ShapeDtypeStruct
    return layer, shape((batch, 64), "float32"), shape((64, Sizes().width), "float32")
"""


def test_a_file_is_checked_as_python_would_run_it(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN_PY)
    (tmp_path / "neighbour.py").write_text("WIDTH = 24\n")
    (tmp_path / "late_neighbour.py").write_text("")
    for command in (["check"], ["estimate"]):
        assert cli.main([*command, f"{tmp_path / 'train.py'}:step", "--batch", "16"]) == 0
        assert "layer on generic" in capsys.readouterr().out
    assert cli.main(["check", f"{tmp_path / 'train.py'}:step", "--batch", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["matrix flops"] == 2 * 16 * 64 * 24


def test_the_command_line_prints_and_writes_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out, page = tmp_path / "check.json", tmp_path / "check.html"
    arguments = ["tests.test_check:mlp_step", "--chip", "tpu-v3", "--sink-size", "10", "--compare", "bf16", "--json", str(out)]
    assert cli.main(["check", *arguments, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "MLP on tpu-v3 in fp32: fits" in text and "10 steps a round trip" in text and "policy bf16" in text and "mixed" not in text
    assert json.loads(out.read_text())["estimate"]["steps"] == 10
    assert "MLP on tpu-v3 in fp32: fits" in page.read_text() and 'id="timeline"' in page.read_text()


def test_a_bad_verdict_is_exit_status_1(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    page = tmp_path / "check.html"
    assert cli.main(["check", "tests.test_check:loud_step", "--compare", "--html", str(page)]) == 1
    assert "overflows" in capsys.readouterr().out and 'id="numerics"' in page.read_text()
    assert cli.main(["check", "tests.test_check:huge_step", "--batch", "65536", "--chip", "tpu-v5e", "--compare", "--html", str(page)]) == 1
    captured = capsys.readouterr()
    assert "does not fit" in captured.out and captured.err == "" and "does not fit" in page.read_text()
    assert "--batch 16384: would fit in 8.0" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "expected module:function or file.py:function"),
        (["no_such_file.py:step"], "no_such_file.py: no such file"),
        (["tests/test_check.py:absent"], "tests/test_check.py has no function 'absent'"),
        (["tests.test_check:RNG"], "has no function 'RNG'"),
        (["tests.test_check:huge_step", "--sink-size", "3"], "gives a function, which is called once a round trip"),
        (["tests.test_check:mlp_step", "--policy", "fp17"], "unknown policy 'fp17'"),
        (["tests.test_check:mlp_step", "--compare", "bf17"], "Did you mean 'bf16'"),
        (["tests.test_check:mlp_step", "--batch", "0"], "at least 1"),
    ],
)
def test_a_bad_command_line_is_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
