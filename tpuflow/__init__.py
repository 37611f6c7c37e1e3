"""Train JAX models on a simulated accelerator.

The public names are loaded when they are first used, so that running a saved Program needs no frontend, Flax or Optax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpuflow.amp import LossScale, Policy, autocast
    from tpuflow.api.callbacks import Callback, LossMonitor, Run, TimeMonitor
    from tpuflow.api.checkpointing import ModelCheckpoint
    from tpuflow.api.compiling import jit
    from tpuflow.api.estimating import Estimate, estimate, estimate_training
    from tpuflow.api.looping import Sink, Sunk, sink
    from tpuflow.api.losses import LOSSES, cross_entropy
    from tpuflow.api.metrics import METRICS, Metric
    from tpuflow.api.numerics.checking import check_numerics
    from tpuflow.api.numerics.report import NumericsComparison, NumericsReport
    from tpuflow.api.plain import TrainingStep, training_step
    from tpuflow.api.result import TrainResult
    from tpuflow.api.summaries import SummaryWriter
    from tpuflow.api.training import train
    from tpuflow.api.watching import EarlyStopping
    from tpuflow.api.weights import load_params
    from tpuflow.chips import CHIPS, Chip, get_chip
    from tpuflow.device.runtime import Executable
    from tpuflow.device.timing import Calibration

__version__ = "0.1.0"

_HOMES = {
    "CHIPS": "tpuflow.chips",
    "Calibration": "tpuflow.device.timing",
    "Callback": "tpuflow.api.callbacks",
    "Chip": "tpuflow.chips",
    "EarlyStopping": "tpuflow.api.watching",
    "Estimate": "tpuflow.api.estimating",
    "Executable": "tpuflow.device.runtime",
    "LOSSES": "tpuflow.api.losses",
    "LossMonitor": "tpuflow.api.callbacks",
    "LossScale": "tpuflow.amp",
    "METRICS": "tpuflow.api.metrics",
    "Metric": "tpuflow.api.metrics",
    "ModelCheckpoint": "tpuflow.api.checkpointing",
    "NumericsComparison": "tpuflow.api.numerics.report",
    "NumericsReport": "tpuflow.api.numerics.report",
    "Policy": "tpuflow.amp",
    "Run": "tpuflow.api.callbacks",
    "Sink": "tpuflow.api.looping",
    "Sunk": "tpuflow.api.looping",
    "SummaryWriter": "tpuflow.api.summaries",
    "TimeMonitor": "tpuflow.api.callbacks",
    "TrainResult": "tpuflow.api.result",
    "TrainingStep": "tpuflow.api.plain",
    "autocast": "tpuflow.amp",
    "check_numerics": "tpuflow.api.numerics.checking",
    "cross_entropy": "tpuflow.api.losses",
    "estimate": "tpuflow.api.estimating",
    "estimate_training": "tpuflow.api.estimating",
    "get_chip": "tpuflow.chips",
    "jit": "tpuflow.api.compiling",
    "sink": "tpuflow.api.looping",
    "load_params": "tpuflow.api.weights",
    "train": "tpuflow.api.training",
    "training_step": "tpuflow.api.plain",
}

__all__ = [
    "CHIPS",
    "LOSSES",
    "METRICS",
    "Calibration",
    "Callback",
    "Chip",
    "EarlyStopping",
    "Estimate",
    "Executable",
    "LossMonitor",
    "LossScale",
    "Metric",
    "ModelCheckpoint",
    "NumericsComparison",
    "NumericsReport",
    "Policy",
    "Run",
    "Sink",
    "Sunk",
    "SummaryWriter",
    "TimeMonitor",
    "TrainResult",
    "TrainingStep",
    "autocast",
    "check_numerics",
    "cross_entropy",
    "estimate",
    "estimate_training",
    "get_chip",
    "jit",
    "load_params",
    "sink",
    "train",
    "training_step",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tpuflow' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
