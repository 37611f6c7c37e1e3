"""The losses that have a name, one row each, and how one is chosen for given labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuflow.amp.policy import cast_floats
from tpuflow.checking import check_choice, check_number, check_real
from tpuflow.errors import ConfigError, DataError, a_thing, unknown
from tpuflow.stages.tracing import users_code
from tpuflow.training.mismatches import one_class, out_of_range, remedy, types_text

LossFunction = Callable[[Any, Any], jax.Array]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: `fn(outputs, labels)` gives an fp32 scalar (or one number an example, of which the mean is taken).

    `classes` is true if labels are class numbers of the outputs' last axis, so that an accuracy can be counted; `checked` if the
    labels must have the outputs' shape, for classes without the last axis. One that is not checked gets whatever the batch has beside
    the inputs.
    """

    name: str
    fn: LossFunction
    classes: bool = False
    checked: bool = True

    def __call__(self, outputs: Any, labels: Any) -> jax.Array:
        """The loss in fp32, a scalar, whatever the type of the outputs."""
        return jnp.mean(self.fn(cast_floats(outputs, jnp.float32), labels)).astype(jnp.float32)


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] for integer labels: logits [..., C], labels [...] -> [...].

    The label's logit is selected by comparison rather than by indexing: its gradient is then a select and not a scatter.
    """
    shifted, picked = _shifted_and_picked(logits, labels)
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - picked


def _shifted_and_picked(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [..., C] less their maximum, and the label's among them [...]."""
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return shifted, jnp.sum(jnp.where(classes == labels[..., None].astype(jnp.int32), shifted, 0.0), axis=-1)


SPREADS = ("all", "others")


def cross_entropy(*, label_smoothing: float = 0.0, spread: str = "all", classes: int | None = None) -> Loss:
    """Softmax cross-entropy with smoothed labels, for `tpuflow.train(loss=...)`.

    label_smoothing: the probability mass s that is moved away from the label's class, from 0 to below 1.
    spread: the classes that share s. "all": every class gets s / C, the label's own too (PyTorch's `label_smoothing`). "others": every
      other class gets s / (C - 1), and the label's keeps 1 - s (MindSpore's guides).
    classes: C; the outputs' last axis if not given. (MindSpore's guide keeps 1001 whatever the network has; its shares then do not
      add up to one.)

    Raises:
      ConfigError: an option is out of its range.
    """
    check_real("label_smoothing", label_smoothing, "a number from 0 to below 1", 0.0, math.nextafter(1.0, 0.0))
    check_choice("spread", spread, SPREADS)
    if classes is not None:
        check_number("classes", classes, 2)
    if label_smoothing == 0.0:
        return LOSSES["softmax_cross_entropy"]

    def smoothed(logits: jax.Array, labels: jax.Array) -> jax.Array:
        count = classes or logits.shape[-1]
        off = label_smoothing / (count if spread == "all" else count - 1)
        on = 1.0 - label_smoothing + (off if spread == "all" else 0.0)
        return _shared_cross_entropy(logits, labels, on, off)

    return Loss(f"softmax_cross_entropy(label_smoothing={label_smoothing:g}, spread={spread})", smoothed, classes=True)


def _shared_cross_entropy(logits: jax.Array, labels: jax.Array, on: float, off: float) -> jax.Array:
    """-sum(share * log softmax(logits)) where the label's share is `on` and every other class's `off`: [..., C], [...] -> [...].

    Every term is positive, so nothing cancels.
    """
    shifted, picked = _shifted_and_picked(logits, labels)
    shares = on + off * (logits.shape[-1] - 1)
    return shares * jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - (on - off) * picked - off * jnp.sum(shifted, axis=-1)


def sigmoid_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Binary cross-entropy of logits against labels in [0, 1], elementwise: max(x, 0) - x*y + log(1 + exp(-|x|))."""
    return jnp.maximum(logits, 0.0) - logits * labels.astype(jnp.float32) + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def squared_error(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """(outputs - labels)^2, elementwise."""
    return jnp.square(outputs - labels.astype(jnp.float32))


def absolute_error(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """|outputs - labels|, elementwise."""
    return jnp.abs(outputs - labels.astype(jnp.float32))


def huber(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Half the squared error up to an error of one, linear beyond, elementwise."""
    error = jnp.abs(outputs - labels.astype(jnp.float32))
    return jnp.where(error <= 1.0, 0.5 * jnp.square(error), error - 0.5)


LOSSES = {
    row.name: row
    for row in (
        Loss("softmax_cross_entropy", softmax_cross_entropy, classes=True),
        Loss("sigmoid_cross_entropy", sigmoid_cross_entropy),
        Loss("mse", squared_error),
        Loss("mae", absolute_error),
        Loss("huber", huber),
    )
}


def get_loss(loss: str | LossFunction | None, labels: Any) -> tuple[Loss, str]:
    """The loss of a name or a function of the user's own, or one that fits the labels; and why it was chosen ("" if it was given).

    labels: the one array of a batch that outputs are compared with; None if there is none.

    Raises:
      ConfigError: no loss has that name, or there are no labels to choose one by.
    """
    if isinstance(loss, Loss):
        return loss, ""
    if callable(loss):
        classes = labels is not None and _is_integer(labels.dtype)
        return Loss(getattr(loss, "__name__", type(loss).__name__), loss, classes=classes, checked=False), ""
    if labels is None:
        asked = "none was given, so it is chosen by labels" if loss is None else f"loss {loss!r} compares outputs with one array of labels"
        raise ConfigError(
            f"loss: {asked}, and the data have none: neither the second of a pair nor an entry called label. Give data=(inputs, labels), a "
            "function loss(outputs, batch), or loss_fn."
        )
    if loss is None:
        return _chosen(np.dtype(labels.dtype))
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss], ""
    raise unknown("loss", loss, LOSSES, "a function (outputs, labels) -> loss")


def resolve_classes(loss: Loss, outputs: Any, labels: Any) -> Loss:
    """The loss; one of the user's own has `classes` only if the labels' shape is that of the outputs without the last axis."""
    if loss.checked or not loss.classes:
        return loss
    alike = hasattr(outputs, "shape") and tuple(labels.shape) == tuple(outputs.shape[:-1])
    return replace(loss, classes=alike)


def check_fit(loss: Loss, outputs: Any, labels: Any, what: str = "data", why: str = "") -> None:
    """Check that the loss can compare outputs and labels of these shapes. why: the reason for its choice, if it was not given.

    Raises:
      DataError: it cannot.
    """
    if not loss.checked:
        return
    chosen = f" (not given, so chosen by the {why})" if why else ""
    if loss.classes:
        fits = _is_integer(labels.dtype) and tuple(labels.shape) == tuple(outputs.shape[:-1])
        wanted = f"integer labels of shape {list(outputs.shape[:-1])} (class numbers)"
    else:
        fits, wanted = tuple(labels.shape) == tuple(outputs.shape), f"labels of shape {list(outputs.shape)}"
    if not fits:
        raise DataError(
            f"{what}: loss {loss.name!r}{chosen}: the model's outputs have shape {list(outputs.shape)}, so it needs {wanted}; "
            f"got {labels.dtype}{list(labels.shape)}. {remedy(outputs, labels, classes=loss.classes)}"
        )
    if loss.classes and outputs.shape[-1] == 1:
        raise DataError(f"{what}: loss {loss.name!r}{chosen}: the model has one output. {one_class(outputs)}")


def check_function(loss: Loss, outputs: Any, targets: Any) -> None:
    """Check that a loss of the user's own takes outputs and targets of these shapes and returns an array.

    Raises:
      ConfigError: it does not.
    """
    if loss.checked:
        return
    like = jax.eval_shape(lambda tree: cast_floats(tree, jnp.float32), outputs)
    called = f"loss {loss.name!r}, called with outputs {types_text(like)} and labels {types_text(targets)}"
    wanted = "A loss takes (outputs, labels) and returns one number, or one for each example."
    with users_code(f"while tracing {called}", (TypeError, ValueError), lambda said: ConfigError(f"{called}: {said} {wanted}")):
        found = jax.eval_shape(loss.fn, like, targets)
    if not hasattr(found, "shape"):
        raise ConfigError(f"{called}: it returned {a_thing(found)}. {wanted}")


def check_labels(labels: np.ndarray, classes: int, first_sample: int = 0, what: str = "data") -> None:
    """Check that every label is a class number.

    Raises:
      DataError: one is below 0 or not below `classes`.
    """
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        place = int(np.argmax(wrong.reshape(len(labels), -1).any(axis=1)))
        value = labels[place][wrong[place]].flat[0] if labels.ndim > 1 else labels[place]
        raise DataError(
            f"{what}: the label of sample {first_sample + place} is {int(value)}, but the model has {classes} outputs, so labels must be "
            f"0 to {classes - 1}; {int(wrong.sum())} labels are out of range. {out_of_range(labels, classes)}"
        )


def _chosen(dtype: np.dtype) -> tuple[Loss, str]:
    if _is_integer(dtype):
        return LOSSES["softmax_cross_entropy"], "integer labels"
    return LOSSES["mse"], "boolean labels" if dtype == np.bool_ else "floating-point labels"


def _is_integer(dtype: Any) -> bool:
    return np.issubdtype(np.dtype(dtype), np.integer)
