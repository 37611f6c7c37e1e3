"""Threads and ends of processes under stock JAX on the simulated device: `JAX_PLATFORMS=tpusim python -m bench.pjrt_stress`.

Threads run operations of all kinds at once and check every value. Then processes end in every phase: while a thread compiles, runs, copies,
with arrays in hand, by an exception, by a signal; each has to leave with the exit status that the program chose. The processes are forked
before the device is first used, which saves them the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import tpuflow.compiler
import tpuflow.pjrt  # noqa: F401 (what children need is imported before they are)
from bench.timing import machine

THREADS, OPERATIONS, EXITS = 12, 200_000, 100
LIMIT_SECONDS = 120
"""Of one process, and without an operation of one thread."""
STATUS = 7


def _eager(x: Any, i: int) -> bool:
    return float((x + i)[1]) == 1 + i


def _compiled(x: Any, i: int) -> bool:
    return np.asarray(_step(x, np.float32(i)))[2] == 4 + i


def _transferred(x: Any, i: int) -> bool:
    return np.asarray(jax.device_put(np.full(5, i, np.float32))).sum() == 5 * i


def _looked_at(x: Any, i: int) -> bool:
    return x.shape == (8,) and x.dtype == np.float32 and x.nbytes == 32 and not x.is_deleted()


def _donated(x: Any, i: int) -> bool:
    given = jax.device_put(np.full(6, i, np.float32))
    return float(_giving(given)[0]) == i + 1 and given.is_deleted()


def _refused(x: Any, i: int) -> bool:
    try:
        jnp.dot(x, jnp.zeros(3))
    except TypeError:
        return True
    return False


_step = jax.jit(lambda x, i: x * 2 + i)
_giving = jax.jit(lambda x: x + 1, donate_argnums=0)
KINDS: Sequence[Callable[[Any, int], bool]] = (_eager, _compiled, _transferred, _looked_at, _donated, _looked_at, _compiled, _refused)


def threads(operations: int) -> dict[str, Any]:
    """How many operations the threads did, how many were wrong, and whether a thread stood still."""
    done, wrong = [0] * THREADS, list[str]()

    def work(thread: int) -> None:
        x = jnp.arange(8.0)
        for i in range(operations // THREADS):
            kind = KINDS[(i + thread) % len(KINDS)]
            if not kind(x, i % 1000):
                wrong.append(kind.__name__)
            done[thread] += 1

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(THREADS)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    hung = _stands_still(workers, done)
    return {"threads": THREADS, "operations": sum(done), "wrong": wrong[:10], "hung": hung, "seconds": time.perf_counter() - began}


def _stands_still(workers: Sequence[threading.Thread], done: Sequence[int]) -> bool:
    """Wait for them; True if for a long time none does anything."""
    before, since = 0, time.monotonic()
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.1)
        if sum(done) != before:
            before, since = sum(done), time.monotonic()
        elif time.monotonic() - since > LIMIT_SECONDS:
            return True
    return False


def _in_thread(function: Callable[[], Any]) -> None:
    threading.Thread(target=function, daemon=True).start()


def _for_ever(function: Callable[[], Any]) -> Callable[[], None]:
    def work() -> None:
        while True:
            function()

    return work


def _deep(x: Any) -> Any:
    """A program that takes a while to compile."""
    for i in range(60):
        x = jnp.sin(x) @ (x + i)
    return x


def _mid_compile(number: int) -> NoReturn:
    x = jnp.ones((8, 8))
    _in_thread(lambda: jax.jit(_deep)(x))
    time.sleep(0.05 * number)
    sys.exit(STATUS)


def _mid_execute(number: int) -> NoReturn:
    run = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ y * 0.01, x))
    x = run(jnp.ones((64, 64)))
    _in_thread(_for_ever(lambda: run(x)))
    time.sleep(0.01 * number)
    sys.exit(STATUS)


def _daemons(number: int) -> NoReturn:
    x = jnp.ones(8)
    for _ in range(4):
        _in_thread(_for_ever(lambda: np.asarray(x + 1)))
    time.sleep(0.01 * number)
    sys.exit(STATUS)


def _arrays_in_hand(number: int) -> NoReturn:
    sys.modules["kept"] = jnp.ones((number + 1, 4)) * 2  # type: ignore[assignment]
    sys.exit(STATUS)


def _exception(number: int) -> NoReturn:
    kept = jax.jit(lambda x: x + 1)(jnp.ones(number + 1))
    raise SystemExit(STATUS) from ValueError(kept)


def _interrupted(number: int) -> NoReturn:
    """Ctrl-C while it compiles or soon after; again, as a user would, if it went unheard."""
    x = jnp.ones((8, 8))
    try:
        threading.Timer(0.02 * (number + 1), os.kill, (os.getpid(), signal.SIGINT)).start()
        jax.block_until_ready(jax.jit(_deep)(x))
        time.sleep(1)
        signal.raise_signal(signal.SIGINT)  # Python drops one that comes while JAX's callback of the garbage collector runs
    except (KeyboardInterrupt, jax.errors.JaxRuntimeError):
        sys.exit(STATUS)
    sys.exit(1)


PHASES: Mapping[str, Callable[[int], NoReturn]] = {
    "a thread compiles": _mid_compile,
    "a thread runs a program": _mid_execute,
    "daemon threads call": _daemons,
    "arrays in hand": _arrays_in_hand,
    "an exception": _exception,
    "Ctrl-C": _interrupted,
}


def exits(count: int) -> dict[str, list[int]]:
    """The exit statuses of so many processes in turn, by phase; negative: of a signal."""
    found: dict[str, list[int]] = {phase: [] for phase in PHASES}
    for number in range(count):
        phase = list(PHASES)[number % len(PHASES)]
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            PHASES[phase](number // len(PHASES))
        found[phase].append(_status(child))
    return found


def _status(child: int) -> int:
    """A child's exit status; one that does not end is killed."""
    for _ in range(LIMIT_SECONDS * 20):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Print what happened, as JSON; 0 if nothing hung, crashed or was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.pjrt_stress", description=__doc__)
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="of all threads together [%(default)s]")
    parser.add_argument("--exits", type=int, default=EXITS, help="processes [%(default)s]")
    parser.add_argument("--json", type=Path, help="write it here, too")
    given = parser.parse_args(argv)
    ended = exits(given.exits)  # before this process uses the device: it is forked
    at_once = threads(given.operations)
    found = {"machine": machine(), "platform": jax.default_backend(), "exits": ended, "threads": at_once}
    text = json.dumps(found)
    print(text)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    good = not at_once["hung"] and not at_once["wrong"] and all(s == STATUS for statuses in ended.values() for s in statuses)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
