"""What one call of a compiled `tpuflow.jit` function costs on the host, by number of leaves, beside `jax.jit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import tpuflow
from bench.timing import interleaved, medians, publish

LEAVES = (1, 4, 16, 64, 256)
CALLS, ROUNDS = 300, 9


def _add_one(tree: list[Any]) -> list[Any]:
    return [x + 1.0 for x in tree]


def run() -> tuple[str, Mapping[str, Any]]:
    """Microseconds a call, and a straight-line fit: microseconds a call plus microseconds a leaf."""
    rows = []
    for leaves in LEAVES:
        tree = [jnp.zeros((8,)) for _ in range(leaves)]
        functions = {"tpuflow": tpuflow.jit(_add_one), "jax": jax.jit(_add_one)}

        def calls(f: Any, tree: Any = tree) -> None:
            for _ in range(CALLS):
                out = f(tree)
            jax.block_until_ready(out)

        times = medians(interleaved({n: (lambda f=f: calls(f)) for n, f in functions.items()}, ROUNDS))
        rows.append({"leaves": leaves, **{n: 1e6 * s / CALLS for n, s in times.items()}})
    first, last = rows[0], rows[-1]
    a_leaf = (last["tpuflow"] - first["tpuflow"]) / (last["leaves"] - first["leaves"])
    fixed = first["tpuflow"] - a_leaf * first["leaves"]
    lines = [f"{'leaves':>6} {'tpuflow us':>11} {'jax us':>8} {'ratio':>6}"]
    lines += [f"{r['leaves']:6} {r['tpuflow']:11.1f} {r['jax']:8.1f} {r['tpuflow'] / r['jax']:6.2f}" for r in rows]
    lines.append(f"tpuflow: {fixed:.1f} us a call + {a_leaf:.2f} us a leaf")
    return "\n".join(lines), {"rows": rows, "call_us": fixed, "leaf_us": a_leaf}


if __name__ == "__main__":
    publish(__doc__, run)
