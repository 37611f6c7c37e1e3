"""docs/xla_tpu.md: what is kept of XLA:TPU's plans, beside ours. Its compiler is not needed: the pages are made of kept figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from bench import kept_rows, xla_batches, xla_operations, xla_products, xla_tpu
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


def test_steps_have_names_of_their_own_and_layers_that_are_computed_again():
    assert len({step.name for step in STEPS}) == len(STEPS)
    again = next(step for step in STEPS if step.remat and step.make is RESNET.make)
    assert again.name == "ResNet-50, batch 32, momentum, checkpointed"
    assert again.config.model.block is not RESNET.config.model.block


@pytest.mark.parametrize("most", [0, 1, 5, 100, 473])
def test_the_largest_batch_is_found_nearly(most: int):
    found = xla_batches.largest(lambda batch: batch <= most, 32)
    assert found <= most <= found + max(1, found // xla_batches.CLOSE)


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


def test_products_are_a_hundred_shapes_and_a_factor_is_how_far_apart_both_are():
    groups = xla_products.groups()
    assert sum(map(len, groups.values())) >= 100
    for operations in groups.values():
        assert len({one.name for one in operations}) == len(operations)
        for one in operations:
            jax.eval_shape(one.function, *one.arguments)
    rows = {"a grid | tpu-v5e": {"ours": {"x": 1.0, "y": 2.0, "z": 1.0}, "theirs": {"x": 1.0, "y": 1.0, "z": 2.5}}}
    text = xla_products.section(rows)
    assert "| tpu-v5e | 3 | 2.00 | 1.00 | 0.40 | 2.00 | 67% |" in text and "| a grid: z | 0.40 |" in text


@pytest.mark.parametrize("part", [xla_tpu, xla_products, xla_operations])
def test_the_page_has_what_was_kept(part: Any):
    assert part.section(kept_rows.kept(part.RESULTS)).strip() in xla_tpu.PAGE.read_text(encoding="utf-8")
