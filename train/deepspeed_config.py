"""DeepSpeed's JSON configuration: what of it says how a training is done, as options of `tpuflow.train`.

Names and defaults are those of DeepSpeed's documentation (https://www.deepspeed.ai/docs/config-json/). Sections are tables: a key has what
checks its value and, where it changes nothing here, why.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import optax
from jax import numpy as jnp

from tpuflow import amp
from tpuflow.errors import ConfigError
from tpuflow.training.strategies import SHARDINGS

Section = Mapping[str, Any]
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a section: what its value must be, in words, and whether it is; `idle`: why it has no effect, for the values that it has
    none for."""

    expected: str
    fits: Callable[[Any], bool]
    idle: str = ""


def _number(least: float = 0.0) -> Key:
    return Key(f"a number of at least {least:g}", lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v >= least)


def _whole(least: int) -> Key:
    return Key(f"a whole number of at least {least}", lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least)


def _switch(idle: str = "") -> Key:
    return Key("true or false", lambda v: isinstance(v, bool), idle)


def _only(value: bool, why: str) -> Key:
    return Key(f"{str(value).lower()} ({why})", lambda v: v is value)


def _size(idle: str) -> Key:
    return Key("a positive number", lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v > 0, idle)


def _section() -> Key:
    return Key("an object", lambda v: isinstance(v, dict))


def _text() -> Key:
    return Key("a name", lambda v: isinstance(v, str))


_ONE_BY_ONE = "arrays are sent one by one"
_OFFLOADED: Mapping[str, Key] = {
    "device": Key("none or cpu", lambda v: v in ("none", "cpu")), "pin_memory": _switch("the host's memory is always pinned"),
    "buffer_count": _size(_ONE_BY_ONE),
}  # fmt: skip
"""Keys of whatever is in the host's memory."""
TOP: Mapping[str, Key] = {
    "train_batch_size": _whole(1), "train_micro_batch_size_per_gpu": _whole(1), "gradient_accumulation_steps": _whole(1),
    "optimizer": _section(), "scheduler": _section(), "fp16": _section(), "bf16": _section(), "zero_optimization": _section(),
    "gradient_clipping": _number(), "steps_per_print": _size("see --log-interval"), "wall_clock_breakdown": _switch(),
    "prescale_gradients": _switch("gradients are always divided before they are added"), "seed": _whole(0),
}  # fmt: skip
SECTIONS: Mapping[str, Mapping[str, Key]] = {
    "optimizer": {"type": _text(), "params": _section()},
    "scheduler": {"type": _text(), "params": _section()},
    "fp16": {
        "enabled": _switch(), "loss_scale": _number(), "initial_scale_power": _whole(0), "loss_scale_window": _whole(1),
        "hysteresis": _whole(1), "consecutive_hysteresis": _only(False, "until the scale grows"), "min_loss_scale": _number(),
        "fp16_master_weights_and_grads": _only(False, "parameters are kept in fp32"),
        "auto_cast": _switch("inputs are always cast"),
    },
    "bf16": {"enabled": _switch()},
    "zero_optimization": {
        "stage": Key("0, 1, 2 or 3", lambda v: v in range(4) and not isinstance(v, bool)),
        "allgather_partitions": _switch(_ONE_BY_ONE), "reduce_scatter": _switch("gradients are always scattered"),
        "allgather_bucket_size": _size(_ONE_BY_ONE), "reduce_bucket_size": _size(_ONE_BY_ONE),
        "overlap_comm": _switch("collectives always run beside kernels"), "contiguous_gradients": _switch(_ONE_BY_ONE),
        "stage3_prefetch_bucket_size": _size(_ONE_BY_ONE), "stage3_param_persistence_threshold": _size("all parameters are cut"),
        "stage3_max_live_parameters": _size("the compiler plans memory"), "stage3_max_reuse_distance": _size("the compiler plans memory"),
        "stage3_gather_16bit_weights_on_model_save": _switch("results hold whole arrays"),
        "cpu_offload": _switch(), "offload_optimizer": _section(), "offload_param": _section(),
    },
    "zero_optimization.offload_param": {
        **_OFFLOADED, "buffer_size": _size(_ONE_BY_ONE), "max_in_cpu": _size("all of them are offloaded"),
    },
    "zero_optimization.offload_optimizer": {
        **_OFFLOADED, "ratio": _size("all of it is offloaded"),
        "pipeline_read": _switch("copies always run beside kernels"), "pipeline_write": _switch("copies always run beside kernels"),
        "fast_init": _switch("there is nothing to initialise"),
    },
}  # fmt: skip
"""What is known of each section; what is set to its default here and has no effect is not spoken of."""
DOES: Mapping[str, bool] = dict.fromkeys(
    ("reduce_scatter", "overlap_comm", "contiguous_gradients", "allgather_partitions", "pin_memory", "pipeline_read", "pipeline_write"),
    True,
)
"""Idle keys whose value is what is done anyway."""


def _adam(rate: Any, p: Section) -> optax.GradientTransformation:
    b1, b2 = p.get("betas", (0.9, 0.999))
    decay, eps = p.get("weight_decay", 0.0), p.get("eps", 1e-8)
    if p.get("adam_w_mode", True) or not decay:
        return optax.adamw(rate, b1, b2, eps, weight_decay=decay)
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(rate, b1, b2, eps))


def _sgd(rate: Any, p: Section) -> optax.GradientTransformation:
    sgd = optax.sgd(rate, momentum=p.get("momentum") or None, nesterov=p.get("nesterov", False))
    return optax.chain(optax.add_decayed_weights(p["weight_decay"]), sgd) if p.get("weight_decay") else sgd


def _lamb(rate: Any, p: Section) -> optax.GradientTransformation:
    b1, b2 = p.get("betas", (0.9, 0.999))
    return optax.lamb(rate, b1, b2, p.get("eps", 1e-8), weight_decay=p.get("weight_decay", 0.0))


@dataclass(frozen=True, slots=True)
class Named:
    """What a "type" names: how it is made of its "params", and the keys that these may have."""

    make: Callable[..., Any]
    keys: Mapping[str, Key]


_BETAS = Key("two numbers", lambda v: isinstance(v, list) and len(v) == 2 and all(isinstance(b, float | int) and 0 <= b < 1 for b in v))
_COMMON = {"lr": _number(), "weight_decay": _number()}
_MOMENTS = {**_COMMON, "betas": _BETAS, "eps": _number()}
OPTIMIZERS: Mapping[str, Named] = {
    "Adam": Named(_adam, {**_MOMENTS, "torch_adam": _switch("it is the same"), "adam_w_mode": _switch()}),
    "AdamW": Named(lambda rate, p: _adam(rate, {**p, "adam_w_mode": True}), _MOMENTS),
    "SGD": Named(_sgd, {**_COMMON, "momentum": _number(), "nesterov": _switch()}),
    "Lamb": Named(_lamb, _MOMENTS),
}
LEARNING_RATE = 1e-3  # DeepSpeed's optimizers' own


def _gamma(step: Any, p: Section) -> Any:
    """The share of the way from the least to the greatest rate, by the logarithm unless it is to be linear."""
    steps = max(2, p.get("warmup_num_steps", 1000))
    if p.get("warmup_type", "log") == "linear":
        return jnp.minimum(step / steps, 1.0)
    return jnp.minimum(jnp.log(step + 1.0) / math.log(steps), 1.0)


def _warmup(p: Section, rate: float) -> optax.Schedule:
    """DeepSpeed's WarmupLR: update n, from 0, has the rate of its iteration n."""
    low, high = p.get("warmup_min_lr", 0.0), p.get("warmup_max_lr", rate)
    return lambda step: jnp.float32(low) + jnp.float32(high - low) * _gamma(jnp.asarray(step, jnp.float32), p)


def _warmup_decay(p: Section, rate: float) -> optax.Schedule:
    """WarmupDecayLR: then linearly down to the least rate."""
    low, high, total = p.get("warmup_min_lr", 0.0), p.get("warmup_max_lr", rate), p["total_num_steps"]
    steps = max(2, p.get("warmup_num_steps", 1000))

    def schedule(step: Any) -> Any:
        at = jnp.asarray(step, jnp.float32)
        falling = jnp.maximum((total - at) / max(1.0, total - steps), 0.0)
        return jnp.float32(low) + jnp.float32(high - low) * jnp.where(at < steps, _gamma(at, p), falling)

    return schedule


_TYPE = Key("log or linear", lambda v: v in ("log", "linear"))
_WARMUP = {"warmup_min_lr": _number(), "warmup_max_lr": _number(), "warmup_num_steps": _whole(0), "warmup_type": _TYPE}
SCHEDULERS: Mapping[str, Named] = {
    "WarmupLR": Named(_warmup, _WARMUP),
    "WarmupDecayLR": Named(_warmup_decay, {**_WARMUP, "total_num_steps": _whole(1)}),
}

BF16 = amp.Policy("bf16 with fp32 parameters", "float32", "bfloat16", "float32", "float32", "all", documented_by="DeepSpeed")


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What a configuration says of a training on so many chips. batch_size: samples of a step on all chips; steps gather for an update."""

    batch_size: int
    accumulate_steps: int
    optimizer: optax.GradientTransformation
    policy: amp.Policy
    sharding: str
    offload_optimizer: bool
    offload_params: bool
    breakdown: bool
    seed: int


def parse_config(config: Section, chips: int) -> DeepSpeedConfig:
    """What a configuration says; keys that are unknown or have no effect are named in one warning.

    Raises:
      ConfigError: a value is not what it must be, or contradicts another.
    """
    unknown, idle = _checked(config)
    batch, steps = _batches(config, chips)
    found = DeepSpeedConfig(
        batch,
        steps,
        _optimizer(config),
        _policy(config),
        _sharding(config),
        _offloads_optimizer(config),
        _offloads_params(config),
        config.get("wall_clock_breakdown", False),
        config.get("seed", 0),
    )
    said = [f"unknown: {', '.join(unknown)}"] if unknown else []
    said += [f"without effect: {', '.join(f'{name} ({why})' for name, why in idle.items())}"] if idle else []
    if said:
        warnings.warn(f"DeepSpeed's configuration has keys that are {'; and '.join(said)}.", stacklevel=2)
    return found


def _checked(config: Section) -> tuple[list[str], dict[str, str]]:
    """(unknown keys, idle ones and why) of a configuration whose values are what they must be."""
    unknown: list[str] = []
    idle: dict[str, str] = {}
    for place, keys, section in _sections(config):
        for name, value in section.items():
            path = f"{place}{name}"
            if name not in keys:
                unknown.append(path)
            elif not keys[name].fits(value):
                raise ConfigError(f"DeepSpeed's configuration: {path}: expected {keys[name].expected}, got {value!r}.")
            elif keys[name].idle and DOES.get(name) != value:
                idle[path] = keys[name].idle
    return unknown, idle


def _sections(config: Section) -> Iterator[tuple[str, Mapping[str, Key], Section]]:
    """(where it is, its keys, what is there) of every section, from the outside in: a section is an object when it is looked into."""
    yield "", TOP, config
    for place, keys in SECTIONS.items():
        yield f"{place}.", keys, functools.reduce(lambda section, name: section.get(name, {}), place.split("."), config)
    for name, table in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        if name in config:
            kind = config[name].get("type")
            if kind not in table:
                raise ConfigError(f"DeepSpeed's configuration: {name}.type: expected one of {', '.join(table)}, got {kind!r}.")
            yield f"{name}.params.", table[kind].keys, config[name].get("params", {})


def _batches(config: Section, chips: int) -> tuple[int, int]:
    """(samples of a step on all chips, steps for an update): train_batch_size is micro-batch times steps times chips."""
    whole, micro, steps = (config.get(name) for name in BATCHES)
    if micro is None:
        if whole is None:
            raise ConfigError("DeepSpeed's configuration: give train_batch_size or train_micro_batch_size_per_gpu.")
        steps = 1 if steps is None else steps
        micro = whole // (steps * chips)
    if steps is None:
        steps = 1 if whole is None else whole // (micro * chips)
    if micro < 1 or steps < 1 or (whole is not None and whole != micro * steps * chips):
        raise ConfigError(
            f"DeepSpeed's configuration: train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {chips} chips; make them agree, or leave one out."
        )
    return micro * chips, steps


def _optimizer(config: Section) -> optax.GradientTransformation:
    """With its schedule, and clipping before it."""
    if "optimizer" not in config:
        raise ConfigError('DeepSpeed\'s configuration: give an optimizer, such as {"type": "Adam", "params": {"lr": 0.001}}.')
    params = config["optimizer"].get("params", {})
    rate: Any = params.get("lr", LEARNING_RATE)
    if "scheduler" in config:
        wanted = config["scheduler"].get("params", {})
        kind = config["scheduler"]["type"]
        if kind == "WarmupDecayLR" and "total_num_steps" not in wanted:
            raise ConfigError("DeepSpeed's configuration: scheduler.params: WarmupDecayLR needs total_num_steps.")
        if wanted.get("warmup_min_lr", 0.0) > wanted.get("warmup_max_lr", rate):
            raise ConfigError("DeepSpeed's configuration: scheduler.params: warmup_min_lr is greater than warmup_max_lr.")
        rate = SCHEDULERS[kind].make(wanted, rate)
    made = OPTIMIZERS[config["optimizer"]["type"]].make(rate, params)
    clip = config.get("gradient_clipping", 0.0)
    return optax.chain(optax.clip_by_global_norm(clip), made) if clip else made


def _policy(config: Section) -> amp.Policy:
    """Parameters are in fp32; a 16-bit type is for everything that is computed."""
    fp16, bf16 = (config.get(name, {}).get("enabled", False) for name in ("fp16", "bf16"))
    if fp16 and bf16:
        raise ConfigError("DeepSpeed's configuration: fp16 and bf16 are both enabled; enable one of them.")
    if fp16:
        return amp.get_policy("O2").adjusted(loss_scale=_loss_scale(config["fp16"]))
    return BF16 if bf16 else amp.get_policy("fp32")


def _loss_scale(fp16: Section) -> amp.LossScale:
    """A number, or 0 for a dynamic one."""
    if fp16.get("loss_scale", 0):
        return amp.LossScale("static", float(fp16["loss_scale"]))
    return amp.LossScale(
        "dynamic", 2.0 ** fp16.get("initial_scale_power", 16), growth_interval=fp16.get("loss_scale_window", 1000),
        smallest=float(fp16.get("min_loss_scale", 1)), hysteresis=fp16.get("hysteresis", 2),
    )  # fmt: skip


def _sharding(config: Section) -> str:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return next(name for name, number in SHARDINGS.items() if number == stage)


def _offloads_optimizer(config: Section) -> bool:
    """Whether the optimizer's state is to be in the host's memory. DeepSpeed then updates on the host's processors as well; here the chip
    does, with the state copied in and out."""
    zero = config.get("zero_optimization", {})
    wanted = zero.get("cpu_offload", False) or zero.get("offload_optimizer", {}).get("device", "none") == "cpu"
    if wanted and not zero.get("stage", 0):
        raise ConfigError("DeepSpeed's configuration: zero_optimization: offload_optimizer needs stage 1, 2 or 3, got 0.")
    return wanted


def _offloads_params(config: Section) -> bool:
    """Whether the parameters are to be in the host's memory."""
    zero = config.get("zero_optimization", {})
    wanted = zero.get("offload_param", {}).get("device", "none") == "cpu"
    if wanted and zero.get("stage", 0) != 3:
        raise ConfigError(f"DeepSpeed's configuration: zero_optimization: offload_param needs stage 3, got {zero.get('stage', 0)}.")
    return wanted
