"""Functions of several chips that call the host, with what they give: run as `python -m tests.host_calls_on_meshes`, for JAX's default
backend, or one of tpuflow's engines on four host devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpuflow.jaxprs.processes import values

SIZES = {"a": 2, "b": 2}
X = np.arange(16, dtype=np.float32).reshape(8, 2)
NUMBER = jax.ShapeDtypeStruct((), np.float32)
HEARD: list[float] = []


def told(x: Any) -> None:
    """Note a number, of a call without results."""
    jax.debug.callback(lambda x: HEARD.append(float(x)), x)


def doubled(x: Any) -> Any:
    """Twice a number, as the host has it, which notes it."""

    def host(x: Any) -> Any:
        HEARD.append(float(x))
        return np.float32(2 * np.asarray(x))

    return io_callback(host, NUMBER, x)


def reversed_by_host(x: Any) -> Any:
    """The rows of an array in another order."""
    return jax.pure_callback(lambda x: np.asarray(x)[::-1], x, x)


class Case(NamedTuple):
    """A function of X, put on the chips by hand, or with X cut over both axes. heard: what the host is told, in any order."""

    function: Callable[[Any], Any]
    by_hand: bool
    heard: list[float]


def _place() -> Any:
    return lax.axis_index(("a", "b"))


def _where_a_chip_is(x: Any) -> Any:
    told(_place())
    return reversed_by_host(x) + doubled(x.sum())


def _on_one_of_them(x: Any) -> Any:
    def yes(x: Any) -> Any:
        told(x[0, 0])
        return x + doubled(x[0, 1])

    return lax.cond(_place() == 2, yes, lambda x: x, x)


def _as_often_as_it_says(x: Any) -> Any:
    def trip(carry: Any) -> Any:
        n, total = carry
        return n + 1, total + doubled(n + 10 * _place())

    return x + lax.while_loop(lambda carry: carry[0] < _place(), trip, (0 * _place(), jnp.float32(0)))[1]


def _in_branches_of_a_loop(x: Any) -> Any:
    def trip(i: Any, x: Any) -> Any:
        return lax.switch((i + _place()) % 3, [lambda x: x + doubled(x[0, 0]), lambda x: (told(x[0, 1]), x)[1], lambda x: x + 1], x)

    return lax.fori_loop(0, 3, trip, x)


def _between_collectives(x: Any) -> Any:
    total = lax.psum(x, ("a", "b"))
    mine = doubled(lax.psum(x.sum(), "a"))
    return total + lax.pmax(mine, "b")


def _in_a_scan(x: Any) -> Any:
    def trip(carry: Any, row: Any) -> Any:
        told(row.sum())
        return carry + doubled(carry.sum()), row

    return lax.scan(trip, x[0], x)


def _several(x: Any) -> Any:
    told(x.sum())
    return reversed_by_host(x) * doubled(x[0, 1]), jax.pure_callback(lambda x: np.float32(7), NUMBER, x)


def _outside_and_inside(x: Any) -> Any:
    told(x.sum())
    return by_hand(lambda x: x + doubled(x[0, 0]))(x) + reversed_by_host(x)


def by_hand(function: Callable[[Any], Any], devices: Any = None) -> Callable[[Any], Any]:
    """A function of the rows that each chip has."""
    mesh = mesh_of(devices)
    return jax.shard_map(function, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False)


def mesh_of(devices: Any = None) -> Any:
    """An abstract mesh, or one of these devices."""
    kinds = (jax.sharding.AxisType.Auto,) * len(SIZES)
    if devices is None:
        return jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=kinds)
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), devices=devices, axis_types=kinds)


_SUMS, _FIRST = X.reshape(4, -1).sum(1), X[::2, 0]
CASES: dict[str, Case] = {
    "where a chip is": Case(_where_a_chip_is, True, [0, 1, 2, 3, *_SUMS]),
    "on one of them": Case(_on_one_of_them, True, [X[4, 0], X[4, 1]]),
    "as often as it says": Case(_as_often_as_it_says, True, [10, 20, 21, 30, 31, 32]),
    "in branches of a loop": Case(_in_branches_of_a_loop, True, []),
    "between collectives": Case(_between_collectives, True, [*(_SUMS[:2] + _SUMS[2:])] * 2),
    "in a scan, by hand": Case(lambda x: tuple(v[None] for v in _in_a_scan(x)), True, []),
    "in a scan": Case(_in_a_scan, False, []),
    "several": Case(_several, False, [X.sum(), X[0, 1]]),
    "a condition": Case(lambda x: lax.cond(x.sum() > 5, lambda x: x + doubled(x[1, 0]), lambda x: x, x), False, [X[1, 0]]),
    "outside and inside": Case(_outside_and_inside, False, [X.sum(), *_FIRST]),
}  # fmt: skip
"""Where nothing is said of what the host hears, JAX's CPU backend is asked."""


def within_a_mesh(jit: Callable[..., Any]) -> list[float]:
    """What a function of the host computes with JAX where the mesh of the program's arrays is set."""
    mesh = mesh_of(jax.devices())
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P(("a", "b"))))
        function = jax.shard_map(lambda x: jax.pure_callback(lambda x: x * 2.0, x, x), in_specs=P(("a", "b")), out_specs=P(("a", "b")))
        return np.asarray(jit(function)(x)).tolist()


def run(name: str, jit: Callable[..., Any], devices: Any = None) -> tuple[list[list[Any]], list[float]]:
    """The results of a case and what the host heard in it."""
    case = CASES[name]
    HEARD.clear()
    cut = NamedSharding(mesh_of(devices), P(("a", "b")))
    function = jit(by_hand(case.function, devices)) if case.by_hand else jit(case.function, in_shardings=cut)
    results = [np.asarray(values(x)).tolist() for x in jax.tree.leaves(function(X))]
    jax.effects_barrier()
    return results, [*HEARD]


def by_jax() -> dict[str, Any]:
    """All cases on JAX's default backend, and what is computed within a mesh."""
    found: dict[str, Any] = {name: run(name, jax.jit, jax.devices()) for name in CASES}
    return {**found, "within a mesh": ([within_a_mesh(jax.jit)], [])}


def on_host_devices() -> dict[str, Any]:
    """The same by the fast engine: the chips of each case on JAX's devices, and arrays that lie on these."""
    import tpuflow
    from tpuflow.device.fast.host_devices import SpreadHost

    with mock.patch("tpuflow.device.fast.host_devices.host_of", lambda program: SpreadHost(program.mesh, jax.devices())):
        found: dict[str, Any] = {name: run(name, tpuflow.jit) for name in CASES}
    return {**found, "within a mesh": ([within_a_mesh(tpuflow.jit)], [])}


if __name__ == "__main__":
    print(json.dumps(on_host_devices() if "spread" in sys.argv else by_jax()))
