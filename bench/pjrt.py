"""What the simulated device costs as a backend of stock JAX, beside JAX's CPU backend: one call, by number of leaves; the call of a
ResNet-50 training step, with arrays of one element in place of its own; and that step's compilation, by either importer."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
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
COMPILE_WAYS = ("stablehlo", "jaxpr", "jax.jit")
"""The importer of StableHLO, under stock JAX; that of jaxprs; and jax.jit on the CPU."""
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
    """A ResNet-50 training step, and the shapes of its state and of a batch."""
    from models.resnet import resnet50
    from tpuflow.training.config import StepConfig
    from tpuflow.training.preparing import make_recipe, state_shapes

    batch = jax.ShapeDtypeStruct(IMAGES, np.float32), jax.ShapeDtypeStruct(IMAGES[:1], np.int32)
    config = StepConfig(resnet50(1000), batch, "fp32", optax.sgd(0.1, momentum=0.9))
    recipe, state = state_shapes(make_recipe(config, batch)[0], batch)
    return recipe.train_step, state, batch


def _step_calls(state: Any) -> dict[str, float]:
    """Milliseconds of a call that takes and gives as many arrays as the step, of one element each."""
    small = [np.zeros((), x.dtype) for x in jax.tree.leaves(state)]
    trees = {p: jax.device_put(small, jax.devices(p)[0]) for p in PLATFORMS}

    def calls(tree: list[Any]) -> Callable[[], None]:
        function = jax.jit(lambda tree: [x + 1 for x in tree])
        return functools.partial(_repeated, function, tree)

    times = medians(interleaved({p: calls(tree) for p, tree in trees.items()}, ROUNDS))
    return {"leaves": len(small), **{p: 1e3 * s / STEP_CALLS for p, s in times.items()}}


def _repeated(function: Callable[[list[Any]], Any], tree: list[Any]) -> None:
    for _ in range(STEP_CALLS):
        jax.block_until_ready(function(tree))


def _lowered(way: str, function: Callable[..., Any], arguments: Any) -> Any:
    """A function of arrays of these shapes as a way into the device, or jax.jit on the CPU, has it before it compiles it."""
    place = jax.sharding.SingleDeviceSharding(jax.devices(PLATFORMS[0] if way == "stablehlo" else "cpu")[0])
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    return (tpuflow.jit if way == "jaxpr" else jax.jit)(function).lower(*given)


def _compile(way: str, function: Callable[..., Any], arguments: Any) -> None:
    """From a function to its executable, XLA's part of it too, which `tpuflow.jit` leaves to the first call."""
    compiled = _lowered(way, function, arguments).compile()
    if way == "jaxpr":
        compiled.executable.compile()


def compilation(way: str) -> dict[str, float]:
    """Seconds of wall and processor time of the step's compilation in this process, which has compiled something small before: what it
    imports is there."""
    if way == "stablehlo":
        tpuflow.pjrt.initialize()
    step, *arguments = _step()
    _compile(way, lambda x: x + 1, (jax.ShapeDtypeStruct((2,), np.float32),))
    jax.clear_caches()
    began, worked = time.perf_counter(), time.process_time()
    _compile(way, lambda *given: step(*given), arguments)
    return {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - worked}


def _compilations() -> dict[str, dict[str, float]]:
    """Medians over rounds, in which the ways take turns, each in a process of its own: what one has compiled another would find."""
    rounds = [{way: _in_process(way) for way in COMPILE_WAYS} for _ in range(COMPILE_ROUNDS)]
    return {way: {key: statistics.median(r[way][key] for r in rounds) for key in rounds[0][way]} for way in COMPILE_WAYS}


def _in_process(way: str) -> dict[str, float]:
    environment = {**os.environ, "TPUFLOW_CACHE": "off", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "bench.pjrt", "--compile", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def run() -> tuple[str, Mapping[str, Any]]:
    """Microseconds a call and a straight-line fit for the device; milliseconds of a step's call; seconds of its compilation; what holds."""
    tpuflow.pjrt.initialize()
    began, rows = time.perf_counter(), _calls_by_leaves()
    first, last, ours = rows[0], rows[-1], f"dispatch {PLATFORMS[0]}"
    a_leaf = (last[ours] - first[ours]) / (last["leaves"] - first["leaves"])
    fixed = first[ours] - a_leaf * first["leaves"]
    called, compiled = _step_calls(_step()[1]), _compilations()
    ratios = {way: compiled[way]["seconds"] / compiled["jax.jit"]["seconds"] for way in ("stablehlo", "jaxpr")}
    holds = {
        f"a call in {CALL_US:g} us": fixed <= CALL_US,
        f"a leaf in {LEAF_US:g} us": a_leaf <= LEAF_US,
        f"a ResNet-50 step's call in {STEP_MS:g} ms": called[PLATFORMS[0]] <= STEP_MS,
        f"its compilation in {COMPILE_RATIO:g} times jax.jit's": max(ratios.values()) <= COMPILE_RATIO,
    }
    figures = {
        "rows": rows, "call_us": fixed, "leaf_us": a_leaf, "step_call_ms": called, "compilations": compiled, "compile_ratios": ratios,
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
    compiled = [f"{way} {c['seconds']:.2f} s ({c['processor_seconds']:.2f} of processor)" for way, c in figures["compilations"].items()]
    lines.append(f"its compilation: {', '.join(compiled)}")
    lines += [f"{limit}: {'holds' if held else 'DOES NOT HOLD'}" for limit, held in figures["holds"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        print(json.dumps(compilation(sys.argv[2])))
    else:
        publish(__doc__, run)
