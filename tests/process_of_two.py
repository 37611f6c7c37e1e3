"""One of two processes that share a mesh of four chips; `tests/test_processes.py` starts both, and runs the same alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import tpuflow
from tests.host_calls_on_meshes import run
from tests.quick import quickly_compiled
from tpuflow.errors import PeerError
from tpuflow.jaxprs.processes import values

HEARTBEAT_SECONDS = 60
LOST = 3
DIES_AFTER, EVERY = 4, 2
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(44, 6)).astype(np.float32), RNG.integers(0, 3, 44).astype(np.int32)
ARRAY = RNG.normal(size=(8, 6)).astype(np.float32)


class Net(nn.Module):
    """A dense layer with a bias that four chips do not divide, dropout, and another, [B, 6] -> [B, 3]."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(5)(x))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=False)(x))


def collectives() -> dict[str, np.ndarray]:
    """Every collective over both axes of a mesh, cut so that whole arrays can and cannot lie as their pieces do; positions; a loop that
    chips run differently long."""
    mesh = AbstractMesh((2, 2), ("a", "b"))

    def on_a_chip(x: Any) -> Any:
        own = lax.axis_index("a") * 2 + lax.axis_index("b")
        several = lax.while_loop(lambda s: s[0] < own, lambda s: (s[0] + 1, s[1] * 1.5), (0 * own, x))[1]
        return {
            "sum": lax.psum(several, ("a", "b")), "greatest": lax.pmax(x, "a"), "gathered": lax.all_gather(x, "b", tiled=True),
            "scattered": lax.psum_scatter(several, "a", tiled=True), "turned": lax.ppermute(x, "a", [(0, 1), (1, 0)]),
            "exchanged": lax.all_to_all(x, "a", 0, 0, tiled=True), "place": own[None],
        }  # fmt: skip

    lies = {
        "sum": P(), "greatest": P("b"), "gathered": P("a"), "scattered": P(("a", "b")), "turned": P(("b", "a")),
        "exchanged": P(("a", "b")), "place": P(("a", "b")),
    }  # fmt: skip
    step = tpuflow.jit(jax.shard_map(on_a_chip, mesh=mesh, in_specs=P(("a", "b")), out_specs=lies, check_vma=False), fidelity="bitexact")
    once = step(ARRAY)
    return {name: values(x) for name, x in once.items()} | {"again": values(step(once["scattered"].repeat(2, 0))["sum"])}


def calls() -> dict[str, np.ndarray]:
    """Calls of the host by each chip, with what is there, and of one process for all."""
    return {name: np.concatenate([np.ravel(x) for x in run(name, tpuflow.jit)[0]]) for name in ("where a chip is", "several")}


def train(sharding: str = "zero3", mesh: Any = None, **options: Any) -> tpuflow.TrainResult:
    """Two epochs with momentum and a ragged last batch."""
    return tpuflow.train(
        Net(), (X, Y), optimizer=optax.sgd(0.05, momentum=0.9), batch_size=8, epochs=2, shuffle=True, fidelity="bitexact", progress=False,
        mesh=mesh or {"data": 4}, sharding=sharding, **options,
    )  # fmt: skip


def arrays_of(result: tpuflow.TrainResult) -> dict[str, np.ndarray]:
    """All that a training has computed."""
    leaves = jax.tree.leaves((result.params, result.opt_state))
    return {"losses": np.asarray(result.losses), **{f"leaf {i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}}


def trained(sharding: str) -> dict[str, np.ndarray]:
    """The arrays of a training with evaluations."""
    return arrays_of(train(sharding, eval_data=(X[:20], Y[:20]) if sharding == "zero3" else None))


WORK: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "collectives": collectives, "calls": calls, "ddp": lambda: trained("ddp"), "zero3": lambda: trained("zero3"),
}  # fmt: skip


class Ends(tpuflow.Callback):
    """The second process gets a signal in the middle of a training."""

    every_steps = EVERY

    def __init__(self, by: signal.Signals):
        self.by = by

    def on_sink_end(self, run: tpuflow.Run) -> None:
        """After so many steps."""
        if run.steps > DIES_AFTER and jax.process_index() == 1:
            os.kill(os.getpid(), self.by)


def main(process: int, port: int, folder: Path, by: str) -> None:
    """Do all work, then lose a process: killed or, without that work before, stopped."""
    jax.distributed.initialize(f"localhost:{port}", 2, process, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    for name, work in WORK.items() if by == "SIGKILL" else ():
        np.savez(folder / f"{name}{process}.npz", **work())
    (folder / f"{process}.pid").write_text(str(os.getpid()))
    try:
        train(callbacks=[tpuflow.ModelCheckpoint(folder / "run", every_steps=EVERY), Ends(signal.Signals[by])])
    except PeerError as error:
        (folder / "lost.txt").write_text(str(error))
        if by == "SIGSTOP":
            os.kill(int((folder / "1.pid").read_text()), signal.SIGKILL)
        os._exit(LOST)


if __name__ == "__main__":
    with quickly_compiled():
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
