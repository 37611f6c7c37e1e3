"""Configurations, field by field those of the JSON files that transformers and diffusers keep beside weights."""

from __future__ import annotations

import abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Self

import jax
from flax import linen as nn

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": nn.tanh,
}
"""transformers' name -> function. "gelu" is the one by erf, the next two are its approximation by tanh."""


@dataclasses.dataclass(frozen=True)
class FileConfig(abc.ABC):
    """What the configurations have in common; each field has the name, the meaning and the default that it has in the file.

    An `int` is a size, from 1 on; a number that may be 0 is a `float`, or may be None.
    """

    KIND: ClassVar[str]
    """The key that says whose file it is."""
    FILE: ClassVar[str] = "config.json"
    ONLY: ClassVar[Mapping[str, Any]] = {}
    """Key of the file that changes what is computed -> the one value that is computed here."""
    OURS: ClassVar[tuple[str, ...]] = ()
    """Fields that the file does not have."""

    def __post_init__(self) -> None:
        """Raise ValueError naming every field whose value is of another type or out of range, or else all that do not go together."""
        found = self._misfits() or self.conflicts()
        if found:
            raise ValueError(f"{type(self).__module__}.{type(self).__qualname__}: {'; '.join(found)}")

    @classmethod
    @abc.abstractmethod
    def kind(cls) -> str:
        """What the file has under `KIND`."""

    @classmethod
    def choices(cls) -> Mapping[str, Collection[str]]:
        """Field that is a word -> the words that it may be."""
        return {}

    def conflicts(self) -> list[str]:
        """What does not go together, in words; every field is of its own type by then."""
        return []

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """Make the configuration that a file says; keys that change nothing of what is computed are not looked at.

        Raises:
          ValueError: it is of another kind of model, asks for something that is not computed here, or a value is none.
        """
        where, kind = f"{cls.FILE} of a {cls.kind()} model", json.get(cls.KIND, cls.kind())
        if kind != cls.kind():
            raise ValueError(f"{where}: {cls.KIND} is {kind!r}, expected {cls.kind()!r}; take the module of that model")
        return cls._from_keys(json, where)

    @classmethod
    def _from_keys(cls, json: Mapping[str, Any], where: str) -> Self:
        refused = [
            f"{key} is {json[key]!r}, only {value!r} is computed" for key, value in cls.ONLY.items() if json.get(key, value) != value
        ]
        if refused:
            raise ValueError(f"{where}: {'; '.join(refused)}")
        return cls(**{name: _hashable(json[name]) for name in cls._names() if name in json})

    def to_json(self) -> dict[str, Any]:
        """Return what the file holds: the original reads the same model from it."""
        return {self.KIND: self.kind(), **{name: _plain(getattr(self, name)) for name in self._names()}}

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls) if field.name not in cls.OURS]

    def _misfits(self) -> list[str]:
        kinds = typing.get_type_hints(type(self))
        found = [_misfit(field.name, getattr(self, field.name), kinds[field.name]) for field in dataclasses.fields(self)]
        for name, words in self.choices().items():
            if getattr(self, name) not in words:
                found.append(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(words)}")
        return [text for text in found if text]


@dataclasses.dataclass(frozen=True)
class JsonConfig(FileConfig):
    """What the configurations of transformers' models have in common.

    `scan` and `remat` say how the layers are written down, and are not in the file. `scan`: the layers are one `lax.scan` over stacked
    parameters, so that neither the program nor compiling it grows with the depth; otherwise each is written out. `remat`: a layer's inner
    values are computed again in the backward pass instead of being kept (`jax.checkpoint`).
    """

    KIND: ClassVar[str] = "model_type"
    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    """transformers' class that computes the same."""
    ACTIVATION: ClassVar[str]
    """The field that names the activation."""
    OURS: ClassVar[tuple[str, ...]] = ("scan", "remat")

    scan: bool = dataclasses.field(default=False, kw_only=True)
    remat: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def kind(cls) -> str:
        """As `FileConfig.kind`."""
        return cls.MODEL_TYPE

    @classmethod
    def choices(cls) -> Mapping[str, Collection[str]]:
        """As `FileConfig.choices`."""
        return {cls.ACTIVATION: ACTIVATIONS}

    def to_json(self) -> dict[str, Any]:
        """As `FileConfig.to_json`."""
        return {"architectures": [self.ARCHITECTURE], **super().to_json()}

    @property
    def activation(self) -> Callable[[jax.Array], jax.Array]:
        """The function between the dense layers."""
        return ACTIVATIONS[getattr(self, self.ACTIVATION)]


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
