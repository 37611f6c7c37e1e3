"""What the simulated device costs as a backend of stock JAX, beside JAX's CPU backend: one call, by number of leaves; the call of a
ResNet-50 training step, with arrays of one element in place of its own; and that step's compilation, by either importer."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

import tpuflow
import tpuflow.pjrt
from bench.timing import interleaved, medians, publish

LEAVES = (1, 4, 16, 64, 256)
CALLS, ROUNDS = 200, 9
STEP_CALLS, COMPILE_ROUNDS = 10, 2
IMAGES = (2, 96, 96, 3)
CALL_US, LEAF_US, STEP_MS, COMPILE_RATIO = 60.0, 8.0, 4.0, 2.0
"""What a call, a leaf, a ResNet-50 step's call and the compilation of one may cost: the last in jax.jit's compilations."""
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


def _calls_by_leaves() -> list[dict[str, Any]]:
    """Microseconds a call on each platform, by what is done with its results."""
    rows = []
    for leaves in LEAVES:
        host = [np.ones((4, 4), np.float32)] * leaves
        trees = {p: jax.device_put(host, jax.devices(p)[0]) for p in PLATFORMS}
        functions = {f"{way} {p}": _calls(tree, then) for p, tree in trees.items() for way, then in WAYS.items()}
        times = medians(interleaved(functions, ROUNDS))
        count = max(10, CALLS // leaves)
        rows.append({"leaves": leaves, **{name: 1e6 * s / count for name, s in times.items()}})
    return rows


def _step() -> tuple[Callable[..., Any], Any, Any]:
    """A ResNet-50 training step, its state and a batch."""
    from models.resnet import resnet50

    rng = np.random.default_rng(0)
    batch = rng.random(IMAGES, np.float32), rng.integers(0, 1000, IMAGES[0]).astype(np.int32)
    made = tpuflow.training_step(resnet50(1000), batch, "fp32", optax.sgd(0.1, momentum=0.9))
    return made.step, made.state, batch


def _step_calls(state: Any) -> dict[str, float]:
    """Milliseconds of a call that takes and gives as many arrays as the step, of one element each."""
    small = [np.zeros((), np.asarray(x).dtype) for x in jax.tree.leaves(state)]
    trees = {p: jax.device_put(small, jax.devices(p)[0]) for p in PLATFORMS}

    def calls(tree: list[Any]) -> Callable[[], None]:
        function = jax.jit(lambda tree: [x + 1 for x in tree])
        return functools.partial(_repeated, function, tree)

    times = medians(interleaved({p: calls(tree) for p, tree in trees.items()}, ROUNDS))
    return {"leaves": len(small), **{p: 1e3 * s / STEP_CALLS for p, s in times.items()}}


def _repeated(function: Callable[[list[Any]], Any], tree: list[Any]) -> None:
    for _ in range(STEP_CALLS):
        jax.block_until_ready(function(tree))


def _compilations(step: Callable[..., Any], state: Any, batch: Any) -> dict[str, list[float]]:
    """Seconds from the function to its executable, in turn: by the importer of StableHLO, by that of jaxprs, and jax.jit's on the CPU."""

    def compiling(jit: Callable[..., Any], platform: str) -> Callable[[], None]:
        place = jax.sharding.SingleDeviceSharding(jax.devices(platform)[0])

        def seen(x: Any) -> Any:
            return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=place)

        def compile_once() -> None:
            jax.clear_caches()
            jit(lambda *given: step(*given)).lower(*jax.tree.map(seen, (state, batch))).compile()

        return compile_once

    ways = {"stablehlo": compiling(jax.jit, PLATFORMS[0]), "jaxpr": compiling(tpuflow.jit, "cpu"), "jax.jit": compiling(jax.jit, "cpu")}
    return interleaved(ways, COMPILE_ROUNDS, warmup=0)


def run() -> tuple[str, Mapping[str, Any]]:
    """Microseconds a call and a straight-line fit for the device; milliseconds of a step's call; seconds of its compilation; what holds."""
    tpuflow.pjrt.initialize()
    began, rows = time.perf_counter(), _calls_by_leaves()
    first, last, ours = rows[0], rows[-1], f"dispatch {PLATFORMS[0]}"
    a_leaf = (last[ours] - first[ours]) / (last["leaves"] - first["leaves"])
    fixed = first[ours] - a_leaf * first["leaves"]
    step, state, batch = _step()
    called, compiled = _step_calls(state), medians(_compilations(step, state, batch))
    ratios = {name: compiled[name] / compiled["jax.jit"] for name in ("stablehlo", "jaxpr")}
    holds = {
        f"a call in {CALL_US:g} us": fixed <= CALL_US,
        f"a leaf in {LEAF_US:g} us": a_leaf <= LEAF_US,
        f"a ResNet-50 step's call in {STEP_MS:g} ms": called[PLATFORMS[0]] <= STEP_MS,
        f"its compilation in {COMPILE_RATIO:g} times jax.jit's": max(ratios.values()) <= COMPILE_RATIO,
    }
    figures = {
        "rows": rows, "call_us": fixed, "leaf_us": a_leaf, "step_call_ms": called, "compile_seconds": compiled, "compile_ratios": ratios,
        "holds": holds, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    return _text(figures), figures


def _text(figures: Mapping[str, Any]) -> str:
    rows, called = figures["rows"], figures["step_call_ms"]
    names = [name for name in rows[0] if name != "leaves"]
    lines = ["us a call", f"{'leaves':>6} " + " ".join(f"{name:>16}" for name in names)]
    lines += [f"{r['leaves']:6} " + " ".join(f"{r[name]:16.1f}" for name in names) for r in rows]
    lines.append(f"dispatch {PLATFORMS[0]}: {figures['call_us']:.1f} us a call + {figures['leaf_us']:.2f} us a leaf")
    lines.append(f"a ResNet-50 step's call, {called['leaves']} arrays: " + ", ".join(f"{p} {called[p]:.2f} ms" for p in PLATFORMS))
    lines.append("its compilation: " + ", ".join(f"{name} {s:.2f} s" for name, s in figures["compile_seconds"].items()))
    lines += [f"{limit}: {'holds' if held else 'DOES NOT HOLD'}" for limit, held in figures["holds"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    publish(__doc__, run)
