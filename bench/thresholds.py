"""docs/thresholds.md, the numbers that passes compare with and how times depend on each: `python -m bench.thresholds`."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tpuflow
from models.gpt2 import GPT2, Config
from models.lenet import lenet_step
from models.resnet import resnet50_step
from tpuflow.jaxprs.persistent import OFF

PATH = Path(__file__).parents[1] / "docs" / "thresholds.md"
PASSES = "tpuflow.lower.passes"
POLICY = "mixed_bf16"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number of a pass: its module and name, what it decides, where it is from. `also`: modules that import it."""

    module: str
    name: str
    decides: str
    source: str
    also: tuple[str, ...] = ()

    @property
    def value(self) -> Any:
        """As it is now."""
        return getattr(importlib.import_module(self.module), self.name)

    @contextmanager
    def set_to(self, value: Any) -> Iterator[None]:
        """The library with another value."""
        kept = self.value
        modules = [importlib.import_module(name) for name in (self.module, *self.also)]
        try:
            for module in modules:
                setattr(module, self.name, value)
            yield
        finally:
            for module in modules:
                setattr(module, self.name, kept)


RULE = "rule of thumb; the columns at the right say what it is worth"
THRESHOLDS = (
    Threshold(
        f"{PASSES}.unit_seconds",
        "HELD_MOVES",
        "moves that a byte which is held no longer is worth",
        "storing and loading it once more",
    ),
    Threshold(f"{PASSES}.join_small", "SMALL_BYTES", "arrays that small kernels which are joined may have", "half a tile"),
    Threshold(
        "tpuflow.lower.tiling",
        "TILE_BYTES",
        "bytes of the largest tile",
        "ten in two slots fill 10 MiB",
        also=("tpuflow.lower.emit.site", "tpuflow.lower.emit.rows"),
    ),
    Threshold("tpuflow.lower.tiling", "ROOM_MOVES", "moves that a byte of VMEM which tiles take is worth", "fit on BERT-base, tpu-v6e"),
    Threshold(
        "tpuflow.lower.tiling",
        "UNHIDDEN",
        "turns beside which nothing else passes; start-ups that a kernel more is worth",
        "the first tile's way in, the last one's out",
        also=(f"{PASSES}.unit_seconds",),
    ),
    Threshold("tpuflow.lower.tiling", "HIDDEN_SHARE", "share of a step's moves below which a start-up is not hidden", RULE),
    Threshold("tpuflow.lower.stays", "COPIES_AHEAD", "kernels that a copy from HBM goes ahead of its reader", RULE),
)


CHIP = "tpu-v5e"
GPT2_SMALL = dataclasses.replace(Config(), n_layer=2)
TOKENS = jax.ShapeDtypeStruct((4, GPT2_SMALL.n_positions), jnp.int32)
STEPS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "LeNet-5, 32": lambda: lenet_step(32),
    "ResNet-50, 16": lambda: resnet50_step(16),
    "GPT-2 of 2 layers, 4": lambda: (GPT2(GPT2_SMALL), (TOKENS, TOKENS)),
}


def seconds() -> dict[str, float]:
    """The device's modelled time of every step."""
    return {name: tpuflow.estimate_training(*make(), policy=POLICY, chip=CHIP).time.device_seconds for name, make in STEPS.items()}


def row(threshold: Threshold, base: Mapping[str, float]) -> str:
    """A row of the table: what times do at half and twice the value."""
    cells = [f"`{threshold.module.removeprefix('tpuflow.lower.')}.{threshold.name}`", f"{threshold.value:,}", threshold.decides]
    for factor in (0.5, 2):
        with threshold.set_to(type(threshold.value)(threshold.value * factor)):
            cells += [f"{now / base[name] - 1:+.1%}" for name, now in seconds().items()]
    return f"| {' | '.join((*cells, threshold.source))} |"


def page() -> str:
    """The page with today's figures."""
    base = seconds()
    head = ("number", "value", "decides", *(f"{name}: {at}" for at in ("half", "twice") for name in STEPS), "source")
    lines = [
        "# Numbers that passes compare with",
        "Made by `python -m bench.thresholds`; do not edit. Most passes ask one question: does a change save modelled time? Where",
        "they compare with a number instead, it stands here with what a step's modelled time does at half and at twice that number",
        f"({POLICY}, {CHIP}, device time). What the order of sums depends on (`lower/graph/blocking.py`) is semantics and not here.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for threshold in THRESHOLDS:
        lines.append(row(threshold, base))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    os.environ["TPUFLOW_CACHE"] = OFF
    PATH.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
