"""How kernels are cut is text: as written it compiles to the same Program, what is changed is obeyed, what breaks a sum is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests import golden_text
from tests.compile_cases import CASES
from tests.emit_cases import SMALL
from tests.test_golden_text import constants
from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import F32
from tpuflow.errors import CompileError, OutOfMemoryError, TpuflowError
from tpuflow.isa.program import Kernel
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


PRODUCT = "[256, 512 of 2048 sequential, 256]"


def test_tiles_that_are_changed_are_obeyed_and_change_no_bit() -> None:
    assert PRODUCT in text()
    changed = parse(text().replace(PRODUCT, "[64 of 256, 512 of 2048 sequential, 128 of 256]"))
    programs = [compile_graph(graph, chip="generic", passes=()) for graph in (parse(text()), changed)]
    grids = [[[axis.size for axis in k.grid] for k in program.code if isinstance(k, Kernel)] for program in programs]
    assert [4] in grids[0] and [4, 2, 4] in grids[1]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(np.float32) for v in changed.inputs]
    kept, cut = (Executable(program, "reference").launch(arrays)[0] for program in programs)
    for one, other in zip(kept, cut, strict=True):
        np.testing.assert_array_equal(one, other)


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
    graph = parse(text().replace(PRODUCT, new))
    with pytest.raises(error, match=re.escape(message)):
        compile_graph(graph, chip="generic", passes=())


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OutOfMemoryError, match="does not fit on the chip with the tiles given"):
        compile_graph(parse(text()), chip=SMALL, passes=())


def test_a_sum_is_cut_into_its_blocks_only() -> None:
    (tiling,) = re.findall(r"tiled\((\[\d+ of 4096 sequential, \d+(?: of 256)?\])\)", text())
    with pytest.raises(CompileError, match="a multiple of .*, a block of its sum"):
        compile_graph(parse(text().replace(tiling, "[3 of 4096 sequential, 256]")), chip="generic", passes=())
