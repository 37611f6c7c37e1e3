"""The CIFAR-10 network of DeepSpeed's example (DeepSpeedExamples/training/cifar/cifar10_deepspeed.py), on simulated chips.

Options have the example's names; the number of chips, which there the launcher gives, is --chips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tpuflow
from models.cifar_net import CifarExperts, CifarNet
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import ConfigError
from train import cifar10, transforms
from train.cifar import hits_of
from train.deepspeed_config import Section, parse_config
from train.logs import Lines, Row
from train.model_files import read_json
from train.options import DeviceOptions, option
from train.ranges import check_least, dashed
from train.recipe import Recipe, transformed

DTYPES, STAGES, MLPS, NOISES = ("bf16", "fp16", "fp32"), (0, 1, 2, 3), ("standard", "residual"), ("None", "RSample", "Jitter")


LEAST = {"chips": 1, "epochs": 1, "log_interval": 1, "ep_world_size": 1, "min_capacity": 0, "seed": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions(DeviceOptions):
    """The example's options."""

    chips: int = option(4, "training", "simulated chips", int)
    epochs: int = option(2, "training", "passes over the training images", int, also=("-e",))
    log_interval: int = option(2000, "training", "print the mean loss after every N steps of an epoch", int)
    dtype: str | None = option(None, "training", "what is computed in [fp16]", choices=DTYPES)
    stage: int | None = option(None, "training", "ZeRO's stage [0]", int, choices=STAGES)
    deepspeed: bool = option(False, "training", "as launchers give it; changes nothing", flag="--deepspeed")
    deepspeed_config: Path | None = option(
        None, "training", "DeepSpeed's JSON; else the example's own", Path, metavar="FILE", also=("--deepspeed_config",)
    )
    moe: bool = option(False, "mixture of experts", "a mixture of experts in place of the last layer but one", flag="--moe")
    ep_world_size: int = option(1, "mixture of experts", "chips that the experts are spread over", int)
    num_experts: Sequence[int] = option((1,), "mixture of experts", "experts of each such layer", int, nargs="+")
    mlp_type: str = option("standard", "mixture of experts", "residual: a dense layer beside the experts", choices=MLPS)
    top_k: int = option(1, "mixture of experts", "experts of an image", int, choices=(1, 2))
    min_capacity: int = option(0, "mixture of experts", "images that an expert takes at least", int)
    noisy_gate_policy: str | None = option(None, "mixture of experts", "noise of the gate, with --top-k 1", choices=NOISES)
    moe_param_group: bool = option(False, "mixture of experts", "needed with ZeRO, as in DeepSpeed", flag="--moe-param-group")
    seed: int = option(0, "training", "of initial weights and of the order of the images", int)
    data_dir: Path | None = option(None, "data and output", "folder of the data; else $TPUFLOW_DATA, ...", Path, metavar="FOLDER")
    train_samples: int | None = option(None, "data and output", "use the first N training images only", int, metavar="N")
    test_samples: int | None = option(None, "data and output", "use the first N test images only; 0: no evaluation", int, metavar="N")
    json: Path | None = option(None, "data and output", "write the whole result there", Path, metavar="FILE")
    progress: bool = option(True, "data and output", "no progress bar", flag="--no-progress")

    def check(self) -> None:
        """That options are in their ranges and do not contradict one another.

        Raises:
          ConfigError: one is not, or does.
        """
        check_least(self, LEAST, dashed)
        if not self.moe and (tuple(self.num_experts) != (1,) or self.ep_world_size > 1 or self.moe_param_group):
            raise ConfigError("--num-experts, --ep-world-size and --moe-param-group are of a mixture of experts: give --moe, too.")
        if self.chips % self.ep_world_size:
            raise ConfigError(f"--ep-world-size {self.ep_world_size} does not divide --chips {self.chips}.")
        for count in self.num_experts:
            if count < self.top_k or count % self.ep_world_size:
                raise ConfigError(
                    f"--num-experts {count}: expected at least --top-k {self.top_k}, a multiple of --ep-world-size {self.ep_world_size}."
                )
        if self.top_k == 2 and self.noise is not None:
            raise ConfigError(f"--noisy-gate-policy {self.noise} goes with --top-k 1.")

    @property
    def noise(self) -> str | None:
        """Of the gate."""
        return None if self.noisy_gate_policy == "None" else self.noisy_gate_policy

    @property
    def mesh(self) -> dict[str, int] | None:
        """The chips; those that experts are spread over lie side by side."""
        if self.chips == 1:
            return None
        apart = {"data": self.chips // self.ep_world_size}
        return apart | ({"expert": self.ep_world_size} if self.ep_world_size > 1 else {})


def config_of(options: DeepSpeedOptions) -> Section:
    """The file's configuration, or the example's own by --dtype and --stage.

    Raises:
      ConfigError: the file says something else than these.
    """
    if options.deepspeed_config is None:
        return example_config(options.dtype or "fp16", options.stage or 0)
    config = read_json(options.deepspeed_config, "a training by --deepspeed_config")
    stage = _of(config, "zero_optimization", "stage", 0)
    if options.stage is not None and options.stage != stage:
        raise ConfigError(
            f"--stage {options.stage}: {options.deepspeed_config} has zero_optimization.stage {stage}; leave one of them out."
        )
    enabled = [name for name in ("fp16", "bf16") if _of(config, name, "enabled", False)] or ["fp32"]
    if options.dtype is not None and enabled != [options.dtype]:
        raise ConfigError(f"--dtype {options.dtype}: {options.deepspeed_config} enables {' and '.join(enabled)}; leave one of them out.")
    return config


def _of(config: Section, section: str, name: str, default: Any) -> Any:
    found = config.get(section, {})
    return found.get(name, default) if isinstance(found, Mapping) else default


def example_config(dtype: str, stage: int) -> Section:
    """What the example has in its code."""
    return {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {
            "enabled": dtype == "fp16", "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
            "min_loss_scale": 1, "initial_scale_power": 15,
        },
        "zero_optimization": {"stage": stage},
        "wall_clock_breakdown": False,
    }  # fmt: skip


def model_of(options: DeepSpeedOptions) -> CifarNet:
    """The tutorial's network, with experts if they are asked for."""
    if not options.moe:
        return CifarNet()
    return CifarExperts(
        experts=tuple(options.num_experts), k=options.top_k, min_capacity=options.min_capacity, residual=options.mlp_type == "residual",
        noise=options.noise, axis="expert" if options.ep_world_size > 1 else None,
    )  # fmt: skip


def run(options: DeepSpeedOptions) -> Any:
    """Train, print the example's lines; the result.

    Raises:
      ConfigError, DataError: options, configuration or data do not fit.
    """
    config = parse_config(config_of(options), options.chips)
    if options.moe and config.sharding != "ddp" and not options.moe_param_group:
        raise ConfigError(f"--moe with ZeRO ({config.sharding}): give --moe-param-group, too, as DeepSpeed needs it.")
    data = cifar10.load(options.data_dir)
    train = transformed(_first(data.train, options.train_samples), transforms.TUTORIAL)
    test = transformed(_first(data.test, options.test_samples or None), transforms.TUTORIAL)
    evaluated = options.test_samples != 0
    rows = (Row("step_end", "[{epoch}, {step:5d}] loss: {mean:.3f}", options.log_interval, options.log_interval),)
    result = tpuflow.train(
        model_of(options), train, config.policy, config.optimizer, "softmax_cross_entropy", epochs=options.epochs,
        batch_size=config.batch_size, accumulate_steps=config.accumulate_steps, shuffle=True, seed=options.seed or config.seed,
        mesh=options.mesh, sharding=config.sharding if options.mesh else "ddp", offload_optimizer=config.offload_optimizer,
        offload_params=config.offload_params,
        eval_data=test if evaluated else None, eval_epochs=options.epochs if evaluated else None,
        metrics=("accuracy", "class_accuracy", "loss") if evaluated else None,
        callbacks=(Lines((*rows, Row("train_end", "Finished Training")), len(train[0])),), progress=options.progress, **options.device,
    )  # fmt: skip
    if not result.interrupted and evaluated:
        print(accuracies(result.history[-1]["class_accuracy"], test[1]), flush=True)
    if config.breakdown:
        print(breakdown(result), flush=True)
    return result


def _first(data: tuple[np.ndarray, np.ndarray], count: int | None) -> tuple[np.ndarray, np.ndarray]:
    return data[0][:count], data[1][:count]


def accuracies(percent: Sequence[float], labels: np.ndarray) -> str:
    """What the example prints at its end."""
    hits = hits_of(percent, labels)
    total = sum(hit for hit, _ in hits.values())
    lines = [f"Accuracy of the network on the {len(labels)} test images: {100 * total // len(labels)} %"]
    lines += [f"Accuracy of {name:>5s} : {100 * hit // images:2d} %" for name, (hit, images) in hits.items() if images]
    return "\n".join(lines)


def breakdown(result: Any) -> str:
    """What "wall_clock_breakdown" asks for: the modelled time of a step, of the slowest kernels, and of collectives."""
    program = next(e.program for e in result.executables if e.program.outputs)
    time = sink_time(program, 1)
    return f"wall_clock_breakdown: {time.summary()}\n{time.table(8)}"


RECIPE = Recipe(
    "cifar_deepspeed", "the CIFAR-10 network of DeepSpeed's example: ZeRO and experts on several chips", __doc__, DeepSpeedOptions(), run
)
