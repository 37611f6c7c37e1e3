"""Which versions of JAX tpuflow works with: `python -m bench.jax_versions` installs each, with the flax that goes with it, into a folder of
its own and runs a small program by each door with it; what happens is a section of docs/jax.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.sections import put_section

TITLE = "Versions of JAX"
NEWEST = {"0.10.2": "0.12.8", "0.9.2": "0.12.6", "0.8.3": "0.12.6"}
"""The last of each of the newest three minor versions that the package index has for Python 3.11, and the last flax that takes it."""
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Door:
    """A way to the compiler, with a program that goes it and fails if what comes of it is not what JAX gives on its CPU."""

    name: str
    program: str
    environment: Mapping[str, str] = field(default_factory=lambda: {"JAX_PLATFORMS": "cpu"})


DOORS = (
    Door(
        "`tpuflow.jit`",
        """
import jax, jax.numpy as jnp, numpy as np, tpuflow
def step(key, x):
    y = jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ x), x)
    return jax.random.gamma(key, y + 2), jnp.linalg.qr(y)[1], jnp.fft.fft(y)
key, x = jax.random.key(1), np.eye(4, dtype=np.float32) / 4
for ours, theirs in zip(tpuflow.jit(step)(key, x), step(key, x)):
    np.testing.assert_allclose(ours, theirs, 1e-4, 1e-5)
loss = lambda x: jnp.tanh(x @ x).sum()
np.testing.assert_allclose(tpuflow.jit(jax.grad(loss))(x), jax.grad(loss)(x), 1e-5)
halved = lambda x: jax.pure_callback(lambda y: np.asarray(y) / 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
np.testing.assert_allclose(tpuflow.jit(halved)(x), x / 2)
""",
    ),
    Door(
        "`tpuflow.train`",
        """
import numpy as np, optax, tpuflow
from flax import linen as nn, nnx
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int32)
class Layers(nnx.Module):
    def __init__(self, rngs): self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)
    def __call__(self, x): return self.last(nnx.relu(self.first(x)))
for model in (nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(2)]), Layers(nnx.Rngs(0))):
    result = tpuflow.train(model, (x, y), policy="mixed", optimizer=optax.adam(1e-2), batch_size=16, epochs=3)
    assert result.losses[-1] < result.losses[0]
""",
    ),
    Door(
        "several chips",
        """
import jax, jax.numpy as jnp, numpy as np, tpuflow
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
mesh = AbstractMesh((2, 4), ("data", "model"))
f = lambda x, w: jax.nn.gelu(x @ w)
x, w = np.ones((8, 16), np.float32) / 16, np.ones((16, 32), np.float32) / 4
partitioned = tpuflow.jit(f, in_shardings=(NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P("model"))))
mapped = jax.shard_map(
    lambda x, w: jax.nn.gelu(jax.lax.psum(x @ w, "model")), mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data")
)
for step in (partitioned, tpuflow.jit(mapped)):
    assert "model" in str(step.lower(x, w).compile().time().collectives)
    np.testing.assert_allclose(step(x, w), f(x, w), 1e-6)
""",
    ),
    Door(
        "`JAX_PLATFORMS=tpusim`",
        """
import jax, jax.numpy as jnp, numpy as np
assert jax.devices()[0].platform == "tpusim"
halved = lambda x: jax.pure_callback(lambda y: np.asarray(y) / 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
np.testing.assert_array_equal(jax.jit(halved)(jnp.arange(3.0)), [0, 0.5, 1])
assert float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((4, 4)))) == 64
assert jax.random.normal(jax.random.key(0), (3,)).shape == (3,)
jax.jit(lambda x: jax.debug.print("{}", x, ordered=True))(jnp.ones(2))
jax.effects_barrier()
""",
        {"JAX_PLATFORMS": "tpusim"},
    ),
    Door(
        "`tpusim`, 8 devices",
        """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("data")))
assert float(jax.jit(lambda x: (x @ x.T).sum())(x)) == 1024
""",
        {"JAX_PLATFORMS": "tpusim", "TPUFLOW_DEVICES": "8"},
    ),
)


def install(version: str, folder: Path) -> None:
    """JAX and jaxlib of a version, and flax, into a folder.

    Raises:
      subprocess.CalledProcessError: there is no such version for this Python, or no package index.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"jax=={version}", f"jaxlib=={version}", f"flax=={NEWEST[version]}"], check=True, stderr=subprocess.PIPE)


def tried(door: Door, folder: Path) -> str:
    """ "works", or the last line of what a program said."""
    path = {"JAX_TRACEBACK_FILTERING": "off", "PYTHONPATH": os.pathsep.join((str(folder), str(REPOSITORY)))}
    done = subprocess.run(
        [sys.executable, "-c", door.program], env={**os.environ, **door.environment, **path}, capture_output=True, text=True, check=False
    )
    return "works" if done.returncode == 0 else f"`{(done.stderr.strip().splitlines() or ['ends without a word'])[-1][:200]}`"


def page(found: Mapping[str, Sequence[str]]) -> str:
    """The section of docs/jax.md."""
    rows = [f"| {version} | {NEWEST[version]} | {' | '.join(doors)} |" for version, doors in found.items()]
    return "\n".join([
        "The package takes the last three minor versions of JAX (pyproject.toml names them); pip finds the flax for each. What they name",
        "otherwise is in `tpuflow/jaxprs/versions.py`. `python -m bench.jax_versions` tries each version alone and writes this table;",
        "`make test` tries the older ones where it reaches a package index. All figures in these pages are of the newest.",
        "",
        f"| jax and jaxlib | flax | {' | '.join(door.name for door in DOORS)} |",
        f"|---|---|{'---|' * len(DOORS)}",
        *rows,
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Try the versions and write the section."""
    parser = argparse.ArgumentParser(prog="python -m bench.jax_versions", description=__doc__)
    parser.add_argument("versions", nargs="*", default=[*NEWEST], help=f"of jax and jaxlib [{' '.join(NEWEST)}]")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/jax.md"), help="[%(default)s]")
    given = parser.parse_args(argv)
    if unknown := set(given.versions) - set(NEWEST):
        parser.error(f"no row for {', '.join(sorted(unknown))}; there are {', '.join(NEWEST)}")
    found: dict[str, list[str]] = {}
    for version in given.versions:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "site-packages"  # whose lines are no user's
            install(version, folder)
            found[version] = [tried(door, folder) for door in DOORS]
        print(version, *found[version], sep="  ", flush=True)
    put_section(given.output, TITLE, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
