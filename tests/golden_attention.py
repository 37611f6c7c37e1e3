"""Long attention and its gradients on TPU rows, with and without JoinProducts: `python -m tests.golden_attention` writes the table anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from tpuflow.chips import Chip
from tpuflow.compiler import PIPELINE, compile_graph
from tpuflow.device.timing.program import time_program
from tpuflow.isa.program import Program
from tpuflow.lower.importers.jaxpr.importer import lower_with_calls
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.join_products import JoinProducts
from tpuflow.stages.analysis import memory_analysis

PATH = Path(__file__).parent / "golden" / "attention.txt"
APART = tuple(step for step in PIPELINE if not isinstance(step, JoinProducts))
HEADS, WIDTH = 12, 64
CHIPS = ("tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
ABOUT = """Causal attention, 12 heads of 64 in bf16, and its gradients: products apart from softmax, and joined with it (JoinProducts).
Modelled ms, MB moved to and from HBM, MB of temporaries there, and MB of arrays of the size of the scores, in HBM or VMEM.

"""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: Any = None, kept: Any = None) -> jax.Array:
    """[B, H, T, D], [B, H, S, D] twice -> [B, H, T, D]; `seen`: who sees whom; `kept`: which weights dropout of a tenth leaves."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5)
    if seen is not None:
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    if kept is not None:
        weights = jnp.where(kept, weights / jnp.asarray(0.9, weights.dtype), jnp.asarray(0, weights.dtype))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def gradients(q: jax.Array, k: jax.Array, v: jax.Array, seen: Any = None, kept: Any = None) -> tuple[jax.Array, ...]:
    """What attention gives, and the gradients of its operands for a cotangent that depends on it."""
    mixed, back = jax.vjp(lambda *x: attend(*x, seen, kept), q, k, v)
    return mixed, *back(jnp.sin(mixed))


def causal(length: int) -> np.ndarray:
    """[T, T] bool."""
    return np.tril(np.ones((length, length), np.bool_))


def program(length: int, chip: str | Chip, passes: Sequence[Pass], *, backward: bool = True) -> Program:
    """The Program of one sequence."""

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        seen = jnp.tril(jnp.ones((length, length), jnp.bool_))
        return gradients(q, k, v, seen) if backward else (attend(q, k, v, seen),)

    shapes = [jax.ShapeDtypeStruct((1, HEADS, length, WIDTH), jnp.bfloat16)] * 3
    graph, _ = lower_with_calls(jax.make_jaxpr(function)(*shapes), "attention")
    return compile_graph(graph, chip=chip, passes=passes)


def line(length: int, chip: str, *, backward: bool) -> str:
    """A row of the table."""
    cells = []
    for passes in (APART, PIPELINE):
        compiled = program(length, chip, passes, backward=backward)
        time, memory = time_program(compiled), memory_analysis(compiled)
        scores = sum(b.elems * b.dtype.bytes for b in compiled.buffers if b.elems >= HEADS * length**2)
        sizes = (time.work.hbm_bytes, memory.temp_size_in_bytes, scores)
        cells.append(f"{time.device_picoseconds / 1e9:8.3f}" + "".join(f"{n / 1e6:9.1f}" for n in sizes))
    return f"{'gradients' if backward else 'attention'} {length} {chip:8}" + " |".join(cells)


def text() -> str:
    """The whole table."""
    rows = (line(length, chip, backward=backward) for backward in (False, True) for length in (2048, 8192) for chip in CHIPS)
    head = f"{'':23}" + " |".join([f"{'ms':>8}{'moved':>9}{'held':>9}{'scores':>9}"] * 2)
    return ABOUT + "\n".join((head, *rows)) + "\n"


def main() -> None:
    """Write the table."""
    PATH.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
