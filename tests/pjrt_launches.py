"""Run in a process of its own, with JAX_PLATFORMS=tpusim: facts of calls after the first one of a Program, printed as JSON."""

from __future__ import annotations

import gc
import json
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.pjrt_facts import FACTS, fact, raised
from tpuflow.pjrt.buffer import add_external_reference, array_of, drop_external_reference
from tpuflow.pjrt.device import Device
from tpuflow.pjrt.executable import Loaded
from tpuflow.pjrt.handles import OBJECTS
from tpuflow.pjrt.shim import LAUNCH

CALLS = 3


def usage() -> Any:
    (device,) = (found for found in OBJECTS.values() if isinstance(found, Device))
    return device.memory.usage


def launches() -> dict[str, tuple[int, bool]]:
    """How often each Program ran, and whether C launches it."""
    return {found.program.name: (found.runs, bool(found.header[LAUNCH])) for found in OBJECTS.values() if isinstance(found, Loaded)}


@jax.jit
def many(tree: Any, number: Any) -> Any:
    return [x + 1 for x in tree], number, tree[0].astype(jnp.complex64) * 2j, tree[0].astype(jnp.int4), tree[1][:0], jnp.bool(True), number


@jax.jit
def loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, x: x * 2, x)


@jax.jit
def told(x: Any) -> Any:
    jax.debug.callback(lambda x: heard.append(float(x)), x)
    return x + 1


heard: list[float] = []
step = jax.jit(lambda a, b, x: (a + x, b * x, x + 1), donate_argnums=(0, 1))


def given(*values: float) -> list[Any]:
    return [jax.device_put(np.full((4, 4), value, np.float32)) for value in values]


@fact
def values() -> Any:
    """Sums of the results of each call."""
    tree, number = [jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 2), jnp.bfloat16)], jnp.float32(7)
    found = [[str(np.asarray(x).astype(complex).sum()) for x in jax.tree.leaves((many(tree, number), loop(tree[0])))] for _ in range(CALLS)]
    return found[0], found[1] == found[0], found[2] == found[0]


@fact
def calls_of_the_host() -> Any:
    for i in range(CALLS):
        told(jnp.float32(i))
    jax.effects_barrier()
    return heard


@fact
def donation() -> Any:
    for _ in range(CALLS):
        a, b, x = given(1, 2, 3)
        results = step(a, b, x)
    sums = [float(y.sum()) for y in results]
    return sums, [y.is_deleted() for y in (a, b, x)], raised(lambda: step(a, *given(1, 1))), raised(lambda: a + 1)


@fact
def the_same_array_donated_twice() -> Any:
    a, x = given(2, 3)
    return raised(lambda: [float(y.sum()) for y in step(a, a, x)]), x.is_deleted()


@fact
def an_array_that_others_look_at() -> Any:
    """It is deleted, and its memory stays as it is."""
    a, b, x = given(1, 2, 3)
    handle = [*OBJECTS][-3]
    add_external_reference(handle)
    array = array_of(handle)
    results = [float(y.sum()) for y in step(a, b, x)]
    array_is = float(np.asarray(array).sum())
    drop_external_reference(handle)
    return results, array_is, a.is_deleted(), b.is_deleted()


@fact
def memory() -> Any:
    """Of calls whose results are dropped nothing stays; where there is no room nothing is lost."""
    a, b, x = given(1, 2, 3)
    gc.collect()
    jax.block_until_ready(many([x, x], x))
    before = usage().in_use
    for _ in range(CALLS):
        jax.block_until_ready(many([x, x], x))
    after, limit = usage().in_use, usage().limit
    usage().limit = 0
    error, no_step = raised(lambda: many([x, x], x))[:60], raised(lambda: step(a, b, x))[:60]
    usage().limit = limit
    return after - before, error, no_step, a.is_deleted(), float(many([a, b], x)[0][1].sum())


@fact
def ctrl_c() -> Any:
    """It comes while the Program runs."""
    x = jnp.ones((700, 700))
    long = jax.jit(lambda x: x @ x @ x @ x @ x @ x @ x @ x)
    found = []
    for _ in range(CALLS):
        jax.block_until_ready(long(x))
    for _ in range(CALLS):
        timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,))
        try:
            timer.start()
            while True:
                long(x)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            found.append(str(error))
        except KeyboardInterrupt:
            found.append("CANCELLED: interrupted (Ctrl-C)")  # between two calls
    return sorted(set(found)), float(long(x)[0, 0]) > 0


@fact
def threads() -> Any:
    found: list[float] = []

    def work(number: int) -> None:
        a, b, x = given(number, 1, 2)
        for _ in range(200):
            a, b, _ = step(a, b / 2, x)
        found.append(float(a[0, 0]))

    gc.collect()
    before = usage().in_use
    running = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    gc.collect()
    jnp.zeros(()).block_until_ready()  # any call frees what was dropped
    return sorted(found), usage().in_use - before <= 4


FACTS["launches"] = launches()
print(json.dumps(FACTS))
