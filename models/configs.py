"""Configurations of language models, field by field those of transformers' `config.json`, read from it and written to it."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
from flax import linen as nn

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": nn.tanh,
}
"""transformers' name -> function. "gelu" is the one by erf, the next two are its approximation by tanh."""


@dataclasses.dataclass(frozen=True)
class JsonConfig:
    """What the configurations have in common; each field has the name, the meaning and the default that it has in `config.json`.

    `scan` and `remat` say how the layers are written down, and are not in the file. `scan`: the layers are one `lax.scan` over stacked
    parameters, so that neither the program nor compiling it grows with the depth; otherwise each is written out. `remat`: a layer's inner
    values are computed again in the backward pass instead of being kept (`jax.checkpoint`).
    """

    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    """transformers' class that computes the same."""
    ONLY: ClassVar[Mapping[str, Any]] = {}
    """Key of `config.json` that changes what is computed -> the one value that is computed here."""
    ACTIVATION: ClassVar[str]
    """The field that names the activation."""
    OURS: ClassVar[tuple[str, ...]] = ("scan", "remat")

    scan: bool = dataclasses.field(default=False, kw_only=True)
    remat: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Raise ValueError naming every field whose value is of another type or out of range, or else all that do not go together."""
        found = self._misfits() or self.conflicts()
        if found:
            raise ValueError(f"{type(self).__module__}.Config: {'; '.join(found)}")

    def conflicts(self) -> list[str]:
        """What does not go together, in words; every field is of its own type by then."""
        return []

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """Make the configuration that a `config.json` says; keys that change nothing of what is computed are not looked at.

        Raises:
          ValueError: it is of another kind of model, asks for something that is not computed here, or a value is none.
        """
        where = f"config.json of a {cls.MODEL_TYPE} model"
        if json.get("model_type", cls.MODEL_TYPE) != cls.MODEL_TYPE:
            raise ValueError(f"{where}: model_type is {json['model_type']!r}, expected {cls.MODEL_TYPE!r}; take the module of that model")
        refused = [
            f"{key} is {json[key]!r}, only {value!r} is computed" for key, value in cls.ONLY.items() if json.get(key, value) != value
        ]
        if refused:
            raise ValueError(f"{where}: {'; '.join(refused)}")
        return cls(**{name: _hashable(json[name]) for name in cls._names() if name in json})

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds: transformers reads the same model from it."""
        fields = {name: _plain(getattr(self, name)) for name in self._names()}
        return {"architectures": [self.ARCHITECTURE], "model_type": self.MODEL_TYPE, **fields}

    @property
    def activation(self) -> Callable[[jax.Array], jax.Array]:
        """The function between the dense layers."""
        return ACTIVATIONS[getattr(self, self.ACTIVATION)]

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls) if field.name not in cls.OURS]

    def _misfits(self) -> list[str]:
        kinds = typing.get_type_hints(type(self))
        found = [_misfit(field.name, getattr(self, field.name), kinds[field.name]) for field in dataclasses.fields(self)]
        if getattr(self, self.ACTIVATION) not in ACTIVATIONS:
            found.append(f"{self.ACTIVATION} is {getattr(self, self.ACTIVATION)!r}, expected one of {', '.join(ACTIVATIONS)}")
        return [text for text in found if text]


def indivisible(name: str, number: int, by: str, divisor: int) -> list[str]:
    """A sentence if the first number is no multiple of the second."""
    return [] if number % divisor == 0 else [f"{name} is {number}, expected a multiple of {by}, {divisor}"]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _misfit(name: str, value: Any, annotation: Any) -> str | None:
    """What is wrong with a value: an `int` is a size, from 1 on; what may be None, and a rate, is from 0 on."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if not any(_is(value, kind) for kind in kinds):
        return f"{name} is {value!r}, expected {' or '.join(getattr(kind, '__name__', str(kind)) for kind in kinds)}"
    least = 1 if kinds == (int,) else 0
    return f"{name} is {value!r}, expected at least {least}" if isinstance(value, int | float) and value < least else None


def _is(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is(one, typing.get_args(kind)[0]) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
