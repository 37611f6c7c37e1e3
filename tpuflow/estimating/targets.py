"""What the command line estimates: a function or a model that "module:function" gives for a batch size."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from flax import linen, nnx

from tpuflow.errors import ConfigError
from tpuflow.estimating.estimating import Calibrated, Estimate, estimate, estimate_training


def estimate_target(target: str, batch: int, chip: str, policy: str | None, sink_size: int, calibration: Calibrated = None) -> Estimate:
    """The estimate of what `module:function` gives for a batch size: (function, *shapes) or (Flax module, batch).

    Raises:
      ConfigError: there is no such function, or it gives something else.
    """
    if batch < 1:
        raise ConfigError(f"--batch: expected at least 1, got {batch}.")
    made = _load(target)(batch)
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise ConfigError(f"{target}({batch}) gave {type(made).__name__}; expected (function, *shapes) or (Flax module, batch).")
    first, *shapes = made
    if not isinstance(first, linen.Module | nnx.Module):
        return estimate(first, *shapes, chip=chip, policy=policy, calibration=calibration)
    if len(shapes) != 1:
        raise ConfigError(f"{target}({batch}) gave a Flax module and {len(shapes)} others; expected a batch, such as (inputs, labels).")
    return estimate_training(first, shapes[0], chip=chip, policy=policy or "fp32", sink_size=sink_size, calibration=calibration)


def _load(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise ConfigError(f"{target!r}: expected module:function, for example models.resnet:resnet50_step.")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: models and recipes lie in the folder one works in
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{target!r}: {error}. Run the command in the folder that holds the module, or install it.") from error
    finally:
        sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"{target!r}: module {module_name} has no function {name!r}.")
    return getattr(module, name)
