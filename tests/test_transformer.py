"""GPT-2 as a model of JAX: what sees what, training on the simulated device, layers in a scan, and what it costs at full size."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import tpuflow
from models.gpt2 import GPT2, GPT3_XL, NO_DROPOUT, SIZES, TINY, Config
from tests.tolerances import TRANSFORMER_LOSSES
from tpuflow.training.config import StepConfig
from tpuflow.training.preparing import make_recipe
from tpuflow.training.train_step import TrainState

TOLERANCE = 1e-4
"""Of the largest value: fp32 sums in another order."""

SCANNED = dataclasses.replace(TINY, scan=True)


def variables(config: Config, seed: int = 0) -> Any:
    """Initial variables; every leaf random, since zeros and ones would hide mistakes."""
    like = jax.eval_shape(GPT2(config).init, jax.random.key(0), tokens(1, config))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0.1, 0.2, leaf.shape).astype(np.float32), like)


def tokens(batch: int, config: Config = TINY, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, config.n_positions)).astype(np.int32)


def text(batches: int, batch: int, config: Config = TINY) -> tuple[np.ndarray, np.ndarray]:
    """Sequences that can be learnt: each token is the one before plus 1 or 7; and their next tokens."""
    rng = np.random.default_rng(0)
    steps = rng.choice([1, 7], (batches * batch, config.n_positions))
    whole = (rng.integers(0, config.vocab_size, (batches * batch, 1)) + np.cumsum(steps, 1)) % config.vocab_size
    return whole[:, :-1].astype(np.int32), whole[:, 1:].astype(np.int32)


def stacked(params: Any, layers: int) -> Any:
    """Parameters of layers written out as those of layers in a scan."""
    rest = {name: tree for name, tree in params.items() if not name.startswith("h_")}
    return {**rest, "h": jax.tree.map(lambda *leaves: np.stack(leaves), *(params[f"h_{i}"] for i in range(layers)))}


def loss_of(config: Config, params: Any, x: np.ndarray, y: np.ndarray) -> jax.Array:
    logits = GPT2(config).apply({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def assert_close(ours: Any, theirs: Any, what: str = "") -> None:
    scale = max(1e-6, float(np.abs(np.asarray(theirs)).max()))
    np.testing.assert_allclose(np.asarray(ours) / scale, np.asarray(theirs) / scale, rtol=0, atol=TOLERANCE, err_msg=what)


# --- the model itself ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_has_as_many_parameters_as_gpt_2():
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    assert {name: parameters(config) for name, config in SIZES.items()} == published


@pytest.mark.parametrize("scan", [False, True])
def test_the_large_one_has_1_3_billion_parameters(scan):
    width, layers = 2048, 24
    layer = 12 * width**2 + 13 * width  # products of 3, 1, 4 and 4 times width^2; their biases (9) and two normalisations (4)
    assert parameters(dataclasses.replace(GPT3_XL, scan=scan)) == (50257 + 2048 + 2) * width + layers * layer


def parameters(config: Config) -> int:
    like = jax.eval_shape(GPT2(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(like))


def test_no_position_sees_what_comes_after_it():
    x = tokens(1)
    changed = x.copy()
    changed[0, 9] = (x[0, 9] + 1) % TINY.vocab_size
    apply = jax.jit(GPT2(TINY).apply)
    one, other = (np.asarray(apply(variables(TINY), t)) for t in (x, changed))
    np.testing.assert_array_equal(one[0, :9], other[0, :9])
    assert (np.abs(one[0, 9:] - other[0, 9:]).max(axis=-1) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_layers_in_a_scan_or_checkpointed_give_the_same_loss_and_gradients(remat):
    params, x, y = variables(TINY)["params"], tokens(3), tokens(3, seed=2)
    plain_loss, plain = jax.jit(jax.value_and_grad(lambda p: loss_of(TINY, p, x, y)))(params)
    config = dataclasses.replace(SCANNED, remat=remat)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: loss_of(config, p, x, y)))(stacked(params, TINY.n_layer))
    assert float(loss) == pytest.approx(float(plain_loss), rel=TOLERANCE)
    jax.tree.map(assert_close, grads, stacked(plain, TINY.n_layer))


# --- on the simulated device --------------------------------------------------------------------------------------------


def plain_losses(config: Config, policy: str, data: tuple[np.ndarray, np.ndarray], batch: int, params: Any) -> list[float]:
    """The losses of the same training step under plain jax.jit."""
    recipe, _ = make_recipe(StepConfig(GPT2(config), data, policy, optax.adam(1e-2)), data)
    state = recipe.initial_state(params, {}, None)
    step = jax.jit(recipe.train_step)
    losses: list[float] = []
    for i in range(0, len(data[0]), batch):
        state, figures = step(state, (data[0][i : i + batch], data[1][i : i + batch]))
        losses.append(float(figures.loss))
    assert isinstance(state, TrainState)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "config"),
    [("mixed_bf16", TINY), ("fp32", dataclasses.replace(SCANNED, remat=True))],
    ids=["mixed_bf16", "fp32-scan-remat"],
)
def test_training_on_the_device_follows_plain_jax(policy, config):
    data, batch = text(24, 16), 16
    params = jax.jit(GPT2(config).init)(jax.random.key(3), data[0][:1])["params"]
    options: dict[str, Any] = {"policy": policy, "optimizer": optax.adam(1e-2), "batch_size": batch, "params": params}
    with jax.default_matmul_precision("highest"):  # a TPU's own default would make f32 products of operands in bf16
        result = tpuflow.train(GPT2(config), data, progress=False, chip="tpu-v4", **options)
    expected = plain_losses(config, policy, data, batch, params)
    np.testing.assert_allclose(result.losses, expected, rtol=TRANSFORMER_LOSSES[policy])
    assert expected[-1] < 0.5 * expected[0], "it must learn, or equal losses show little"


# --- what it costs ------------------------------------------------------------------------------------------------------

SMALL = Config(vocab_size=512, n_positions=256, n_embd=256, n_layer=6, n_head=4, **NO_DROPOUT)


def forward_macs(config: Config, batch: int) -> int:
    """Multiply-adds of a forward pass: 12 D^2 a token and layer, scores and mixtures of T x T positions, the output layer."""
    d, t = config.n_embd, config.n_positions
    return batch * t * (config.n_layer * (12 * d * d + 2 * t * d) + config.vocab_size * d)


def estimated(config: Config, batch: int, **options: Any) -> tpuflow.Estimate:
    shape = jax.ShapeDtypeStruct((batch, config.n_positions), jnp.int32)
    return tpuflow.estimate_training(
        GPT2(config), (shape, shape), chip="tpu-v4", policy="mixed_bf16", optimizer=optax.adam(1e-3), sink_size=1, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["written out", "scan"])
def test_checkpointed_layers_take_less_memory_and_more_work(scan):
    kept, again = (estimated(dataclasses.replace(SMALL, scan=scan, remat=remat), 32) for remat in (False, True))
    forward = forward_macs(SMALL, 32)
    (kept_macs,), (again_macs,) = (e.time.work.macs.values() for e in (kept, again))
    scores = 0 if scan else 32 * SMALL.n_layer * SMALL.n_positions**2 * SMALL.n_embd
    assert kept_macs == 3 * forward + scores, "a product forward, two backward; scores are made again where both are in one graph"
    assert 3.5 * forward < again_macs < 4 * forward, "but for each layer's last product, whose result the backward pass does not need"
    assert again.memory.temp_size_in_bytes < 0.5 * kept.memory.temp_size_in_bytes
    if not scan:  # what is kept from trip to trip of a scan is stored and loaded, which costs more than computing it again
        assert 1.1 * kept.step_seconds < again.step_seconds < 1.7 * kept.step_seconds


@pytest.mark.slow
def test_a_scan_over_the_layers_is_estimated_like_layers_written_out():
    out, scan = (estimated(dataclasses.replace(SMALL, remat=True, scan=scan), 32) for scan in (False, True))
    assert not scan.time.assumed, "the trips are known"
    assert scan.time.work.macs == out.time.work.macs
    assert scan.memory.argument_size_in_bytes == pytest.approx(out.memory.argument_size_in_bytes, rel=1e-2)
    assert 0.7 < scan.step_seconds / out.step_seconds < 2


ESTIMATE = """
import json, pathlib, resource, sys
from tpuflow.estimating.targets import estimate_target
e = estimate_target(sys.argv[1], 1, "tpu-v4", "mixed_bf16", 100)
usage, status = resource.getrusage(resource.RUSAGE_SELF), pathlib.Path("/proc/self/status")
resident = usage.ru_maxrss  # which on Linux counts what started this process too: there, the process's own
if status.exists():
    resident = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({
    "resident": resident * 1024, "cpu": usage.ru_utime,
    "macs": sum(e.time.work.macs.values()), "arguments": e.memory.argument_size_in_bytes, "temporaries": e.memory.temp_size_in_bytes,
    "mfu": e.time.mfu, "seconds": e.step_seconds, "roofline": e.time.roofline_seconds, "steps": e.steps,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param("transformer_1b3_step", marks=pytest.mark.slow), "transformer_1b3_scan_step"])
def test_a_step_of_1_3_billion_parameters_is_estimated_on_a_laptop(target):
    done = subprocess.run([sys.executable, "-c", ESTIMATE, f"models.gpt2:{target}"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["cpu"] < 60 and found["resident"] < 2 * 2**30, "no array of the model's size: its parameters alone are 5 GB"
    count = parameters(GPT3_XL)
    assert 12 * count <= found["arguments"] < 12.001 * count, "f32 parameters and Adam's two moments"
    width = GPT3_XL.n_layer * GPT3_XL.n_positions * GPT3_XL.n_embd * 2
    assert 4 * width < found["temporaries"] < 8 * count, "at least four bf16 arrays of every layer are kept; most gradients go into Adam"
    assert 3.5 * forward_macs(GPT3_XL, 1) < found["macs"] / found["steps"] < 4 * forward_macs(GPT3_XL, 1)
    assert found["roofline"] < found["seconds"] * found["steps"]
    assert 0.25 < found["mfu"] < 0.75, "what such models reach on such chips"
