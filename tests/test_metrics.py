"""Metrics: what each kind of function means, the named ones against NumPy, exact sums, and mistakes that show before the first step."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tpuflow
from tpuflow.errors import ConfigError
from tpuflow.training.metrics import METRICS, Metric, Tally, class_accuracy, top_k_accuracy

CLASSES = 7


def data(samples: int = 43) -> tuple[np.ndarray, np.ndarray]:
    """Noise with as many labels of each class as come; class 6 never does."""
    rng = np.random.default_rng(2)
    return rng.normal(size=(samples, 5)).astype(np.float32), rng.integers(0, CLASSES - 1, samples)


def largest_margin(outputs: Any, labels: Any) -> Any:
    """A value a sample."""
    return outputs.max(-1) - outputs.min(-1)


def spread(outputs: Any, labels: Any) -> Any:
    """A value a batch."""
    return outputs.max() - outputs.min()


def mean_of_even_labels(outputs: Any, labels: Any) -> Any:
    """A ratio of sums: the mean of the first output over the samples with an even label."""
    even = labels % 2 == 0
    return jnp.sum(jnp.where(even, outputs[:, 0], 0.0)), jnp.sum(even)


@pytest.fixture(scope="module")
def evaluated() -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """What an evaluation with ragged batches reports, the outputs it saw, and the labels."""
    model, (x, y) = nn.Dense(CLASSES), data()
    metrics = ("accuracy", "loss", "top5", "class_accuracy", largest_margin, spread, mean_of_even_labels)
    result = tpuflow.train(
        model, data(), eval_data=(x, y), metrics=metrics, optimizer=optax.sgd(0.1), batch_size=16, engine="reference", progress=False
    )
    assert result.settings["metrics"] == [
        "accuracy", "avg_loss", "top5", "class_accuracy", "largest_margin", "spread", "mean_of_even_labels",
    ]  # fmt: skip
    return result.history[-1], np.asarray(model.apply({"params": result.params}, x), np.float64), y


def test_accuracies_count_every_sample(evaluated):
    found, outputs, y = evaluated
    assert found["accuracy"] == pytest.approx(100 * (outputs.argmax(1) == y).mean())
    assert found["top5"] == pytest.approx(100 * (np.argsort(-outputs, 1)[:, :5] == y[:, None]).any(1).mean())
    assert found["top5"] > found["accuracy"] > 0


def test_accuracies_of_the_classes_are_a_list_with_nan_where_a_class_never_came(evaluated):
    found, outputs, y = evaluated
    hits = outputs.argmax(1) == y
    want = [100 * hits[y == c].mean() for c in range(CLASSES - 1)]
    assert found["class_accuracy"][:-1] == pytest.approx(want)
    assert len(found["class_accuracy"]) == CLASSES and math.isnan(found["class_accuracy"][-1])


def test_values_of_samples_are_averaged_over_samples(evaluated):
    found, outputs, _ = evaluated
    assert found["largest_margin"] == pytest.approx((outputs.max(1) - outputs.min(1)).mean(), rel=1e-6)


def test_values_of_batches_are_averaged_over_batches_the_ragged_one_included(evaluated):
    found, outputs, _ = evaluated
    batches = [outputs[i : i + 16] for i in range(0, 43, 16)]
    assert found["spread"] == pytest.approx(np.mean([b.max() - b.min() for b in batches]), rel=1e-6)


def test_a_pair_is_the_ratio_of_its_sums(evaluated):
    found, outputs, y = evaluated
    assert found["mean_of_even_labels"] == pytest.approx(outputs[y % 2 == 0, 0].mean(), rel=1e-5)


def test_the_loss_is_the_trainings_own_rounded_as_in_training():
    x, y = data(16)
    result = tpuflow.train(
        nn.Dense(CLASSES), (x, y), policy="mixed", eval_data=(x, y), metrics=("loss",), optimizer=optax.sgd(0.0), batch_size=16,
        engine="reference", progress=False,
    )  # fmt: skip
    assert result.history[-1]["avg_loss"] == result.losses[0]
    assert float(np.float16(result.losses[0])) == result.losses[0]
    assert "accuracy" not in result.history[-1]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_breaks_ties_as_argmax_and_misses_what_is_not_a_number(k):
    outputs = jnp.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [np.nan, 1.0, 2.0, 0.0], [5.0, np.nan, 1.0, 2.0]])
    order = [[1, 2, 3, 0], [0, 1, 2, 3], [0, 2, 1, 3], [1, 0, 3, 2]]  # largest first, earlier first among equals, NaN above all
    for label in range(4):
        hits, count = top_k_accuracy(outputs, jnp.full(4, label), k)
        finite = [row for row in range(4) if not np.isnan(outputs[row, label])]
        assert int(hits) == sum(label in order[row][:k] for row in finite) and int(count) == 4


def test_class_accuracy_serves_labels_of_any_rank():
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 5)))
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 5, (2, 3, 4)))
    hits, counts = class_accuracy(outputs, labels)
    want = (np.argmax(outputs, -1) == labels) & (np.asarray(labels)[..., None] == np.arange(5)).any(-1)
    assert int(counts.sum()) == 24 and int(hits.sum()) == int(want.sum())
    assert [int(c) for c in counts] == [int((labels == c).sum()) for c in range(5)]


def test_sums_are_exact_on_the_host():
    tally = Tally((Metric("values", lambda outputs, labels: outputs), Metric("ratio", lambda outputs, labels: (outputs, labels), 100.0)))
    tally.add({"values": np.array([[1e8, 1.0], [-1e8, 1e-8]], np.float32), "ratio": (np.array([2**24, 1]), np.array([2**25, 0]))})
    tally.add({"values": np.array([[3.0]], np.float32), "ratio": (np.array([1]), np.array([2]))})
    small = float(np.float32(1e-8))
    assert tally.results() == {"values": math.fsum([1.0, small, 3.0]) / 5, "ratio": 100.0 * (2**24 + 2) / (2**25 + 2)}


def test_a_metric_of_ones_own_name_and_percent_is_a_row():
    twice = Metric("confident", lambda outputs, labels: outputs.max(-1) > 0.0, scale=100.0)
    result = tpuflow.train(
        nn.Dense(CLASSES), data(), eval_data=data(), metrics=[twice], optimizer=optax.sgd(0.1), batch_size=16, engine="reference",
        progress=False,
    )  # fmt: skip
    assert 0.0 <= result.history[-1]["confident"] <= 100.0


BAD = {
    "a name that is none": ({"metrics": ("acuracy",)}, "unknown metric 'acuracy'. Did you mean 'accuracy'"),
    "a name instead of several": ({"metrics": "accuracy"}, "metrics: expected a sequence"),
    "two of one name": ({"metrics": (spread, spread)}, "two are called 'spread'"),
    "a name of the history": ({"metrics": (Metric("losses", spread),)}, "'losses' is a name of the history itself"),
    "values of another shape": ({"metrics": (lambda outputs, labels: outputs[:3],)}, r"returned float32\[3, 7\] for a batch of 16"),
    "a pair of two shapes": ({"metrics": (lambda outputs, labels: (outputs[0], labels.sum()),)}, "expected one value a sample"),
    "too few classes": ({"metrics": ("top5",), "model": nn.Dense(4)}, "needs at least 5 classes; the model has 4"),
    "no class labels": ({"metrics": ("top5",), "loss": "mse"}, "needs labels that are class numbers"),
    "nothing to measure on": ({"metrics": ("accuracy",), "eval_data": None}, "metrics: they are measured on eval_data"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_metric_that_cannot_be_is_refused_before_the_first_step(name):
    changes, message = BAD[name]
    x, y = data()
    y = y % 4 if "model" in changes else y
    y = np.zeros((len(x), CLASSES), np.float32) if changes.get("loss") == "mse" else y
    options = {"model": nn.Dense(CLASSES), "eval_data": (x, y), "batch_size": 16, "progress": False, **changes}
    with pytest.raises(ConfigError, match=message):
        tpuflow.train(data=(x, y), **options)


def test_a_summary_sees_the_arrays_of_all_samples():
    seen: list[Any] = []

    def first_and_label(outputs: Any, labels: Any) -> Any:
        return {"first": outputs[:, 0], "label": labels}

    def summary(samples: Any) -> dict[str, float]:
        seen.append(samples)
        return {"median": float(np.median(samples["first"])), "labels": float(samples["label"].sum())}

    x, y = data()
    metrics = ("loss", tpuflow.Metric("both", first_and_label, summary=summary))
    result = tpuflow.train(
        nn.Dense(7), (x, y), batch_size=8, eval_data=(x, y), metrics=metrics, progress=False, callbacks=[tpuflow.EarlyStopping("median")]
    )
    logits = np.asarray(result.predict(x, progress=False))
    assert {name: array.shape for name, array in seen[0].items()} == {"first": (43,), "label": (43,)}
    assert result.history[-1]["median"] == pytest.approx(float(np.median(logits[:, 0])), rel=1e-6)
    assert result.history[-1]["labels"] == y.sum() and "both" not in result.history[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fn": lambda outputs, labels: outputs.mean(), "summary": dict}, "expected arrays with an axis of samples first"),
        ({"fn": lambda outputs, labels: outputs, "summary": lambda samples: 3.0}, "its summary returned 3.0; expected a number"),
        (
            {"fn": lambda outputs, labels: outputs, "summary": lambda samples: {"losses": 3.0}},
            "expected a number for each name, and none of",
        ),
        ({"fn": lambda outputs, labels: outputs, "summary": 3}, "summary"),
    ],
)
def test_a_summary_that_is_none_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tpuflow.train(nn.Dense(7), data(), eval_data=data(), metrics=[tpuflow.Metric("mine", **given)], progress=False)


def test_every_named_metric_documents_itself():
    assert all(row.fn.__doc__ for row in METRICS.values())
