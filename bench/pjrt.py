"""What one call costs the host when the simulated device is a backend of stock JAX, by number of leaves, beside JAX's CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import tpuflow.pjrt
from bench.timing import interleaved, medians, publish

LEAVES = (1, 4, 16, 64, 256)
CALLS, ROUNDS = 200, 9
PLATFORMS = (tpuflow.pjrt.PLATFORM, "cpu")
WAYS: dict[str, Callable[[list[Any]], Any]] = {
    "dispatch": lambda outputs: None,
    "block": jax.block_until_ready,
    "asarray": lambda outputs: [np.asarray(x) for x in outputs],
}
"""What is done with the results of each call."""


def _add_one(tree: list[Any]) -> list[Any]:
    return [x + 1.0 for x in tree]


def _calls(tree: list[Any], then: Callable[[list[Any]], Any]) -> Callable[[], None]:
    function = jax.jit(_add_one)
    count = max(10, CALLS // len(tree))

    def calls() -> None:
        for _ in range(count):
            outputs = function(tree)
            then(outputs)
        jax.block_until_ready(outputs)

    return calls


def run() -> tuple[str, Mapping[str, Any]]:
    """Microseconds a call on each platform, and a straight-line fit for the device: microseconds a call plus microseconds a leaf."""
    tpuflow.pjrt.initialize()
    rows = []
    for leaves in LEAVES:
        host = [np.ones((4, 4), np.float32)] * leaves
        trees = {p: jax.device_put(host, jax.devices(p)[0]) for p in PLATFORMS}
        functions = {f"{way} {p}": _calls(tree, then) for p, tree in trees.items() for way, then in WAYS.items()}
        times = medians(interleaved(functions, ROUNDS))
        count = max(10, CALLS // leaves)
        rows.append({"leaves": leaves, **{name: 1e6 * s / count for name, s in times.items()}})
    first, last, ours = rows[0], rows[-1], f"dispatch {PLATFORMS[0]}"
    a_leaf = (last[ours] - first[ours]) / (last["leaves"] - first["leaves"])
    fixed = first[ours] - a_leaf * first["leaves"]
    names = [name for name in first if name != "leaves"]
    lines = ["us a call", f"{'leaves':>6} " + " ".join(f"{name:>16}" for name in names)]
    lines += [f"{r['leaves']:6} " + " ".join(f"{r[name]:16.1f}" for name in names) for r in rows]
    lines.append(f"{ours}: {fixed:.1f} us a call + {a_leaf:.2f} us a leaf")
    return "\n".join(lines), {"rows": rows, "call_us": fixed, "leaf_us": a_leaf}


if __name__ == "__main__":
    publish(__doc__, run)
