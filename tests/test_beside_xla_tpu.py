"""docs/xla_tpu.md: what is kept of XLA:TPU's plans, beside ours. Its compiler is not needed: the pages are made of kept figures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import pytest

from bench import kept_rows, vendor_plans, xla_batches, xla_operations, xla_products, xla_tpu
from bench.vendor_steps import RESNET, STEPS


def _half(number: int) -> kept_rows.Figures:
    return {"half": number / 2}


def test_rows_are_kept_as_they_come_beside_those_that_were_there(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"a": {"theirs": {"half": 7}}}))
    found = kept_rows.make(path, {("a", "ours"): (_half, (3,)), ("b", "ours"): (_half, (4,))}, jobs=1)
    assert found == {"a": {"theirs": {"half": 7}, "ours": {"half": 1.5}}, "b": {"ours": {"half": 2.0}}} == kept_rows.kept(path)


def test_a_step_beyond_its_limit_is_named_and_a_refusal_is_not_a_ratio():
    row, other = (xla_tpu.row_of(RESNET, chip) for chip in ("tpu-v3", "tpu-v5e"))
    theirs = {"hbm": 100, "temporaries": 100}
    rows = {row: {"ours": {"hbm": 111, "temporaries": 90}, "theirs": theirs}, other: {"ours": theirs, "theirs": {"refused": "fails"}}}
    assert xla_tpu.beyond(rows) == [f"{row}: hbm 1.11"]
    assert "| 1.11 / 0.90 |" in xla_tpu.section(rows) and "| fails |" in xla_tpu.section(rows)


def test_bytes_of_a_plan_without_its_code_are_marked_as_the_least_that_they_are():
    row = xla_tpu.row_of(RESNET, "tpu-v3")
    one = {"hbm": 100, "temporaries": 100}
    assert "| ≤1.00 |" in xla_tpu.section({row: {"ours": one, "theirs": {**one, "at_least": True}}})


def test_temporaries_are_what_is_in_hbm_and_neither_an_argument_nor_of_a_thread():
    held = vendor_plans.temporaries("""BufferAssignment:
allocation 0: size 4096, page 0, thread-local:
allocation 1: size 1000, page 0, parameter 1, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
 value: <1 x @0> (size=1000,offset=0): f32[250]{0}
allocation 2: size 512, page 0, constant:
allocation 3: size 30, color 1, page 0, preallocated-temp:
allocation 4: size 7000, page 0, preallocated-temp:
""")
    assert held == 7512


def test_the_text_of_a_module_is_whole_when_its_entry_is():
    text = "HloModule m\n\n%f {\n  ROOT x\n}\n\nENTRY %main {\n  ROOT y\n}\n"
    assert [vendor_plans.is_whole(text[:end]) for end in (text.index("ENTRY"), -3, None)] == [False, False, True]


def test_a_compile_that_says_nothing_is_no_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vendor_plans, "_compile", _ends)
    with pytest.raises(RuntimeError, match="ResNet-50, batch 32, momentum on tpu-v3: the process that compiles ended with 3"):
        vendor_plans.plan(RESNET, "tpu-v3")


def _ends(*_: Any) -> None:
    os._exit(3)  # as a fault in native code would


def test_steps_have_names_of_their_own_and_layers_that_are_computed_again():
    assert len({step.name for step in STEPS}) == len(STEPS)
    again = next(step for step in STEPS if step.remat and step.make is RESNET.make)
    assert again.name == "ResNet-50, batch 32, momentum, checkpointed"
    assert again.config.model.block is not RESNET.config.model.block


@pytest.mark.parametrize("most", [0, 1, 5, 100, 473])
@pytest.mark.parametrize("bend", [0, 3])
def test_the_largest_batch_is_found_nearly_by_few_compiles(most: int, bend: int):
    tried: list[int] = []

    def need(batch: int) -> int:
        tried.append(batch)
        return 500 + 10 * batch + bend * (batch - most) ** 2 * (1 if batch > most else -1) // 1000

    found = xla_batches.largest(need, 509 + 10 * most, 32)
    assert found <= most <= found + max(1, found // xla_batches.CLOSE)
    assert min(tried) > 0 and len(set(tried)) == len(tried) <= (14 if bend else 6)


def test_batches_around_ours_are_the_ends_of_what_ours_is_within_a_tenth_of():
    more, less = xla_batches.around(100)
    assert 100 < 0.9 * more and 100 >= 0.9 * (more - 1) and 100 <= 1.1 * less and 100 > 1.1 * (less - 1)
    ours = {"batch": 100}
    for answers, expected in (("does not fit", "fits"), "within"), (("fits", "fits"), "more"), (("does not fit",) * 2, "less"):
        row = {"ours": ours, "theirs": dict(zip(map(str, (more, less)), answers, strict=True))}
        assert f"100, {expected}" in xla_batches.section({f"{RESNET.words} | tpu-v3": row})


def test_operations_can_be_traced_and_those_in_question_are_beyond_what_they_need():
    for function, arguments in xla_operations.cases().values():
        jax.eval_shape(function, *arguments)
    ours = {"add, f32, 128": [100, 100], "sort rows, f32, 128": [201, 100], "slice, f32, 128": [10, 100]}
    rows = {"tpu-v3": {"ours": ours, "theirs": {"sort rows, f32, 128": 100, "slice, f32, 128": 10}}}
    assert xla_operations.in_question(rows, "tpu-v3") == ["sort rows, f32, 128", "slice, f32, 128"]
    assert "| tpu-v3 | 3 | 1 | 2 | 1 |" in xla_operations.section(rows) and "| sort rows, f32, 128 | 2.01 |" in xla_operations.section(rows)
    rows["tpu-v3"]["theirs"]["sort rows, f32, 128"] = None
    assert "| sort rows, f32, 128 | XLA:TPU refuses it |" in xla_operations.section(rows)


def test_products_are_a_hundred_shapes_and_a_factor_is_how_far_apart_both_are():
    groups = xla_products.groups()
    assert sum(map(len, groups.values())) >= 100
    for operations in groups.values():
        assert len({one.name for one in operations}) == len(operations)
        for one in operations:
            jax.eval_shape(one.function, *one.arguments)
    x, y, z = (one.name for one in groups["a grid"][:3])
    rows = {"a grid | tpu-v5e": {"ours": {x: 1.0, y: 2.0, z: 1.0}, "theirs": {x: 1.0, y: 1.0, z: 2.5}}}
    assert "| tpu-v5e | 3 | 2.00 | 1.00 | 0.40 | 2.00 | 67% |" in xla_products.section(rows)
    assert xla_products.beyond(rows) == ["tpu-v5e: median factor 2.000", f"tpu-v5e: a grid: {z}: 0.40"]


@pytest.mark.parametrize(
    ("name", "cycles", "cause"),
    [
        ("[4096, 256] x [256, 4096]", 15, xla_products.SHORT),  # cycles for each register of results
        ("[4096, 256] x [256, 4096]", 30, ""),
        ("28 x 28, 256 to 256, 3 x 3 by 2, gradient of the input", 74, xla_products.ZEROS),
    ],
)
def test_what_is_far_apart_has_a_cause_or_is_named(name: str, cycles: int, cause: str):
    group, one = next((group, one) for group, some in xla_products.groups().items() for one in some if one.name == name)
    expected = cycles / xla_products.cycles_a_register(one, "tpu-v5e", 1.0)
    rows = {f"{group} | tpu-v5e": {"ours": {name: expected / 4}, "theirs": {name: expected}}}
    assert f"| tpu-v5e | {group}: {name} | 0.25 | {cycles} | {cause} |" in xla_products.section(rows)
    assert (f"tpu-v5e: {group}: {name}: 0.25" in xla_products.beyond(rows)) == (not cause)


@pytest.mark.parametrize("part", [xla_tpu, xla_products, xla_operations])
def test_the_page_has_what_was_kept(part: Any):
    assert part.section(kept_rows.kept(part.RESULTS)).strip() in xla_tpu.PAGE.read_text(encoding="utf-8")
