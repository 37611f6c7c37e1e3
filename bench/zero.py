"""docs/zero.md, what chips hold and send in ZeRO's stages, read off compiled Programs beside the paper's formulas: `python -m bench.zero`.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5 and 7: of psi parameters, with
states of K numbers a parameter, over N chips.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from models.gpt2 import GPT2, NO_DROPOUT, Config, transformer_1b3_scan_step
from tpuflow.chips import get_chip
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import estimate_training, training_program
from tpuflow.isa.collectives import Collective
from tpuflow.isa.program import Program, walk
from tpuflow.stages.analysis import memory_analysis
from tpuflow.training.config import StepConfig
from tpuflow.training.strategies import SHARDINGS

PATH = Path(__file__).parents[1] / "docs" / "zero.md"
CHIP, CHIPS, WIDTHS, BATCH = "tpu-v5e", (2, 4, 8, 64), (64, 128, 128, 64), 128
FLOAT_BYTES, STATES = 4, 2  # fp32; Adam has two numbers a parameter
SCANNED, WIDTH, SCAN_CHIPS = 4, 64, (8, 64)


class Layers(nn.Module):
    """Dense layers whose sizes 64 chips divide."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, 64] -> [B, 64]."""
        for width in WIDTHS[1:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(WIDTHS[-1])(x)


class Layer(nn.Module):
    """One of a scan."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """[B, 64] -> [B, 64]."""
        return nn.relu(nn.Dense(WIDTH)(x)), None


class ScannedLayers(nn.Module):
    """Dense layers in a scan."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, 64] -> [B, 64]."""
        return nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=SCANNED)()(x, None)[0]


@dataclass(frozen=True, slots=True)
class Network:
    """A model of psi parameters, of which so many are gathered once only in the third stage: no backward pass needs them."""

    model: nn.Module
    psi: int
    once: int


WRITTEN_OUT = Network(Layers(), sum((n + 1) * m for n, m in itertools.pairwise(WIDTHS)), WIDTHS[0] * WIDTHS[1] + sum(WIDTHS[1:]))
"""Gathered once: the first kernel, as there is no gradient of the inputs, and biases."""
IN_A_SCAN = Network(ScannedLayers(), SCANNED * (WIDTH + 1) * WIDTH, SCANNED * WIDTH)
"""Gathered once: biases. (A scan has a gradient of every layer's inputs.)"""

TIMES_SENT = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}
"""How many times psi a chip sends a step, times (N - 1) / N."""


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one chip: (measured, by the formula) of what it holds between steps, and of the arrays that it sends in one."""

    network: Network
    chips: int
    sharding: str
    parameters: tuple[int, float]
    gradients: tuple[int, float]
    states: tuple[int, float]
    sent: tuple[int, float]

    @property
    def once(self) -> float:
        """What the third stage need not send: parameters that no backward pass asks for again."""
        return FLOAT_BYTES * self.network.once * (self.chips - 1) / self.chips if self.sharding == "zero3" else 0

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


def row(chips: int, sharding: str, network: Network = WRITTEN_OUT) -> Row:
    """Measured off the Programs of one training step: with gradients that gather for two, which are then held between steps; and what is
    sent, without. The mean of the losses, one number, is left out."""
    gathering, plain = (_program(network, chips, sharding, steps) for steps in (2, 1))
    of = {name: sum(_bytes(p) for p in gathering.inputs if f"/{p.name}".startswith(start)) for name, start in PLACES.items()}
    sent = sum(r.count * r.sent_bytes for r in sink_time(plain, 1).collectives) - 2 * (chips - 1) * FLOAT_BYTES
    psi_bytes = FLOAT_BYTES * network.psi
    held = [psi_bytes * each / (chips if SHARDINGS[sharding] >= stage else 1) for each, stage in ((1, 3), (1, 2), (STATES, 1))]
    parameters, gradients, states = [(of[name], formula) for name, formula in zip(PLACES, held, strict=True)]
    return Row(network, chips, sharding, parameters, gradients, states, (sent, TIMES_SENT[sharding] * psi_bytes * (chips - 1) / chips))


PLACES = {"parameters": "/params/", "gradients": "/opt_state/grads/", "states": "/opt_state/inner/"}
"""Where the state of a training has them."""


def _bytes(port: Any) -> int:
    """Of an array with axes; counts are nothing that ZeRO counts."""
    return math.prod(port.shape) * port.dtype.bytes if port.shape else 0


def _program(network: Network, chips: int, sharding: str, accumulate: int) -> Program:
    batch = (jax.ShapeDtypeStruct((BATCH, WIDTHS[0]), jnp.float32), jax.ShapeDtypeStruct((BATCH,), jnp.int32))
    config = StepConfig(
        network.model, batch, optimizer=optax.adam(1e-3), mesh={"data": chips}, sharding=sharding, accumulate_steps=accumulate, chip=CHIP
    )
    return training_program(config, get_chip(CHIP))[1]


def within(sharding: str) -> str:
    """A line of a table: what a step of layers in a scan holds besides, on so few chips; and the largest gradient that it sends at once."""
    program = _program(IN_A_SCAN, SCAN_CHIPS[0], sharding, 1)
    sent = max(program.buffers[c.source].bytes for _, c in walk(program.code) if isinstance(c, Collective) and c.kind in SUMS)
    return f"| {sharding} | {sent:,} | {memory_analysis(program).temp_size_in_bytes:,} |"


SUMS = ("all_reduce", "reduce_scatter")
"""How gradients are sent."""


def written_out() -> list[str]:
    """Lines of a table: what a step of GPT-2, its 12 layers written out, needs on 8 chips, and how long it is."""
    config = Config(**NO_DROPOUT)
    tokens = jax.ShapeDtypeStruct((8, config.n_positions), jnp.int32)
    return _needs(GPT2(config), (tokens, tokens))


def large() -> list[str]:
    """Lines of a table: what a step of 1.3 billion parameters, its layers in a scan, needs on 8 chips, and how long it is if that fits."""
    return _needs(*transformer_1b3_scan_step(8))


def _needs(model: nn.Module, shapes: Any) -> list[str]:
    lines, chip = [], get_chip(CHIP)
    for sharding in SHARDINGS:
        try:
            found = estimate_training(
                model, shapes, "mixed_bf16", optimizer=optax.adamw(1e-4), chip=chip, mesh={"data": 8}, sharding=sharding
            )
            needed, seconds = found.memory.peak_memory_in_bytes, f"{1e3 * found.step_seconds:.1f} ms"
        except OutOfMemoryError as error:
            needed, seconds = error.needed_bytes, "does not fit"
        lines.append(f"| {sharding} | {needed / 2**30:.2f} | {seconds} |")
    return lines


def _lines(rows: Sequence[Row]) -> str:
    """Of the table, every number checked."""
    for one in rows:
        one.check()
    return "\n".join(one.line() for one in rows)


def page() -> str:
    """The page as Markdown."""
    lines = _lines([row(chips, sharding) for chips in CHIPS for sharding in SHARDINGS])
    scanned = _lines([row(chips, sharding, IN_A_SCAN) for chips in SCAN_CHIPS for sharding in SHARDINGS])
    besides = "\n".join(map(within, SHARDINGS))
    psi, needs, small = WRITTEN_OUT.psi, "\n".join(large()), "\n".join(written_out())
    columns = "| N | sharding | parameters | gradients | states | sent | formula | not sent again |\n" + "|---" * 8 + "|"
    return f"""# What ZeRO's stages hold and send

Made by `python -m bench.zero`. {len(WIDTHS) - 1} dense layers of {" x ".join(map(str, WIDTHS))}, psi = {psi:,} parameters in fp32, Adam
(K = {STATES} numbers of state a parameter), on N chips of {CHIP}. Bytes of one chip, read off the compiled Programs: what it holds between
steps (gradients where they accumulate over two), and what it sends in a step. Every number equals its formula (Rajbhandari et al., 2020):

| | parameters | gradients | states | sent |
|---|---|---|---|---|
| ddp | psi | psi | K psi | 2 psi (N - 1) / N |
| zero1 | psi | psi | K psi / N | 2 psi (N - 1) / N |
| zero2 | psi | psi / N | K psi / N | 2 psi (N - 1) / N |
| zero3 | psi / N | psi / N | K psi / N | 3 psi (N - 1) / N, less what the backward pass does not need again |

The last column is that: {WRITTEN_OUT.once:,} of the parameters (biases, and the first kernel, since there is no gradient of the inputs)
are gathered once in the third stage, not twice. Where sizes do not divide, an array's shard is rounded up to whole elements.

{columns}
{lines}

## Layers in a scan

{SCANNED} dense layers of {WIDTH} x {WIDTH} as one scan, psi = {IN_A_SCAN.psi:,}. From the second stage on such parameters are cut
layer by layer: each trip of the backward scan scatters its own layer's gradients, and new parameters are gathered one layer after the
other. In the third stage each trip gathers its own layer, the backward pass once more. The formulas are the same; what is not sent again
are the biases.

{columns}
{scanned}

Within a step, on {SCAN_CHIPS[0]} chips: bytes of the largest gradient that is sent at once, and all that a chip holds besides its state and
its batch. Of layers in a scan no chip ever has all gradients from the second stage on, nor all new parameters beside the old ones.

| sharding | largest gradient | temporaries |
|---|---|---|
{besides}

In the third stage a chip has the parameters of one layer at a time, too, and of layers that are computed again (`nn.remat`) nothing but
their inputs. A language model of 1.3 billion parameters, its 24 layers in a scan and computed again, with AdamW in mixed precision, one
sequence of 2048 tokens a chip, on 8 chips of {CHIP} with 16 GiB each:

| sharding | GiB a chip | a step |
|---|---|---|
{needs}

## Layers written out

Gradients are sent as they are made, and a chip has one whole until the kernels behind it have hidden that: then its place is free, and
the update of its shard and the gathering of the new parameters go on beside the rest of the backward pass. GPT-2's 124 million
parameters, its 12 layers written out and none computed again, with AdamW in mixed precision, one sequence of 1024 tokens a chip, on 8
chips of {CHIP}:

| sharding | GiB a chip | a step |
|---|---|---|
{small}
"""


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
