"""Published times of several chips beside ours: every row is modelled or is said to be left out, and collectives are near."""

from __future__ import annotations

import statistics
import time

import pytest

from bench.accuracy import measured_rows
from bench.measured import on_chips
from bench.several_chips import collectives, data_parallel
from bench.transformers import PUBLISHED, gpt3_175b
from tpuflow.chips import get_chip
from tpuflow.estimating.estimating import training_program
from tpuflow.stages.analysis import memory_analysis


def test_collectives_are_as_near_to_published_times_as_the_page_promises() -> None:
    assert statistics.median(abs(sent.error) for sent in collectives()) < 0.15
    assert all(sent.row["source"] and None not in sent.row for sent in collectives())


def test_every_transformer_has_the_batch_and_the_chips_of_its_row() -> None:
    published = measured_rows()
    for row_id, row in PUBLISHED.items():
        tokens, _ = row.step().data
        assert tokens.shape == (int(published[row_id]["global_batch"]), int(published[row_id]["seq_len"]))
        assert row.chips == int(published[row_id]["num_chips"])


@pytest.mark.parametrize(("row_id", "billions"), [("M315", 22), ("M319", 52), ("M320", 16), ("M322", 64), ("M359", 1024)])
def test_a_transformer_has_the_parameters_of_its_name(row_id: str, billions: int) -> None:
    row = PUBLISHED[row_id]
    tokens = row.batch * 2048
    scores = 12 * row.layers * row.heads * row.head_width * 2048 * tokens
    assert (row.step_flops - scores) / 6 / tokens == pytest.approx(billions * 1e9, rel=0.06)


def test_a_data_parallel_row_is_the_step_of_one_chip_with_the_whole_batch() -> None:
    rows = data_parallel()
    step = rows["M269"].config
    assert step.mesh == {"data": 8} and step.sharding == "ddp" and step.model.style.norm_axis is None
    assert step.data[0].shape == (256 * 8, 224, 224, 3)
    assert on_chips(step, 1).data[0].shape == step.data[0].shape


def test_a_row_whose_log_says_so_normalises_the_batches_of_several_chips_together() -> None:
    step = data_parallel()["M275"].config
    assert step.mesh == {"data": 512, "group": 4} and step.model.style.norm_axis == "group"
    assert step.data[0].shape == (16 * 2048, 224, 224, 3), "64 pictures a group"


def test_berts_on_ascend_have_the_dropout_of_their_sources_and_those_on_tpus_say_that_they_have_none() -> None:
    for row_id, row in data_parallel().items():
        if row.model.startswith("BERT"):
            dropout = row.config.model.config.hidden_dropout_prob
            assert dropout == (0.1 if row.chip.family == "ascend" else 0.0), row_id
            assert ("without dropout" in row.note) == (dropout == 0.0), row_id


def test_a_step_of_175_billion_parameters_on_1024_chips_is_estimated_in_a_minute() -> None:
    chip, began = get_chip("tpu-v5p"), time.process_time()
    program = training_program(gpt3_175b(1024), chip)[1]
    assert time.process_time() - began < 60
    assert memory_analysis(program).argument_size_in_bytes == pytest.approx(12 * 175e9 / 1024, rel=0.01)
