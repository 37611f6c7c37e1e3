"""Long launches, each of which is sent a real SIGINT: what came of it, and after how long, as JSON (run by tests/test_slices.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import tpuflow
from tpuflow.errors import LaunchAbandoned

PRESSED_AFTER = 1.0  # seconds of this process at work
X = jnp.full((128, 128), 0.01)
FOREVER = 2**30


def step(x: jax.Array) -> jax.Array:
    """[128, 128] -> [128, 128]."""
    return jnp.tanh(x @ x) + 0.1 * x


def nested(x: jax.Array) -> jax.Array:
    """Trips that take minutes each."""
    return jax.lax.fori_loop(0, 4, lambda _, y: jax.lax.fori_loop(0, 2**20, lambda _, z: step(z), y), x)


def straight(x: jax.Array) -> jax.Array:
    """Nothing to cut: products one after the other, for minutes."""
    for _ in range(24):
        x = jnp.tanh(x @ x)
    return x


LAUNCHES: dict[str, tuple[Callable[[jax.Array], jax.Array], jax.Array]] = {
    "fori": (lambda x: jax.lax.fori_loop(0, FOREVER, lambda _, y: step(y), x), X),
    "while": (lambda x: jax.lax.while_loop(lambda c: c[0] < FOREVER, lambda c: (c[0] + 1, step(c[1])), (0, x))[1], X),
    "nested": (nested, X),
    "straight": (straight, jnp.full((6000, 6000), 0.01)),
}


def interrupted(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> dict[str, object]:
    """Compile, launch, press Ctrl-C; the seconds until it was answered, and with what. On a machine that is busy with others it is those
    that this process had of them."""
    call = tpuflow.jit(function).lower(x).compile()
    call.executable.compile()
    pressed: list[tuple[float, float]] = []

    def press() -> None:
        while time.process_time() - began < PRESSED_AFTER:
            time.sleep(0.05)
        pressed.append((time.perf_counter(), time.process_time()))
        os.kill(os.getpid(), signal.SIGINT)

    began = time.process_time()
    threading.Thread(target=press, daemon=True).start()
    try:
        np.asarray(call(x))
    except KeyboardInterrupt as stop:
        wall, own = time.perf_counter() - pressed[0][0], time.process_time() - pressed[0][1]
        return {"answer": type(stop).__name__, "seconds": min(wall, own), "abandoned": isinstance(stop, LaunchAbandoned)}
    return {"answer": "it came to its end", "seconds": 0.0, "abandoned": False}


if __name__ == "__main__":
    print(json.dumps({name: interrupted(*LAUNCHES[name]) for name in sys.argv[1:]}))
    sys.stdout.flush()
    os._exit(0)  # what was abandoned would be waited for
