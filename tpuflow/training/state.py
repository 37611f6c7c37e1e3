"""What a training changes from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

from tpuflow.training.averaging import EMAState


class TrainState(NamedTuple):
    """What lives on the device through a sink: parameters, carried variables (batch statistics, ...), optimizer state, random key.

    `key` is None for models that draw no random numbers, `ema` where no average of the parameters is kept.
    """

    params: Any
    carried: Any
    opt_state: Any
    key: Any = None
    ema: EMAState | None = None
