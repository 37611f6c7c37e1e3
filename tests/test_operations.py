"""Every row of the one table of operations, and its gradient, judged by jax.jit: as a graph, by either importer, and on every engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import jax
import numpy as np
import pytest

from tests.cases import PROGRAMS, ROWS, Case, over_rows, repeats_others, sample, words
from tests.quick import quickly_compiled
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.program import Program
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.importers.jaxpr import lower_jaxpr
from tpuflow.lower.importers.stablehlo.importer import lower_stablehlo

pytestmark = pytest.mark.optimised

OPTIMISED_NATIVE = frozenset(row.name for row in PROGRAMS[::4] if not repeats_others(row))
"""Rows whose native code XLA optimises, too: that it may change digits is what test_native_arithmetic and the trainings bound."""


def _run(program: Program, arrays: list[np.ndarray], engine: str, fidelity: str) -> tuple[np.ndarray, ...]:
    outputs, _ = Executable(program, engine=engine, fidelity=fidelity).launch(arrays)
    return tuple(np.asarray(x) for x in outputs)


def _graphs(case: Case) -> tuple[Graph, Graph]:
    """By the importer of jaxprs, and by that of StableHLO."""
    traced = jax.jit(case.fn, keep_unused=True).trace(*case.arguments())
    text = traced.lower(lowering_platforms=(case.platform,)).as_text(debug_info=True)
    return verify(lower_jaxpr(jax.make_jaxpr(case.fn)(*case.arguments()), case.name)), verify(lower_stablehlo(text).graph)


def _same_bits(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes(), f"bits differ in {np.sum(a != b)} places: {a[a != b][:4]} and {b[a != b][:4]}"


@over_rows(ROWS[::4])
def test_the_graph_of_every_row_computes_what_jax_computes_with_the_same_bits_by_either_importer(case: Case) -> None:
    arrays = [words(x) for x in jax.tree.leaves(case.arguments())]
    of_jaxpr, of_stablehlo = (interpret(graph, *arrays) for graph in _graphs(case))
    case.check(of_jaxpr)
    _same_bits(of_stablehlo, of_jaxpr)


def _machine_code(*, optimised: bool) -> AbstractContextManager[None]:
    return nullcontext() if optimised else quickly_compiled()


@over_rows(sample(17), of=PROGRAMS)
def test_every_row_means_the_same_everywhere(case: Case) -> None:
    arguments = case.arguments()
    program = compile_function(case.fn, arguments, name=case.name)
    arrays = [words(x) for x in jax.tree.leaves(arguments)]
    reference = _run(program, arrays, "reference", "bitexact")
    case.check(reference)
    from_text = assemble(disassemble(program.strip()))
    with _machine_code(optimised=not repeats_others(case)):
        _same_bits(_run(from_text, arrays, "fast", "bitexact"), reference)
    with _machine_code(optimised=case.name in OPTIMISED_NATIVE):
        case.check(_run(program, arrays, "fast", "native"))
