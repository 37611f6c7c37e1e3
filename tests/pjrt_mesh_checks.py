"""Run in a process of its own, on eight simulated devices: what only a backend's user sees of programs for several, printed as JSON."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from tests.pjrt_facts import FACTS, fact, raised
from tests.pjrt_mesh_cases import cut, square


def in_use() -> list[int]:
    return [d.memory_stats()["bytes_in_use"] for d in jax.devices()]


@fact
def donation() -> Any:
    x = jax.device_put(np.ones((8, 8), np.float32), cut("a", "b"))
    same = jax.jit(lambda x: x[0] * 3, out_shardings=cut())(x)
    total = jax.jit(lambda x, y: (x + 1, y * 2), donate_argnums=(0, 1))(x, same)
    return x.is_deleted(), same.is_deleted(), float(total[0].sum()), float(total[1].sum()), raised(lambda: x + 1)


@fact
def one_devices_part_of_a_result_is_its_own() -> Any:
    """All devices have the same result; one of them donates it to a program of its own."""
    same = jax.jit(lambda: jnp.arange(4.0), out_shardings=cut())()
    parts = [s.data for s in same.addressable_shards]
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(parts[3])
    return [p.is_deleted() for p in parts], float(doubled.sum()), doubled.device.id, [float(p.sum()) for p in parts if not p.is_deleted()]


@fact
def memory() -> Any:
    before = in_use()
    x = jax.device_put(np.ones((8, 8), np.float32), cut("a", "b"))
    y = jax.jit(lambda x: (x + 1, x.sum(0)), out_shardings=(cut("a"), cut()))(x)
    between = in_use()
    del x, y
    jax.device_put(0)
    return [b - a for a, b in zip(before, between, strict=True)], in_use()[1:] == before[1:]


@fact
def pieces_at_the_host() -> Any:
    there = cut("a", "b").with_memory_kind("pinned_host")
    before = in_use()
    x = jax.device_put(np.ones((8, 8), np.float32), there)
    held = in_use()
    function = jax.jit(lambda x: jax.device_put(jax.device_put(x, cut("a", "b")) * 2, there))
    result = function(x)
    found = function.lower(x).compile().memory_analysis()
    return held == before, result.sharding.memory_kind, float(np.asarray(result).sum()), found.host_argument_size_in_bytes


@fact
def a_serialized_executable_runs_and_says_how_results_are_cut() -> Any:
    x = jax.device_put(square(), cut("a", "b"))
    compiled = jax.jit(lambda x: (x.T, x.sum(0) * 1j)).lower(x).compile()
    again = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled), execution_devices=jax.devices())
    turned, sums = again(x)
    return [str(s.spec) for s in jax.tree.leaves(again.output_shardings)], float(turned[1, 0]), str(np.asarray(sums)[1])


@fact
def text() -> Any:
    """XLA's, of what each device runs, without what the partitioner was asked to fail on."""
    x = jax.device_put(square(), cut("a", "b"))
    return jax.jit(lambda x: x.sum()).lower(x).compile().as_text()


@fact
def analyses() -> Any:
    compiled = jax.jit(lambda x: x + 1, out_shardings=cut("a", "b")).lower(jax.device_put(square(), cut("a", "b"))).compile()
    return compiled.memory_analysis().argument_size_in_bytes, compiled.cost_analysis()["bytes accessed"]


@fact
def errors() -> Any:
    x = jax.device_put(square(), cut("a", "b"))

    return {
        "too large": raised(lambda: jax.jit(lambda: jnp.ones((2**18, 2**18)), out_shardings=cut("a"))()),
        "alive": float((x + 1).sum()),
    }


if __name__ == "__main__":
    print(json.dumps(FACTS))
