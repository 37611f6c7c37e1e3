"""What of JAX and of StableHLO runs on the device: `python -m tests.coverage` writes docs/coverage.md.

Every primitive that JAX defines and every operation of its dialects is in one group: it has a rule, JAX's own code expresses it in others,
or it has none for a reason, and the page says what to do instead. `python -m tests.coverage --check` says what is in no group.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
from jax.extend.core import Primitive
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

from tpuflow.jaxprs.compat import CALLS_OF_THE_HOST
from tpuflow.jaxprs.expansions import EXPANSIONS
from tpuflow.lower.importers.advice import FAMILIES
from tpuflow.lower.importers.jaxpr import RULES as PRIMITIVES
from tpuflow.lower.importers.jaxpr.registry import COMPLEX as COMPLEX_PRIMITIVES
from tpuflow.lower.importers.stablehlo.advice import UNKNOWN, advice
from tpuflow.lower.importers.stablehlo.importer import RULES as OPERATIONS
from tpuflow.lower.importers.stablehlo.walk import COMPLEX as COMPLEX_OPERATIONS

PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"
_CONTAINERS = ("stablehlo.return", "stablehlo.custom_call", "sdy.mesh", "sdy.return", "sdy.data_flow_edge", "sdy.func_data_flow_edge",
               "sdy.constant")  # fmt: skip
"""Operations that are read as part of others."""
_MODULES = (
    "experimental.pallas",
    "experimental.sparse",
    "experimental.checkify",
    "experimental.multihost_utils",
    "scipy.linalg",
    "export",
    "ffi",
    "nn",
)
"""Modules of JAX that define primitives and are not imported with it."""

Groups = Mapping[str, set[str]]


def primitives_of_jax() -> set[str]:
    """The names of all primitives that JAX defines, those of its packages for other devices and sparse arrays included."""
    for module in _MODULES:
        importlib.import_module(f"jax.{module}")
    return {x.name for x in _objects() if isinstance(x, Primitive)} - {"device_call", "host_call"}  # tpuflow's own


def _objects() -> list[object]:
    """All that the garbage collector knows, what it has been told to leave alone included."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    found = gc.get_objects()
    if frozen:
        gc.freeze()
    return found


def operations_of_stablehlo() -> set[str]:
    """The names of all operations of StableHLO, CHLO and Shardy that jaxlib knows."""
    classes = (c for dialect in (stablehlo, chlo, sdy) for c in vars(dialect).values() if isinstance(c, type))
    return {c.OPERATION_NAME for c in classes if hasattr(c, "OPERATION_NAME")}


def primitives() -> Groups:
    """How primitives of JAX are compiled, or why they are not."""
    return {
        "have a rule": {*PRIMITIVES, *COMPLEX_PRIMITIVES},
        "are written in terms of others by JAX's own code": set(EXPANSIONS),
        "call the host": {p.name for p in CALLS_OF_THE_HOST},
        **{f"{family.what}. Instead, {family.instead}": set(family.primitives) for family in FAMILIES},
    }


def operations() -> Groups:
    """How operations of StableHLO are compiled, or why they are not."""
    groups = {"have a rule": operations_of_stablehlo() & {*OPERATIONS, *COMPLEX_OPERATIONS}, "are read as part of others": set(_CONTAINERS)}
    for name in sorted(operations_of_stablehlo() - groups["have a rule"] - set(_CONTAINERS)):
        reason = advice(name)
        if reason != UNKNOWN:
            groups.setdefault(reason, set()).add(name)
    return groups


def unknown() -> set[str]:
    """Primitives and operations that are in no group."""
    return _missing(primitives_of_jax(), primitives()) | _missing(operations_of_stablehlo(), operations())


def _missing(names: Iterable[str], groups: Groups) -> set[str]:
    return set(names) - set().union(*groups.values())


def page() -> str:
    """docs/coverage.md."""
    calls = sorted(n.removeprefix("custom_call ") for n in OPERATIONS if n.startswith("custom_call "))
    return "\n".join((
        "# What runs on the device\n",
        "Written by `python -m tests.coverage`. A form of a primitive or an operation that its rule does not cover is an error that says "
        "so, with the line of the program.\n",
        f"## Primitives of JAX {'.'.join(jax.__version__.split('.')[:2])}\n",
        *_table("primitives", primitives(), primitives_of_jax()),
        "\nArrays that are changed in place (`jax.new_ref`) are handed on instead, if the compiled function makes them.\n",
        "## Operations of StableHLO, CHLO and Shardy\n",
        *_table("operations", operations(), operations_of_stablehlo()),
        f"\nCustom calls with a known meaning: {', '.join(f'`{c}`' for c in calls)}.\n",
    ))  # fmt: skip


def _table(what: str, groups: Groups, names: set[str]) -> list[str]:
    rows = [f"| {len(names & members)} | {how} | {_listed(names & members)} |" for how, members in groups.items() if names & members]
    return [f"| | how, or why not | {what} |", "|---|---|---|", *rows]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def problem() -> str:
    """What is wrong with the page; empty if nothing is. To be asked in a process of its own, where only JAX defines primitives."""
    if new := sorted(unknown()):
        return f"in no group: {', '.join(new)}. Give each a rule, or a row in tpuflow/lower/importers/advice.py."
    return "" if PAGE.read_text() == page() else "docs/coverage.md is not what `python -m tests.coverage` writes."


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(problem() or 0)
    PAGE.write_text(page())
