"""DeepSpeed's example: its configuration, its options, and a training by them."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import tpuflow
from models.cifar_net import CifarExperts
from tests.tolerances import sum_bound
from tpuflow.errors import ConfigError
from tpuflow.examples.data import ImageData
from train import cifar10
from train.__main__ import main
from train.cifar_deepspeed import DeepSpeedOptions, config_of, example_config
from train.deepspeed_config import DeepSpeedConfig, parse_config

ADAM = {"type": "Adam", "params": {"lr": 0.01}}
RNG = np.random.default_rng(0)


def parsed(chips: int = 4, **config: Any) -> DeepSpeedConfig:
    """A configuration of 16 samples and Adam, with what is given; it has nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return parse_config({"train_batch_size": 16, "optimizer": ADAM, **config}, chips)


def test_the_example_s_own_configuration_is_a_training_of_16_images_a_step() -> None:
    for stage, sharding in enumerate(("ddp", "zero1", "zero2", "zero3")):
        found = parsed(**example_config("fp16", stage))
        assert (found.batch_size, found.accumulate_steps, found.sharding) == (16, 1, sharding)
        scale = found.policy.loss_scale
        assert (scale.kind, scale.initial, scale.growth_interval, scale.smallest) == ("dynamic", 2.0**15, 500, 1.0)
        assert (found.policy.param_dtype, found.policy.compute_dtype) == ("float32", "float16")
    assert parsed(**example_config("bf16", 0)).policy.compute_dtype == "bfloat16"
    assert parsed(**example_config("fp32", 0)).policy.compute_dtype == "float32"


@pytest.mark.parametrize(
    ("given", "batch", "steps"),
    [
        ({"train_batch_size": 32}, 32, 1),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 16, 2),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 8, 4),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 16, 2),
    ],
)
def test_a_batch_is_what_a_chip_takes_at_once_times_steps_times_chips(given: dict[str, int], batch: int, steps: int) -> None:
    found = parsed(**given)
    assert (found.batch_size, found.accumulate_steps) == (batch, steps)


def updates(optimizer: Any, steps: int = 1) -> list[float]:
    """What it makes of a gradient of 1 for a parameter of 2, step by step."""
    params = {"w": np.float32(2.0)}
    state, found = optimizer.init(params), []
    for _ in range(steps):
        change, state = optimizer.update({"w": np.float32(1.0)}, state, params)
        found.append(float(change["w"]))
    return found


def test_rates_warm_up_by_the_logarithm_or_linearly() -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    warmup = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
    rates = updates(parsed(optimizer=sgd, scheduler={"type": "WarmupLR", "params": warmup}).optimizer, 6)
    expected = [0.1 + 0.4 * min(1.0, math.log(n + 1) / math.log(4)) for n in range(6)]
    np.testing.assert_allclose(rates, -np.array(expected), rtol=sum_bound(4))
    rates = updates(parsed(optimizer=sgd, scheduler={"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}}).optimizer, 6)
    np.testing.assert_allclose(rates, [-0.1, -0.2, -0.3, -0.4, -0.5, -0.5], rtol=sum_bound(4))
    decay = {"type": "WarmupDecayLR", "params": {**warmup, "warmup_type": "linear", "total_num_steps": 8}}
    rates = updates(parsed(optimizer=sgd, scheduler=decay).optimizer, 9)
    np.testing.assert_allclose(rates[3:], [-0.4, -0.5, -0.4, -0.3, -0.2, -0.1], rtol=sum_bound(4))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}, optax.sgd(0.5, momentum=0.9)),
        ({"type": "Adam", "params": {"lr": 0.5, "weight_decay": 0.1, "betas": [0.8, 0.9]}}, optax.adamw(0.5, 0.8, 0.9, weight_decay=0.1)),
        ({"type": "AdamW", "params": {"weight_decay": 0.1}}, optax.adamw(1e-3, weight_decay=0.1)),
        ({"type": "Lamb", "params": {"lr": 0.5}}, optax.lamb(0.5, eps=1e-8)),
        (
            {"type": "Adam", "params": {"lr": 0.5, "weight_decay": 0.1, "adam_w_mode": False}},
            optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.5)),
        ),
    ],
)
def test_an_optimizer_is_optax_s_with_its_numbers(optimizer: Any, expected: Any) -> None:
    assert updates(parsed(optimizer=optimizer).optimizer, 3) == updates(expected, 3)
    clipped = parsed(optimizer=optimizer, gradient_clipping=0.1).optimizer
    assert updates(clipped, 3) == updates(optax.chain(optax.clip_by_global_norm(0.1), expected), 3)


def test_unknown_keys_and_those_without_effect_are_named_in_one_warning() -> None:
    config = {
        "train_batch_size": 16, "optimizer": {**ADAM, "params": {"lr": 0.1, "beta": 1}}, "flops_profiler": {},
        "zero_optimization": {"stage": 1, "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 5e8, "offload": 1},
    }  # fmt: skip
    with pytest.warns(UserWarning, match="DeepSpeed's configuration has keys") as found:
        parse_config(config, 4)
    (one,) = found
    said = str(one.message)
    assert "unknown: flops_profiler, zero_optimization.offload, optimizer.params.beta" in said
    assert "zero_optimization.overlap_comm (collectives always run beside kernels)" in said
    assert "zero_optimization.reduce_bucket_size (arrays are sent one by one)" in said and "reduce_scatter" not in said


@pytest.mark.parametrize(
    ("zero", "offloads"),
    [
        ({"cpu_offload": True}, True),
        ({"offload_optimizer": {"device": "cpu", "pin_memory": True}}, True),
        ({"offload_optimizer": {}}, False),
    ],
)
def test_the_optimizer_s_state_may_be_at_the_host(zero: Any, *, offloads: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parsed(zero_optimization={"stage": 2, **zero}).offload_optimizer is offloads


def test_parameters_may_be_at_the_host() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there, here = (
            parsed(zero_optimization={"stage": 3, "offload_param": {"device": device, "pin_memory": True}}) for device in ("cpu", "none")
        )
    assert there.offload_params and not there.offload_optimizer and not here.offload_params


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size 16 is not train_micro_batch_size_per_gpu 3 x .* 1 x 4 chips"),
        ({"train_batch_size": 2}, "train_batch_size 2 is not"),
        ({"train_batch_size": "many"}, "train_batch_size: expected a whole number of at least 1, got 'many'"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": 2}, "zero_optimization: expected an object, got 2"),
        ({"zero_optimization": {"cpu_offload": True}}, "offload_optimizer needs stage 1, 2 or 3, got 0"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param needs stage 3, got 2"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device: expected none or cpu"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type: expected one of Adam, AdamW, SGD, Lamb, got 'Lion'"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 3}}}, "optimizer.params.betas: expected two numbers"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1}}}, "warmup_min_lr is greater than warmup_max_lr"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "needs total_num_steps"),
    ],
)
def test_what_does_not_fit_or_contradicts_itself_is_refused(config: Any, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        parsed(**config)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"num_experts": (4,)}, "give --moe"),
        ({"moe": True, "num_experts": (3,), "ep_world_size": 2}, "--num-experts 3: expected at least --top-k 1, a multiple of"),
        ({"moe": True, "num_experts": (3,), "ep_world_size": 3}, "--ep-world-size 3 does not divide --chips 4"),
        ({"moe": True, "num_experts": (2,), "top_k": 2, "noisy_gate_policy": "RSample"}, "goes with --top-k 1"),
        ({"chips": 0}, "--chips: expected 1 or more"),
    ],
)
def test_options_that_contradict_one_another_are_refused(options: Any, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        DeepSpeedOptions(**options).check()


def test_options_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}))
    with pytest.raises(ConfigError, match=r"--stage 1: .*ds_config.json has zero_optimization.stage 2"):
        config_of(DeepSpeedOptions(deepspeed_config=path, stage=1))
    with pytest.raises(ConfigError, match=r"--dtype bf16: .*ds_config.json enables fp16"):
        config_of(DeepSpeedOptions(deepspeed_config=path, dtype="bf16"))
    path.write_text("[1")
    with pytest.raises(ConfigError, match=r"ds_config.json: cannot be read .*; a training by --deepspeed_config has one"):
        config_of(DeepSpeedOptions(deepspeed_config=path))


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 training and 16 test images of noise."""

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        return RNG.integers(0, 256, (count, 32, 32, 3), np.uint8), (np.arange(count) % 10).astype(np.int32)

    monkeypatch.setattr(cifar10, "load", lambda data_dir: ImageData("noise", "here", some(48), some(16)))


@pytest.mark.slow
def test_the_example_runs_by_its_own_command_line(images: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        **example_config("bf16", 2), "train_batch_size": 32, "gradient_accumulation_steps": 2, "wall_clock_breakdown": True,
    }  # fmt: skip
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    arguments = ["--deepspeed", "--deepspeed_config", str(path), "--chips", "2", "-e", "1", "--log-interval", "2", "--no-progress"]
    moe = ["--moe", "--num-experts", "2", "--ep-world-size", "2", "--mlp-type", "residual", "--noisy-gate-policy", "RSample"]
    assert main(["cifar_deepspeed", *arguments, *moe]) == 2
    assert "give --moe-param-group" in capsys.readouterr().err
    assert main(["cifar_deepspeed", *arguments, *moe, "--moe-param-group"]) == 0
    said = capsys.readouterr().out
    for line in ("[1,     2] loss: ", "Finished Training", "Accuracy of the network on the 16 test images: ", "Accuracy of plane : "):
        assert line in said
    assert "wall_clock_breakdown: " in said and "collectives" in said


@pytest.mark.slow
def test_experts_in_the_network_over_a_mesh_give_the_losses_of_one_chip() -> None:
    """With --moe --num-experts 4 --ep-world-size 2 --top-k 1: a group of images of one chip is what each of four gates by itself. There
    is place for all, since which ones an expert takes otherwise is drawn by each chip."""
    data = (RNG.normal(size=(16, 32, 32, 3)).astype(np.float32), (np.arange(16) % 10).astype(np.int32))
    options = {"optimizer": optax.sgd(0.01), "batch_size": 16, "epochs": 3, "progress": False}
    one = tpuflow.train(CifarExperts(min_capacity=4, group_tokens=4), data, **options)
    several = tpuflow.train(CifarExperts(min_capacity=4, axis="expert"), data, **options, mesh={"data": 2, "expert": 2})
    found, expected = ([loss for epoch in r.history for loss in epoch["losses"]] for r in (several, one))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
