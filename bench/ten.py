"""Ten programs under stock `jax.jit` on the simulated device beside JAX's CPU backend, in one process, with 32-bit and with 16-bit numbers.

`python -m bench.ten --json bench/results/ten.json` runs each on both in turn, results awaited, and prints medians and their ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import tpuflow.pjrt
from bench.pjrt import PLATFORMS
from bench.program_operations import OPERATIONS, Make, convolution, floats, integers
from bench.programs import awaited
from bench.sections import put_section
from bench.timing import call_seconds, publish

ROUNDS = 41
PAGE, TITLE = Path("docs/pjrt.md"), "Ten programs"
MEAN_LIMIT, WORST_LIMIT = 1.10, 1.5
TYPES: Mapping[str, Any] = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def _matmuls(x: Any, weights: Sequence[Any]) -> Any:
    for w in weights:
        x = jax.nn.relu(x @ w)
    return x


def _convolutions(x: Any, kernels: Sequence[Any]) -> Any:
    for kernel in kernels:
        x = jax.nn.relu(convolution(x, kernel))
    return x


def _lstm(xs: Any, w: Any, u: Any) -> Any:
    """[T, B, D] -> the last state, [B, D]."""

    def cell(carry: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], None]:
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros_like(xs[0])
    return lax.scan(cell, (zero, zero), xs)[0][0]


def _gather_and_scatter(table: Any, ids: Any) -> Any:
    return jnp.zeros_like(table).at[ids].add(table[ids])


def _fft(x: Any) -> Any:
    """In f32, as there is none in 16 bits."""
    return jnp.abs(jnp.fft.rfft(x.astype(jnp.float32))).astype(x.dtype)


PROGRAMS: Mapping[str, Make] = {
    "matmul chain": lambda: (_matmuls, (floats(256, 512), [0.05 * floats(512, 512)] * 4)),
    "attention": OPERATIONS["attention"],
    "layer norm": OPERATIONS["layer norm"],
    "convolutions": lambda: (_convolutions, (floats(4, 32, 32, 64), [0.05 * floats(3, 3, 64, 64)] * 3)),
    "LSTM scan": lambda: (_lstm, (floats(64, 32, 128), 0.1 * floats(128, 512), 0.1 * floats(128, 512))),
    "sort": OPERATIONS["sort"],
    "gather and scatter": lambda: (_gather_and_scatter, (floats(8192, 256), integers(8192, 4096))),
    "FFT": lambda: (_fft, (floats(256, 1024),)),
    "elementwise chain": OPERATIONS["elementwise chain"],
    "reduction": lambda: (lambda x: (x.sum(-1), x.max(0)), (floats(2048, 1024),)),
}


def measure(name: str, width: str) -> dict[str, Any]:
    """A program's row: seconds of a call on each platform, and their ratio."""
    function, arguments = PROGRAMS[name]()
    arguments = jax.tree.map(lambda x: x.astype(TYPES[width]) if x.dtype == np.float32 else x, arguments)
    placed = {p: jax.device_put(arguments, jax.devices(p)[0]) for p in PLATFORMS}
    compiled = {p: jax.jit(lambda *given: function(*given)) for p in PLATFORMS}
    for p in PLATFORMS:
        jax.block_until_ready(compiled[p](*placed[p]))
    seconds = call_seconds({p: awaited(compiled[p], placed[p]) for p in PLATFORMS}, "cpu", ROUNDS)
    return {"program": name, "type": width, "seconds": seconds, "ratio": seconds[PLATFORMS[0]] / seconds["cpu"]}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ratios' geometric mean and the largest, of all and of each width; whether the limits hold."""
    means = {w: statistics.geometric_mean([r["ratio"] for r in rows if r["type"] == w]) for w in TYPES}
    mean, worst = statistics.geometric_mean([r["ratio"] for r in rows]), max(rows, key=lambda r: r["ratio"])
    return {
        "geometric_mean": mean, "by_type": means, "worst": f"{worst['program']}, {worst['type']}", "worst_ratio": worst["ratio"],
        "holds": mean <= MEAN_LIMIT and worst["ratio"] <= WORST_LIMIT,
    }  # fmt: skip


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The section of docs/pjrt.md."""
    found = summary(rows)
    lines = [
        "Under stock `jax.jit`, on the device and on JAX's CPU backend in turn in one process, results awaited.",
        "Written by `python -m bench.ten`.",
        "",
        "| program | type | tpusim, ms | cpu, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        ours, other = (1e3 * r["seconds"][p] for p in PLATFORMS)
        lines.append(f"| {r['program']} | {r['type']} | {ours:.3f} | {other:.3f} | {r['ratio']:.2f} |")
    means = ", ".join(f"{w} {m:.2f}" for w, m in found["by_type"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"Geometric mean {found['geometric_mean']:.2f} (limit {MEAN_LIMIT:.2f}; {means}); largest {found['worst_ratio']:.2f}, "
            f"{found['worst']} (limit {WORST_LIMIT:.2f}).",
        ]
    )


def run() -> tuple[str, Mapping[str, Any]]:
    """The table, which goes on its page, and all figures."""
    tpuflow.pjrt.initialize()
    rows = [measure(name, width) for width in TYPES for name in PROGRAMS]
    text = page(rows)
    put_section(PAGE, TITLE, text)
    return text, {"summary": summary(rows), "rows": rows}


if __name__ == "__main__":
    publish(__doc__, run)
