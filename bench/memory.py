"""What training steps hold and move, beside what XLA plans for TPUs: `python -m bench.memory`, as docs/memory.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import tpuflow.compiler
from bench.measured import LAMB, LARGE, MOMENTUM, pretraining_loss
from models import gpt2, llama
from models.bert import NO_DROPOUT, BertForPreTraining, pretraining_batch
from models.resnet import resnet50
from tpuflow.chips import get_chip
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import training_program
from tpuflow.lower.passes.rematerialize import Rematerialize
from tpuflow.stages.analysis import memory_analysis
from tpuflow.training.config import StepConfig

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
STEPS = 100
ADAMW = optax.adamw(1e-4)
POLICY = "mixed_bf16"


def _tokens(batch: int, length: int) -> tuple[Any, Any]:
    one = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return one, one


def gpt2_124m() -> StepConfig:
    """GPT-2 with 124 million parameters."""
    return StepConfig(gpt2.GPT2(replace(gpt2.SIZES["gpt2"], **gpt2.NO_DROPOUT)), _tokens(8, 1024), POLICY, ADAMW)


def bert_large(batch: int = 8, length: int = 512, masked: int = 76) -> StepConfig:
    """BERT-large's pretraining."""
    module = BertForPreTraining(replace(LARGE, hidden_act="gelu_new", **NO_DROPOUT))
    return StepConfig(module, pretraining_batch(batch, length, masked), POLICY, LAMB, pretraining_loss)


def bert_large_128() -> StepConfig:
    """The same with sequences of 128, 20 masked words in each."""
    return bert_large(32, 128, 20)


def resnet_50() -> StepConfig:
    """ResNet-50 of 224x224."""
    pictures = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)
    return StepConfig(resnet50(1000), pictures, POLICY, MOMENTUM)


def llama_8() -> StepConfig:
    """Eight of TinyLlama's layers."""
    config = replace(llama.SIZES["TinyLlama/TinyLlama-1.1B-Chat-v1.0"], num_hidden_layers=8)
    return StepConfig(llama.Llama(config), _tokens(4, 1024), POLICY, ADAMW)


@dataclass(frozen=True, slots=True)
class Vendor:
    """What XLA:TPU plans, in GB: temporaries, and bytes to and from HBM by fusions and prefetches, as `tpuflow compare` finds them with
    jax 0.10.2 and libtpu 0.0.52."""

    temporaries: float
    traffic: float


ROWS: tuple[tuple[str, Callable[[], StepConfig], str, Vendor | None], ...] = (
    ("GPT-2 124M, batch 8, sequence 1,024, AdamW", gpt2_124m, "tpu-v5e", Vendor(5.36, 48.9)),
    ("GPT-2 124M, batch 8, sequence 1,024, AdamW", gpt2_124m, "tpu-v3", Vendor(5.26, 69.4)),
    ("BERT-large, batch 8, sequence 512, LAMB", bert_large, "tpu-v5e", Vendor(4.46, 34.7)),
    ("BERT-large, batch 8, sequence 512, LAMB", bert_large, "tpu-v3", Vendor(4.54, 80.3)),
    ("BERT-large, batch 32, sequence 128, LAMB", bert_large_128, "tpu-v5e", Vendor(3.26, 25.9)),
    ("BERT-large, batch 32, sequence 128, LAMB", bert_large_128, "tpu-v3", Vendor(3.19, 66.7)),
    ("ResNet-50, batch 32, momentum", resnet_50, "tpu-v5e", Vendor(1.21, 6.6)),
    ("ResNet-50, batch 32, momentum", resnet_50, "tpu-v3", Vendor(1.27, 11.4)),
    ("GPT-2 124M, batch 8, sequence 1,024, AdamW", gpt2_124m, "tpu-v5p", None),
    ("ResNet-50, batch 32, momentum", resnet_50, "tpu-v5p", Vendor(1.25, 9.7)),
    ("ResNet-50, batch 32, momentum", resnet_50, "tpu-v4", Vendor(1.25, 8.4)),
    ("TinyLlama, 8 layers, batch 4, sequence 1,024, AdamW", llama_8, "tpu-v5e", Vendor(4.95, 62.7)),
    ("TinyLlama, 8 layers, batch 4, sequence 1,024, AdamW", llama_8, "tpu-v3", Vendor(5.18, 102.5)),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """Temporaries of a step, its traffic and what it moves within the chip, in GB; its modelled milliseconds."""

    temporaries: float
    traffic: float
    within_chip: float
    ms: float

    @classmethod
    def of(cls, step: StepConfig, chip: str) -> Planned | None:
        """Compile a step; None if it does not fit."""
        try:
            program = training_program(step, get_chip(chip))[1]
        except OutOfMemoryError:
            return None
        time, memory = sink_time(program, STEPS), memory_analysis(program)
        hbm, kept = time.work.hbm_bytes / STEPS, time.work.resident_bytes / STEPS
        return cls(memory.temp_size_in_bytes / 1e9, hbm / 1e9, kept / 1e9, 1e3 * time.seconds / STEPS)


@contextmanager
def keeping() -> Iterator[None]:
    """Compile without the pass that computes again."""
    whole = tpuflow.compiler.PIPELINE
    tpuflow.compiler.PIPELINE = tuple(step for step in whole if not isinstance(step, Rematerialize))
    try:
        yield
    finally:
        tpuflow.compiler.PIPELINE = whole


ABOUT = """# Memory of training steps

Made by `python -m bench.memory`; do not edit. Mixed bf16; temporaries are all that is neither parameter, optimizer state nor batch;
traffic is what a step moves to and from HBM, and "on chip" what it moves to and from arrays that stay there; times are modelled
([how](timing.md)).

What keeps temporaries low: `Rematerialize` computes again, in a kernel of the backward pass that reads what they are made of, softmax,
GELU and normalised rows that the forward pass would store for it; results take the place of operands that are read for the last time;
arrays are placed by size where placing them by time leaves gaps ([passes](architecture.md)). None of it changes a bit of any result.
The columns "kept" are of the same compiler without `Rematerialize`.

XLA:TPU's columns are what the vendor's compiler plans for the same steps ([`tpuflow compare`](reports.md#beside-xlatpu) with jax 0.10.2
and libtpu 0.0.52; of tpu-v3 and v4 for one of their two cores, which then takes the whole batch). Traffic counts what is
read again, of both. Both keep whole arrays in VMEM from kernel to kernel, and copy others to it or from it for a part of their lives, while
kernels run ([how](architecture.md)); of several cores each keeps what it alone reads and writes, for which rows are cut into equal blocks,
equally many for each. The CMEM of tpu-v4 all its cores reach, so that it keeps any.
Where ours is lower, attention stores neither scores nor weights (`JoinProducts`). Traffic and "on chip" both count what copies move.

| step | chip | temporaries GB | kept | XLA:TPU | traffic GB | kept | XLA:TPU | on chip GB | ms | kept |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def line(name: str, chip: str, now: Planned | None, kept: Planned | None, vendor: Vendor | None) -> str:
    """A row of the table."""
    ours, before = ([p.temporaries, p.traffic, p.within_chip, p.ms] if p else [None] * 4 for p in (now, kept))
    theirs = [vendor.temporaries, vendor.traffic] if vendor else [None] * 2
    cells = [(ours[0], 2), (before[0], 2), (theirs[0], 2), (ours[1], 1), (before[1], 1), (theirs[1], 1)]
    cells += [(ours[2], 1), (ours[3], 1), (before[3], 1)]
    return f"| {name} | {chip} | {' | '.join('' if x is None else f'{x:.{digits}f}' for x, digits in cells)} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--only", help="the rows that have this text, printed; the page stays as it is")
    only = parser.parse_args().only
    lines = []
    for name, step, chip, vendor in ROWS:
        if only is None or only in f"{name} {chip}":
            now = Planned.of(step(), chip)
            with keeping():
                kept = Planned.of(step(), chip)
            lines.append(line(name, chip, now, kept, vendor))
            print(lines[-1], flush=True)
    if only is None:
        PAGE.write_text(ABOUT + "\n".join(lines) + "\n\nAn empty cell: XLA:TPU's compile fails; of ours, it does not fit.\n")


if __name__ == "__main__":
    main()
