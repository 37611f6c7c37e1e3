"""Targets of the command line, "module:function" or "file.py:function": the function returns, for a batch size, the step to estimate."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from tpuflow.errors import ConfigError, did_you_mean
from tpuflow.estimating.estimating import Calibrated, Estimate, estimate, estimate_training
from tpuflow.training.adapters.choosing import is_model
from tpuflow.training.config import StepConfig

EXPECTED = "expected (function, *shapes), (model, batch), or a StepConfig"


@dataclass(frozen=True, slots=True)
class Step:
    """The step that a target returns: a function and its arguments, or a model and one batch, such as (inputs, labels); arrays or shapes.

    options: the options of the training, as for `tpuflow.estimate_training`, if the target returned a `StepConfig`.
    """

    step: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it is a model to be trained, rather than a function to be called."""
        return is_model(self.step)

    def on_chips(self, target: str, several_chips: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options, with those of several chips.

        Raises:
          ConfigError: it is a function, which says by itself how its arrays lie.
        """
        if several_chips and not self.trains:
            raise ConfigError(
                f"{target} gives a function, which says by itself how its arrays lie on a mesh (shard_map, NamedShardings); "
                f"{' and '.join(f'--{name}' for name in several_chips)} are for a model, which is trained. Leave them out."
            )
        return {**self.options, **several_chips}


def load_step(target: str, batch: int) -> Step:
    """Load a target, and call it for a batch size.

    Raises:
      ConfigError: there is no such function, or it gives something else.
    """
    if batch < 1:
        raise ConfigError(f"--batch: expected at least 1, got {batch}.")
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"{target!r}: expected module:function or file.py:function, for example tpuflow.examples.models.resnet:resnet50_step."
        )
    with _beside(Path(place).parent if place.endswith(".py") else Path()):
        made = _function(place, name, target)(batch)
    if isinstance(made, StepConfig):
        given = {one.name: getattr(made, one.name) for one in fields(StepConfig) if made.is_given(one.name)}
        return Step(given.pop("model"), (given.pop("data"),), given)
    if not isinstance(made, tuple) or not made or not (callable(made[0]) or is_model(made[0])):
        raise ConfigError(f"{target}({batch}) gave {type(made).__name__}; {EXPECTED}.")
    step = Step(made[0], made[1:])
    if step.trains and len(step.arguments) != 1:
        raise ConfigError(f"{target}({batch}) gave a model and {len(step.arguments)} others; expected a batch, such as (inputs, labels).")
    return step


def estimate_target(
    target: str,
    batch: int,
    chip: str,
    policy: str | None,
    sink_size: int,
    calibration: Calibrated = None,
    several_chips: Mapping[str, Any] = MappingProxyType({}),
) -> Estimate:
    """The estimate of what a target gives for a batch size.

    several_chips: `mesh` and `sharding` of a training, where they are to be others than the target says.

    Raises:
      ConfigError: there is no such function, or it gives something else.
    """
    made = load_step(target, batch)
    options = made.on_chips(target, several_chips)
    if not made.trains:
        found = estimate(made.step, *made.arguments, chip=chip, policy=policy, calibration=calibration)
        return replace(found, batch_size=batch)
    chosen = {**options, "chip": chip, "sink_size": sink_size, **({} if policy is None else {"policy": policy})}
    return estimate_training(made.step, *made.arguments, **chosen, calibration=calibration)


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Within the block, imports search the folder of a file first, as `python file.py` does, then the working directory, as `python -m`."""
    before = list(sys.path)
    sys.path[:0] = [str(folder.resolve()), os.getcwd()]
    try:
        yield
    finally:
        sys.path[:] = before


def _function(place: str, name: str, target: str) -> Callable[[int], Any]:
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"{target!r}: {error}. Run the command in the folder that holds the module, or install it.") from error
    if not callable(getattr(module, name, None)):
        functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise ConfigError(f"{target!r}: {place} has no function {name!r}.{did_you_mean(name, functions)} Name one that it has.")
    return getattr(module, name)


def _from_file(path: Path) -> ModuleType:
    """A file as a module of its own name, unless another module has that name already.

    Raises:
      ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected file.py:function or module:function.")
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.resolve().parent}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
