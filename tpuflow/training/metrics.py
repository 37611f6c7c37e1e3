"""What an evaluation measures: figures of each batch, computed on the device, and their exact sums on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.amp.policy import cast_floats
from tpuflow.checking import check_callable, check_number, check_real, check_switch, check_text
from tpuflow.errors import ConfigError, shown, unknown
from tpuflow.stages.tracing import users_code
from tpuflow.training.losses import Loss
from tpuflow.training.mismatches import types_text

WANTED = "A metric takes (outputs, labels) and returns one value a sample, a scalar, or a pair (parts, wholes) of arrays of one shape."
MetricFunction = Callable[[Any, Any], Any]
TOP = 5


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of an evaluation, under `name` in the result.

    `fn(outputs, labels)` sees the fp32 outputs [B, ...] and the labels [B, ...] of one batch, on the device. What it returns decides
    what is reported, times `scale`:

    * one value a sample, [B] or [B, ...]: the mean of all values of all batches;
    * a scalar: the mean over batches, each counting the same, as for the loss;
    * a pair of arrays of one shape, (parts, wholes): the sum of the parts over the sum of the wholes, elementwise; a list if they
      have an axis, NaN where the wholes add up to nothing. That is how what is not a mean over samples is made, such as an
      accuracy for each class.

    With a `summary`, `fn` returns any tree of arrays with an axis of samples first, [B, ...]; those of all samples are gathered on the
    host as NumPy arrays [N, ...], and what `summary(tree)` makes of them is reported: a number for each name, in place of `name`. That is
    how what needs all samples at once is made, such as the mean average precision of a detector.

    `classes` is true if it needs labels that are class numbers, and at least `least_classes` of them; `labelled` if it gets the one array
    of labels and not what the batch has beside the inputs, as functions of the user's own do;
    `of_loss` if it comes from the loss of the user's own rather than from outputs.
    """

    name: str
    fn: MetricFunction
    scale: float = 1.0
    classes: bool = False
    least_classes: int = 1
    labelled: bool = False
    of_loss: bool = False
    summary: Callable[[Any], Mapping[str, float]] | None = None

    def __post_init__(self) -> None:
        check_text("metric: name", self.name)
        check_callable(f"metric {self.name!r}: fn", self.fn, "(outputs, labels) -> values")
        check_real(f"metric {self.name!r}: scale", self.scale, "a finite number")
        check_number(f"metric {self.name!r}: least_classes", self.least_classes, 1)
        if self.summary is not None:
            check_callable(f"metric {self.name!r}: summary", self.summary, "(arrays of all samples) -> numbers by name")
        for name in ("classes", "labelled", "of_loss"):
            check_switch(f"metric {self.name!r}: {name}", getattr(self, name))


def accuracy(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(labels that are the class of the largest output, labels)."""
    return jnp.sum(_hits(outputs, labels), dtype=jnp.int32), jnp.int32(labels.size)


def top_k_accuracy(outputs: jax.Array, labels: jax.Array, k: int = TOP) -> tuple[jax.Array, jax.Array]:
    """(labels among the k largest outputs, labels): outputs [..., C], labels [...].

    A label is among them if fewer than k outputs are ahead of its own: larger, or as large and earlier, or not a number.
    """
    classes = _class_numbers(outputs)
    own = classes == labels[..., None].astype(jnp.int32)
    mine = jnp.sum(jnp.where(own, outputs, 0.0), axis=-1, keepdims=True)
    earlier = jnp.logical_and(outputs == mine, classes < labels[..., None].astype(jnp.int32))
    ahead = jnp.logical_or(jnp.logical_not(outputs <= mine), earlier)
    rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    return jnp.sum(rank < k, dtype=jnp.int32), jnp.int32(labels.size)


def class_accuracy(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(hits of each class [C], labels of each class [C])."""
    of_class = _class_numbers(outputs) == labels[..., None].astype(jnp.int32)
    hits = jnp.logical_and(of_class, _hits(outputs, labels)[..., None])
    axes = tuple(range(labels.ndim))
    return jnp.sum(hits, axis=axes, dtype=jnp.int32), jnp.sum(of_class, axis=axes, dtype=jnp.int32)


def _hits(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.argmax(outputs, axis=-1) == labels


def _class_numbers(outputs: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, outputs.shape, outputs.ndim - 1)


METRICS = {
    row.name: row
    for row in (
        Metric("accuracy", accuracy, 100.0, classes=True, labelled=True),
        Metric("top5", top_k_accuracy, 100.0, classes=True, least_classes=TOP, labelled=True),
        Metric("class_accuracy", class_accuracy, 100.0, classes=True, labelled=True),
    )
}
"""The metrics that have a name, beside "loss", which is the training's own; accuracies in percent."""

RESERVED = ("epoch", "losses", "loss_scale", "skipped", "metrics", "steps", "evaluations", "complete")
"""What the history of an epoch holds beside the metrics."""


def metrics_of_loss(figures: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Metrics for the scalars that the user's `loss_fn` or `eval_step` computes itself, under these names."""

    def none(outputs: Any, targets: Any) -> Any:
        raise AssertionError("the loss measures it")

    return tuple(Metric(name, none, of_loss=True) for name in figures)


def get_metrics(metrics: Sequence[str | Metric | MetricFunction] | None, loss: Loss | None, loss_dtype: str) -> tuple[Metric, ...]:
    """The rows of metrics given by name, as functions, or as rows; if none are given, the loss, and the accuracy for class labels.

    "loss" is `loss` of each batch, rounded to `loss_dtype` as in training, under the name "avg_loss".

    Raises:
      ConfigError: one is unknown, needs class labels where there are none, or has the name of another.
    """
    if metrics is None:
        metrics = ("accuracy", "loss") if loss is not None and loss.classes else ("loss",)
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise ConfigError(f"metrics: expected a sequence such as ('accuracy', 'loss'), got {metrics!r}.")

    def batch_loss(outputs: Any, labels: Any) -> jax.Array:
        assert loss is not None
        return loss(outputs, labels).astype(loss_dtype).astype(jnp.float32)

    named = METRICS if loss is None else {**METRICS, "loss": Metric("avg_loss", batch_loss, labelled=loss.checked)}
    rows = tuple(_row(given, named) for given in metrics)
    names = [row.name for row in rows]
    for row in rows:
        if row.classes and loss is not None and not loss.classes:
            raise ConfigError(
                f"metric {row.name!r} needs labels that are class numbers, which the loss {loss.name!r} does not take; choose other "
                "metrics, or loss='softmax_cross_entropy' with integer labels."
            )
        if names.count(row.name) > 1:
            raise ConfigError(f"metrics: two are called {row.name!r}; give one another name with tpuflow.Metric(name, function).")
        if row.name in RESERVED:
            raise ConfigError(f"metrics: {row.name!r} is a name of the history itself; choose another one.")
    return rows


def _row(given: str | Metric | MetricFunction, named: Mapping[str, Metric]) -> Metric:
    if isinstance(given, Metric):
        return given
    if callable(given):
        return Metric(getattr(given, "__name__", type(given).__name__), given)
    if isinstance(given, str) and given in named:
        return named[given]
    raise unknown("metric", given, named, "a function (outputs, labels) -> values, or a tpuflow.Metric")


def measure(metrics: Sequence[Metric], outputs: Any, targets: Any, labels: Any) -> dict[str, Any]:
    """The figures of one batch by metric name: per sample, scalar, or a pair; traced on the device."""
    outputs = cast_floats(outputs, jnp.float32)
    return {metric.name: metric.fn(outputs, labels if metric.labelled else targets) for metric in metrics}


def check_metrics(metrics: Sequence[Metric], outputs: Any, targets: Any, labels: Any, batch: int) -> None:
    """Check that every metric can be computed for outputs and targets of these shapes, and returns something that can be summed.

    Raises:
      ConfigError: one cannot, or does not.
    """
    like = cast_floats_like(outputs)
    for metric in metrics:
        if metric.classes and outputs.shape[-1] < metric.least_classes:
            raise ConfigError(
                f"metric {metric.name!r} needs at least {metric.least_classes} classes; the model has {outputs.shape[-1]}. Leave it out, "
                "or choose 'accuracy'."
            )
        given = labels if metric.labelled else targets
        called = f"metric {metric.name!r}, called with outputs {types_text(like)} and labels {types_text(given)}"
        with users_code(f"while tracing {called}", (TypeError, ValueError), lambda said: ConfigError(f"{called}: {said} {WANTED}")):  # noqa: B023
            found = jax.eval_shape(metric.fn, like, given)
        fits = _is_figure(found, batch) if metric.summary is None else _is_of_samples(found, batch)
        if not fits:
            expected = "one value a sample, a scalar, or a pair (parts, wholes) of arrays of one shape"
            raise ConfigError(
                f"metric {metric.name!r} returned {jax.tree.map(lambda a: f'{a.dtype}{list(a.shape)}', found)} for a batch of "
                f"{batch}; expected {expected if metric.summary is None else 'arrays with an axis of samples first, for its summary'}."
            )


def cast_floats_like(outputs: Any) -> Any:
    """The shapes of outputs as losses and metrics see them: floats in fp32."""
    return jax.eval_shape(lambda tree: cast_floats(tree, jnp.float32), outputs)


def _is_figure(found: Any, batch: int) -> bool:
    if isinstance(found, tuple):
        return len(found) == 2 and all(hasattr(a, "shape") for a in found) and found[0].shape == found[1].shape and found[0].ndim < 2
    return hasattr(found, "shape") and (found.ndim == 0 or found.shape[0] == batch)


def _is_of_samples(found: Any, batch: int) -> bool:
    leaves = jax.tree.leaves(found)
    return bool(leaves) and all(leaf.ndim > 0 and leaf.shape[0] == batch for leaf in leaves)


@dataclass(slots=True)
class Tally:
    """Accumulates the figures of an evaluation. Sums over batches are exact: they are rounded once."""

    metrics: Sequence[Metric]
    _batches: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add the figures of a slice, a group of batches; every array has the batches as its first axis."""
        self._batches.append({name: jax.tree.map(np.asarray, figure) for name, figure in figures.items()})

    def results(self) -> dict[str, Any]:
        """Metric name -> number, or list of numbers.

        Raises:
          ConfigError: a summary is no mapping of numbers, or uses a name that is taken.
        """
        found: dict[str, Any] = {}
        for metric in self.metrics:
            figures = [batch[metric.name] for batch in self._batches]
            if metric.summary is None:
                found[metric.name] = _scaled(_total(figures), metric.scale)
            else:
                found |= _summarised(metric, figures, (*RESERVED, *found))
        return found


def _summarised(metric: Metric, slices: Sequence[Any], taken: Sequence[str]) -> dict[str, float]:
    """The result of a metric's summary on all samples, from slices of [batches, B, ...]."""
    assert metric.summary is not None
    samples = jax.tree.map(lambda *arrays: np.concatenate([a.reshape(-1, *a.shape[2:]) for a in arrays]), *slices)
    found: Any = metric.summary(samples)
    if not isinstance(found, Mapping) or not all(isinstance(v, int | float) for v in found.values()) or set(found) & set(taken):
        raise ConfigError(
            f"metric {metric.name!r}: its summary returned {shown(found)}; expected a number for each name, and none of {', '.join(taken)}."
        )
    return {name: metric.scale * value for name, value in found.items()}


def _total(slices: Sequence[Any]) -> Any:
    """The ratio of sums for pairs, else the mean of all values."""
    if isinstance(slices[0], tuple):
        parts, wholes = (_column_sums(np.concatenate([s[i] for s in slices])) for i in (0, 1))
        ratios = [_ratio(p, w) for p, w in zip(parts, wholes, strict=True)]
        return ratios if slices[0][0].ndim > 1 else ratios[0]
    values = np.concatenate([s.reshape(-1) for s in slices])
    return _exact_sum(values) / len(values)


def _column_sums(figures: np.ndarray) -> list[float]:
    """[batches] or [batches, K] -> the sum of each column."""
    return [_exact_sum(column) for column in figures.reshape(len(figures), -1).T]


def _exact_sum(values: np.ndarray) -> float:
    numbers = values.astype(np.float64)
    return math.fsum(numbers) if np.isfinite(numbers).all() else float(numbers.sum())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _scaled(value: Any, scale: float) -> Any:
    return [scale * v for v in value] if isinstance(value, list) else scale * value
