"""The adapter for nnx modules.

Training and evaluation mode are attributes of nnx modules, so there is a graph definition for each; random streams are variables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tpuflow.training.adapters.model import Apply, AroundNorm, Inputs, Model, parameters_of


def nnx_model(module: nnx.Module, around_norm: AroundNorm | None) -> Model:
    """The functions of an nnx module; the module itself gets the trained variables in the end."""
    copy = nnx.clone(module)  # modes are set in it: the user's module stays as it is until it is trained
    nnx.pop(copy, nnx.Intermediate)  # what earlier calls of the user's have sown is no variable

    def split() -> tuple[Any, ...]:
        return nnx.split(copy, nnx.Param, ...)

    def apply_with(graphdef: Any) -> Apply:
        def apply(params: Any, carried: Any, inputs: Inputs, rngs: Any, wanted: tuple[str, ...] = (), /) -> tuple[Any, Any, Any]:
            # Variables may be changed only where they were made, so the module gets fresh ones in the innermost transformation.
            params, carried = jax.tree.map(lambda leaf: leaf, (params, carried))
            merged = nnx.merge(graphdef, params, carried)
            if around_norm is not None:
                _surround_norms(merged, around_norm)
            _name_scopes(merged)
            args, kwargs = inputs
            options = dict(kwargs)
            outputs = getattr(merged, options.pop("method", "__call__"))(*args, **options)
            kept, sown = _parted(nnx.split(merged, nnx.Param, ...)[2], carried)
            return outputs, kept, sown

        return apply

    def in_mode(set_mode: Callable[[], None]) -> Any:
        set_mode()
        return split()[0]

    eval_graph, train_graph = in_mode(copy.eval), in_mode(copy.train)
    _, params, carried = split()

    def norms(params: Any, carried: Any) -> Any:
        owners = {path[:-1] for path, variable in nnx.to_flat_state(carried) if isinstance(variable, nnx.BatchStat)}
        return nnx.from_flat_state([(path, variable.replace(path[:-1] in owners)) for path, variable in nnx.to_flat_state(params)])

    def update(params: Any, carried: Any) -> None:
        nnx.update(module, params, carried)

    return Model(
        type(module).__name__,
        lambda key, inputs: (params, carried),
        apply_with(train_graph),
        apply_with(eval_graph),
        norms=norms,
        parameters=parameters_of(type(module).__call__) if callable(module) else (),
        update=update,
    )


def _parted(variables: Any, carried: Any) -> tuple[Any, dict[str, Any]]:
    """Split the variables after a call: (those that existed before it, the new ones, which were sown, by the name of their type)."""
    before = {path for path, _ in nnx.to_flat_state(carried)}
    flat = list(nnx.to_flat_state(variables))
    sown: dict[str, dict[str, Any]] = {}
    for path, variable in flat:
        if path not in before:
            sown.setdefault(type(variable).__name__, {})["/".join(map(str, path))] = variable.get_value()
    return nnx.from_flat_state([(path, variable) for path, variable in flat if path in before]), sown


def _surround_norms(module: nnx.Module, around_norm: AroundNorm) -> None:
    """Put `around_norm` around the call of every nnx module inside that owns running statistics; `module` must be a copy."""
    for _, part in list(nnx.iter_graph(module)):
        if isinstance(part, nnx.Module) and any(isinstance(value, nnx.BatchStat) for value in vars(part).values()):
            object.__setattr__(part, "__class__", _surrounded(type(part), around_norm))


@functools.lru_cache(maxsize=64)
def _surrounded(cls: type[nnx.Module], around_norm: AroundNorm) -> type[nnx.Module]:
    """A subclass of an nnx module type with `around_norm` around its call."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around_norm(functools.partial(cls.__call__, self))(*args, **kwargs)  # type: ignore[operator]

    return type(cls.__name__, (cls,), {"__call__": call})


def _name_scopes(module: nnx.Module) -> None:
    """Put every call of an nnx module inside under a name scope, its attribute's name, as linen does; `module` must be a copy."""
    parts = {path: part for path, part in nnx.iter_graph(module) if isinstance(part, nnx.Module) and callable(part)}
    for path, part in parts.items():
        if path:
            around = max((len(other) for other in parts if len(other) < len(path) and other == path[: len(other)]), default=0)
            object.__setattr__(part, "__class__", _scoped(type(part), "/".join(map(str, path[around:]))))


@functools.lru_cache(maxsize=1024)
def _scoped(cls: type[nnx.Module], name: str) -> type[nnx.Module]:
    """A subclass of an nnx module type whose call is under a name scope."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return cls.__call__(self, *args, **kwargs)  # type: ignore[operator]

    return type(cls.__name__, (cls,), {"__call__": call})
