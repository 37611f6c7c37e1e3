"""What the simulated device costs as a backend of stock JAX, beside JAX's CPU backend: one call, by number of leaves, and the call of a
ResNet-50 training step, with arrays of one element in place of its own, both launched in C and in Python; and that step's compilation, by
either importer."""

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
from tpuflow.pjrt.settings import OFF, ON, SHIM

LEAVES = (1, 4, 16, 64, 256)
CALLS, ROUNDS = 200, 9
STEP_CALLS, COMPILE_ROUNDS = 10, 2
IMAGES = (2, 96, 96, 3)
LAUNCHERS = {"C": ON, "Python": OFF}
"""Who launches, and the setting of the shim for that."""
CALL_US, LEAF_US = {"C": 15.0, "Python": 60.0}, {"C": 4.0, "Python": 8.0}
STEP_MS, COMPILE_RATIO = 4.0, 2.0
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


def calls() -> dict[str, Any]:
    """Microseconds a call and a straight-line fit for the device; milliseconds of a step's call."""
    tpuflow.pjrt.initialize()
    rows, ours = _calls_by_leaves(), f"dispatch {PLATFORMS[0]}"
    first, last = rows[0], rows[-1]
    a_leaf = (last[ours] - first[ours]) / (last["leaves"] - first["leaves"])
    return {"rows": rows, "call_us": first[ours] - a_leaf * first["leaves"], "leaf_us": a_leaf, "step_call_ms": _step_calls(_step()[1])}


def _compilations() -> dict[str, dict[str, float]]:
    """Medians over rounds, in which the ways take turns, each in a process of its own: what one has compiled another would find."""
    rounds = [{way: _in_process("--compile", way) for way in COMPILE_WAYS} for _ in range(COMPILE_ROUNDS)]
    return {way: {key: statistics.median(r[way][key] for r in rounds) for key in rounds[0][way]} for way in COMPILE_WAYS}


def _in_process(*arguments: str, **settings: str) -> dict[str, Any]:
    """What this file prints in a process of its own."""
    environment = {**os.environ, "TPUFLOW_CACHE": "off", "JAX_ENABLE_COMPILATION_CACHE": "false", **settings}
    command = [sys.executable, "-m", "bench.pjrt", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def run() -> tuple[str, Mapping[str, Any]]:
    """Calls by who launches, compilations, and what holds."""
    began = time.perf_counter()
    called = {who: _in_process("--calls", **{SHIM: setting}) for who, setting in LAUNCHERS.items()}
    compiled = _compilations()
    ratios = {way: compiled[way]["seconds"] / compiled["jax.jit"]["seconds"] for way in ("stablehlo", "jaxpr")}
    holds = {}
    for who, found in called.items():
        holds[f"a call launched in {who} in {CALL_US[who]:g} us"] = found["call_us"] <= CALL_US[who]
        holds[f"a leaf launched in {who} in {LEAF_US[who]:g} us"] = found["leaf_us"] <= LEAF_US[who]
        holds[f"a ResNet-50 step's call launched in {who} in {STEP_MS:g} ms"] = found["step_call_ms"][PLATFORMS[0]] <= STEP_MS
    holds[f"its compilation in {COMPILE_RATIO:g} times jax.jit's"] = max(ratios.values()) <= COMPILE_RATIO
    seconds = time.perf_counter() - began
    figures = {"calls": called, "compilations": compiled, "compile_ratios": ratios, "holds": holds, "seconds": seconds}
    return _text(figures), figures


def _text(figures: Mapping[str, Any]) -> str:
    lines = []
    for who, found in figures["calls"].items():
        names = [name for name in found["rows"][0] if name != "leaves"]
        lines += [f"launched in {who}, us a call", f"{'leaves':>6} " + " ".join(f"{name:>16}" for name in names)]
        lines += [f"{r['leaves']:6} " + " ".join(f"{r[name]:16.1f}" for name in names) for r in found["rows"]]
        lines.append(f"dispatch {PLATFORMS[0]}: {found['call_us']:.1f} us a call + {found['leaf_us']:.2f} us a leaf")
        step = found["step_call_ms"]
        lines.append(f"a ResNet-50 step's call, {step['leaves']} arrays: " + ", ".join(f"{p} {step[p]:.2f} ms" for p in PLATFORMS))
    compiled = [f"{way} {c['seconds']:.2f} s ({c['processor_seconds']:.2f} of processor)" for way, c in figures["compilations"].items()]
    lines.append(f"its compilation: {', '.join(compiled)}")
    lines += [f"{limit}: {'holds' if held else 'DOES NOT HOLD'}" for limit, held in figures["holds"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        print(json.dumps(compilation(sys.argv[2])))
    elif sys.argv[1:2] == ["--calls"]:
        print(json.dumps(calls()))
    else:
        publish(__doc__, run)
