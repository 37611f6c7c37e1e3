"""`python -m tests.release`: build wheel and sdist, check them, and try the wheel in an environment that has nothing else.

    python -m tests.release --folder dist

The wheel is built from the sdist, so that what is missing there is missing here too. It is tried as its user would: a new virtual
environment, `pip install`, an empty folder, the README's first example, `tpuflow doctor`, and `tpuflow check` and `tpuflow estimate` of
examples that come with it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

REPOSITORY = Path(__file__).parents[1]
INSTALLED = (
    ("doctor",),
    ("check", "tpuflow.examples.mnist:step", "--batch", "64", "--chip", "bm1690", "--compare"),
    ("estimate", "tpuflow.examples.models.lenet:lenet_step", "--chip", "ascend910"),
)
"""What `tpuflow` is asked once it is installed."""


def build(folder: Path, *, isolated: bool = True) -> tuple[Path, Path]:
    """The (wheel, sdist) of this checkout in an empty folder; with the setuptools of this environment if not `isolated`."""
    options = () if isolated else ("--no-isolation",)
    _run([sys.executable, "-m", "build", *options, "--outdir", str(folder), str(REPOSITORY)], quiet=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def first_example() -> str:
    """The first Python of the README."""
    found = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.S)
    assert found, "README.md has no Python"
    return found[1]


def expected_files() -> set[str]:
    """What of this checkout belongs in a wheel, by its name there, its metadata aside."""
    package = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "tpuflow").rglob("*") if _belongs(path)}
    return package | {f"tpuflow/examples/models/{path.name}" for path in (REPOSITORY / "models").glob("*.py")}


def files_of(wheel: Path) -> set[str]:
    """The names in a wheel, its metadata aside."""
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def try_installed(wheel: Path) -> None:
    """Install a wheel into a new environment and use it there, in an empty folder.

    Raises:
      subprocess.CalledProcessError: something ended with another status than 0.
    """
    with tempfile.TemporaryDirectory() as name:
        empty, environment = Path(name) / "empty", Path(name) / "venv"
        empty.mkdir()
        venv.create(environment, with_pip=True)
        programs = environment / ("Scripts" if sys.platform == "win32" else "bin")
        _run([str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)])
        _run([str(programs / "python"), "-"], folder=empty, text=first_example())
        for arguments in INSTALLED:
            _run([str(programs / "tpuflow"), *arguments], folder=empty)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, check, try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "dist", help="where the files go; what is there is removed")
    folder = parser.parse_args(arguments).folder
    shutil.rmtree(folder, ignore_errors=True)
    wheel, sdist = build(folder)
    if different := expected_files() ^ files_of(wheel):
        raise SystemExit(f"{wheel.name}: in the wheel or in the checkout, but not in both: {', '.join(sorted(different))}")
    _run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    try_installed(wheel)
    print(f"{wheel}: works alone")


def _belongs(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _run(command: Sequence[str], *, folder: Path = REPOSITORY, text: str | None = None, quiet: bool = False) -> None:
    print("+", *(part if part != "-" else "README.md's first example" for part in command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would lead to the checkout
    done = subprocess.run(command, cwd=folder, env=environment, input=text, capture_output=quiet, text=True)
    if done.returncode:
        print(done.stdout or "", done.stderr or "", sep="", file=sys.stderr)
        done.check_returncode()


if __name__ == "__main__":
    main()
