"""Imports go down only: the floors of docs/architecture.md, held by reading every file's import statements."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("tpuflow", "models", "train", "bench", "tests")

FLOORS = {
    "tpuflow.checking": 0,
    "tpuflow.entries": 0,
    "tpuflow.errors": 0,
    "tpuflow.garbage": 0,
    "tpuflow.once": 0,
    "tpuflow.config": 0,
    "tpuflow.dtypes": 0,
    "tpuflow.chips": 0,
    "tpuflow.isa": 1,
    "tpuflow.jaxprs": 1,
    "tpuflow.lower": 2,
    "tpuflow.amp": 2,
    "tpuflow.device": 2,
    "tpuflow.compiler": 3,
    "tpuflow.comparing": 4,
    "tpuflow.data": 4,
    "tpuflow.doctor": 4,
    "tpuflow.estimating": 4,
    "tpuflow.nnx": 4,
    "tpuflow.numerics": 4,
    "tpuflow.pjrt": 4,
    "tpuflow.stages": 4,
    "tpuflow.verdict": 4,
    "tpuflow.torch": 4,
    "tpuflow.training": 4,
    "tpuflow.reports": 4,
    "tpuflow.cli": 4,
    "tpuflow.archives": 4,
    "tpuflow.importers": 4,
    "tpuflow.examples": 5,
    "tpuflow.__main__": 4,
    "tpuflow": 4,
    "models": 5,
    "train": 5,
    "bench": 5,
    "tests": 5,
}
"""The longest prefix of a module's name gives its floor; a bare "tpuflow" stands for its __init__ alone."""

BLIND_FLOOR = 2
"""Parts of this floor do not see each other; on the floors 0, 1, 3 and 4 they may."""

SEEN_ON_TOP = {
    "models": {"models"},
    "tpuflow.examples": set(),
    "train": {"models", "train"},
    "bench": {"models", "train", "bench"},
    "tests": set(PACKAGES),
}
"""What the parts of the top floor see of each other; all but models see tpuflow as well, and in it `models/` as tpuflow.examples.models."""

TWO_NAMES = {"models"}
"""Folders that are packages by two names, so that their files name each other relatively, and no others may."""

SEEN_BY_OPERATIONS = ("tpuflow.dtypes", "tpuflow.errors", "tpuflow.isa", "tpuflow.lower.graph", "tpuflow.lower.operations")
"""What builders of nodes know: neither jaxprs nor the importers that call them."""

DEVICE_FREE = {"numpy", "ml_dtypes"}
THIRD_PARTY = {
    "tpuflow.entries": set(),
    "tpuflow.errors": set(),
    "tpuflow.garbage": set(),
    "tpuflow.once": set(),
    "tpuflow.config": set(),
    "tpuflow.dtypes": DEVICE_FREE,
    "tpuflow.chips": DEVICE_FREE,
    "tpuflow.isa": DEVICE_FREE,
    "tpuflow.jaxprs": DEVICE_FREE | {"jax"},
    "tpuflow.jaxprs.batches": DEVICE_FREE | {"jaxlib"},
    "tpuflow.jaxprs.host_calls": DEVICE_FREE | {"jax", "jaxlib"},
    "tpuflow.jaxprs.modules": DEVICE_FREE | {"jax", "jaxlib"},
    "tpuflow.jaxprs.partitioner": DEVICE_FREE | {"jax", "jaxlib"},
    "tpuflow.jaxprs.executables": DEVICE_FREE | {"jax", "jaxlib"},
    "tpuflow.jaxprs.plugins": DEVICE_FREE | {"jax", "jaxlib"},
    "tpuflow.jaxprs.versions": DEVICE_FREE | {"jax", "jaxlib"},
    "tpuflow.lower": DEVICE_FREE,
    "tpuflow.lower.importers.jaxpr": DEVICE_FREE | {"jax"},
    "tpuflow.lower.importers.stablehlo": DEVICE_FREE | {"jaxlib"},
    "tpuflow.amp": DEVICE_FREE | {"jax", "optax"},
    "tpuflow.device": DEVICE_FREE,
    "tpuflow.device.fast": DEVICE_FREE | {"jax"},
    "tpuflow.compiler": DEVICE_FREE | {"jax"},
    "tpuflow.archives": DEVICE_FREE,
    "tpuflow.importers": DEVICE_FREE,
    "tpuflow.pjrt": DEVICE_FREE,
    "tpuflow.reports": DEVICE_FREE,
    "tpuflow": DEVICE_FREE | {"jax", "flax", "optax", "rich"},
    "tpuflow.torch": DEVICE_FREE | {"jax", "optax", "torch", "functorch"},
    "tpuflow.training.checkpoints.files": DEVICE_FREE | {"orbax"},
    "models": {"jax", "flax"},
}
"""Which packages beside the standard library a part may import; train, bench and tests may import any."""

JAX_INTERNALS = ("jax._src", "jax.core", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")
MAY_USE_INTERNALS = {
    "tpuflow.comparing.vendor": ("jax.experimental",),
    "tpuflow.jaxprs.checks": JAX_INTERNALS,
    "tpuflow.jaxprs.compat": JAX_INTERNALS,
    "tpuflow.jaxprs.executables": JAX_INTERNALS,
    "tpuflow.jaxprs.expansions": JAX_INTERNALS,
    "tpuflow.jaxprs.batches": ("jaxlib",),
    "tpuflow.jaxprs.host_calls": JAX_INTERNALS,
    "tpuflow.jaxprs.modules": JAX_INTERNALS,
    "tpuflow.jaxprs.partitioner": ("jaxlib",),
    "tpuflow.jaxprs.plugins": JAX_INTERNALS,
    "tpuflow.jaxprs.python_calls": JAX_INTERNALS,
    "tpuflow.jaxprs.processes": ("jax.experimental",),
    "tpuflow.jaxprs.versions": JAX_INTERNALS,
    "tpuflow.lower.importers.stablehlo.compat": ("jaxlib",),
    "tpuflow.lower.importers.stablehlo.parsing": ("jaxlib",),
}


def _prefix(module: str, table: dict) -> str | None:
    parts = module.split(".")
    return next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in table), None)


@cache
def _modules() -> dict[str, Path]:
    """Module name -> file, for every Python file of the repository's packages."""
    files = (file for package in PACKAGES for file in sorted((REPOSITORY / package).rglob("*.py")))
    return {".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def _imports(tree: ast.AST, module: str = "") -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything that a module imports; `from a import b` gives a.b, which is a module or a name in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{_origin(node, module)}.{alias.name}", node.lineno) for alias in node.names)


def _origin(node: ast.ImportFrom, module: str) -> str:
    """What an import is from, written out; a folder of two names has no folders in it."""
    package = module.partition(".")[0]
    assert not node.level or (node.level == 1 and package in TWO_NAMES), f"line {node.lineno}: relative import"
    return ".".join(part for part in (package if node.level else "", node.module) if part)


def _named_by_itself(module: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of what a folder of two names imports of itself by one of them."""
    package = module.partition(".")[0]
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level)
    if package in TWO_NAMES:
        yield from ((name, node.lineno) for node in froms if (name := node.module or "").partition(".")[0] == package)


def _jax_attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every `jax.a.b` written out as attributes."""
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id == "jax":
            yield ".".join(["jax", *reversed(parts)]), node.lineno


def _module_of(name: str) -> str:
    """tpuflow.isa.Program -> tpuflow.isa: the name of a thing in a module becomes the module's."""
    return name if name in _modules() else name.rpartition(".")[0] if name.rpartition(".")[0] in _modules() else name


def _is_internal(name: str) -> bool:
    return name.startswith(JAX_INTERNALS) or (name.startswith("jax.") and any(part.startswith("_") for part in name.split(".")))


def violations(module: str, source: str) -> list[str]:
    """Every import of `source`, read as the module of this name, that the rules above forbid."""
    tree = ast.parse(source)
    found = [f"{module}:{line}: {text}" for name, line in _imports(tree, module) if (text := _forbidden(module, name))]
    found += [f"{module}:{line}: {name} by name; the folder has two, import it relatively" for name, line in _named_by_itself(module, tree)]
    allowed = MAY_USE_INTERNALS.get(_prefix(module, MAY_USE_INTERNALS) or "", ())
    if module.startswith("tpuflow"):
        internals = {(name, line) for name, line in (*_imports(tree), *_jax_attributes(tree)) if _is_internal(name)}
        found += [f"{module}:{line}: {name} is internal to JAX" for name, line in sorted(internals) if not name.startswith(allowed or "\0")]
    return found


def _forbidden(module: str, name: str) -> str | None:
    package = name.partition(".")[0]
    if package in PACKAGES:
        return _forbidden_floor(module, _module_of(name))
    if package in sys.stdlib_module_names or (rules := _prefix(module, THIRD_PARTY)) is None:
        return None
    return None if package in THIRD_PARTY[rules] else f"{package} is not for {rules}"


def _forbidden_floor(module: str, imported: str) -> str | None:
    ours, theirs = _prefix(module, FLOORS), _prefix(imported, FLOORS)
    assert ours and theirs
    if ours in SEEN_ON_TOP:
        seen = SEEN_ON_TOP[ours] | (set() if ours == "models" else {"tpuflow"})
        return None if theirs.partition(".")[0] in seen else f"{ours} does not import {imported}"
    if module.startswith("tpuflow.lower.operations") and not imported.startswith(SEEN_BY_OPERATIONS):
        return f"tpuflow.lower.operations does not import {imported}"
    if FLOORS[theirs] > FLOORS[ours]:
        return f"{imported} (floor {FLOORS[theirs]}) lies above floor {FLOORS[ours]}"
    blind = FLOORS[ours] == FLOORS[theirs] == BLIND_FLOOR and ours != theirs
    return f"{ours} and {theirs} do not see each other" if blind else None


def _loaded_with(module: str, seen: set[str] | None = None) -> set[str]:
    """Everything that importing a module imports, packages on the way included: its statements outside functions, and theirs."""
    seen = set() if seen is None else seen
    parts = module.split(".")
    for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
        if name in seen:
            continue
        seen.add(name)
        if name in _modules():
            for imported in _imported_at_once(name):
                _loaded_with(imported, seen)
    return seen


@cache
def _imported_at_once(module: str) -> tuple[str, ...]:
    """The modules of ours, and the packages of others, that the statements outside of a module's functions import."""
    imported = [name for name, _ in _imports(_at_import_time(ast.parse(_modules()[module].read_text())), module)]
    return tuple(_module_of(name) if name.partition(".")[0] in PACKAGES else name.partition(".")[0] for name in imported)


def _at_import_time(tree: ast.Module) -> ast.Module:
    """The tree without function bodies and `if TYPE_CHECKING` blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.dump(node.test) else self.generic_visit(node)

    return Strip().visit(tree)


def test_the_repository_has_modules_to_look_at():
    assert {"tpuflow.isa.program", "tpuflow.errors", "models.mlp", "train.recipe", "tests.test_layers"} <= set(_modules())


@pytest.mark.parametrize("module", sorted(_modules()))
def test_a_module_imports_only_from_floors_below(module):
    assert violations(module, _modules()[module].read_text()) == []


@pytest.mark.parametrize("module", sorted(name for name in _modules() if name.startswith("tpuflow.")))
def test_every_module_stands_on_a_floor_of_its_own(module):
    assert _prefix(module, FLOORS) != "tpuflow", f"{module}: give it a floor in FLOORS"


@pytest.mark.parametrize("module", sorted(name for name in _modules() if name.startswith(("tpuflow.isa", "tpuflow.device.reference"))))
def test_the_instruction_set_and_the_reference_engine_load_without_jax(module):
    assert _loaded_with(module) & {"jax", "jaxlib", "flax", "optax"} == set()


def test_between_importer_and_device_nothing_loads_jax():
    loaded: set[str] = set()
    for module in (name for name in _modules() if name.startswith("tpuflow.lower.") and "importers" not in name):
        _loaded_with(module, loaded)
    assert {name for name in loaded if name.startswith(("jax", "tpuflow.jaxprs", "tpuflow.lower.importers"))} == set()


@pytest.mark.parametrize("module", ["tpuflow.cli", "tpuflow.device.fast"])
def test_a_saved_program_runs_without_the_compiler(module):
    assert module in _modules()
    loaded = _loaded_with(module)
    unwanted = {name for name in loaded if name.startswith(("tpuflow.lower", "tpuflow.amp", "tpuflow.compiler", "flax", "optax"))}
    assert unwanted == set()


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("tpuflow.isa.program", "from tpuflow.lower.graph.graph import Graph", "floor 2"),
        ("tpuflow.isa.program", "import jax", "jax is not for tpuflow.isa"),
        ("tpuflow.isa.program", "import tpuflow", "floor 4"),
        ("tpuflow.chips.chip", "def f():\n    from tpuflow import isa", "floor 1"),
        ("tpuflow.lower.tiling", "from tpuflow.device.runtime import run", "do not see each other"),
        ("tpuflow.device.fast.engine", "from tpuflow import amp", "do not see each other"),
        ("tpuflow.device.reference.memory", "from jax import numpy", "jax is not for tpuflow.device"),
        ("tpuflow.device.fast.engine", "import flax", "flax is not for"),
        ("tpuflow.compiler", "from tpuflow.training import entry", "floor 4"),
        ("tpuflow.compiler", "import models.mlp", "floor 5"),
        ("models.mlp", "import tpuflow", "models does not import"),
        ("models.mlp", "import numpy", "numpy is not for models"),
        ("models.mlp", "from models.norm import BatchNorm", "import it relatively"),
        ("tpuflow.examples.mnist", "from train import logs", "tpuflow.examples does not import"),
        ("tpuflow.training.entry", "from tpuflow.examples import data", "floor 5"),
        ("train.mnist", "from tests import conftest", "train does not import"),
        ("tpuflow.lower.passes.fuse", "from jax._src import core", "internal to JAX"),
        ("tpuflow.lower.passes.fuse", "import jax\nx = jax._src.core.Jaxpr", "internal to JAX"),
        ("tpuflow.stages.compiling", "from jax.interpreters import mlir", "internal to JAX"),
        ("tpuflow.amp.autocast", "from jax._src import core", "internal to JAX"),
        ("tpuflow.amp.casting", "from jax.extend.core import Jaxpr", "internal to JAX"),
        ("tpuflow.jaxprs.walk", "from jax.extend.core import Jaxpr", "internal to JAX"),
        ("tpuflow.lower.importers.stablehlo.walk", "from jaxlib.mlir import ir", "internal to JAX"),
        ("tpuflow.lower.importers.stablehlo.compat", "from jax._src import core", "internal to JAX"),
        ("tpuflow.jaxprs.walk", "from tpuflow.lower.graph.graph import Graph", "floor 2"),
        ("tpuflow.lower.passes.fuse", "import jax", "jax is not for tpuflow.lower"),
        ("tpuflow.lower.operations.gather", "from jax import lax", "jax is not for tpuflow.lower"),
        ("tpuflow.lower.operations.gather", "from tpuflow.jaxprs.compat import Jaxpr", "tpuflow.lower.operations does not import"),
        ("tpuflow.lower.operations.gather", "from tpuflow.lower.importers.jaxpr.importer import inline", "does not import"),
    ],
)
def test_a_planted_violation_is_found(module, source, complaint):
    assert any(complaint in text for text in violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tpuflow.jaxprs.compat", "from jax._src import core\nfrom jax.extend.core import Jaxpr"),
        ("tpuflow.amp.casting", "from tpuflow.jaxprs.walk import walk"),
        ("tpuflow.training.entry", "import flax, optax, jax\nfrom tpuflow.amp import autocast\nfrom tpuflow import compiler"),
        ("train.mnist", "import tpuflow\nfrom models.mlp import MLP"),
        ("models.mlp", "import math\nimport jax\nfrom flax import linen\nfrom .norm import BatchNorm"),
        ("tpuflow.examples.mnist", "from tpuflow.examples.models.mlp import MLP\nimport optax"),
        ("train.mnist", "from tpuflow.examples import data"),
    ],
)
def test_a_permitted_import_is_not_complained_about(module, source):
    assert violations(module, source) == []


def test_what_no_training_has_asked_for_is_not_imported():
    heavy = ("flax.nnx", "orbax", "torch", "tokenizers", "matplotlib", "tensorboardX")
    used = "tpuflow.train, tpuflow.estimate, tpuflow.ModelCheckpoint"
    code = f"import sys, tpuflow; {used}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY).stdout == "[]\n"
