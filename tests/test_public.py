"""How public programs are run and compared: a notebook and a script of our own stand for a checkout's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.public import Ended, compared, difference, printed
from bench.public_programs import PROGRAMS, Program
from bench.public_run import arrays_of, pieces, run

CELLS = ["%matplotlib inline\nimport numpy as np\nx = np.arange(3)", "!pip install what\nx + 1", "%%time\nx = 1 / 0"]


def test_a_notebooks_cells_run_without_the_shells_lines_and_keep_their_values(tmp_path):
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in CELLS]}))
    namespace: dict[str, object] = {}
    run(notebook, namespace)
    found = arrays_of(namespace)
    assert len(pieces(notebook)) == 3 and set(found) == {"x", "cell 2"}
    np.testing.assert_array_equal(found["cell 2"], [1, 2, 3])


def test_what_is_printed_is_compared_by_the_words_before_it_but_for_times_and_addresses():
    found = printed("step 1 loss=0.5 took 0.12 s\nstep 2 loss=.25 took 3 s\n<f at 0x7f3a> [1. 2.\n nan] layer1 1e-3")
    assert {words: list(map(str, numbers)) for words, numbers in found.items()} == {
        "printed: step": ["1.0"], "printed: loss=": ["0.5", "0.25"], "printed: s step": ["2.0"],
        "printed: s <f at 0x> [": ["1.0", "2.0", "nan"], "printed: ] layer1": ["0.001"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plain", "ours", "expected"),
    [([1.0, 2.0], [1.0, 1.5], 0.25), ([np.nan, np.inf], [np.nan, np.inf], 0.0), ([np.nan], [1.0], np.inf), ([1e-9], [2e-9], 1e-7)],
)
def test_a_difference_is_relative_to_the_largest_element(plain, ours, expected):
    assert difference("x", np.asarray(plain), np.asarray(ours)) == pytest.approx(expected)


def test_what_only_one_run_has_is_no_agreement():
    program, one, other = Program("a", "b.py", skip=("^t$",)), Ended({"x": np.ones(2), "t": np.ones(1)}, "", 1.0), Ended({}, "", 1.0)
    with pytest.raises(ValueError, match="only one has 'x'"):
        compared(program, one, other)
    assert compared(program, one, one) == {"arrays": 1, "numbers": 2, "difference": 0.0, "worst": "x"}


def test_programs_have_names_of_their_own():
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS) == len({p.short for p in PROGRAMS})
    assert all(not Path(p.path).is_absolute() and p.bound < 0.1 for p in PROGRAMS)
