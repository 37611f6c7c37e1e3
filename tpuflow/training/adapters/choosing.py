"""`get_model`: picks the adapter for a model by the library that it is from."""

from __future__ import annotations

import importlib
from typing import Any

from flax import linen

from tpuflow.errors import ConfigError
from tpuflow.stages import nnx_objects
from tpuflow.training.adapters.linen_modules import linen_model
from tpuflow.training.adapters.model import AroundNorm, Model
from tpuflow.training.adapters.other_libraries import equinox_model, function_model, haiku_model, is_equinox, is_haiku
from tpuflow.training.descriptions import describe_wrong_model, is_from_package


def get_model(model: Any, around_norm: AroundNorm | None = None, params: Any = None) -> Model:
    """A model of any supported library as a `Model`.

    around_norm: wraps every call of a batch-normalisation layer of linen or nnx. params: the initial parameters that the user gives, which
    a plain function needs.

    Raises:
      ConfigError: it is no model.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, type):
        raise ConfigError(f"model: {EXPECTED}, got {describe_wrong_model(model)}.")
    if isinstance(model, linen.Module):
        return linen_model(model, around_norm)
    if nnx_objects.is_module(model):
        return importlib.import_module("tpuflow.training.adapters.nnx_modules").nnx_model(model, around_norm)
    for is_theirs, made in ((is_haiku, haiku_model), (is_equinox, equinox_model)):
        if is_theirs(model):
            return made(model)
    if callable(model) and not is_from_package("torch", model):
        return function_model(model, params)
    raise ConfigError(f"model: {EXPECTED}, got {describe_wrong_model(model)}.")


def is_model(value: Any) -> bool:
    """Whether a value is a model of a library or a `Model`; a plain function, which needs parameters to be one, is not."""
    return isinstance(value, Model | linen.Module) or nnx_objects.is_module(value) or is_haiku(value) or is_equinox(value)


EXPECTED = (
    "expected a flax.linen.Module or flax.nnx.Module instance, what hk.transform makes, an Equinox module, a function "
    "(params, *inputs) -> outputs, or a tpuflow.Model"
)
