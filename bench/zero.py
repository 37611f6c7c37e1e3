"""docs/zero.md, what chips hold and send in ZeRO's stages, read off compiled Programs beside the paper's formulas: `python -m bench.zero`.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5 and 7: of psi parameters, with
states of K numbers a parameter, over N chips.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tpuflow.chips import get_chip
from tpuflow.device.timing.program import sink_time
from tpuflow.estimating.estimating import training_program
from tpuflow.isa.program import Program
from tpuflow.training.config import StepConfig
from tpuflow.training.parallel import SHARDINGS

PATH = Path(__file__).parents[1] / "docs" / "zero.md"
CHIP, CHIPS, WIDTHS, BATCH = "tpu-v5e", (2, 4, 8, 64), (64, 128, 128, 64), 128
FLOAT_BYTES, STATES = 4, 2  # fp32; Adam has two numbers a parameter


class Layers(nn.Module):
    """Dense layers whose sizes 64 chips divide."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, 64] -> [B, 64]."""
        for width in WIDTHS[1:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(WIDTHS[-1])(x)


PSI = sum((n + 1) * m for n, m in itertools.pairwise(WIDTHS))
"""Parameters."""
ONCE = WIDTHS[0] * WIDTHS[1] + sum(WIDTHS[1:])
"""Those of them that a backward pass does not need: the first kernel, as there is no gradient of the inputs, and biases."""

Formula = Callable[[int], float]
HELD: Mapping[str, tuple[Formula, Formula, Formula]] = {
    "ddp": (lambda n: PSI, lambda n: PSI, lambda n: STATES * PSI),
    "zero1": (lambda n: PSI, lambda n: PSI, lambda n: STATES * PSI / n),
    "zero2": (lambda n: PSI, lambda n: PSI / n, lambda n: STATES * PSI / n),
    "zero3": (lambda n: PSI / n, lambda n: PSI / n, lambda n: STATES * PSI / n),
}
"""Numbers that a chip holds: parameters, gradients, optimizer states."""
TIMES_SENT = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}
"""How many times psi a chip sends a step, times (N - 1) / N."""


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one chip: (measured, by the formula) of what it holds between steps, and of the arrays that it sends in one."""

    chips: int
    sharding: str
    parameters: tuple[int, float]
    gradients: tuple[int, float]
    states: tuple[int, float]
    sent: tuple[int, float]

    @property
    def once(self) -> float:
        """What the third stage need not send: parameters that no backward pass asks for again."""
        return FLOAT_BYTES * ONCE * (self.chips - 1) / self.chips if self.sharding == "zero3" else 0

    def check(self) -> None:
        """That everything is what the formulas say.

        Raises:
          AssertionError: it is not.
        """
        for measured, formula in (self.parameters, self.gradients, self.states):
            assert measured == formula, self
        assert self.sent[0] == self.sent[1] - self.once, self

    def line(self) -> str:
        """Of the table."""
        held = [f"{n:,}" if n == f else f"{n:,} ({f:,.0f})" for n, f in (self.parameters, self.gradients, self.states)]
        return f"| {self.chips} | {self.sharding} | {' | '.join(held)} | {self.sent[0]:,} | {self.sent[1]:,.0f} | {self.once:,.0f} |"


def row(chips: int, sharding: str) -> Row:
    """Measured off the Programs of one training step: with gradients that gather for two, which are then held between steps; and what is
    sent, without. The mean of the losses, one number, is left out."""
    gathering, plain = (_program(chips, sharding, steps) for steps in (2, 1))
    of = {name: sum(_bytes(p) for p in gathering.inputs if f"/{p.name}".startswith(start)) for name, start in PLACES.items()}
    sent = sum(r.count * r.sent_bytes for r in sink_time(plain, 1).collectives) - 2 * (chips - 1) * FLOAT_BYTES
    parameters, gradients, states = [(of[name], FLOAT_BYTES * f(chips)) for name, f in zip(PLACES, HELD[sharding], strict=True)]
    formula = FLOAT_BYTES * TIMES_SENT[sharding] * PSI * (chips - 1) / chips
    return Row(chips, sharding, parameters, gradients, states, (sent, formula))


PLACES = {"parameters": "/params/", "gradients": "/opt_state/grads/", "states": "/opt_state/inner/"}
"""Where the state of a training has them."""


def _bytes(port: Any) -> int:
    """Of an array with axes; counts are nothing that ZeRO counts."""
    return math.prod(port.shape) * port.dtype.bytes if port.shape else 0


def _program(chips: int, sharding: str, accumulate: int) -> Program:
    batch = (jax.ShapeDtypeStruct((BATCH, WIDTHS[0]), jnp.float32), jax.ShapeDtypeStruct((BATCH,), jnp.int32))
    config = StepConfig(
        Layers(), batch, optimizer=optax.adam(1e-3), mesh={"data": chips}, sharding=sharding, accumulate_steps=accumulate, chip=CHIP
    )
    return training_program(config, get_chip(CHIP))[1]


def page() -> str:
    """The page as Markdown."""
    rows = [row(chips, sharding) for chips in CHIPS for sharding in SHARDINGS]
    for one in rows:
        one.check()
    lines = "\n".join(one.line() for one in rows)
    return f"""# What ZeRO's stages hold and send

Made by `python -m bench.zero`. {len(WIDTHS) - 1} dense layers of {" x ".join(map(str, WIDTHS))}, psi = {PSI:,} parameters in fp32, Adam
(K = {STATES} numbers of state a parameter), on N chips of {CHIP}. Bytes of one chip, read off the compiled Programs: what it holds between
steps (gradients where they accumulate over two), and what it sends in a step. Every number equals its formula (Rajbhandari et al., 2020):

| | parameters | gradients | states | sent |
|---|---|---|---|---|
| ddp | psi | psi | K psi | 2 psi (N - 1) / N |
| zero1 | psi | psi | K psi / N | 2 psi (N - 1) / N |
| zero2 | psi | psi / N | K psi / N | 2 psi (N - 1) / N |
| zero3 | psi / N | psi / N | K psi / N | 3 psi (N - 1) / N, less what the backward pass does not need again |

The last column is that: {ONCE:,} of the parameters (biases, and the first kernel, since there is no gradient of the inputs) are gathered
once in the third stage, not twice. Where sizes do not divide, an array's share is rounded up to whole elements.

| N | sharding | parameters | gradients | states | sent | formula | not sent again |
|---|---|---|---|---|---|---|---|
{lines}
"""


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
