"""Batches depend on the seed and their number only: not on threads, not on where a run began; and training takes them."""

from __future__ import annotations

import itertools
import json
import threading

import grain
import hypothesis
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import tpuflow
from models.mlp import MLP
from tpuflow.errors import ConfigError, DataError
from train.pipeline import Batches, Loader, shuffled
from train.transforms import RandomCrop, RandomHorizontalFlip, ToFloat

SAMPLES = 23
AUGMENT = (RandomCrop(6, 6, padding=2), RandomHorizontalFlip(), ToFloat())


def _data() -> tuple[np.ndarray, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, 6, 6, 1), np.uint8)
    return pixels, np.arange(SAMPLES, dtype=np.int32)


def _batches(batch_size: int = 5, **options) -> Batches:
    return Batches(*_data(), batch_size, **options)


def _labels(batches) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def _assert_same(ours, theirs) -> None:
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_unshuffled_batches_follow_the_arrays_and_the_last_may_be_smaller():
    inputs, labels = _data()
    found = list(Loader(_batches()))
    assert [len(batch) for _, batch in found] == [5, 5, 5, 5, 3]
    np.testing.assert_array_equal(np.concatenate([batch for batch, _ in found]), inputs)
    np.testing.assert_array_equal(np.concatenate([batch for _, batch in found]), labels)


def test_a_remainder_is_dropped_in_every_pass_if_asked():
    batches = _batches(drop_remainder=True, repeat=2)
    assert len(batches) == 8
    assert _labels(Loader(batches)) == 2 * [list(range(i, i + 5)) for i in (0, 5, 10, 15)]


def test_repeating_makes_one_epoch_of_several_passes_each_in_its_own_order():
    once, twice = _batches(shuffle=True, seed=3), _batches(shuffle=True, seed=3, repeat=2)
    loader = Loader(once)
    assert _labels(Loader(twice)) == _labels(loader) + _labels(loader)


@hypothesis.given(count=st.integers(1, 60), buffer=st.integers(1, 70), seed=st.integers(0, 5), walk=st.integers(0, 5))
def test_shuffling_keeps_every_sample_and_a_buffer_bounds_how_early_it_comes(count, buffer, seed, walk):
    order = shuffled(count, buffer, seed, walk)
    assert sorted(order) == list(range(count))
    assert np.all(order < np.arange(count) + buffer)


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    loaders = [Loader(_batches(shuffle=buffer, seed=seed)) for buffer in (True, 9) for seed in (0, 1)]
    orders = [str(_labels(loader)) for loader in loaders for _ in range(3)]
    assert len(set(orders)) == len(orders)


def test_a_buffer_of_one_and_no_shuffling_are_the_same():
    assert _labels(Loader(_batches(shuffle=1))) == _labels(Loader(_batches()))


@pytest.mark.parametrize("shuffle", [True, 7])
def test_batches_do_not_depend_on_threads_or_on_what_was_made_before(shuffle):
    batches = _batches(shuffle=shuffle, transforms=AUGMENT, seed=4)
    expected = [batches[number] for number in reversed(range(2 * len(batches)))][::-1]
    for threads, prefetch in ((1, 1), (3, 2), (2, 20)):
        loader = Loader(batches, threads=threads, prefetch=prefetch)
        _assert_same(itertools.chain(loader, loader), expected)


def test_a_run_resumes_anywhere_through_json():
    batches = _batches(shuffle=True, transforms=AUGMENT, seed=4)
    expected = [batches[number] for number in range(2 * len(batches))]
    for done in range(len(expected)):
        loader = Loader(batches)
        _ = list(itertools.islice(itertools.chain(loader, loader), done))
        resumed = Loader(_batches(shuffle=True, transforms=AUGMENT, seed=4))
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert resumed.position == done
        rest = itertools.chain.from_iterable(resumed for _ in range(2 - done // len(batches)))
        _assert_same(rest, expected[done:])


def test_a_position_in_other_batches_is_refused():
    state = Loader(_batches(shuffle=True, seed=1)).state_dict()
    with pytest.raises(ConfigError, match=r"batch_size 5 \(here 4\), seed 1 \(here 0\)"):
        Loader(_batches(4, shuffle=True)).load_state_dict(state)
    with pytest.raises(ConfigError, match="buffer 23"):
        Loader(_batches(seed=1)).load_state_dict(state)
    with pytest.raises(ConfigError, match="no position"):
        Loader(_batches()).load_state_dict(_batches().identity())


def test_an_iteration_that_was_overtaken_says_so():
    loader = Loader(_batches())
    first = iter(loader)
    next(first)
    loader.seek(3)
    with pytest.raises(ConfigError, match="overtaken"):
        next(first)
    assert _labels(loader) == [list(range(15, 20)), [20, 21, 22]]


def test_an_error_in_a_transform_reaches_the_training_and_leaves_no_thread():
    def broken(images, rng):
        raise ArithmeticError("broken")

    before = threading.active_count()
    with pytest.raises(ArithmeticError, match="broken"):
        list(Loader(_batches(transforms=(broken,))))
    for thread in threading.enumerate():
        if thread.name.startswith("loader"):
            thread.join(5)
    assert threading.active_count() <= before


def test_wrong_options_are_clear_errors():
    inputs, labels = _data()
    with pytest.raises(DataError, match="23 inputs but 22 labels"):
        Batches(inputs, labels[1:], 5)
    with pytest.raises(DataError, match="23 samples make no batch of 24"):
        _batches(24, drop_remainder=True)
    for name in ("batch_size", "repeat"):
        with pytest.raises(ConfigError, match=name):
            _batches(**{name: 0})
    with pytest.raises(ConfigError, match="shuffle"):
        _batches(shuffle=-1)
    for name in ("threads", "prefetch"):
        with pytest.raises(ConfigError, match=name):
            Loader(_batches(), **{name: 0})
    with pytest.raises(IndexError):
        _batches()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("sink_size", [-1, 3])
def test_training_takes_a_loader_and_sees_what_it_sees_in_arrays(sink_size):
    inputs, labels = _data()
    inputs, labels = ToFloat()(inputs), labels % 3
    options = {"optimizer": optax.sgd(0.1), "epochs": 2, "sink_size": sink_size, "progress": False}
    model = MLP((4,), 3)
    of_arrays = tpuflow.train(model, (inputs, labels), batch_size=5, shuffle=True, seed=7, **options)
    loader = Loader(Batches(inputs, labels, 5, shuffle=True, seed=7))
    of_loader = tpuflow.train(model, loader, seed=7, eval_data=Loader(Batches(inputs, labels, 5)), **options)
    losses = [[epoch["losses"] for epoch in result.history] for result in (of_arrays, of_loader)]
    assert losses[0] == losses[1]


def test_batches_are_a_data_source_for_grain():
    batches = _batches(shuffle=True, transforms=AUGMENT)
    found = grain.MapDataset.source(batches).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    _assert_same(found, Loader(batches))
