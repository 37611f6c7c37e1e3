"""From pictures to detections on the device: network, decoding and suppression in one Program for each shape of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import tpuflow
from models.yolov5 import YOLOv5, decode
from tpuflow.amp import get_policy
from tpuflow.isa.program import While, walk
from tpuflow.training.adapters import get_model
from tpuflow.training.application import Application
from train.detection.batches import Batch
from train.detection.loss import DetectionLoss, pixels
from train.detection.nms import Detections, Suppression, suppress
from train.options import DeviceOptions

LOSSES = ("box", "obj", "cls")


@dataclass(slots=True, eq=False)
class Predictor:
    """A network with its variables ({"params": ..., "batch_stats": ...}); called with a batch, it gives what it finds in it.

    loss: is computed as well, from `boxes`, `classes` and `valid` of the batch. The network runs in the policy's precision, decoding,
    suppression and loss in fp32.
    """

    network: YOLOv5
    variables: Mapping[str, Any]
    suppression: Suppression
    policy: str = "fp32"
    options: DeviceOptions = field(default_factory=DeviceOptions)
    loss: DetectionLoss | None = None
    _programs: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _last: tuple[Any, int] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        policy = get_policy(self.policy)
        model, (params, carried) = self._model(), _parted(self.variables)
        self.variables = {"params": policy.cast_params(params, model.norms(params, carried)), **carried}

    def __call__(self, batch: Batch) -> tuple[Detections, np.ndarray | None]:
        """(detections as NumPy arrays, in pixels of the frames; losses of boxes, objectness and classes float32 [3], if computed)."""
        given = {name: batch[name] for name in (tuple(batch) if self.loss else ("images",))}
        program = self.program(given)
        detections, losses = program(self.variables, given)
        detections = Detections(*map(np.asarray, detections))
        self._last = program, int(detections.valid.sum(axis=1).max())
        return detections, None if losses is None else np.asarray(losses)

    def program(self, batch: Batch) -> Any:
        """The compiled Program for batches of this shape: (variables, batch) -> (Detections, losses or None)."""
        shapes = tuple(sorted((name, array.shape) for name, array in batch.items()))
        if shapes not in self._programs:
            on_device = tpuflow.jit(self._predict, **self.options.device)
            self._programs[shapes] = on_device.lower(self.variables, batch).compile()
        return self._programs[shapes]

    def modelled(self, what: str) -> str:
        """A line that says how long `what`, which is what was done last, takes on the chip."""
        assert self._last is not None
        program, boxes = self._last
        suppressing = [place for place, block in walk(program.executable.program.code) if isinstance(block, While)]
        seconds = program.executable.time(dict.fromkeys(suppressing, boxes)).seconds  # a trip finds a box in each picture
        return f"{what}: {1e3 * seconds:.3f} ms (modelled on {self.options.chip}, {self.policy}; up to {boxes} boxes a picture)"

    def _predict(self, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> tuple[Detections, Any]:
        params, carried = _parted(variables)
        apply = Application(self._model(), get_policy(self.policy), carried, None, train=False)
        maps = apply(params, pixels(batch))
        found = suppress(decode(maps, self.network.config), self.suppression)
        if self.loss is None:
            return found, None
        losses = self.loss(maps, batch)[1]
        return found, jax.numpy.stack([losses[name] for name in LOSSES])

    def _model(self) -> Any:
        policy = get_policy(self.policy)
        return get_model(self.network, policy.around_norm if policy.surrounds_norms else None)


def _parted(variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    return variables["params"], {name: tree for name, tree in variables.items() if name != "params"}
