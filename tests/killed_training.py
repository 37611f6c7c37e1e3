"""A small training in a process of its own, which a test kills with SIGKILL and starts again."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401  (imported once by the fork server, not by every child)

import tpuflow
from tests.quick import quickly_compiled
from tests.test_training import Net, blobs
from tpuflow.training import entry  # noqa: F401
from tpuflow.training.callbacks import checkpointing  # noqa: F401
from tpuflow.training.checkpoints import files
from tpuflow.training.checkpoints.locking import LOCK

STEPS = 60
EVERY = 3


class Report(tpuflow.Callback):
    """Tells the number of every step to whoever watches."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def on_step_end(self, run: tpuflow.Run) -> None:
        self._pipe.send(run.step)


def train(directory: str, callbacks: Sequence[tpuflow.Callback] = (), **options: Any) -> tpuflow.TrainResult:
    """Four epochs in mixed precision, shuffled, with a ragged last batch and momentum; saved every few steps."""
    return tpuflow.train(
        Net(),
        blobs(15 * 16 - 5),
        policy="mixed",
        optimizer=optax.sgd(0.01, momentum=0.9),
        epochs=STEPS // 15,
        batch_size=16,
        shuffle=True,
        callbacks=[tpuflow.ModelCheckpoint(directory, every_steps=EVERY, keep=3), *callbacks],
        resume=directory,
        progress=False,
        **options,
    )


def share_compiled_code(cache: str) -> None:
    """Have XLA's results kept in this directory."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def child(directory: str, cache: str, pipe: Connection) -> None:
    """What runs in the process; compiled code is shared through `cache`."""
    share_compiled_code(cache)
    with quickly_compiled():
        result = train(directory, [Report(pipe)])
    np.savez(Path(directory).parent / "final.npz", *map(np.asarray, jax.tree.leaves((result.params, result.opt_state))))
    pipe.send("done")


def paused_child(directory: str, cache: str, pipe: Connection) -> None:
    """What runs in a process that stops in the middle of writing its second checkpoint until it is told to go on."""
    share_compiled_code(cache)
    flush, saves = files._flush, []

    def pause(path: Path) -> None:
        saves.append(path)
        if len(saves) == 2:
            pipe.send(os.getpid())
            pipe.recv()
        flush(path)

    files._flush = pause
    train(directory)
    pipe.send("done")


def start(target: Callable[..., None], *arguments: Any, duplex: bool = False) -> tuple[Any, Connection]:
    """A process that runs `target` with one end of a pipe as its last argument, and the other end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=duplex)
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    return process, ours


def kill_and_resume(folder: Path, kills: int, seed: int) -> tuple[int, int, int]:
    """Start the training until it ends, killing it `kills` times, each within a few steps of its beginning and at a random moment of
    what follows (mostly the writing of a checkpoint). Returns how many were really killed, how many of them with the directory locked,
    and the processes started."""
    rng, killed, locked, started = random.Random(seed), 0, 0, 0
    while True:
        process, ours = start(child, str(folder / "run"), str(folder / "cache"))
        started += 1
        ended = _watch(process, ours, rng) if killed < kills else _until_done(ours)
        process.join()
        killed += process.exitcode == -9
        locked += process.exitcode == -9 and _was_locked_by(process.pid, folder / "run")
        if ended:
            return killed, locked, started


def _was_locked_by(pid: int, directory: Path) -> bool:
    """Whether a killed process held the lock: its file is still there, and says so."""
    return json.loads((directory / LOCK).read_text())["pid"] == pid


def _watch(process: Any, pipe: Connection, rng: random.Random) -> bool:
    """Kill the process some steps after its first one; whether it ended before that."""
    try:
        for _ in range(rng.randint(1, 2 * EVERY)):
            if pipe.recv() == "done":
                return True
    except EOFError:
        raise AssertionError("the training failed by itself") from None
    process.join(rng.uniform(0.0, 0.06))
    process.kill()
    return False


def _until_done(pipe: Connection) -> bool:
    while pipe.recv() != "done":
        pass
    return True
