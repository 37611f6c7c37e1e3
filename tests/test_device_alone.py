"""A saved Program runs where nothing of the compiler can be imported, and gives the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuflow.compiler import compile_jaxpr
from tpuflow.device.runtime import Executable

BLOCKED = (
    "tpuflow.lower",
    "tpuflow.amp",
    "tpuflow.compiler",
    "tpuflow.data",
    "tpuflow.estimating",
    "tpuflow.numerics",
    "tpuflow.stages",
    "tpuflow.training",
    "flax",
    "optax",
)

RUN_BLOCKED = """
import sys, importlib.abc
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in {blocked!r}):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
from tpuflow.cli import main
sys.exit(main({arguments!r}))
"""


def _step(w: jnp.ndarray, x: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
    h = jnp.tanh(x @ w)
    return jnp.sum(h), w - 0.1 * (x.T @ (1 - h * h))


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_saved_program_runs_without_the_compiler(tmp_path: Path, engine: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((20, 30), np.float32), "x": rng.standard_normal((7, 20), np.float32)}
    closed = jax.make_jaxpr(_step)(*arrays.values())
    program = compile_jaxpr(closed, name="step", input_names=("w", "x"), output_names=("loss", "new_w"))
    executable = Executable(program, engine=engine, fidelity="bitexact")
    wanted = executable.run(arrays)
    executable.save(tmp_path / "step.tpx")
    np.savez(tmp_path / "in.npz", **arrays)
    arguments = ["run", "step.tpx", "--inputs", "in.npz", "--outputs", "out.npz", "--engine", engine, "--fidelity", "bitexact"]
    script = RUN_BLOCKED.format(blocked=BLOCKED, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as got:
        assert sorted(got) == sorted(wanted)
        for name in wanted:
            assert got[name].tobytes() == wanted[name].tobytes()


@pytest.mark.parametrize("arguments", [["chips"], ["--version"]], ids=" ".join)
def test_what_needs_no_compiler_loads_none(arguments: list[str]) -> None:
    script = RUN_BLOCKED.format(blocked=(*BLOCKED, "jax"), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr
