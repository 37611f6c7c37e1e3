"""The adapters for plain functions, Haiku's transformed functions and Equinox modules; neither library is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from tpuflow.errors import ConfigError
from tpuflow.training.adapters.model import Apply, Inputs, Model, parameters_of

KEY = "key"
"""The random stream of models that have but one."""


def function_model(function: Callable[..., Any], params: Any) -> Model:
    """A plain function (params, *inputs) -> outputs, in training and evaluation alike.

    Raises:
      ConfigError: there are no parameters to start from.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if params is None:
        raise ConfigError(
            f"model: {name} is a plain function (params, *inputs) -> outputs, so it needs parameters to start from: params=..."
        )

    def apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: tuple[str, ...] = (), /) -> tuple[Any, Any, Any]:
        args, kwargs = inputs
        return function(params, *args, **kwargs), carried, {}

    return Model(
        name, lambda key, inputs: (jax.tree.map(jax.numpy.asarray, params), {}), apply, apply, parameters=parameters_of(function)[1:]
    )


def is_haiku(model: Any) -> bool:
    """Whether it is what `hk.transform` or `hk.transform_with_state` makes."""
    return getattr(model, "_fields", None) == ("init", "apply")


def haiku_model(transformed: Any) -> Model:
    """A Haiku function, the same in training and evaluation. It is always given a random key."""
    stateful = type(transformed).__name__ == "TransformedWithState"

    def init(key: jax.Array, inputs: Inputs) -> tuple[Any, Any]:
        args, kwargs = inputs
        made = transformed.init(key, *args, **kwargs)
        return made if stateful else (made, {})

    def apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: tuple[str, ...] = (), /) -> tuple[Any, Any, Any]:
        args, kwargs = inputs
        key = (rngs or {}).get(KEY)
        if stateful:
            outputs, carried = transformed.apply(params, carried, key, *args, **kwargs)
            return outputs, carried, {}
        return transformed.apply(params, key, *args, **kwargs), carried, {}

    def eval_apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: tuple[str, ...] = (), /) -> tuple[Any, Any, Any]:
        return apply(params, carried, inputs, rngs)[0], carried, {}

    return Model(type(transformed).__name__, init, apply, eval_apply)


def is_equinox(model: Any) -> bool:
    """Whether it is an Equinox module."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(model, equinox.Module)


def equinox_model(module: Any) -> Model:
    """An Equinox module, which is written for one sample, mapped over the batch. If its call takes a `key`, every sample gets its own."""
    equinox = sys.modules["equinox"]
    own, static = equinox.partition(module, equinox.is_inexact_array)
    still = equinox.nn.inference_mode(static, value=True)
    keyed = KEY in parameters_of(type(module).__call__)

    def init(key: jax.Array, inputs: Inputs) -> tuple[Any, Any]:
        return own, {}

    def apply_with(rest: Any, *, train: bool) -> Apply:
        def apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: tuple[str, ...] = (), /) -> tuple[Any, Any, Any]:
            args, kwargs = inputs
            whole = equinox.combine(params, rest)
            if not (keyed and train and rngs):
                return jax.vmap(lambda a, k: whole(*a, **k))(args, kwargs), carried, {}
            keys = jax.random.split(rngs[KEY], len(jax.tree.leaves((args, kwargs))[0]))
            return jax.vmap(lambda a, k, key: whole(*a, **k, key=key))(args, kwargs, keys), carried, {}

        return apply

    return Model(
        type(module).__name__,
        init,
        apply_with(static, train=True),
        apply_with(still, train=False),
        parameters=tuple(p for p in parameters_of(type(module).__call__) if p != KEY),
    )
