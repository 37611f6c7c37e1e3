"""`Model`: what a training needs of a model of any library: its variables as two trees (trained, carried), and pure functions of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import flax.errors
import jax
import jax.numpy as jnp

from tpuflow.errors import ConfigError
from tpuflow.stages.nnx_objects import loaded_nnx

MODE_ARGUMENTS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
DROPOUT = "dropout"
AUXILIARY = "losses"
"""The sown collection whose numbers are added to the loss."""
MISFITS = (TypeError, ValueError, flax.errors.FlaxError)
"""What a module raises for inputs of a shape or type that it cannot take."""

OTHER_LAYERS = (
    "Give the parameters of this model, as its init makes them; to keep some of another model's, save those and read them with "
    "tpuflow.load_params(path, like=variables, skip_mismatched=True)."
)

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional arguments and keyword arguments of a model's call."""
AroundNorm = Callable[[Callable[..., Any]], Callable[..., Any]]


class Apply(Protocol):
    """A model's call as a pure function."""

    def __call__(self, params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: tuple[str, ...] = (), /) -> tuple[Any, Any, Any]:
        """(outputs, carried variables after the call, sown values by collection, of `wanted` and perhaps others). rngs: stream -> key."""
        ...


def _no_norms(params: Any, carried: Any) -> Any:
    return jax.tree.map(lambda leaf: False, params)


def _keep(params: Any, carried: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Model:
    """A model as functions; `tpuflow.train` takes one of your own in place of a module.

    name: what reports call it.
    init: (key, (args, kwargs)) -> (params, carried). `carried` are variables that a step changes without a gradient; {} for none.
    train_apply, eval_apply: (params, carried, (args, kwargs), rngs, wanted) -> (outputs, carried, sown); see `Apply`.
    norms: (params, carried) -> a tree of booleans as `params`: the parameters of layers that normalise by the batch.
    parameters: the names of the call's arguments, by which entries of a batch that is a mapping find their places.
    update: (params, carried) -> None: called with the trained variables in the end.
    without_streams: a context in which a call that is given no random stream fails if it draws from one or asks for one; None: it need not.
    """

    name: str
    init: Callable[[jax.Array, Inputs], tuple[Any, Any]]
    train_apply: Apply
    eval_apply: Apply
    norms: Callable[[Any, Any], Any] = _no_norms
    parameters: tuple[str, ...] = ()
    update: Callable[[Any, Any], None] = _keep
    without_streams: Callable[[], AbstractContextManager[None]] | None = None


def modes_of(call: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a model's call that tell training from evaluation, with their value in training."""
    names = inspect.signature(call).parameters
    return {name: value for name, value in MODE_ARGUMENTS.items() if name in names}


def parameters_of(call: Callable[..., Any]) -> tuple[str, ...]:
    """The names of all other arguments."""
    return tuple(name for name in inspect.signature(call).parameters if name != "self" and name not in MODE_ARGUMENTS)


def initial_params(given: Any, shapes: Any) -> Any:
    """The user's own parameters, checked against the model's shapes; `{"params": ...}` is unwrapped.

    Raises:
      ConfigError: the tree, a shape, or an element type differs.
    """
    if isinstance(given, Mapping) and set(given) == {"params"} and not (isinstance(shapes, Mapping) and set(shapes) == {"params"}):
        given = given["params"]
    nnx = loaded_nnx()
    if nnx is not None and isinstance(shapes, nnx.State) and not isinstance(given, nnx.State):
        given = nnx.State(given)
    found, wanted = dict(_paths(given)), dict(_paths(shapes))
    missing, extra = [p for p in wanted if p not in found], [p for p in found if p not in wanted]
    if missing or extra:
        raise ConfigError(
            f"params: the tree is not the model's: missing {_some(missing)}, unknown {_some(extra)}; the model has {_some(list(wanted))}. "
            f"{OTHER_LAYERS}"
        )
    for path, leaf in found.items():
        if tuple(jnp.shape(leaf)) != tuple(wanted[path].shape):
            has = f"params: {path} has shape {list(jnp.shape(leaf))}, the model's has {list(wanted[path].shape)}."
            raise ConfigError(f"{has} {OTHER_LAYERS}")
    leaves = [jnp.asarray(found[path], wanted[path].dtype) for path in wanted]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _paths(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _some(names: list[str]) -> str:
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")) or "nothing"
