"""How kernels are cut is text: as written it compiles to the same Program, what is changed is obeyed, what breaks a sum is refused."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tests import golden_text
from tests.compile_cases import CASES
from tests.emit_cases import CASES as EMIT_CASES
from tests.emit_cases import SMALL, Case
from tests.test_golden_text import constants
from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import F32
from tpuflow.errors import CompileError, GraphError, OutOfMemoryError, TpuflowError
from tpuflow.isa.program import Kernel
from tpuflow.lower.graph.accesses import Access
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Graph, TensorType
from tpuflow.lower.graph.parse import parse

CHIPS = {"generic": get_chip("generic"), "tpu-v4": get_chip("tpu-v4"), "small": SMALL}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("name", CASES)
def test_a_schedule_that_is_read_compiles_to_the_same_program(name: str, chip: Chip) -> None:
    graph = CASES[name].graph()
    scheduled, program = golden_text.stages(graph, chip)["kernels"], compile_graph(graph, chip=chip)
    text = str(scheduled)
    again = parse(text, constants=constants(scheduled))
    assert str(again) == text
    assert compile_graph(again, chip=chip, passes=()).code == program.code


def product() -> Graph:
    """A product whose contraction is cut, and sums over the rows of another array."""
    b = Builder("product", [TensorType(F32, shape) for shape in ((256, 2048), (2048, 256), (4096, 256))])
    x, w, y = b.inputs
    return b.finish([b.dot(x, w, (1,), (0,)), b.reduce("add", y, (0,))])


def text() -> str:
    """Its schedule for the generic chip."""
    return str(golden_text.stages(product(), "generic")["kernels"])


def without_accesses() -> str:
    """The same, with tilings only."""
    return re.sub(r" reads \(.*?\) writes \([^)]*\)", "", text())


PRODUCT = "[256, 512 of 2048 sequential, 256]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiling", "grid"),
    [
        ("[64 of 256, 512 of 2048 sequential, 128 of 256]", [4, 2, 4]),
        ("[64 of 256, 2048, 96 of 256 sequential]", [4, 3]),  # the left operand stays
        ("[96 of 256 sequential, 2048, 64 of 256]", [4, 3]),  # the right one
    ],
)
def test_tiles_that_are_changed_are_obeyed_and_change_no_bit(tiling: str, grid: list[int]) -> None:
    assert PRODUCT in text()
    changed = parse(text().replace(PRODUCT, tiling))
    programs = [compile_graph(graph, chip="generic", passes=()) for graph in (parse(text()), changed)]
    grids = [[[axis.size for axis in k.grid] for k in program.code if isinstance(k, Kernel)] for program in programs]
    assert [4] in grids[0] and grid in grids[1]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(np.float32) for v in changed.inputs]
    kept, cut = (Executable(program, "reference").launch(arrays)[0] for program in programs)
    for one, other in zip(kept, cut, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_kernel_says_what_it_reads_and_writes() -> None:
    assert f"tiled({PRODUCT} reads (%0[x0, x1], %1[x1, x2]) writes (%3[x0, x2]))" in text()


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "%0[x0, x1]",
            "%0[x0, 2048 at (1 + 1*x1)/1]",
            CompileError,
            "a kernel reads operand 0[x0, 2048 at (1 + 1*x1)/1], operand 1[x1, x2]",
        ),
        ("writes (%3[x0, x2])", "writes (%3[x2, x0])", CompileError, "a kernel writes result 0[x2, x0], but it writes result 0[x0, x2]"),
        ("%0[x0, x1]", "%0[x0, x7]", GraphError, "expected x0 to x2"),
        ("%0[x0, x1]", "%9[x0, x1]", GraphError, "expected a value that is defined above"),
        ("%0[x0, x1]", "%2[x0, x1]", GraphError, "expected operands and results of the node only"),
        ("%0[x0, x1]", "%0[x0]", GraphError, "its axes have 256 elements in all, the operand 524288"),
        ("%0[x0, x1]", "%0[x0, 2048 at (2048 + 1*x1)/1]", GraphError, "no point is at an element of the axis 2048 at (2048 + 1*x1)/1"),
    ],
)
def test_accesses_that_are_none_are_refused(old: str, new: str, error: type[TpuflowError], message: str) -> None:
    assert old in text()
    with pytest.raises(error, match=re.escape(message)):
        compile_graph(parse(text().replace(old, new)), chip="generic", passes=())


def test_accesses_may_be_left_out() -> None:
    assert "reads" not in without_accesses()
    assert (
        compile_graph(parse(without_accesses()), chip="generic", passes=()).code
        == compile_graph(parse(text()), chip="generic", passes=()).code
    )


def elements(access: Access, sizes: tuple[int, ...]) -> set[int]:
    """The elements of an operand that the points of a space are at, counted row-major."""
    points = np.indices(sizes).reshape(len(sizes), math.prod(sizes))
    place, there = np.zeros(points.shape[1], int), np.ones(points.shape[1], bool)
    for axis in access.axes:
        b = axis.bound
        at = b.origin + sum((factor * points[a] for a, factor in b.terms), np.zeros_like(place))
        there &= (at % b.dilation == 0) & (at >= 0) & (at // b.dilation < b.extent)
        place = place * b.extent + at // b.dilation
    return set(place[there].tolist())


@pytest.mark.parametrize("case", [case for case in EMIT_CASES if case.name != "several"], ids=lambda case: case.name)
def test_kernels_write_every_element_of_what_they_make(case: Case) -> None:
    for node in golden_text.stages(case.graph(), case.small)["kernels"].walk():
        written: dict[int, set[int]] = {}
        known = not any(axis.start is not None for t in node.tilings for access in t.writes for axis in access.axes)
        for tiling in node.tilings if known else ():
            for access in tiling.writes:
                written.setdefault(access.operand, set()).update(elements(access, tiling.sizes))
        for operand, found in written.items():
            assert found == set(range(node.results[operand - len(node.inputs)].type.elems))


@pytest.mark.parametrize(
    ("new", "error", "message"),
    [
        (
            "[256, 256 of 2048 sequential, 256]",
            CompileError,
            "into 256 of 2048 sequential; it should be 512, a block of its sum",
        ),
        ("[256, 512 of 2048, 256]", CompileError, "cuts axis 1 into 512 of 2048; it should be 512 of 2048 sequential"),
        ("[64 of 256 sequential, 512 of 2048 sequential, 256]", CompileError, "it should be 64 of 256"),
        ("[256, 512 of 4096 sequential, 256]", CompileError, "is of the space [256, 4096, 256]; the kernel's is [256, 2048, 256]"),
        ("[0 of 256, 512 of 2048 sequential, 256]", CompileError, "it should be 1 to 256 elements"),
        (f"{PRODUCT}, {PRODUCT}", CompileError, "has 2 tilings, but becomes 1 kernels; give one for each"),
    ],
)
def test_tilings_that_are_none_are_refused(new: str, error: type[TpuflowError], message: str) -> None:
    graph = parse(without_accesses().replace(PRODUCT, new))
    with pytest.raises(error, match=re.escape(message)):
        compile_graph(graph, chip="generic", passes=())


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OutOfMemoryError, match="does not fit on the chip with the tiles given"):
        compile_graph(parse(text()), chip=SMALL, passes=())


def test_a_sum_is_cut_into_its_blocks_only() -> None:
    (tiling,) = re.findall(r"tiled\((\[\d+ of 4096 sequential, \d+(?: of 256)?\]) reads", text())
    with pytest.raises(CompileError, match="a multiple of .*, a block of its sum"):
        compile_graph(parse(text().replace(tiling, "[3 of 4096 sequential, 256]")), chip="generic", passes=())
