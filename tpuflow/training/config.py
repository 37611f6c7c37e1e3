"""The options of a training: one field each, from which signatures, checks, documentation, settings and fingerprints derive.

A new option is one field here and the line that uses it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec, TypeVar

import optax
from jax.sharding import PartitionSpec

from tpuflow import amp
from tpuflow.checking import check_choice, check_number, check_path, check_switch
from tpuflow.chips import Chip
from tpuflow.device.runtime import ENGINES, FIDELITIES
from tpuflow.errors import ConfigError, unknown
from tpuflow.training.application import LossFn
from tpuflow.training.averaging import EMA, get_ema
from tpuflow.training.callbacks.base import Callback
from tpuflow.training.descriptions import check_optimizer
from tpuflow.training.losses import Loss, LossFunction
from tpuflow.training.metrics import Metric, MetricFunction
from tpuflow.training.partitioning import check_rules
from tpuflow.training.roles import InputSelection
from tpuflow.training.strategies import SHARDINGS, check_mesh

Check = Callable[[str, Any], object]
P = ParamSpec("P")
R = TypeVar("R")
WIDTH = 136
PLAIN = (bool, int, float, str)


def option(default: Any, text: str, check: Check | None = None, *, shown: bool = False, same: bool = False) -> Any:
    """A field: its default, what it does, and how its value is checked.

    shown: results report it among their settings. same: it is part of a training's fingerprint, so that a training can resume from a
    checkpoint only with the same value.
    """
    return dataclasses.field(default=default, metadata={"text": text, "check": check, "shown": shown, "same": same})


def required(text: str) -> Any:
    """A field without a default."""
    return dataclasses.field(metadata={"text": text, "check": None, "shown": False, "same": False})


def _plain(value: Any) -> Any:
    """A value as plain data that is the same in every process: without the addresses of functions."""
    return value if isinstance(value, PLAIN) or value is None else re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _at_least(least: int) -> Check:
    return lambda name, value: check_number(name, value, least)


def _one_of(*allowed: str) -> Check:
    return lambda name, value: check_choice(name, value, allowed)


def _sharding(name: str, value: Any) -> None:
    if isinstance(value, str):
        check_choice(name, value, tuple(SHARDINGS))
    else:
        check_rules(name, value)


def _if_given(check: Check) -> Check:
    return lambda name, value: value is None or check(name, value)


def _optimizer(name: str, value: Any) -> None:
    check_optimizer(value)


def _function(name: str, value: Any) -> None:
    if not callable(value):
        raise ConfigError(f"{name}: expected a function, got {value!r}.")


def _patterns(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{name}: expected a sequence of patterns of parameter paths such as ('backbone/*',), got {value!r}.")


def _accumulation(name: str, value: Any) -> None:
    if not isinstance(value, amp.Accumulation):
        check_number(name, value, 1)


def _numerics(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        check_number(name, value, 1)


@dataclass(frozen=True, slots=True)
class StepConfig:
    """What makes a training step: the options that `train`, `training_step`, `check_numerics` and `estimate_training` share."""

    model: Any = required(
        "a `flax.linen.Module` or `flax.nnx.Module` instance (which gets the trained variables in the end), what `hk.transform` makes, an "
        "Equinox module, a function (params, *inputs) -> outputs (with `params`), or a `tpuflow.Model`."
    )
    data: Any = required(
        "a tree of arrays [N, ...] such as (inputs, labels) or a mapping, an iterable of batches of such a form, a function that makes "
        "one, or a loader."
    )
    policy: str | amp.Policy = option("fp32", "precision, a name of `tpuflow.amp.POLICIES` or a `Policy` of your own.")
    optimizer: optax.GradientTransformation | None = option(
        None,
        "an Optax transformation, adam(1e-3) if not given; `tpuflow.param_groups` has one for each group of parameters. It gets `value`, "
        "`grad`, `value_fn` and `grad_fn` if it asks for them (lbfgs, sam).",
        _if_given(_optimizer),
    )
    loss: str | Loss | LossFunction | None = option(
        None,
        "a name of `tpuflow.LOSSES`, `tpuflow.cross_entropy(label_smoothing=...)`, or a function (fp32 outputs, labels) -> loss, which "
        "gets the second part of a pair, whatever tree that is, and the whole batch if it is no pair; chosen by the labels if not given: "
        'softmax cross-entropy for integers, mean squared error for floats. What linen models sow as "losses" is added in training, and no '
        "part of an evaluation's avg_loss.",
    )
    _: KW_ONLY
    loss_fn: LossFn | None = option(
        None,
        "a function (apply, params, batch, rngs) -> loss, or (loss, scalars by name), in place of `loss`: it calls the model itself, see "
        '`tpuflow.training.application.Application`. The scalars are in the history under "metrics".',
        _if_given(_function),
    )
    inputs: InputSelection = option(
        None,
        "what of a batch the model gets: an entry, several of them in order, or a function of the batch. If not given: the first of a "
        "pair; of a mapping the entries that are called like the arguments of the model's call, or the only one beside the label.",
    )
    seed: int = option(0, "of initial parameters, of shuffling, of the model's random numbers.", _at_least(0), shown=True, same=True)
    params: Any = option(
        None,
        'parameters to start from instead: a tree (for linen, with or without {"params": ...}, and with batch statistics and the like if '
        "they are given too), or the path of a checkpoint or file that `tpuflow.load_params` reads.",
    )
    frozen: Sequence[str] = option(
        (), "patterns of the paths of parameters that stay as they are, such as ('backbone/*',); no gradient is computed for them.",
        _patterns, same=True,
    )  # fmt: skip
    ema: EMA | float | None = option(
        None, "keep an exponential moving average of the parameters: a `tpuflow.EMA`, or its decay. Evaluations use it.",
        lambda name, value: get_ema(value), same=True,
    )  # fmt: skip
    eval_params: Callable[[Any, Any], Any] | None = option(
        None, "in place of `ema`, a function (the optimizer's state, params) -> the parameters that evaluations use, such as "
        "`optax.contrib.schedule_free_eval_params`.",
        _if_given(_function),
    )  # fmt: skip
    keep_batchnorm_fp32: bool | None = option(
        None, "batch normalisation in fp32 (True) or in the policy's compute type (False); as the policy says if not given."
    )
    loss_scale: amp.LossScale | float | str | None = option(
        None, 'in place of the policy\'s: a number (static), "dynamic", "none", or a `LossScale`.'
    )
    accumulate_steps: int | amp.Accumulation = option(
        1,
        "steps for one update, or a `tpuflow.Accumulation`, whose number rises in a warm-up: it takes the mean of their gradients, summed "
        "in fp32. Each step counts the same, also one of a ragged batch; statistics of batch normalisation move every step; what a "
        "training ends with before one is due stays in `opt_state` and changes no parameter. Schedules count updates.",
        _accumulation, shown=True, same=True,
    )  # fmt: skip
    mesh: Mapping[str, int] | None = option(
        None, "train on several chips: the axes of a mesh with how many chips they have, such as {'data': 4}; every chip takes a piece of "
        "each batch. Layers with experts may use a second axis, {'data': 2, 'expert': 2}.", _if_given(check_mesh),
        shown=True,
    )  # fmt: skip
    sharding: str | Mapping[str, PartitionSpec] = option(
        "ddp",
        'what each chip of the mesh holds. "ddp": all parameters and all of the optimizer\'s state. ZeRO\'s stages: "zero1", its share of '
        'the optimizer\'s state; "zero2", of the gradients, too; "zero3", of the parameters, too. Gradients, losses and batch statistics '
        "are means over the chips, each chip draws random numbers of its own; results and checkpoints hold whole arrays. Or rules, such as "
        '{"*/up/kernel": PartitionSpec(None, "model"), "*/down/kernel": PartitionSpec("model")}: the step of one chip, partitioned by XLA '
        'so that parameters lie as the first pattern that matches says, others whole, and batches are cut over the axis "data".',
        _sharding, shown=True,
    )  # fmt: skip
    offload_optimizer: bool = option(
        False,
        "the arrays of the optimizer's state are in the host's memory between steps; a step copies each into HBM for its update, and back "
        "(docs/time_and_memory.md). No value changes.",
        check_switch, shown=True,
    )  # fmt: skip
    offload_params: bool = option(
        False,
        "the parameters are in the host's memory between steps; a step copies each into HBM before it is first read, and back after its "
        "update. A step that needs more HBM than there is lets go of them after the forward pass, and copies them in again for the "
        "backward pass; those that a scan stacks layer by layer. No value changes.",
        check_switch, shown=True,
    )  # fmt: skip
    chip: str | Chip = option("generic", "a row of the catalogue.")
    engine: str = option("fast", "how the device is simulated, see `tpuflow.device`.", _one_of(*ENGINES), shown=True)
    fidelity: str = option("native", "likewise.", _one_of(*FIDELITIES), shown=True)

    def check(self) -> None:
        """Raise a ConfigError unless every option is what its field allows."""
        for field in dataclasses.fields(self):
            if (check := field.metadata["check"]) is not None:
                check(field.name, getattr(self, field.name))

    def is_given(self, name: str) -> bool:
        """Whether an option has another value than its default."""
        value, default = getattr(self, name), next(f.default for f in dataclasses.fields(self) if f.name == name)
        return value is not default and not (type(value) is type(default) and value == default)

    def training(self, **others: Any) -> TrainConfig:
        """The options of a training of this step; `others` are those that a step does not have."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(StepConfig)}, **others)

    def shown(self) -> dict[str, Any]:
        """The options that results report, as plain data."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.metadata["shown"]}

    def same(self) -> dict[str, Any]:
        """The options that are part of the fingerprint, as plain data; those that were not given are left out."""
        found = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.metadata["same"]}
        return {n: _plain(v) for n, (v, default) in found.items() if isinstance(v, PLAIN) or v != default}


@dataclass(frozen=True, slots=True)
class TrainConfig(StepConfig):
    """The options of `tpuflow.train`."""

    _: KW_ONLY
    state: Any = option(
        None,
        "the state that a step of your own begins with, any tree of arrays; `model` is then that step: a function (state, batch) -> "
        '(state, scalars by name, "loss" among them), such as one with several optimizers. The result\'s `params` are the last state.',
    )
    eval_step: Callable[[Any, Any], Any] | None = option(
        None, "the evaluation of a step of your own: (state, batch) -> figures by name, as metrics give them.", _if_given(_function)
    )
    epochs: int = option(1, "passes over the data; with a positive `sink_size`, sinks.", _at_least(1), shown=True)
    batch_size: int | None = option(
        None, "samples a step, 32 if not given; the last batch of an epoch may be smaller. Iterables bring their own batches.",
        _if_given(_at_least(1)),
    )  # fmt: skip
    nominal_batch_size: int | None = option(
        None, "accumulate as many steps for one update as make about so many samples, in place of `accumulate_steps`.",
        _if_given(_at_least(1)),
    )  # fmt: skip
    sink_size: int = option(
        -1, "steps in one host round trip: -1 a whole epoch; 0 one; k > 0: the data are walked endlessly, k batches an epoch.",
        _at_least(-1), shown=True,
    )  # fmt: skip
    eval_data: Any = option(None, "as `data`; evaluated on the device, by default after each epoch.")
    eval_epochs: int | None = option(None, "evaluate after every so many epochs.", _if_given(_at_least(1)))
    eval_steps: int | None = option(
        None,
        "evaluate after every so many steps, counted over the whole training; a sink that goes on beyond is split there, which changes no "
        "value. With `eval_steps` alone there is no evaluation after each epoch.",
        _if_given(_at_least(1)),
    )
    metrics: Sequence[str | Metric | MetricFunction] | None = option(
        None,
        "what to measure on `eval_data`: names of `tpuflow.METRICS`, functions (fp32 outputs, labels) -> values, or `Metric`s; the loss "
        "(with `loss_fn`, its scalars too), and the accuracy for class labels, if not given.",
    )
    shuffle: bool = option(False, "a new order of the samples in each epoch (arrays only).", check_switch, shown=True, same=True)
    numerics: bool | int = option(
        False,
        "report what happens to every number of a step (see `tpuflow.check_numerics`) before every epoch and after the last; a number n: "
        "before the first and after every n-th step. What is measured is a step beside the training, on the first batch of the data each "
        "time; it changes no value. The reports are in `result.numerics`.",
        _numerics,
    )
    callbacks: Sequence[Callback] = option((), "see `tpuflow.Callback`.")
    resume: Any = option(
        None,
        "a directory where `tpuflow.ModelCheckpoint` saves, or one checkpoint in it. The training goes on from the newest good checkpoint, "
        "bit for bit as if it had never stopped; without any, it starts from the beginning, so the same call can be repeated until it has "
        "ended (with a warning, unless a `ModelCheckpoint` of this training saves there). Data, model, policy, loss and optimizer must be "
        "the same; `epochs` and `sink_size` may change.",
        _if_given(check_path),
    )
    progress: bool = option(True, "show a progress bar, and say what was chosen.", check_switch)
    json: Any = option(None, "write the result there; checked before the training starts.", _if_given(check_path))


def configured(make: Callable[P, Any], raises: str) -> Callable[[Callable[[Any], R]], Callable[P, R]]:
    """A decorator: makes of a function of a config (`make`) one that takes the config's fields as its arguments. The fields give it its
    signature and, with their texts, its docstring."""

    def decorate(run: Callable[[Any], R]) -> Callable[P, R]:
        signature = inspect.signature(make)
        name = getattr(run, "__name__", "call")

        @functools.wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for given in kwargs:
                if given not in signature.parameters:
                    raise unknown(f"{name}() option", given, signature.parameters)
            return run(make(*args, **kwargs))

        call.__signature__ = signature.replace(return_annotation=inspect.signature(run).return_annotation)  # type: ignore[attr-defined]
        call.__doc__ = documented(run.__doc__ or "", make, raises)
        return call

    return decorate


def documented(text: str, config: Any, raises: str) -> str:
    """A docstring: what a function does, its options, what it raises."""
    rows = [
        textwrap.fill(f"{f.name}: {f.metadata['text']}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        for f in dataclasses.fields(config)
    ]
    return "\n".join([inspect.cleandoc(text), "", "Args:", *rows, "", "Raises:", textwrap.indent(inspect.cleandoc(raises), "  "), ""])
