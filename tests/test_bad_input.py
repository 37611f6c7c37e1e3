"""What users get wrong: each mistake has one clear error, before anything was trained if it can be known then."""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import tpuflow
from tests.test_training import Net, blobs, fit
from tpuflow.errors import ConfigError, DataError, TpuflowError, UnsupportedPrimitiveError

X, Y = blobs(40)


class Parameterless(nn.Module):
    """Nothing to train."""

    def __call__(self, x):
        return x


class TwoOutputs(nn.Module):
    """A pair instead of one array."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x), x


class Broken(nn.Module):
    """Raises an error of its own."""

    @nn.compact
    def __call__(self, x):
        raise KeyError("my own mistake")


def _with(labels, index, value):
    labels = labels.copy()
    labels[index] = value
    return labels


CASES = {
    # name: (options of fit, error, words that must be in its message)
    "label too large": ({"data": (X, _with(Y, 7, 3))}, DataError, ["sample 7", "is 3", "0 to 2", "1 labels"]),
    "label negative": ({"data": (X, _with(Y, 0, -1))}, DataError, ["sample 0", "is -1", "0 to 2"]),
    "eval label": ({"eval_data": (X, _with(Y, 9, 5))}, DataError, ["eval_data", "sample 9", "is 5"]),
    "label in a stream": ({"data": [(X[:8], Y[:8]), (X[8:16], _with(Y, 9, 5)[8:16])]}, DataError, ["sample 9", "is 5"]),
    "batch larger than data": ({"batch_size": 64}, ConfigError, ["batch_size 64", "40 samples", "at most 40"]),
    "empty data": ({"data": (X[:0], Y[:0])}, DataError, ["empty", "0 samples"]),
    "empty iterable": ({"data": []}, DataError, ["no batch", "at least one"]),
    "empty function": ({"data": lambda: iter(())}, DataError, ["no batch"]),
    "unequal lengths": ({"data": (X, Y[:-1])}, DataError, ["40 samples", "labels 39"]),
    "labels of another shape": ({"data": (X, np.stack([Y, Y], 1))}, DataError, ["integer labels of shape [16]", "int32[16, 2]"]),
    "float labels for classes": ({"data": (X, Y * 1.0), "loss": "softmax_cross_entropy"}, DataError, ["integer labels", "float32[16]"]),
    "integer labels for mse": ({"loss": "mse"}, DataError, ["labels of shape [16, 3]", "[16]"]),
    "eval inputs of another shape": ({"eval_data": (X[:, :5], Y)}, DataError, ["eval_data", "Net", "float32[16, 5]"]),
    "a single array": ({"data": X[0, 0]}, DataError, ["leading axis of samples"]),
    "three arrays a batch": ({"data": [(X, Y, Y)]}, DataError, ["pair (inputs, labels)", "3 parts"]),
    "mapping without labels": ({"data": [{"a": X, "b": Y}]}, DataError, ["label", "a, b"]),
    "text as inputs": ({"data": (np.array(["a"] * 40), Y)}, DataError, ["inputs", "numbers"]),
    "complex inputs": ({"data": (X.astype(np.complex64), Y)}, DataError, ["complex64"]),
    "scalars as a batch": ({"data": [(np.float32(1), np.int32(1))]}, DataError, ["leading batch axis"]),
    "no data at all": ({"data": 5}, DataError, ["arrays (inputs, labels)", "int"]),
    "unknown policy": ({"policy": "mixd"}, ConfigError, ["'mixd'", "Did you mean 'mixed'"]),
    "unknown chip": ({"chip": "bm1960"}, ConfigError, ["'bm1960'", "Did you mean 'bm1690'"]),
    "unknown loss": ({"loss": "softmax_crossentropy"}, ConfigError, ["Did you mean 'softmax_cross_entropy'"]),
    "unknown engine": ({"engine": "fats"}, ConfigError, ["Did you mean 'fast'"]),
    "unknown fidelity": ({"fidelity": "exact"}, ConfigError, ["bitexact", "native"]),
    "optimizer by name": ({"optimizer": "adam"}, ConfigError, ["Optax", "'adam'"]),
    "zero epochs": ({"epochs": 0}, ConfigError, ["epochs", "at least 1"]),
    "half a batch": ({"batch_size": 0.5}, ConfigError, ["batch_size", "0.5"]),
    "zero batch": ({"batch_size": 0}, ConfigError, ["batch_size", "at least 1"]),
    "sink size -2": ({"sink_size": -2}, ConfigError, ["sink_size", "-2"]),
    "shuffling a stream": ({"data": [(X, Y)], "shuffle": True}, ConfigError, ["shuffle", "arrays"]),
    "model without parameters": ({"model": Parameterless()}, ConfigError, ["Parameterless", "no parameters"]),
    "a class, not an instance": ({"model": Net}, ConfigError, ["the class Net", "instance"]),
    "a function as model": ({"model": lambda x: x}, ConfigError, ["plain function", "params="]),
    "a model of two outputs": ({"model": TwoOutputs()}, DataError, ["TwoOutputs", "one array"]),
    "a missing parameter": (
        {"params": {"Dense_0": {"kernel": X}}},
        ConfigError,
        ["missing", "Dense_0/bias", "unknown nothing"],
    ),
    "an unknown parameter": ({"params": {"dense": np.zeros(3)}}, ConfigError, ["unknown dense"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_before_training(name):
    options, error, words = CASES[name]
    with pytest.raises(error) as caught:
        fit(**{"data": (X, Y), **options})
    assert isinstance(caught.value, TpuflowError)
    for word in words:
        assert word in str(caught.value)


def test_a_parameter_of_the_wrong_shape_is_named():
    params = fit().params
    params["Dense_1"]["kernel"] = jnp.zeros((16, 4))
    with pytest.raises(ConfigError, match=r"Dense_1/kernel has shape \[16, 4\], the model's has \[16, 3\]"):
        fit(params=params)


def test_an_error_of_the_model_itself_comes_through_with_a_note():
    with pytest.raises(KeyError, match="my own mistake") as caught:
        fit(Broken())
    assert "while initialising model Broken for inputs float32[16, 7]" in caught.value.__notes__


def test_an_unwritable_json_path_is_found_before_training(tmp_path):
    for path in (tmp_path / "missing" / "out.json", tmp_path):
        steps = []

        class Count(tpuflow.Callback):
            def on_step_end(self, run):
                steps.append(run.step)  # noqa: B023

        with pytest.raises(ConfigError, match="json: cannot write"):
            fit(json=path, callbacks=[Count()])
        assert not steps
    result = fit()
    with pytest.raises(ConfigError, match="out.json: cannot be written"):
        result.to_json(tmp_path / "missing" / "out.json")
    assert os.listdir(tmp_path) == []


def test_bad_data_on_the_way_lose_nothing():
    def batches():
        yield X[:16], Y[:16]
        yield X[16:32], Y[16:32]
        yield X[32:], _with(Y, 35, 9)[32:]

    with pytest.raises(DataError, match="sample 35 is 9") as caught:
        fit(data=batches, sink_size=0)
    assert caught.value.result.losses == fit(data=(X[:32], Y[:32]), sink_size=0).losses


def test_the_package_shows_its_public_names_and_no_others():
    shown = {name for name in dir(tpuflow) if not name.startswith("__")}
    assert shown == set(tpuflow.__all__)
    assert all(hasattr(tpuflow, name) for name in shown - {"torch"})


def test_an_unknown_public_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"'tpuflow' has no attribute 'trian'.*train"):
        tpuflow.trian  # noqa: B018


def test_what_the_device_lacks_is_named_with_the_users_line():
    class Pivoted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return lax.linalg.qr(nn.Dense(3)(x), pivoting=True)[0]

    with pytest.raises(UnsupportedPrimitiveError, match=r"test_bad_input\.py"):
        fit(Pivoted())


def test_an_optimizer_whose_state_changes_type_is_refused():
    def update(grads, state, params=None):
        return grads, state.astype(jnp.float16)

    growing = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    with pytest.raises(TpuflowError, match="from f32.*into f16"):
        fit(optimizer=growing)
