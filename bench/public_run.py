"""One public program as it stands: `python -m bench.public_run FOLDER PROGRAM [ARGUMENT ...]` runs a script, or a notebook's cells.

In FOLDER it leaves what the program had at its end: `arrays.npz`, the arrays and numbers of its names, of its cells' values, of what its
`main` had when it returned, and of the lines, points and pictures that it drew; `run.json`, what it printed and how long it took. The
generators of numpy and Python start from one seed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

SEED = 0
SHELL = ("!", "%")
"""A line that begins so is the notebook's, not Python's."""


class _Tee(StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str, /) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        return super().write(text)


def pieces(program: Path) -> list[str]:
    """The source of a script, or of each of a notebook's code cells."""
    text = program.read_text(encoding="utf-8")
    if program.suffix != ".ipynb":
        return [text]
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return ["".join(_pythons("".join(cell["source"]))) for cell in cells]


def _pythons(cell: str) -> Iterator[str]:
    """The lines of a cell; those of the shell are left empty."""
    lines = cell.splitlines(keepends=True)
    whole = bool(lines) and lines[0].startswith("%%")
    for line in lines:
        yield "\n" if whole or line.lstrip().startswith(SHELL) else line


def run(program: Path, namespace: dict[str, Any]) -> None:
    """Run it in a namespace; a cell's last expression is kept there under the cell's number."""
    for number, source in enumerate(pieces(program), 1):
        name = f"{program.name}[{number}]" if program.suffix == ".ipynb" else str(program)
        tree = ast.parse(source, name)
        last = tree.body.pop() if program.suffix == ".ipynb" and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            namespace[f"cell {number}"] = eval(compile(ast.Expression(last.value), name, "eval"), namespace)


class Mains:
    """Keeps what functions called `main` in a program's file have when they return; `watch` is for `sys.settrace`."""

    def __init__(self, program: Path) -> None:
        self._file, self.found = program.name, dict[str, np.ndarray]()
        self._number = 0

    def watch(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        """Nothing of a call of another function is looked at."""
        if frame.f_code.co_name != "main" or self._file not in frame.f_code.co_filename:
            return None
        frame.f_trace_lines = False
        return self._returns

    def _returns(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._number += 1
            self.found |= {f"main {self._number}: {name}": array for name, array in arrays_of(dict(frame.f_locals)).items()}
        return self._returns


def arrays_of(namespace: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays and numbers of a program's names: of a tree, each leaf."""
    import jax

    found: dict[str, np.ndarray] = {}
    for name, value in namespace.items():
        if name.startswith("_") or isinstance(value, types.ModuleType | type):
            continue
        with suppress(TypeError, ValueError):  # what JAX cannot take apart is no array
            for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                found |= _numbers(f"{name}{jax.tree_util.keystr(path)}", leaf)
    return found


def _numbers(name: str, leaf: Any) -> dict[str, np.ndarray]:
    import jax

    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            return {}
        leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    elif not isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        return {}
    array = np.asarray(leaf)
    if array.dtype.kind in "biufc":
        return {name: array}
    return {name: array.astype(np.float32)} if array.dtype.kind == "V" else {}


def drawn() -> dict[str, np.ndarray]:
    """The lines, points and pictures in matplotlib's figures."""
    plt = sys.modules.get("matplotlib.pyplot")
    axes = [a for number in plt.get_fignums() for a in plt.figure(number).axes] if plt else []
    kinds: tuple[tuple[str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
        ("lines", lambda a: a.lines, lambda line: line.get_xydata()),
        ("points", lambda a: a.collections, lambda points: points.get_offsets()),
        ("pictures", lambda a: a.images, lambda image: image.get_array()),
    )
    found = {
        f"{kind} {n}.{k}": np.ma.filled(read(x), 0) for n, a in enumerate(axes) for kind, of, read in kinds for k, x in enumerate(of(a))
    }
    return {name: array for name, array in found.items() if array.dtype.kind in "biuf"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0 if it ran to its end. What it raises goes through."""
    parser = argparse.ArgumentParser(prog="python -m bench.public_run", description=__doc__)
    parser.add_argument("--without", nargs=2, metavar=("MODULE", "NAME"), help="a function that does nothing in this run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("program", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    program, folder = given.program.resolve(), given.folder.resolve()
    if given.without:
        setattr(importlib.import_module(given.without[0]), given.without[1], lambda *args, **kwargs: None)
    random.seed(SEED)
    np.random.seed(SEED)
    os.chdir(folder)
    sys.path[0] = str(program.parent)
    sys.argv = [str(program), *given.arguments]
    module = types.ModuleType("__main__")
    module.__file__ = str(program)
    sys.modules["__main__"], sys.stdout, start = module, (printed := _Tee()), time.perf_counter()
    mains = Mains(program)
    sys.settrace(mains.watch)
    try:
        run(program, module.__dict__)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.settrace(None)
    found = arrays_of(module.__dict__) | mains.found | drawn()
    np.savez(folder / "arrays.npz", **{name.replace("/", "|"): array for name, array in found.items()})  # type: ignore[arg-type]
    record = {"seconds": time.perf_counter() - start, "printed": printed.getvalue()}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
