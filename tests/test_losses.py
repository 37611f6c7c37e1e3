"""Label smoothing: PyTorch's form, MindSpore's form, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tpuflow
from tpuflow.errors import ConfigError, DataError
from tpuflow.training.losses import LOSSES, cross_entropy


def _case(samples: int = 64, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, classes)) * 5, rng.integers(0, classes, samples)


@pytest.mark.torch
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_label_smoothing_is_pytorchs(torch, smoothing):
    logits, labels = _case()
    loss = cross_entropy(label_smoothing=smoothing)
    tensor = torch.tensor(logits, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(tensor, torch.tensor(labels), label_smoothing=smoothing)
    theirs.backward()
    with jax.enable_x64(True):  # the formula, apart from fp32's own rounding
        ours, gradient = jax.value_and_grad(lambda x: loss.fn(x, jnp.asarray(labels)).mean())(jnp.asarray(logits, jnp.float64))
        assert float(ours) == pytest.approx(theirs.item(), rel=1e-12)
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=0, atol=1e-7)
    single = float(loss(jnp.asarray(logits, jnp.float32), jnp.asarray(labels)))
    assert single == pytest.approx(theirs.item(), rel=3e-7)  # two or three roundings of fp32 (2^-24 each) in a value and in the mean


@pytest.mark.parametrize("classes", [None, 10, 1001])
def test_label_smoothing_over_the_others_is_mindspores(classes):
    logits, labels = _case()
    smoothing = 0.1
    off = smoothing / ((classes or 10) - 1)
    shares = np.full(logits.shape, off)
    shares[np.arange(len(labels)), labels] = 1.0 - smoothing
    log_softmax = logits - logits.max(1, keepdims=True)
    log_softmax = log_softmax - np.log(np.exp(log_softmax).sum(1, keepdims=True))
    want = -(shares * log_softmax).sum(1).mean()
    loss = cross_entropy(label_smoothing=smoothing, spread="others", classes=classes)
    assert float(loss(jnp.asarray(logits, jnp.float32), jnp.asarray(labels))) == pytest.approx(want, rel=3e-7)


def test_no_smoothing_is_the_plain_loss():
    assert cross_entropy() is LOSSES["softmax_cross_entropy"]


@pytest.mark.parametrize("bad", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"spread": "other"}, {"classes": 1}])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        cross_entropy(**bad)


def test_a_smoothed_loss_trains_and_checks_its_labels():
    x, y = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), np.arange(32) % 3
    options = {"loss": cross_entropy(label_smoothing=0.1), "optimizer": optax.sgd(0.5), "batch_size": 16, "progress": False}
    result = tpuflow.train(nn.Dense(3), (x, y), epochs=3, eval_data=(x, y), engine="reference", **options)
    assert result.losses[-1] < result.losses[0] and "accuracy" in result.history[-1]
    assert result.settings["loss"] == "softmax_cross_entropy(label_smoothing=0.1, spread=all)"
    with pytest.raises(DataError, match="the label of sample 3 is 3"):
        tpuflow.train(nn.Dense(3), (x, np.arange(32) % 4), **options)
    with pytest.raises(DataError, match="needs integer labels"):
        tpuflow.train(nn.Dense(3), (x, y.reshape(-1, 1)), **options)


@pytest.mark.slow
def test_a_loss_of_ones_own_may_give_labels_that_are_no_class_a_meaning():
    inputs, classes = _case(samples=32)
    inputs, labels = inputs.astype(np.float32), np.where(np.arange(32) % 3 == 0, -100, classes)

    def counted(logits, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return jnp.sum(jnp.where(labels == -100, 0.0, losses)) / jnp.sum(labels != -100)

    model = nn.Dense(10)
    params = model.init(jax.random.key(0), inputs)
    result = tpuflow.train(model, (inputs, labels), loss=counted, params=params, batch_size=32, eval_data=(inputs, labels), progress=False)
    assert result.losses[0] == pytest.approx(float(counted(model.apply(params, inputs), labels)), rel=1e-6)
    with pytest.raises(DataError, match="the label of sample 0 is -100"):
        tpuflow.train(model, (inputs, labels), loss="softmax_cross_entropy", params=params, progress=False)
