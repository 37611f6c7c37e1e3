"""Train JAX models on a simulated accelerator.

The public names are loaded when they are first used, so that running a saved Program needs no compiler, Flax or Optax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpuflow.errors import did_you_mean

if TYPE_CHECKING:
    from tpuflow import nnx, torch
    from tpuflow.amp import Accumulation, LossScale, Policy, autocast
    from tpuflow.chips import CHIPS, Chip, get_chip
    from tpuflow.comparing.comparing import compare
    from tpuflow.comparing.comparison import Comparison
    from tpuflow.device.runtime import Executable
    from tpuflow.device.timing import Calibration
    from tpuflow.estimating.estimating import Estimate, estimate, estimate_training
    from tpuflow.numerics.checking import check_numerics
    from tpuflow.numerics.report import NumericsComparison, NumericsReport
    from tpuflow.reports.differences import Differences, diff
    from tpuflow.stages.compiling import jit
    from tpuflow.training.adapters.model import Model
    from tpuflow.training.averaging import EMA
    from tpuflow.training.callbacks.base import Callback, LossMonitor, Run, TimeMonitor
    from tpuflow.training.callbacks.checkpointing import ModelCheckpoint
    from tpuflow.training.callbacks.summaries import SummaryWriter
    from tpuflow.training.callbacks.watching import EarlyStopping
    from tpuflow.training.entry import train
    from tpuflow.training.groups import param_groups
    from tpuflow.training.inference import evaluate, predict
    from tpuflow.training.losses import LOSSES, cross_entropy
    from tpuflow.training.metrics import METRICS, Metric
    from tpuflow.training.result import TrainResult
    from tpuflow.training.sinks import Sink, SinkResult, sink
    from tpuflow.training.step_function import TrainingStep, training_step
    from tpuflow.training.weights import load_params
    from tpuflow.verdict.judging import check
    from tpuflow.verdict.verdict import Verdict

__version__ = "0.1.0"

_MODULE_OF = {
    "Accumulation": "tpuflow.amp",
    "CHIPS": "tpuflow.chips",
    "Calibration": "tpuflow.device.timing",
    "Callback": "tpuflow.training.callbacks.base",
    "Chip": "tpuflow.chips",
    "Comparison": "tpuflow.comparing.comparison",
    "Differences": "tpuflow.reports.differences",
    "EMA": "tpuflow.training.averaging",
    "EarlyStopping": "tpuflow.training.callbacks.watching",
    "Estimate": "tpuflow.estimating.estimating",
    "Executable": "tpuflow.device.runtime",
    "LOSSES": "tpuflow.training.losses",
    "LossMonitor": "tpuflow.training.callbacks.base",
    "LossScale": "tpuflow.amp",
    "METRICS": "tpuflow.training.metrics",
    "Metric": "tpuflow.training.metrics",
    "Model": "tpuflow.training.adapters.model",
    "ModelCheckpoint": "tpuflow.training.callbacks.checkpointing",
    "NumericsComparison": "tpuflow.numerics.report",
    "NumericsReport": "tpuflow.numerics.report",
    "Policy": "tpuflow.amp",
    "Run": "tpuflow.training.callbacks.base",
    "Sink": "tpuflow.training.sinks",
    "SinkResult": "tpuflow.training.sinks",
    "SummaryWriter": "tpuflow.training.callbacks.summaries",
    "TimeMonitor": "tpuflow.training.callbacks.base",
    "TrainResult": "tpuflow.training.result",
    "TrainingStep": "tpuflow.training.step_function",
    "Verdict": "tpuflow.verdict.verdict",
    "autocast": "tpuflow.amp",
    "check": "tpuflow.verdict.judging",
    "check_numerics": "tpuflow.numerics.checking",
    "compare": "tpuflow.comparing.comparing",
    "cross_entropy": "tpuflow.training.losses",
    "diff": "tpuflow.reports.differences",
    "estimate": "tpuflow.estimating.estimating",
    "estimate_training": "tpuflow.estimating.estimating",
    "evaluate": "tpuflow.training.inference",
    "get_chip": "tpuflow.chips",
    "jit": "tpuflow.stages.compiling",
    "load_params": "tpuflow.training.weights",
    "param_groups": "tpuflow.training.groups",
    "predict": "tpuflow.training.inference",
    "sink": "tpuflow.training.sinks",
    "train": "tpuflow.training.entry",
    "training_step": "tpuflow.training.step_function",
}
_SUBMODULES = ("nnx", "torch")
"""Public submodules: `tpuflow.nnx.jit`, `tpuflow.torch.train_step` (the latter needs the extra "torch")."""

__all__ = [
    "Accumulation",
    "CHIPS",
    "Calibration",
    "Callback",
    "Chip",
    "Comparison",
    "Differences",
    "EMA",
    "EarlyStopping",
    "Estimate",
    "Executable",
    "LOSSES",
    "LossMonitor",
    "LossScale",
    "METRICS",
    "Metric",
    "Model",
    "ModelCheckpoint",
    "NumericsComparison",
    "NumericsReport",
    "Policy",
    "Run",
    "Sink",
    "SinkResult",
    "SummaryWriter",
    "TimeMonitor",
    "TrainResult",
    "TrainingStep",
    "Verdict",
    "autocast",
    "check",
    "check_numerics",
    "compare",
    "cross_entropy",
    "diff",
    "estimate",
    "estimate_training",
    "evaluate",
    "get_chip",
    "jit",
    "load_params",
    "nnx",
    "param_groups",
    "predict",
    "sink",
    "torch",
    "train",
    "training_step",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used (PEP 562)."""
    if name in _SUBMODULES:
        return importlib.import_module(f"tpuflow.{name}")
    if name not in _MODULE_OF:
        near = did_you_mean(name, __all__)
        raise AttributeError(f"module 'tpuflow' has no attribute {name!r}.{near} Its public names: {', '.join(__all__)}.")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"])
