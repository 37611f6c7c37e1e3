"""Sharded steps of 16 chips beside XLA:TPU's own compile of them: `python -m bench.slices` writes a section of docs/meshes.md.

It needs the package libtpu, and no TPU. Each step is also a target: `tpuflow compare bench.slices:tensor_parallel --batch 16`. What is kept
are ratios and counts, in bench/results/slices.json; nothing that libtpu prints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.decoders import Layer, MeshConfig, Transformer
from bench.recorded import table
from bench.sections import put_section
from bench.transformers import ACTIVATIONS, TOKENS, VOCABULARY
from models.gpt2 import GPT2, NO_DROPOUT, Config
from models.resnet import resnet50_step
from tpuflow.comparing.comparing import compare_target
from tpuflow.comparing.comparison import Comparison, Side
from tpuflow.training.config import StepConfig

CHIP = "tpu-v5e"
HERE = Path(__file__).parent
RESULTS, PAGE, TITLE = HERE / "results" / "slices.json", HERE.parent / "docs" / "meshes.md", "Beside XLA:TPU"
WIDTH, HEADS, INNER = 2048, 16, 7168
"""MaxText's 1B, of which two layers are taken."""


def stage_3(batch: int) -> StepConfig:
    """Two layers of GPT-2 and its embedding, written out, in shares: AdamW, mixed precision."""
    config = Config(n_layer=2, **NO_DROPOUT)
    tokens = jax.ShapeDtypeStruct((batch, config.n_positions), jnp.int32)
    return StepConfig(GPT2(config), (tokens, tokens), "mixed_bf16", optax.adamw(1e-4), mesh={"data": 16}, sharding="zero3", chip=CHIP)


def fully_sharded(batch: int) -> StepConfig:
    """Two layers of Llama, written out, every kernel cut over the chips that share the batch."""
    return _llama(batch, {"data": 16}, "data", None)


def tensor_parallel(batch: int) -> StepConfig:
    """The same, heads, inner widths and the vocabulary cut over four chips, the batch over four."""
    return _llama(batch, {"data": 4, "model": 4}, None, "model")


def data_parallel(batch: int) -> StepConfig:
    """ResNet-50, momentum, mixed precision."""
    model, shapes = resnet50_step(batch)
    optimizer = optax.sgd(0.1, momentum=0.9)
    return StepConfig(model, shapes, "mixed_bf16", optimizer, mesh={"data": 16}, sharding="ddp", chip=CHIP)


def _llama(batch: int, mesh: Mapping[str, int], data: str | None, model: str | None) -> StepConfig:
    lies = NamedSharding(AbstractMesh(tuple(mesh.values()), tuple(mesh)), P("data"))
    config = MeshConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS, lies=lies
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((batch, TOKENS), jnp.int32)
    rules = {
        "embed_tokens/embedding": P(model, data),
        "*/o_proj/kernel": P(model, data),
        "*/down_proj/kernel": P(model, data),
        "lm_head/kernel": P(data, model),
        "*_proj/kernel": P(data, model),
    }
    module = Transformer(config, layer=Layer)
    return StepConfig(module, (tokens, tokens), ACTIVATIONS, optax.adamw(3e-5), mesh=mesh, sharding=rules, chip=CHIP)


STEPS: Mapping[str, tuple[Callable[[int], StepConfig], int]] = {
    "GPT-2, 2 layers, `zero3`": (stage_3, 16),
    "Llama, 2 layers, fully sharded by rules": (fully_sharded, 16),
    "Llama, 2 layers, tensor parallel (data 4 x model 4)": (tensor_parallel, 16),
    "ResNet-50, data parallel": (data_parallel, 512),
}
"""Steps by what they are called, and the batch of all chips together."""


def ratios(found: Comparison) -> dict[str, Any]:
    """What is kept of a comparison: ours over theirs, collectives of each kind, and the share of what is sent beside computation."""
    ours, theirs = found.ours, found.theirs
    memory = [side.argument_bytes + side.temp_bytes for side in (ours, theirs)]
    return {
        "sent": ours.sent_bytes / theirs.sent_bytes,
        "temporaries": ours.temp_bytes / theirs.temp_bytes,
        "memory": memory[0] / memory[1],
        "beside": {name: side.beside_bytes / side.sent_bytes for name, side in (("ours", ours), ("theirs", theirs))},
        "kinds": {name: _kinds(side) for name, side in (("ours", ours), ("theirs", theirs))},
    }


def _kinds(side: Side) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in side.collectives:
        found[one.kind] = found.get(one.kind, 0) + one.count
    return found


def section(figures: Mapping[str, Any]) -> str:
    """The section as Markdown."""
    rows = [_row(name, one) for name, one in figures["steps"].items()]
    heading = (
        "step of 16 chips",
        "sent",
        "temporaries",
        "with arguments",
        "beside computation, ours / theirs",
        "collectives, ours / theirs",
    )
    return f"""XLA:TPU compiles sharded steps ahead of time where libtpu is installed, and `tpuflow compare` lays ours beside: for models
with `--mesh data=16 --sharding zero3` or what a `StepConfig` says, for functions as their arguments and `shard_map`s say
([reports.md](reports.md#beside-xlatpu)). State and batch are cut for it as our Program has them cut. Ours over theirs, of one of 16
chips of {CHIP}, 4 x 4 (`python -m bench.slices`, {figures["date"]}, libtpu {figures["libtpu"]}, jax {figures["jax"]}):

{table(heading, rows)}

"Sent" are bytes of what its schedule has by the formulas of [time](#time). Its sums of gradients over shares are all-reduces, twice what
scattering sends, a few at the end of the step; ours start as gradients are made. Most of its gathers go on inside of fusions that compute,
and gradients of weights that rules cut are sums around a ring of permutes between the parts of a product. Ours are collectives of their
own, started as soon as they can be: what no kernels are left to hide is waited for."""


def _row(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    beside = " / ".join(f"{one['beside'][side]:.0%}" for side in ("ours", "theirs"))
    kinds = [", ".join(f"{count} {kind}" for kind, count in one["kinds"][side].items()) for side in ("ours", "theirs")]
    return name, *(f"{one[what]:.2f}" for what in ("sent", "temporaries", "memory")), beside, " / ".join(kinds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the steps, those that are named or all, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "steps",
        nargs="*",
        choices=[*(step.__name__ for step, _ in STEPS.values()), []],
        metavar="STEP",
        help=f"of {', '.join(step.__name__ for step, _ in STEPS.values())} (default: all)",
    )
    chosen = parser.parse_args(arguments).steps
    kept = json.loads(RESULTS.read_text())["steps"] if RESULTS.exists() else {}
    for name, (step, batch) in STEPS.items():
        if not chosen or step.__name__ in chosen:
            found = compare_target(f"bench.slices:{step.__name__}", batch, CHIP, None)
            print(found)
            kept[name] = ratios(found)
    versions = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
    figures = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **versions, "steps": {name: kept[name] for name in STEPS if name in kept}}
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    put_section(PAGE, TITLE, section(figures))


if __name__ == "__main__":
    main()
