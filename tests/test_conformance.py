"""How JAX's own tests are run and classed: small test files of our own stand for a checkout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.jax_causes import (
    CRASH,
    ELSEWHERE,
    FAILS_SKIPPED_ON_TPU,
    HANG,
    SKIPPED_ELSEWHERE,
    SKIPPED_ON_TPU,
    Case,
    asks,
    cause_of,
    counted,
    row,
)
from bench.jax_tests import Run, Suite, cases_of, classed, page, run_suite
from bench.sections import put_section
from bench.stablehlo_data import judged, mismatch, programs

FILE = """
import os, time, unittest

class Cases(unittest.TestCase):
    def test_adds(self): self.assertEqual(1 + 1, 2)
    def test_ends_the_process(self): os._exit(3)
    def test_is_wrong(self): self.assertEqual(1, 2)
    def test_never_ends(self): time.sleep(600)
    def test_parts(self):
        for i in range(3):
            with self.subTest(i=i): self.assertNotEqual(i, 1)
    @unittest.skip("not here")
    def test_skips(self): pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "small_test.py").write_text(FILE)
    return tmp_path


@pytest.mark.slow
def test_a_crash_and_a_hang_cost_one_case_each(checkout):
    found = {c.name.split("::")[-1]: c for c in cases_of(Run(checkout, platforms="cpu", sample=0, limit_seconds=10), "small_test")}
    outcomes = {name: (c.outcome, c.kind) for name, c in found.items()}
    assert outcomes == {
        "test_adds": ("passed", ""), "test_ends_the_process": ("failed", CRASH), "test_is_wrong": ("failed", "AssertionError"),
        "test_never_ends": ("failed", HANG), "test_parts": ("failed", "AssertionError"), "test_skips": ("skipped", "Skipped"),
    }  # fmt: skip


@pytest.mark.slow
def test_a_sample_is_that_of_its_seed(checkout):
    (checkout / "tests" / "small_test.py").write_text("import pytest\n@pytest.mark.parametrize('i', range(50))\ndef test_it(i): pass\n")
    first, again, other = (
        {c.name for c in cases_of(Run(checkout, platforms="cpu", sample=4, seed=seed), "small_test")} for seed in (0, 0, 1)
    )
    assert len(first) == 4 and first == again != other


@pytest.mark.slow
def test_others_are_drawn_in_the_place_of_those_that_are_skipped_everywhere(checkout):
    text = """
import pytest
@pytest.mark.parametrize('i', range(60))
def test_it(i):
    if i % 2: pytest.skip(f"odd")
    assert i % 4 == 0
"""
    (checkout / "tests" / "small_test.py").write_text(text)
    run = Run(checkout, platforms="cpu", sample=10)
    cases = classed(run, "small_test", list(cases_of(run, "small_test")))
    assert sum(asks(c) for c in cases) == 10 and {c.cause for c in cases} == {"", ELSEWHERE, SKIPPED_ELSEWHERE}
    aside = sum(c.outcome == "skipped" for c in cases)
    assert f"| small_test | {aside} of {len(cases)} | odd ({aside}) |" in page(run, {"small_test": cases})


@pytest.mark.slow
def test_cases_are_told_that_they_run_on_a_tpu_once_they_are_made(checkout):
    text = """
import jax._src.test_util as jtu, pytest
MADE = jtu.device_under_test()
def test_it():
    pytest.skip(f"made on {MADE}, runs on {jtu.device_under_test()}")
"""
    (checkout / "tests" / "small_test.py").write_text(text)
    (found,) = cases_of(Run(checkout, platforms="cpu", as_device="tpu"), "small_test")
    assert (found.outcome, found.text) == ("skipped", "made on cpu, runs on tpu")


@pytest.mark.parametrize(("elsewhere", "on_tpu", "cause"), [("a", "", SKIPPED_ELSEWHERE), ("", "a", SKIPPED_ON_TPU)])
def test_a_case_that_is_skipped_everywhere_or_on_tpus_is_set_aside(elsewhere, on_tpu, cause):
    aside = Case("a", "skipped", text="never", cause=cause_of(Case("a", "skipped"), elsewhere, on_tpu))
    assert aside.cause == cause and row("x_test", [aside, Case("c", "passed")]) == "| x_test | 1 | 1 | 0 | 0 | 100.0% |"
    assert "| x_test | 1 of 2 | never (1) |" in page(Run(Path()), {"x_test": [aside, Case("c", "passed")]})


@pytest.mark.slow
def test_what_is_skipped_for_the_name_of_the_device_is_run_as_if_on_a_tpu(checkout):
    text = """
import jax, jax._src.test_util as jtu, pytest
def test_as_tpu():
    if jax.devices()[0].platform != "cpu" and jtu.device_under_test() != "tpu": pytest.skip("cpu and tpu alone")
def test_cpu_alone():
    if jax.devices()[0].platform != "cpu": pytest.skip("cpu alone")
"""
    (checkout / "tests" / "small_test.py").write_text(text)
    run = Run(checkout, sample=0)
    found = {c.name.split("::")[-1]: (c.outcome, c.cause) for c in classed(run, "small_test", list(cases_of(run, "small_test")))}
    assert found == {"test_as_tpu": ("passed", ""), "test_cpu_alone": ("skipped", SKIPPED_ON_TPU)}


@pytest.mark.parametrize(
    ("kind", "text", "cause", "counts"),
    [
        ("JaxRuntimeError", "UNIMPLEMENTED: x: tensor<3xui64>: the device has no 64-bit elements", "64-bit types", False),
        ("JaxRuntimeError", "UNIMPLEMENTED: a.py:1: no lowering rule for 'chlo.ragged_dot'", "no lowering rule", True),
        ("JaxRuntimeError", "UNIMPLEMENTED: a.py:1: 'stablehlo.sort' on (c64[2]): complex numbers", "a form that a rule", True),
        ("JaxRuntimeError", "INTERNAL: Traceback", "a defect", True),
        ("AssertionError", "\nNot equal to tolerance rtol=1e-06, atol=1e-06", "wrong values", True),
        (HANG, "over the time limit", "hangs", True),
        ("KeyError", "'x'", "other", True),
    ],
)
def test_a_failure_is_classed_by_what_it_says(kind, text, cause, counts):
    found = Case("a", "failed", kind=kind, text=text, cause=cause_of(Case("a", "failed", kind=kind, text=text), set()))
    assert found.cause.startswith(cause) and counted(found) is counts


def test_what_fails_elsewhere_too_or_is_skipped_there_or_on_tpus_is_not_counted():
    assert cause_of(Case("a", "failed", kind="KeyError"), {"a"}) == ELSEWHERE
    assert cause_of(Case("a", "failed", kind="KeyError"), set(), {"a"}) == FAILS_SKIPPED_ON_TPU
    assert not counted(Case("a", "failed", cause=FAILS_SKIPPED_ON_TPU))
    cases = [Case("a", "failed", cause=ELSEWHERE), Case("b", "passed"), Case("c", "skipped"), Case("d", "failed", cause="hangs")]
    assert row("x_test", cases) == "| x_test | 4 | 1 | 1 | 2 | 50.0% |"
    assert "| hangs | 1 | `d`" in page(Run(Path()), {"x_test": cases})


@pytest.mark.slow
def test_a_run_goes_on_from_the_cases_that_it_kept(checkout, tmp_path):
    (checkout / "tests" / "small_test.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    kept: list[Case] = []
    cases = {"Some, every test once": {"small_test": [Case("tests/small_test.py::test_a", "skipped"), Case("b", "failed")]}}
    suite, run = Suite("Some", ("small_test",), 1, 60), Run(checkout, platforms="cpu", sample=0)
    run_suite(suite, run, ["small_test"], cases, tmp_path / "page.md", lambda of: kept.extend(of["Some, every test once"]["small_test"]))
    assert [(c.name[-1], c.outcome) for c in kept] == [("a", "skipped"), ("b", "passed")]
    assert "## Some, every test once" in (tmp_path / "page.md").read_text()


def test_a_section_takes_the_place_of_the_older_one_and_of_no_other(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n## One\n\nold\n\n## Two\n\nkept\n")
    put_section(path, "One", "new")
    put_section(path, "Three", "more\n")
    assert path.read_text() == "# Page\n\n## One\n\nnew\n\n## Two\n\nkept\n\n## Three\n\nmore\n"


@pytest.mark.slow
def test_a_suite_runs_its_files_on_as_many_devices_as_it_says_and_writes_its_own_section(checkout, tmp_path):
    text = "import os\ndef test_devices(): assert (os.environ['TPUFLOW_DEVICES'], os.environ['JAX_PLATFORMS']) == ('8', 'cpu')\n"
    (checkout / "tests" / "small_test.py").write_text(text)
    cases: dict[str, dict[str, list[Case]]] = {}
    run = Run(checkout, platforms="cpu", devices=8)
    run_suite(Suite("Several", ("small_test", "other_test"), 8, 60), run, ["small_test"], cases, tmp_path / "page.md")
    assert [c.outcome for c in cases["Several"]["small_test"]] == ["passed"]
    assert "## Several" in (tmp_path / "page.md").read_text() and ", on 8 devices (" in (tmp_path / "page.md").read_text()


PROGRAM = """
func.func @main() -> tensor<3xf32> {
  %0 = call @inputs() : () -> tensor<3xf32>
  %1 = call @expected() : () -> tensor<3xf32>
  %2 = stablehlo.add %0, %0 : tensor<3xf32>
  stablehlo.custom_call @check.expect_close(%2, %1) {has_side_effect = true} : (tensor<3xf32>, tensor<3xf32>) -> ()
  return %2 : tensor<3xf32>
}
func.func private @inputs() -> tensor<3xf32> {
  %c = stablehlo.constant dense<[1.0, 2.0, 3.0]> : tensor<3xf32>
  return %c : tensor<3xf32>
}
func.func private @expected() -> tensor<3xf32> {
  %c = stablehlo.constant dense<[2.0, 4.0, 6.0]> : tensor<3xf32>
  return %c : tensor<3xf32>
}
"""
OF_CONSTANTS = """
func.func @op() {
  %0 = stablehlo.constant dense<[-2, 0, 2]> : tensor<3xi32>
  %1 = stablehlo.abs %0 : tensor<3xi32>
  check.expect_eq_const %1, dense<[2, 0, 2]> : tensor<3xi32>
  func.return
}
"""


@pytest.mark.parametrize(
    ("text", "outcome", "says"),
    [
        (PROGRAM, "passed", ""),
        (PROGRAM.replace("6.0", "7.0"), "failed", "not equal (expect_close) in 1 of 3 places: 6.0 where 7.0 is expected"),
        (OF_CONSTANTS, "passed", ""),
        (OF_CONSTANTS.replace("i32", "i64"), "skipped", "no 64-bit elements"),
        (OF_CONSTANTS.replace("stablehlo.abs", "stablehlo.not_there"), "failed", "not_there"),
        ("func.func @main() { func.return }", "skipped", "nothing is expected"),
    ],
)
def test_a_program_of_stablehlo_is_judged_by_what_it_expects(text, outcome, says):
    found = judged("small", text)
    assert found.outcome == outcome and says in found.text


def test_programs_of_one_file_are_told_apart_by_number(tmp_path):
    path = tmp_path / "abs.mlir"
    path.write_text(f"{OF_CONSTANTS}\n// -----\n{PROGRAM}")
    assert [name for name, _ in programs(path)] == ["abs-0", "abs-1"]


@pytest.mark.parametrize(("got", "equal"), [(1 + 1e-6, True), (1 + 1e-5, False), (np.nan, False), (np.inf, False)])
def test_close_numbers_are_so_many_units_of_the_last_place_apart(got, equal):
    x, y = (np.array([v, np.nan, np.inf], np.float32) for v in (got, 1))
    assert (mismatch("expect_close", x, y) == "") is equal
