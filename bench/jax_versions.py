"""Which versions of JAX tpuflow works with: `python -m bench.jax_versions` installs each, and nothing else, into a folder of its own and
runs a small program by each door with it; what happens is a section of docs/jax.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.sections import put_section

TITLE = "Versions of JAX"
NEWEST = ("0.10.2", "0.9.2", "0.8.3")
"""The last of each of the newest three minor versions that the package index has for Python 3.11."""
DOORS = {
    "tpuflow.jit": (
        "import numpy as np, jax, jax.numpy as jnp, tpuflow\n"
        "step = tpuflow.jit(jax.grad(lambda x: jnp.tanh(x @ x).sum()))\n"
        "x = np.eye(4, dtype=np.float32) / 4\n"
        "np.testing.assert_allclose(step(x), jax.grad(lambda x: jnp.tanh(x @ x).sum())(x), 1e-5)\n"
    ),
    "JAX_PLATFORMS=tpusim": (
        "import jax, jax.numpy as jnp\n"
        "assert jax.devices()[0].platform == 'tpusim'\n"
        "assert float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((4, 4)))) == 64\n"
    ),
}
"""What is asked of each version: a training step's kinds of work, traced and as StableHLO."""


def install(version: str, folder: Path) -> None:
    """JAX and jaxlib of a version into a folder.

    Raises:
      subprocess.CalledProcessError: there is no such version for this Python.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"jax=={version}", f"jaxlib=={version}"], check=True)


def tried(door: str, folder: Path) -> str:
    """ "works", or the last line of what a program said."""
    here = str(Path(__file__).resolve().parent.parent)
    platforms = {"JAX_PLATFORMS": door.partition("=")[2] or "cpu"}
    environment = {**os.environ, **platforms, "PYTHONPATH": os.pathsep.join((str(folder), here))}
    done = subprocess.run([sys.executable, "-c", DOORS[door]], env=environment, capture_output=True, text=True, check=False)
    return "works" if done.returncode == 0 else f"`{(done.stderr.strip().splitlines() or ['ends without a word'])[-1][:200]}`"


def page(found: dict[str, dict[str, str]]) -> str:
    """The section of docs/jax.md."""
    rows = [f"| {version} | {' | '.join(doors.values())} |" for version, doors in found.items()]
    return "\n".join([
        "The package asks for the versions that its pyproject.toml names: it reads jaxprs and calls jaxlib's partitioner, whose names",
        "change from minor version to minor version. Written by `python -m bench.jax_versions`, which tries each version alone:",
        "",
        f"| jax and jaxlib | {' | '.join(f'`{door}`' for door in DOORS)} |",
        f"|---|{'---|' * len(DOORS)}",
        *rows,
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Try the versions and write the section."""
    parser = argparse.ArgumentParser(prog="python -m bench.jax_versions", description=__doc__)
    parser.add_argument("versions", nargs="*", default=NEWEST, help=f"of jax and jaxlib [{' '.join(NEWEST)}]")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/jax.md"), help="[%(default)s]")
    given = parser.parse_args(argv)
    found: dict[str, dict[str, str]] = {}
    for version in given.versions:
        with tempfile.TemporaryDirectory() as name:
            install(version, Path(name))
            found[version] = {door: tried(door, Path(name)) for door in DOORS}
        print(version, *found[version].values(), sep="  ", flush=True)
    put_section(given.output, TITLE, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
