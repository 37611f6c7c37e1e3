"""ZeRO's stages: what each chip holds and sends, and that the values are those of plain data parallelism and of one chip."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tpuflow
from bench.zero import IN_A_SCAN, PATH, WRITTEN_OUT, Network, row
from tpuflow.chips import get_chip
from tpuflow.device.reference import ReferenceEngine
from tpuflow.errors import ConfigError, OutOfMemoryError
from tpuflow.estimating.estimating import training_program
from tpuflow.isa.collectives import Collective
from tpuflow.isa.program import Program, walk
from tpuflow.stages.analysis import memory_analysis
from tpuflow.stages.flattening import to_device
from tpuflow.training.config import StepConfig, TrainConfig
from tpuflow.training.device_sink import DeviceSink
from tpuflow.training.preparing import prepare
from tpuflow.training.strategies import SHARDINGS

RNG = np.random.default_rng(0)
STAGES = tuple(SHARDINGS)
MODEL = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(3)])  # 16, 3: four chips pad shards
DATA = (RNG.normal(size=(32, 5)).astype(np.float32), np.arange(32) % 3)
RAGGED = (RNG.normal(size=(22, 5)).astype(np.float32), np.arange(22) % 3)  # four chips take the last batch of 6 whole


def trained(sharding: str | None, chips: int = 4, **options: Any) -> Any:
    """Two epochs on so many chips; on one chip without a sharding."""
    given = {"optimizer": optax.sgd(0.1, momentum=0.9), "batch_size": 16, "epochs": 2, "progress": False, "fidelity": "bitexact", **options}
    mesh = {} if sharding is None else {"mesh": {"data": chips}, "sharding": sharding}
    return tpuflow.train(given.pop("model", MODEL), given.pop("data", DATA), **given, **mesh)


def losses(result: Any) -> np.ndarray:
    """Of every step."""
    return np.array([loss for epoch in result.history for loss in epoch["losses"]])


def assert_same_state(one: Any, other: Any) -> None:
    """Bit for bit."""
    for a, b in zip(jax.tree.leaves((one.params, one.opt_state)), jax.tree.leaves((other.params, other.opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_near_state(one: Any, other: Any) -> None:
    """But for the order of sums."""
    for a, b in zip(jax.tree.leaves((one.params, one.opt_state)), jax.tree.leaves((other.params, other.opt_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("chips", "accumulate", "data"), [(8, 1, DATA), (4, 2, RAGGED)])
def test_all_stages_have_the_bits_of_plain_data_parallelism_and_the_losses_of_one_chip(chips: int, accumulate: int, data: Any) -> None:
    """For a sum is its scattered parts, gathered, and momentum is elementwise."""
    one, *stages = (trained(s, chips, accumulate_steps=accumulate, data=data) for s in (None, *STAGES))
    for result in stages:
        np.testing.assert_allclose(losses(result), losses(one), rtol=1e-6)
        np.testing.assert_array_equal(losses(result), losses(stages[0]))
        assert_same_state(result, stages[0])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", STAGES)
def test_all_replicas_are_equal_and_both_engines_agree(sharding: str) -> None:
    """Whole outputs are the same on every chip; loss scale, clipping and a moving average take part."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    config = TrainConfig(MODEL, DATA, "mixed", optimizer, ema=0.9, batch_size=16, mesh={"data": 4}, sharding=sharding, fidelity="bitexact")
    job = prepare(config)
    state = job.recipe.strategy.shard_state(job.state)
    executable = DeviceSink("train_step", job.recipe.train_step, job.target, job.feed.structure).prepare(state, job.signature).executable
    inputs = [np.array(2, np.int32), *map(np.asarray, to_device(jax.tree.leaves(state)))]
    batches = [leaf.reshape(2, 16, *leaf.shape[1:]) for leaf in (DATA[0], DATA[1].astype(np.int32))]
    engine = ReferenceEngine(executable.program)
    outputs, figures = engine.launch(inputs, batches)
    whole = [n for n, port in enumerate(engine.program.outputs) if not any(port.cut)]
    for first, *others in map(engine.pieces, whole):
        for other in others:
            np.testing.assert_array_equal(other, first)
    fast = executable.launch(inputs, batches)
    for a, b in zip((*outputs, *figures), (*fast[0], *fast[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_loss_scale_backs_off_on_all_chips_alike() -> None:
    """One sample overflows fp16: the chip that has it tells the others."""
    data = (DATA[0][:16].copy(), DATA[1][:16])
    data[0][5] = 3e4
    results = [trained(s, policy="mixed", data=data, epochs=3, shuffle=False) for s in STAGES]
    scales = [[scale for epoch in r.history for scale in epoch["loss_scale"]] for r in results]
    assert scales[0][0] > scales[0][1] and all(found == scales[0] for found in scales)
    for result in results[1:]:
        assert_same_state(result, results[0])


OPTIMIZERS: Mapping[str, Any] = {
    "adam": optax.adam(1e-2, eps=1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "decay of matrices": optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "layers' norms": optax.lamb(1e-2, eps=1e-3),
    "rows and columns": optax.adafactor(1e-2, min_dim_size_to_factor=4, multiply_by_parameter_scale=True),
    "greatest element": optax.chain(optax.adaptive_grad_clip(0.1), optax.adamax(1e-2, eps=1e-3)),
    "groups": tpuflow.param_groups({"*/bias": optax.sgd(0.1), "*": optax.sgd(0.05, momentum=0.9)}),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}
"""Elementwise ones, ones that look at shapes or names, norms over chips, and ones that need whole arrays."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_makes_of_shards_what_it_makes_of_whole_arrays(name: str) -> None:
    whole, *sharded = (trained(s, optimizer=OPTIMIZERS[name]) for s in ("ddp", "zero1", "zero3"))
    for result in sharded:
        np.testing.assert_allclose(losses(result), losses(whole), rtol=1e-5)
        for a, b in zip(jax.tree.leaves(result.opt_state), jax.tree.leaves(whole.opt_state), strict=True):
            assert np.shape(a) == np.shape(b)


@pytest.mark.slow
def test_adam_is_as_far_from_one_chip_as_one_chip_is_from_itself_with_the_samples_in_another_order() -> None:
    """It divides by the root of a gradient's square: where a gradient is no more than what rounding leaves of a sum, its update has no
    digit that does not depend on the order of that sum. What is divided by more than that is as close as plain gradient descent."""
    x, y = RNG.normal(size=(256, 20)).astype(np.float32), RNG.integers(0, 3, 256)
    order = np.concatenate([at + RNG.permutation(64) for at in range(0, 256, 64)])

    def apart(eps: float) -> tuple[float, float]:
        options = {"optimizer": optax.adam(1e-2, eps=eps), "batch_size": 64, "epochs": 6, "model": _relu_network()}
        one, several = trained(None, data=(x, y), **options), trained("zero1", data=(x, y), **options)
        reordered = trained(None, data=(x[order], y[order]), **options)
        return tuple(float(np.abs(losses(r) / losses(one) - 1).max()) for r in (several, reordered))  # type: ignore[return-value]

    several, reordered = apart(1e-8)
    assert several <= 4 * reordered
    several, _ = apart(1e-3)
    assert several < 1e-6


def _relu_network() -> nn.Module:
    return nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(3)])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(("zero3", 4), ("zero1", 2)), (("zero1", 2), (None, 1)), ((None, 1), ("zero3", 4))])
def test_checkpoints_hold_whole_values_and_resume_on_another_mesh(tmp_path: Any, before: Any, after: Any) -> None:
    options = {"accumulate_steps": 3}  # of which the checkpoint after 4 has the midst
    full = trained(None, epochs=4, **options)
    saved = tpuflow.ModelCheckpoint(tmp_path)
    trained(*before, epochs=2, callbacks=[saved], **options)
    with pytest.warns(RuntimeWarning, match="the compiled training step is not the one it was saved with"):
        result = trained(*after, epochs=4, resume=tmp_path, **options)
    assert result.resumed_at == 4
    np.testing.assert_allclose(losses(result), losses(full), rtol=1e-6)
    for a, b in zip(jax.tree.leaves(result.opt_state), jax.tree.leaves(full.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_of_an_accumulation_goes_on_bit_for_bit(tmp_path: Any) -> None:
    options = {"accumulate_steps": 2, "sink_size": 1}
    for sharding in ("zero1", "zero3"):
        full = trained(sharding, epochs=4, **options)
        trained(sharding, epochs=1, callbacks=[tpuflow.ModelCheckpoint(tmp_path / sharding)], **options)
        result = trained(sharding, epochs=4, resume=tmp_path / sharding, **options)
        assert_same_state(result, full)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", STAGES)
def test_an_evaluation_on_a_mesh_has_the_figures_of_one_chip(sharding: str) -> None:
    """The model runs on pieces; accuracies and losses are of whole batches, and of the average of the parameters."""
    result = trained(sharding, eval_data=DATA, ema=0.5)
    assert any("eval" in e.program.name or e.program.mesh for e in result.executables)
    found = result.evaluate(DATA, progress=False)
    assert {name: result.history[-1][name] for name in found} == found
    predicted = result.predict(DATA[0], progress=False)
    assert predicted.shape == (32, 3)


@pytest.mark.slow
def test_frozen_parameters_and_a_loss_of_ones_own_go_with_every_stage() -> None:
    def loss_fn(apply: Any, params: Any, batch: Any, rngs: Any) -> Any:
        x, y = batch
        outputs = apply(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()
        return loss, {"largest": jnp.max(jnp.mean(outputs, 0))}

    options = {"frozen": ["layers_0/*"], "loss_fn": loss_fn, "eval_data": DATA}
    one, *stages = (trained(s, **options) for s in (None, *STAGES))
    for result in stages:
        np.testing.assert_allclose(losses(result), losses(one), rtol=1e-6)
        np.testing.assert_allclose(result.history[-1]["avg_loss"], one.history[-1]["avg_loss"], rtol=1e-5)
        assert_same_state(result, stages[0])


class Varied(nn.Module):
    """Batch statistics and dropout."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, 5] -> [B, 3]."""
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(nn.relu(x)))


@pytest.mark.slow
def test_statistics_dropout_and_reports_on_numerics_go_with_every_stage() -> None:
    whole, *sharded = (trained(s, model=Varied(), epochs=1, numerics=True, sink_size=0, eval_data=DATA) for s in ("ddp", "zero1", "zero3"))
    for result in sharded:
        np.testing.assert_array_equal(losses(result), losses(whole))
        assert_same_state(result, whole)
        jax.tree.map(np.testing.assert_array_equal, result.carried, whole.carried)
        assert len(result.numerics) == len(whole.numerics) == 2
    assert "mesh {'data': 4} zero3" in sharded[-1].report()


def test_an_optimizer_that_computes_losses_is_refused() -> None:
    with pytest.raises(ConfigError, match="computes the loss by itself .* or sharding='ddp'"):
        trained("zero1", optimizer=optax.lbfgs())


def test_a_stage_without_a_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match="'zero2' is over the chips of a mesh; give one"):
        tpuflow.train(MODEL, DATA, sharding="zero2", progress=False)


@pytest.mark.parametrize(
    ("sharding", "remedy"), [("ddp", "cutting over the mesh .*'zero3'.* arguments that several chips"), ("zero3", "sharding")]
)
def test_what_does_not_fit_says_what_every_chip_of_the_mesh_has(sharding: str, remedy: str) -> None:
    wide = (jax.ShapeDtypeStruct((16, 2**16), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32))
    with pytest.raises(OutOfMemoryError, match=remedy) as caught:
        tpuflow.estimate_training(nn.Dense(2**16), wide, optimizer=optax.adam(1e-3), chip="tpu-v5e", mesh={"data": 2}, sharding=sharding)
    assert ("several chips have alike" in str(caught.value)) == (sharding == "ddp")


class Layer(nn.Module):
    """One of a scan, of sizes that four chips do not divide."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """[B, 5] -> [B, 5]."""
        return nn.Dense(5)(nn.LayerNorm()(nn.tanh(nn.Dense(7)(x)))), None


class Scanned(nn.Module):
    """Three layers in a scan, kept or computed again."""

    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, 5] -> [B, 3]."""
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        return nn.Dense(3)(nn.scan(layer, {"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_a_scan_are_sent_one_by_one_with_the_values_of_one_chip(remat: bool, sharding: str) -> None:
    """Their gradients, and what is gathered of them: in evaluations too. Clipping adds the squares of shards."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    options = {"model": Scanned(remat), "optimizer": optimizer, "eval_data": DATA, "epochs": 3}
    one, several = trained(None, **options), trained(sharding, **options)
    np.testing.assert_allclose(losses(several), losses(one), rtol=1e-6)
    np.testing.assert_allclose([h["accuracy"] for h in several.history], [h["accuracy"] for h in one.history])
    assert_near_state(several, one)
    programs = [e.program for e in several.executables if e.program.mesh]
    sent = {(c.kind, p.buffers[_whole(c)].elems) for p in programs for _, c in walk(p.code) if isinstance(c, Collective)}
    assert len(programs) >= 2 and {("all_gather", 36), ("reduce_scatter", 36)} <= sent  # of 3 kernels of 5 x 7 one, filled up
    assert max(elems for _, elems in sent) < 3 * 5 * 7


def _whole(collective: Collective) -> int:
    """What is gathered, or what is summed."""
    return collective.target if collective.kind == "all_gather" else collective.source


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_layers_that_are_written_out_hold_a_gradient_no_longer_than_it_is_sent(sharding: str) -> None:
    """On links that hide every transfer behind the kernels that follow, a chip never has all gradients, nor new parameters beside old."""
    chip = replace(get_chip("tpu-v5e"), link_bytes_per_second=1e15, hop_seconds=0.0, collective_seconds=0.0)
    model = nn.Sequential([layer for _ in range(8) for layer in (nn.Dense(512), nn.relu)])
    batch = (jax.ShapeDtypeStruct((64, 512), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32))
    config = StepConfig(model, batch, optimizer=optax.adam(1e-3), mesh={"data": 8}, sharding=sharding, chip=chip)
    program = training_program(config, chip)[1]
    kernel_bytes = 4 * 512 * 512
    assert memory_analysis(program).temp_size_in_bytes < 4 * kernel_bytes


def _activations_program(sharding: str, policy: str) -> Program:
    """A step of layers whose activations are larger than their parameters, and cheap to compute again."""
    model = nn.Sequential([layer for _ in range(6) for layer in (nn.Dense(128), nn.gelu)])
    batch = (jax.ShapeDtypeStruct((2**18, 128), jnp.float32), jax.ShapeDtypeStruct((2**18,), jnp.int32))
    config = StepConfig(model, batch, policy, optax.adam(1e-3), mesh={"data": 4}, sharding=sharding, chip="tpu-v5e")
    return training_program(config, get_chip("tpu-v5e"))[1]


def test_the_third_stage_holds_back_shards_alone_and_keeps_no_activations_that_others_compute_again() -> None:
    whole, sharded = (memory_analysis(_activations_program(s, "fp32")).temp_size_in_bytes for s in ("ddp", "zero3"))
    assert sharded < 1.1 * whole


def test_parameters_that_are_narrowed_to_be_used_are_gathered_so() -> None:
    """Both times; gradients are summed in 32 bits, in which they are kept."""
    program = _activations_program("zero3", "mixed_bf16")
    sent = {(c.kind, program.buffers[c.source].dtype.name) for _, c in walk(program.code) if isinstance(c, Collective)}
    assert {("all_gather", "bf16"), ("reduce_scatter", "f32")} <= sent
    assert ("all_gather", "f32") not in sent


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_layers_in_a_scan_resume_on_another_mesh_as_others_do(tmp_path: Any, sharding: str) -> None:
    """Checkpoints hold whole arrays, however shards are cut: [layers, shard] of 8 chips, of 4, or of one, in the midst of an
    accumulation."""
    options = {"model": Scanned(remat=True), "accumulate_steps": 3, "epochs": 3}
    full = {
        chips: trained(sharding if chips > 1 else None, chips, callbacks=[tpuflow.ModelCheckpoint(tmp_path / str(chips))], **options)
        for chips in (8, 1)
    }
    for before, after in ((8, 8), (8, 4), (8, 1), (1, 8)):
        saved = tmp_path / str(before) / "step_00000004"
        expected = nullcontext() if before == after else pytest.warns(RuntimeWarning, match="the compiled training step is not the one")
        with expected:
            result = trained(sharding if after > 1 else None, after, resume=saved, **options)
        assert result.resumed_at == 4
        np.testing.assert_allclose(losses(result), losses(full[1]), rtol=1e-6)
        assert_near_state(result, full[1])
        if before == after:
            assert_same_state(result, full[before])


@pytest.mark.parametrize("sharding", STAGES)
@pytest.mark.parametrize(("network", "chips"), [(WRITTEN_OUT, 2), (WRITTEN_OUT, 64), (IN_A_SCAN, 64)])
def test_what_a_chip_holds_and_sends_is_what_the_formulas_say_and_the_documentation(network: Network, chips: int, sharding: str) -> None:
    found = row(chips, sharding, network)
    found.check()
    assert found.line() in PATH.read_text(encoding="utf-8")
