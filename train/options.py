"""The options that every recipe shares: one dataclass field each, from which the command line is made."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from tpuflow.errors import ConfigError
from train.optimizers import OPTIMIZERS, SCHEDULES
from train.ranges import check_least, dashed

T = TypeVar("T")


def option(default: Any, group: str, text: str, parse: Callable[[str], Any] = str, **keywords: Any) -> Any:
    """A field that is also an option of the command line: its help, how its text is read, and further words for argparse.

    `flag`: the option's name where it takes no value. `also`: other names of it.
    """
    return field(default=default, metadata={"group": group, "help": text, "type": parse, **keywords})


def scale(text: str) -> str | float:
    """A loss scale: none, dynamic, or the number of a static one."""
    return text if text in ("none", "dynamic") else float(text)


def yes_no(text: str) -> bool:
    """Of yes or no."""
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"expected yes or no, got {text!r}")
    return text == "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Which device is simulated, and how: what the options of every recipe begin with."""

    chip: str = option("generic", "device", "row of the chip catalogue")
    engine: str = option("fast", "device", "XLA, or NumPy tile by tile: slow", choices=("fast", "reference"))
    fidelity: str = option("native", "device", "sums as the host orders them, or the device", choices=("native", "bitexact"))

    @property
    def device(self) -> dict[str, Any]:
        """As keywords of `tpuflow.jit` and `tpuflow.train`."""
        return {one.name: getattr(self, one.name) for one in fields(DeviceOptions)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(DeviceOptions):
    """What a recipe may be told. A recipe's own defaults are an instance; a recipe with options of its own makes a subclass."""

    policy: str = option("fp32", "training", "precision, such as fp32, fp16, mixed, bf16, mixed_bf16, O0, O2 or O3")
    epochs: int = option(1, "training", "passes over the training data; with a positive --sink-size, sinks", int)
    steps: int | None = option(None, "training", "train so many steps in all, whatever --epochs says", int, metavar="N")
    batch_size: int = option(32, "training", "images a step", int)
    lr: float = option(1e-3, "training", "learning rate, the highest of a schedule", float)
    schedule: str = option("constant", "training", "how the learning rate goes", choices=tuple(SCHEDULES))
    lr_init: float = option(0.01, "training", "rate at the beginning of the warm-up of poly and linear", float)
    lr_end: float = option(1e-5, "training", "rate at the end of linear", float)
    warmup_epochs: int = option(0, "training", "epochs of rising rate", int)
    optimizer: str = option("sgd", "training", "Optax optimizer", choices=tuple(OPTIMIZERS))
    momentum: float = option(0.0, "training", "of sgd", float)
    weight_decay: float = option(0.0, "training", "added to the gradients, times the parameters", float)
    clip_norm: float | None = option(None, "training", "scale gradients down to this global norm", float, metavar="NORM")
    accumulate: int = option(1, "training", "steps for one update, which takes the mean of their gradients", int)
    loss_scale: str | float | None = option(
        None, "training", "none, dynamic, or a number for a static scale; else as the policy says", scale, metavar="SCALE"
    )
    keep_batchnorm_fp32: bool | None = option(
        None, "training", "batch normalisation in fp32: yes or no; else as the policy says", yes_no, metavar="YES|NO"
    )
    label_smoothing: float = option(0.0, "training", "share of the label that is spread over the other classes", float)
    init: str = option("random", "training", "initial weights: random, torch-seed0 (where the recipe has them), or a file of PyTorch's")
    seed: int = option(0, "training", "of random weights, of the data's order, of random transforms", int)
    shuffle: int = option(0, "training", "shuffle through a buffer of N images; 0 the files' order, -1 all images", int, metavar="N")
    sink_size: int = option(-1, "device", "steps a host round trip: -1 a whole epoch, 0 each step by itself", int)
    data_dir: Path | None = option(
        None, "data and output", "folder of the data; else $TPUFLOW_DATA, the user's cache, a download", Path, metavar="FOLDER"
    )
    train_samples: int | None = option(None, "data and output", "use the first N training images only", int, metavar="N")
    test_samples: int | None = option(None, "data and output", "use the first N test images only; 0: no evaluation", int, metavar="N")
    eval_epochs: int | None = option(None, "evaluation and checkpoints", "evaluate after every N epochs; else after each", int, metavar="N")
    eval_steps: int | None = option(None, "evaluation and checkpoints", "evaluate after every N steps", int, metavar="N")
    patience: int | None = option(
        None, "evaluation and checkpoints", "stop when N evaluations in a row did not lower the loss", int, metavar="N"
    )
    checkpoint_dir: Path | None = option(None, "evaluation and checkpoints", "save the training there", Path, metavar="FOLDER")
    checkpoint_steps: int | None = option(
        None, "evaluation and checkpoints", "save after every N steps; else after every epoch", int, metavar="N"
    )
    keep_checkpoints: int = option(5, "evaluation and checkpoints", "newest checkpoints to keep", int)
    resume: bool = option(False, "evaluation and checkpoints", "go on from the newest checkpoint in --checkpoint-dir", flag="--resume")
    json: Path | None = option(None, "data and output", "write the whole result there", Path, metavar="FILE")
    numerics: bool = option(
        False, "data and output", "report what happens to every number of a step: before each epoch and at the end", flag="--numerics"
    )
    plot: Path | None = option(
        None, "data and output", "draw loss, accuracy and loss scale there: .png, .svg or .pdf", Path, metavar="FILE"
    )
    tensorboard: Path | None = option(None, "data and output", "write TensorBoard's event files there", Path, metavar="FOLDER")
    progress: bool = option(True, "data and output", "no progress bar", flag="--no-progress")

    def check(self) -> None:
        """That numbers are in their ranges; policies, chips and the like are checked by `tpuflow.train`.

        Raises:
          ConfigError: one is not.
        """
        if self.checkpoint_dir is None and (self.resume or self.checkpoint_steps is not None):
            raise ConfigError("--resume and --checkpoint-steps need --checkpoint-dir FOLDER.")
        least = dict.fromkeys(("epochs", "batch_size", "steps", "accumulate", "train_samples", "keep_checkpoints"), 1)
        least |= {"sink_size": -1, "shuffle": -1, "test_samples": 0, "warmup_epochs": 0, "momentum": 0, "weight_decay": 0}
        least |= dict.fromkeys(("eval_epochs", "eval_steps", "patience", "checkpoint_steps"), 1)
        check_least(self, least, dashed)


WATCHED = frozenset(
    one.name for one in fields(Options) if one.metadata["group"] == "evaluation and checkpoints"
) | {"json", "numerics", "plot", "tensorboard"}  # fmt: skip
"""Options of what `tpuflow.train` does around the steps: a recipe with a loop of its own has none of them."""


def add_options(parser: argparse.ArgumentParser, defaults: Any, without: frozenset[str] = frozenset(), *, spelling: str = "-") -> None:
    """Every field of the defaults' class as an option of the parser, in groups; but for those that the recipe has no use for.

    The device comes last. spelling: what stands between the words of an option; transformers has "_".
    """
    groups: dict[str, Any] = {}
    for one in sorted(fields(defaults), key=lambda one: one.metadata["group"] == "device"):
        if one.name in without:
            continue
        group = groups.setdefault(one.metadata["group"], None) or parser.add_argument_group(one.metadata["group"])
        groups[one.metadata["group"]] = group
        _add(group, one, getattr(defaults, one.name), spelling)


def from_arguments(defaults: T, arguments: argparse.Namespace) -> T:
    """An instance of the defaults' class with what was given."""
    names = [one.name for one in fields(cast(Any, defaults))]
    return type(defaults)(**{name: getattr(arguments, name, getattr(defaults, name)) for name in names})


def _add(group: Any, one: Field[Any], default: Any, spelling: str) -> None:
    words = {name: value for name, value in one.metadata.items() if name not in ("group", "flag", "help", "type", "also")}
    if flag := one.metadata.get("flag"):
        group.add_argument(flag, dest=one.name, action="store_false" if default else "store_true", help=one.metadata["help"])
        return
    words["type"] = one.metadata["type"]
    if "choices" not in words:
        words.setdefault("metavar", {int: "N", float: "X"}.get(one.metadata["type"], one.name.upper()))
    shown = "" if default is None else f" [{' '.join(map(str, default))}]" if isinstance(default, tuple) else " [%(default)s]"
    spellings = (f"--{one.name.replace('_', spelling)}", *one.metadata.get("also", ()))
    group.add_argument(*spellings, default=default, help=one.metadata["help"] + shown, **words)
